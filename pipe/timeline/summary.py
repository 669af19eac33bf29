"""What does a person want to know of a step?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pipe.timeline.advice import advice
from pipe.timeline.balance import Move, Stage, best_move, stages_of
from pipe.timeline.costs import predict, took_turns
from pipe.timeline.idle import CAUSES, Idle, busy_of, idle, schedule_of
from pipe.timeline.trace import TICKS, VALUES, Member, Prediction, Trace, TraceError
from schedules import ScheduleError


class Wait(NamedTuple):
    """How long a member waited for a stage to make its values; stage -1 where the trace doesn't tell."""

    value: str
    stage: int
    time: float


@dataclass(frozen=True)
class MemberSummary:
    """One member's step, in microseconds: `busy` and `idle` make up the step, `causes` make up `idle`."""

    member: int
    rank: int
    replica: int
    busy: float
    idle: float
    bubble: float
    causes: dict[str, float]
    waits: tuple[Wait, ...]
    peak_live: int
    peak_memory: int | None


@dataclass(frozen=True)
class Summary:
    """A step, in microseconds and shares.

    `bubble` is the simulator's: of members x (end - begin), the share in which they don't compute. The
    schedule runs from `begin` to `end` (see `pipe.timeline.idle`); agreement before and optimizer behind
    aren't part of it. `idle_share` is that of the whole step, these included. `ideal` is what the step would
    take if no member waited inside the schedule, and everything else stayed as it is.
    """

    step: int
    duration: float
    begin: float
    end: float
    ideal: float
    bubble: float
    idle_share: float
    members: tuple[MemberSummary, ...]
    stages: tuple[Stage, ...]
    slowest: Stage | None
    move: Move | None
    predicted: Prediction | None
    clock_error: float
    took_turns: bool
    advice: tuple[str, ...]


def summarize(trace: Trace) -> Summary:
    """Computed from the trace alone. Raises a `TraceError` where it doesn't hold together.

    The prediction is the header's, or made here. Where the plan can't be simulated there is none, and no
    layer to move.
    """
    times, stages = idle(trace), stages_of(trace)
    slowest = max(stages, key=lambda stage: stage.time) if len(stages) > 1 else None
    members = tuple(_member(trace, times, number) for number in range(len(trace.members)))
    turns = took_turns(trace)
    makespan, duration = (times.end - times.begin) / TICKS, times.duration / TICKS
    bubble = _idle_share(int(times.busy.sum()), (times.end - times.begin) * len(members))
    predicted, move = _prediction(trace, times), _move(trace, times)
    return Summary(
        step=trace.header.step,
        duration=duration,
        begin=times.begin / TICKS,
        end=times.end / TICKS,
        ideal=duration - bubble * makespan,
        bubble=bubble,
        idle_share=_idle_share(int(times.busy.sum()), times.duration * len(members)),
        members=members,
        stages=stages,
        slowest=slowest,
        move=move,
        predicted=predicted,
        clock_error=max(trace.header.clock.error, default=0.0),
        took_turns=turns,
        advice=tuple(advice(trace, slowest, move, times, turns)),
    )


def scalars_of(trace: Trace) -> dict[str, float]:
    """What is worth a curve over steps: seconds, bubbles, and bytes where known. Takes a fraction of a ms."""
    begin, end = schedule_of(trace)
    busy, makespan, replicas = (
        [busy_of(member) for member in trace.members],
        end - begin,
        trace.header.replicas,
    )
    scalars = {
        "step_seconds": trace.header.duration / 1e6,
        "bubble": _idle_share(sum(busy), makespan * len(busy)),
    }
    for rank in range(trace.header.ranks):
        members = slice(rank * replicas, (rank + 1) * replicas)
        scalars[f"bubble_rank_{rank}"] = _idle_share(sum(busy[members]), makespan * replicas)
        peaks = [peak for member in trace.members[members] if (peak := _peak_memory(member)) is not None]
        if peaks:
            scalars[f"peak_memory_rank_{rank}"] = float(max(peaks))
    return scalars


def summary_data(summary: Summary, trace: Trace) -> dict[str, Any]:
    """As JSON data, for the page."""
    slowest, move = summary.slowest, summary.move
    return {
        "step": summary.step,
        "duration": summary.duration,
        "begin": summary.begin,
        "end": summary.end,
        "ideal": summary.ideal,
        "bubble": summary.bubble,
        "idle_share": summary.idle_share,
        "members": [_member_data(member) for member in summary.members],
        "stages": [_stage_data(stage) for stage in summary.stages],
        "slowest": None if slowest is None else {"stage": slowest.stage, "ratio": slowest.ratio},
        "move": None if move is None else {**move._asdict(), "name": _name_of(trace, move.layer)},
        "predicted": None if summary.predicted is None else summary.predicted.duration,
        "clock_error": summary.clock_error,
        "took_turns": summary.took_turns,
        "advice": list(summary.advice),
    }


def _member_data(member: MemberSummary) -> dict[str, Any]:
    return {**vars(member), "waits": [wait._asdict() for wait in member.waits]}


def _stage_data(stage: Stage) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "rank": stage.rank,
        "layers": list(stage.layers),
        **stage.times,
        "time": stage.time,
        "ratio": stage.ratio,
    }


def _member(trace: Trace, times: Idle, number: int) -> MemberSummary:
    member, busy = trace.members[number], int(times.busy[number])
    causes = dict(zip(CAUSES, (times.causes[number] / TICKS).tolist(), strict=True))
    return MemberSummary(
        member=number,
        rank=member.rank,
        replica=member.replica,
        busy=busy / TICKS,
        idle=(times.duration - busy) / TICKS,
        bubble=_idle_share(busy, times.end - times.begin),
        causes=causes,
        waits=tuple(_waits(trace, times, number)),
        peak_live=int(member.live.max(initial=0)),
        peak_memory=_peak_memory(member),
    )


def _waits(trace: Trace, times: Idle, number: int) -> list[Wait]:
    table = times.waits[number]
    found = [
        Wait(value, stage if stage < trace.header.num_stages else -1, int(table[row, stage]) / TICKS)
        for row, value in enumerate((VALUES["a"], VALUES["g"]))
        for stage in np.flatnonzero(table[row]).tolist()
    ]
    return sorted(found, key=lambda wait: -wait.time)


def _peak_memory(member: Member) -> int | None:
    return None if member.memory is None or not member.memory.size else int(member.memory.max())


def _idle_share(busy: int, total: int) -> float:
    return 1 - busy / total if total > 0 else 0.0


def _prediction(trace: Trace, times: Idle) -> Prediction | None:
    if trace.header.predicted is not None:
        return trace.header.predicted
    try:
        return predict(trace, times)
    except (ScheduleError, TraceError):
        return None


def _move(trace: Trace, times: Idle) -> Move | None:
    try:
        return best_move(trace, times)
    except (ScheduleError, TraceError):
        return None


def _name_of(trace: Trace, layer: int) -> str:
    names = trace.header.layer_names
    return names[layer] if layer < len(names) else ""
