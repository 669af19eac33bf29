"""What does a step say of costs, and what does the simulator make of them?"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pipe.timeline.idle import Idle, idle
from pipe.timeline.trace import COMPUTE, TICKS, Floats, Ints, Member, Prediction, Trace, TraceError
from pipe.timeline.transfers import receives
from schedules import OPS, Costs, Plan, Timeline, simulate
from schedules.dependencies import Edge

Table = npt.NDArray[np.float64]


class Measured:
    """The computations of a step: time and number of each kind, by stage and microbatch.

    `times[kind][stage, microbatch]` and `counts` are sums over the replicas.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        shape = (trace.header.num_stages, trace.header.microbatches)
        self.times = {kind: np.zeros(shape) for kind in COMPUTE}
        self.counts = {kind: np.zeros(shape) for kind in COMPUTE}
        for member in trace.members:
            for kind in COMPUTE:
                self._add(member, kind)

    def mean(self, kind: str) -> Floats:
        """By stage: the mean time of such an action; 0 where there is none."""
        times, counts = self.times[kind].sum(axis=1), self.counts[kind].sum(axis=1)
        return np.asarray(times / np.maximum(counts, 1))

    def table(self, kind: str) -> Table:
        """By stage and microbatch: the mean over replicas; the stage's mean where there is none."""
        counts = self.counts[kind]
        return np.where(counts > 0, self.times[kind] / np.maximum(counts, 1), self.mean(kind)[:, None])

    @cached_property
    def by_microbatch(self) -> dict[str, Floats]:
        """By kind and stage: the time that a microbatch spends there on the mean."""
        forwards = np.maximum(self.counts["F"].sum(axis=1), 1)
        return {kind: self.times[kind].sum(axis=1) / forwards for kind in COMPUTE}

    def has(self, kind: str) -> bool:
        return bool(self.counts[kind].any())

    def _add(self, member: Member, kind: str) -> None:
        rows = np.flatnonzero(member.kind == kind)
        cells = _cells(member, rows, self.times[kind].shape)
        np.add.at(self.times[kind], cells, member.end[rows] - member.start[rows])
        np.add.at(self.counts[kind], cells, 1)


def costs_of(trace: Trace, *, by_microbatch: bool = False) -> Costs:
    """What the simulator needs to know, as measured, in microseconds: the mean of each op by stage.

    With `by_microbatch`, by stage and microbatch. An edge's latency is the median time from when a value was
    made until it arrived, over the receives that waited for it to be made (of a later one, the trace doesn't
    tell); if ranks took turns, 0, as there a value waits for its rank's turn. Collectives cost their mean
    `g`, and `u`: a rank shows only how long it waited for its weights.
    """
    measured = Measured(trace)
    ops: dict[str, Any] = {
        kind: (measured.table if by_microbatch else measured.mean)(kind)
        for kind in COMPUTE
        if measured.has(kind)
    }
    return Costs(
        **ops,
        latency=_latencies(trace),
        unshard=_collective(trace, "u"),
        reduce_grad=_collective(trace, "g"),
    )


def timeline_of(plan: Plan, costs: Costs) -> Timeline:
    """The simulation of a plan as the engine runs it: it does the two actions of a pair in turn."""
    return simulate(dataclasses.replace(plan, pairs=()), costs)


def predict(trace: Trace, times: Idle | None = None) -> Prediction:
    """What the simulator makes of the plan at the measured mean costs, on the trace's own axis.

    It begins where the schedule does; agreement and optimizer take what they took. Raises a `TraceError`
    where the trace has computations that its plan lacks, and a `ScheduleError` where that is none.
    """
    times = idle(trace) if times is None else times
    timeline = timeline_of(trace.plan, costs_of(trace))
    begin, rest = times.begin / TICKS, (times.duration - times.end) / TICKS
    rows = _rows(timeline)
    starts, ends = [], []
    for member in trace.members:
        numbers = _numbers(member, rows)
        starts.append(begin + timeline.starts[numbers])
        ends.append(begin + timeline.ends[numbers])
    return Prediction(begin + timeline.makespan + rest, tuple(starts), tuple(ends))


