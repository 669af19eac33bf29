"""Which actions set a timeline's makespan?"""

from __future__ import annotations

import numpy as np

from schedules.errors import Standing
from schedules.graph import longest_paths
from schedules.simulator import waiting
from schedules.timeline import Timeline


def critical_path(timeline: Timeline) -> tuple[Standing, ...]:
    """Back from the last end, from each action to one that it started right behind."""
    index, graph = waiting(
        timeline.plan, timeline.costs, rendezvous=timeline.rendezvous, blocking=timeline.blocking
    )
    starts = longest_paths(*graph).starts
    ends = starts + graph.durations
    arrivals = ends[graph.sources] + (0 if graph.lags is None else graph.lags)
    tight = np.flatnonzero(arrivals == starts[graph.targets])[::-1]  # a rank's own order, listed first, wins
    before = np.full(len(starts), -1)
    before[graph.targets[tight]] = graph.sources[tight]
    computes = index.computes()
    node, path = int(ends[: len(computes)].argmax()), []
    while node >= 0:
        if node < len(computes) and computes[node]:
            path.append(node)
        node = int(before[node])
    orders = computes.cumsum() - 1  # an action's number among the computations
    return tuple(_standing(timeline, int(orders[node])) for node in reversed(path))


def _standing(timeline: Timeline, number: int) -> Standing:
    rank = int(np.searchsorted(timeline.offsets, number, side="right")) - 1
    position = number - int(timeline.offsets[rank])
    return rank, position, timeline.plan.programs[rank][position]
