"""When does each compute action start, if transfers take no time, and how long do ranks wait?"""

from __future__ import annotations

import numpy as np

from schedules.deadlock import deadlock
from schedules.dependencies import Ints
from schedules.graph import longest_paths
from schedules.index import Index, compute_only
from schedules.ops import OPS
from schedules.plan import Plan


def start_times(index: Index) -> Ints:
    """By number, for checked orders (`verifier.check_orders`), in units of the default costs.

    Raises a `ScheduleError` that draws the ring where ranks wait for each other.
    """
    sources, targets = _edges(index)
    paths = longest_paths(costs(index), sources, targets)
    if paths.done.all():
        return paths.starts
    numbers = np.flatnonzero(~paths.done)
    stuck_ranks, first = np.unique(index.ranks_of(numbers), return_index=True)
    heads = numbers[first]
    blocking = np.isin(targets, heads) & ~paths.done[sources]
    waits = dict(zip(targets[blocking].tolist(), sources[blocking].tolist(), strict=True))
    raise deadlock(index, dict(zip(stuck_ranks.tolist(), heads.tolist(), strict=True)), waits)


def bubble(plan: Plan) -> float:
    """See `Plan.bubble`."""
    index = Index.of(compute_only(plan))
    taken = costs(index)
    makespan = int((start_times(index) + taken).max(initial=0))
    return 1 - float(taken.sum()) / (plan.ranks * makespan) if makespan else 0.0


def costs(index: Index) -> Ints:
    """By number, each action's default cost."""
    return np.concatenate([_COSTS[program.ops] for program in index.plan.programs])


def _edges(index: Index) -> tuple[Ints, Ints]:
    """Each action waits for the one before it in its order, and for what other ranks make for it."""
    inner = np.ones(int(index.offsets[-1]), bool)
    inner[index.offsets[:-1]] = False  # a rank's first action has none before it
    targets = [np.flatnonzero(inner)]
    sources = [targets[0] - 1]
    makers = {value: index.makers(value) for value in _TRAVELLING}
    for (value, source), stage, takers in index.demands():
        if not index.is_local(source, stage):
            there = takers >= 0
            sources.append(makers[value][source][there])
            targets.append(takers[there])
    return np.concatenate(sources), np.concatenate(targets)


_TRAVELLING = {spec.takes for spec in OPS.values() if spec.takes is not None}
_COSTS = np.zeros(256, np.int64)
for _spec in OPS.values():
    _COSTS[_spec.code] = _spec.cost
