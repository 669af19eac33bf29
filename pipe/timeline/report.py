"""What does a step's summary look like as text?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipe.timeline.idle import CAUSES
from pipe.timeline.summary import Summary
from pipe.timeline.trace import COMPUTE, Trace


def report(trace: Trace, summary: Summary) -> str:
    """Lines for a terminal: times of the step, idle time by member and cause, stages, and what to do."""
    show = _Times(summary.duration)
    return "\n".join(
        [
            *_head(trace, summary, show),
            "",
            *_table(_member_rows(trace, summary, show)),
            *_waits(trace, summary, show),
            "",
            *_table(_stage_rows(summary, show)),
            "",
            *summary.advice,
        ]
    )


class _Times:
    """How times are written: all in one unit, that of the step."""

    def __init__(self, duration: float) -> None:
        self.unit, self.scale = ("s", 1e6) if duration >= 1e7 else ("ms", 1e3)

    def __call__(self, time: float) -> str:
        return f"{time / self.scale:.2f}"

    def with_unit(self, time: float) -> str:
        return f"{self(time)} {self.unit}"


def _head(trace: Trace, summary: Summary, show: _Times) -> Iterator[str]:
    header = trace.header
    replicas = f", {header.replicas} replicas" if header.replicas > 1 else ""
    yield (
        f"step {header.step}: {header.schedule}, {header.ranks} ranks{replicas}, {header.num_stages} stages, "
        f"{header.microbatches} microbatches"
    )
    predicted = summary.predicted
    yield f"  step time          {show.with_unit(summary.duration)}" + (
        f" (predicted {show.with_unit(predicted.duration)})" if predicted is not None else ""
    )
    yield f"  ideal              {show.with_unit(summary.ideal)} without the bubble"
    makespan = show.with_unit(summary.end - summary.begin)
    yield f"  bubble             {summary.bubble:.1%} of the schedule's {makespan}"
    yield f"  idle               {summary.idle_share:.1%} of the step"
    for name, value in header.scalars.items():
        yield f"  {name:<18} {value:.6g}"
    if summary.clock_error:
        yield f"  clocks             agree within {summary.clock_error / 1e3:.3f} ms"


def _member_rows(trace: Trace, summary: Summary, show: _Times) -> Iterator[tuple[str, ...]]:
    causes = [cause.replace("_", "-") for cause in CAUSES]
    yield (f"times in {show.unit}", "busy", "idle", "bubble", *causes, "peak live")
    for member in summary.members:
        yield (
            trace.name_of(trace.members[member.member]),
            show(member.busy),
            show(member.idle),
            f"{member.bubble:.1%}",
            *map(show, member.causes.values()),
            str(member.peak_live),
        )


def _waits(trace: Trace, summary: Summary, show: _Times) -> Iterator[str]:
    """The stage that each member waited for longest, and the next ones."""
    found = [(member, member.waits[:_SHOWN]) for member in summary.members if member.waits]
    if found:
        yield ""
        yield "waited for"
    for member, waits in found:
        parts = (
            f"{wait.value}s of {f'stage {wait.stage}' if wait.stage >= 0 else 'an unknown stage'} "
            f"{show.with_unit(wait.time)}"
            for wait in waits
        )
        yield f"  {trace.name_of(trace.members[member.member])}: {', '.join(parts)}"


def _stage_rows(summary: Summary, show: _Times) -> Iterator[tuple[str, ...]]:
    kinds = [kind for kind in COMPUTE if any(stage.times[kind] for stage in summary.stages)]
    yield ("a microbatch", "rank", "layers", *kinds, "all", "x mean")
    for stage in summary.stages:
        start, stop = stage.layers
        yield (
            f"stage {stage.stage}",
            str(stage.rank),
            f"{start}-{stop}",
            *(show(stage.times[kind]) for kind in kinds),
            show(stage.time),
            f"{stage.ratio:.2f}",
        )


def _table(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([f"{first:<{widths[0]}}", *cells])


_SHOWN = 3