def took_turns(trace: Trace) -> bool:
    """Whether no two members ever computed at once, as where one process does the work of all ranks."""
    spans = [(member.start[member.is_compute], member.end[member.is_compute]) for member in trace.members]
    if sum(len(starts) > 0 for starts, _ in spans) < 2:
        return False
    starts, ends = (np.concatenate(columns) for columns in zip(*spans, strict=True))
    by_start = np.argsort(starts, kind="stable")
    overlaps = np.maximum.accumulate(ends[by_start])[:-1] - starts[by_start][1:]
    return bool((overlaps < 1 / TICKS).all())


def _rows(timeline: Timeline) -> dict[str, Ints]:
    """By kind, stage and microbatch, the action's number in the timeline; -1 where there is none."""
    shape = (timeline.plan.num_stages, timeline.plan.microbatches)
    rows = {kind: np.full(shape, -1) for kind in COMPUTE}
    for program, low in zip(timeline.plan.programs, timeline.offsets.tolist(), strict=False):
        for kind in COMPUTE:
            there = np.flatnonzero(program.ops == OPS[kind].code)
            rows[kind][program.stages[there], program.microbatches[there]] = low + there
    return rows


def _numbers(member: Member, rows: dict[str, Ints]) -> Ints:
    """The numbers of a member's computations, in turn."""
    computes = np.flatnonzero(member.is_compute)
    numbers = np.full(len(member.kind), -1)
    for kind, table in rows.items():
        of_kind = computes[member.kind[computes] == kind]
        numbers[of_kind] = table[_cells(member, of_kind, table.shape)]
    if (numbers[computes] < 0).any():
        row = computes[numbers[computes] < 0][0]
        action = f"{member.stage[row]}{member.kind[row]}{member.microbatch[row]}"
        raise TraceError(f"member {member.member} did {action}, which its plan lacks")
    return numbers[computes]


def _cells(member: Member, rows: Ints, shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    stages, microbatches = member.stage[rows], member.microbatch[rows]
    inside = (0 <= stages) & (stages < shape[0]) & (0 <= microbatches) & (microbatches < shape[1])
    if not inside.all():
        row = rows[~inside][0]
        raise TraceError(
            f"member {member.member} computed microbatch {member.microbatch[row]} of stage "
            f"{member.stage[row]}, of {shape[1]} microbatches and {shape[0]} stages"
        )
    return stages, microbatches


def _latencies(trace: Trace) -> float | dict[Edge, float]:
    if trace.header.microbatches > 1 and took_turns(trace):
        return 0.0
    samples: dict[Edge, list[Floats]] = {}
    for member, received in zip(trace.members, receives(trace), strict=True):
        start, end = member.start[received.event], member.end[received.event]
        stage, took = member.stage[received.event], end - received.made
        waited = (start <= received.made) & (took >= 0)  # not where a time is NaN
        for edge in trace.plan.edges:
            of_edge = (np.minimum(stage, received.source) == edge[0]) & (
                np.maximum(stage, received.source) == edge[1]
            )
            samples.setdefault(edge, []).append(took[waited & of_edge])
    joined = {edge: np.concatenate(parts) for edge, parts in samples.items()}
    return {edge: float(np.median(took)) for edge, took in joined.items() if took.size}


def _collective(trace: Trace, kind: str) -> float | Floats:
    """By stage, the mean time of such an event."""
    stages = trace.header.num_stages
    times, counts = np.zeros(stages), np.zeros(stages)
    for member in trace.members:
        rows = np.flatnonzero((member.kind == kind) & (member.stage >= 0) & (member.stage < stages))
        np.add.at(times, member.stage[rows], member.end[rows] - member.start[rows])
        np.add.at(counts, member.stage[rows], 1)
    return np.asarray(times / np.maximum(counts, 1)) if counts.any() else 0.0
