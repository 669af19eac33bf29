"""Which actions set a timeline's makespan?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedules.clock import Graph, start_times
from schedules.dependencies import Ints
from schedules.errors import Standing
from schedules.index import Index
from schedules.simulator import waiting
from schedules.timeline import Timeline


def critical_path(timeline: Timeline) -> tuple[Standing, ...]:
    """Back from the last end, from each action to one that it started right behind.

    A collective is said to stand at the position of the computation that follows it.
    """
    index, graph = waiting(
        timeline.simulated or timeline.plan,
        timeline.costs,
        rendezvous=timeline.rendezvous,
        blocking=timeline.blocking,
    )
    starts = start_times(index, graph)
    ends = starts + graph.durations
    arrivals = ends[graph.sources] + (0 if graph.lags is None else graph.lags)
    tight = np.flatnonzero(arrivals == starts[graph.targets])[::-1]  # a rank's own order, listed first, wins
    before = np.full(len(starts), -1)
    before[graph.targets[tight]] = graph.sources[tight]
    computes = index.computes()
    shown = _numbers(graph, computes)
    node, path = int(np.where(shown >= 0, ends, -1).argmax()), []
    while node >= 0:
        if shown[node] >= 0:
            path.append(int(shown[node]))
        node = int(before[node])
    positions = (
        computes.cumsum() - computes
    )  # computations before each action, on its rank and the ones above
    return tuple(_standing(index, positions, number) for number in reversed(path))


def _numbers(graph: Graph, computes: npt.NDArray[np.bool_]) -> Ints:
    """By node, the action that it shows in the path: a computation or a collective; -1 for none."""
    numbers = np.full(len(graph.durations), -1)
    numbers[: len(computes)] = np.where(computes, np.arange(len(computes)), -1)
    numbers[graph.first_run :] = graph.runs
    return numbers


def _standing(index: Index, positions: Ints, number: int) -> Standing:
    rank, _, action = index.locate(number)
    return rank, int(positions[number] - positions[index.offsets[rank]]), action
