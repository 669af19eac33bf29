"""What does `python -m pipe timeline` say of a log directory?"""

from __future__ import annotations

import statistics
from pathlib import Path

from pipe.timeline.chrome import chrome_trace
from pipe.timeline.logdir import Run, read
from pipe.timeline.picture import milliseconds, svg
from pipe.timeline.report import report
from pipe.timeline.summary import summarize
from pipe.timeline.table import csv_table
from pipe.timeline.trace import TraceError

_LISTED = 12


def timeline(
    logdir: str,
    *,
    run: str | None = None,
    step: int | None = None,
    svg_file: str | None = None,
    trace_file: str | None = None,
    csv_file: str | None = None,
) -> None:
    """Prints a step's summary, the last one's unless told, and writes what was asked for.

    Raises an `OSError` for files, and a `TraceError` where there is no such run or step.
    """
    runs = read(logdir)
    chosen = _run(runs, logdir, run)
    number = chosen.steps[-1] if step is None else step
    if number not in chosen.places:
        raise TraceError(f"run {chosen.name} has no trace of step {number}: it has {_listed(chosen.steps)}")
    if len(runs) > 1:
        print(f"run {chosen.name}, of {_listed(list(runs))}: choose with --run\n")
    trace = chosen.trace(number)
    summary = summarize(trace)
    print(report(trace, summary))
    print(f"\n{_over_steps(chosen)}")
    if svg_file:
        Path(svg_file).write_text(svg(trace), encoding="utf-8")
    if trace_file:
        Path(trace_file).write_text(chrome_trace(trace), encoding="utf-8")
    if csv_file:
        Path(csv_file).write_text(csv_table(trace, summary.predicted), encoding="utf-8")


def _run(runs: dict[str, Run], logdir: str, name: str | None) -> Run:
    """The run of that name; without one, that of the latest trace."""
    if not runs:
        raise TraceError(
            f"{logdir} has no traces, nor has any directory below it: a run writes them with "
            '"tensorboard=DIR" among its options'
        )
    if name is None:
        return max(runs.values(), key=lambda run: run.header(run.steps[-1]).wall_time)
    if name not in runs:
        raise TraceError(f"{logdir} has no run {name!r} with traces: it has {_listed(list(runs))}")
    return runs[name]


def _over_steps(run: Run) -> str:
    durations = {step: run.header(step).duration for step in run.steps}
    slowest = max(durations, key=lambda step: durations[step])
    mean = milliseconds(statistics.fmean(durations.values()))
    bubbles = [share for step, share in run.scalars.get("bubble", {}).items() if step in durations]
    bubble = f", bubble {statistics.fmean(bubbles):.1%}" if bubbles else ""
    return (
        f"{len(durations)} traced steps ({_listed(run.steps)}): mean {mean}{bubble}; "
        f"slowest step {slowest}, {milliseconds(durations[slowest])}"
    )


def _listed(things: list[str] | tuple[int, ...]) -> str:
    """All of them, or the first and the last."""
    texts = [str(thing) for thing in things]
    if len(texts) <= _LISTED:
        return ", ".join(texts)
    return f"{', '.join(texts[: _LISTED - 2])}, ... {texts[-1]}"
