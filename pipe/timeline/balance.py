"""Which stage is the slowest, and what would moving a layer gain?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pipe.timeline.costs import Measured, costs_of, timeline_of
from pipe.timeline.idle import Idle
from pipe.timeline.trace import COMPUTE, TICKS, Floats, Header, Trace
from schedules import Costs

LEAST = 0.02
"""The saving from which on a move is worth telling: a smaller one is within what steps differ by anyway."""


class Stage(NamedTuple):
    """A stage, its mean time a microbatch, and that over the mean of all stages."""

    stage: int
    rank: int
    layers: tuple[int, int]
    times: dict[str, float]
    time: float
    ratio: float


class Move(NamedTuple):
    """A border layer that another stage could have, and the share of the step that it would save."""

    layer: int
    source: int
    target: int
    saving: float


def stages_of(trace: Trace) -> tuple[Stage, ...]:
    """All stages, with the time that a microbatch spends there: forward and backward in all its parts."""
    header, by_kind = trace.header, Measured(trace).by_microbatch
    time = np.sum(list(by_kind.values()), axis=0)
    mean = float(time.mean()) or 1.0
    return tuple(
        Stage(
            stage,
            header.placement[stage],
            header.layers[stage],
            {kind: float(by_kind[kind][stage]) for kind in COMPUTE},
            float(time[stage]),
            float(time[stage]) / mean,
        )
        for stage in range(header.num_stages)
    )


def best_move(trace: Trace, times: Idle) -> Move | None:
    """The one layer that saves most if a neighbouring stage has it, if any saves `LEAST` of the step.

    Layers can't be told apart in a trace: a stage's time is shared out over them by `layer_sizes`, else
    evenly. The same plan is simulated with either stage's new time.
    """
    costs, rest = costs_of(trace), times.duration - (times.end - times.begin)
    before = timeline_of(trace.plan, costs).makespan
    table = _table(costs, trace.header.num_stages)
    moves = []
    for layer, source, target in _candidates(trace.header, table):
        moved = _moved(table, source, target, _share(trace.header, layer, source))
        after = timeline_of(trace.plan, _with_times(costs, moved)).makespan
        moves.append(Move(layer, source, target, (before - after) / (before + rest / TICKS)))
    best = max(moves, key=lambda move: move.saving, default=None)
    return best if best is not None and best.saving > LEAST else None


def _candidates(header: Header, table: dict[str, Floats]) -> Iterator[tuple[int, int, int]]:
    """(layer, source, target) at each border, where it takes from a stage, or rank, that has more to do."""
    stage = table["F"] + table["B"]
    placement = np.array(header.placement)
    rank = np.bincount(placement, stage)[placement]
    for left, right in zip(range(header.num_stages), range(1, header.num_stages), strict=False):
        ways = ((header.layers[left][1] - 1, left, right), (header.layers[right][0], right, left))
        for layer, source, target in ways:
            start, stop = header.layers[source]
            if stop - start > 1 and (stage[source] > stage[target] or rank[source] > rank[target]):
                yield layer, source, target


def _share(header: Header, layer: int, stage: int) -> float:
    """How much of a stage's time is a layer's."""
    start, stop = header.layers[stage]
    if header.layer_sizes is not None:
        total = sum(header.layer_sizes[start:stop])
        if total > 0:
            return header.layer_sizes[layer] / total
    return 1 / (stop - start)


def _table(costs: Costs, stages: int) -> dict[str, Floats]:
    """Each op's cost by stage; one with whole backwards only, or with split ones, gets the others made up."""
    f, b, i, w = (costs.times(op, stages, 1)[:, 0].copy() for op in COMPUTE)
    split = (i + w > 0) & (b == 0)
    whole = (b > 0) & (i + w == 0)
    b[split] = (i + w)[split]
    i[whole] = w[whole] = b[whole] / 2
    return {"F": f, "B": b, "I": i, "W": w}


def _moved(table: dict[str, Floats], source: int, target: int, share: float) -> dict[str, Floats]:
    moved = {op: times.copy() for op, times in table.items()}
    for op, times in table.items():
        moved[op][source] -= times[source] * share
        moved[op][target] += times[source] * share
    return moved


def _with_times(costs: Costs, table: dict[str, Floats]) -> Costs:
    latency: Any = costs.latency
    return Costs(
        **{op: times.tolist() for op, times in table.items()},
        latency=dict(latency) if isinstance(latency, tuple) else latency,  # as Costs keeps a mapping
        unshard=costs.unshard,
        reduce_grad=costs.reduce_grad,
    )
