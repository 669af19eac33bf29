"""When can each node of a graph start, at the earliest? (Longest paths, by Kahn's algorithm.)"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Times = npt.NDArray[Any]
"""Integers or floats: what goes in comes out."""

_FEW = 32768
"""Nodes up to which Python's numbers are faster than numpy's waves (as measured at 16 to 256 ranks)."""


class Paths(NamedTuple):
    """`starts` holds each node's earliest start. Nodes that are on a cycle, or behind one, are not `done`."""

    starts: Times
    done: npt.NDArray[np.bool_]


def longest_paths(durations: Times, sources: Ints, targets: Ints, lags: Times | None = None) -> Paths:
    """A node starts when all nodes with an edge to it ended, `lags[edge]` ago. Linear in nodes and edges."""
    by_source = np.argsort(sources, kind="stable")
    first = np.zeros(len(durations) + 1, np.int64)  # what node n leads to: after[first[n] : first[n + 1]]
    np.cumsum(np.bincount(sources, minlength=len(durations)), out=first[1:])
    missing = np.bincount(targets, minlength=len(durations))  # predecessors that have not ended
    run = _one_by_one if len(durations) <= _FEW else _in_waves
    return run(durations, first, targets[by_source], None if lags is None else lags[by_source], missing)


def _one_by_one(durations: Times, first: Ints, after: Ints, lags: Times | None, missing: Ints) -> Paths:
    """For small graphs: half a microsecond a node, however narrow the graph."""
    starts = np.zeros(len(durations), durations.dtype).tolist()
    lasts, bounds, leads, left = durations.tolist(), first.tolist(), after.tolist(), missing.tolist()
    late = [0] * len(leads) if lags is None else lags.tolist()
    ready = [node for node, count in enumerate(left) if not count]
    for node in ready:  # grows as it goes
        end = starts[node] + lasts[node]
        for edge in range(bounds[node], bounds[node + 1]):
            target, start = leads[edge], end + late[edge]
            if start > starts[target]:
                starts[target] = start
            left[target] -= 1
            if not left[target]:
                ready.append(target)
    return Paths(np.array(starts, durations.dtype), np.array(left) == 0)


def _in_waves(durations: Times, first: Ints, after: Ints, lags: Times | None, missing: Ints) -> Paths:
    """For large graphs: nodes go in waves, of all whose last predecessor was in the wave before.

    wave 0      1      2      3          Wide graphs are fast (numpy works through a wave at once);
         a ---> b ---> d ---> f          a graph as narrow as a chain pays some 20 us a node.
         '----> c -----^
    """
    starts = np.zeros(len(durations), durations.dtype)
    stamp = np.empty(len(durations), np.int64)
    wave = np.flatnonzero(missing == 0)
    while wave.size:
        low = first[wave]
        counts = first[wave + 1] - low
        ends = counts.cumsum()
        edges = np.arange(ends[-1]) + np.repeat(low - ends + counts, counts)
        reached = after[edges]
        reaching = np.repeat(starts[wave] + durations[wave], counts)
        np.maximum.at(starts, reached, reaching if lags is None else reaching + lags[edges])
        np.subtract.at(missing, reached, 1)
        ready = reached[missing[reached] == 0]
        stamp[ready] = numbers = np.arange(ready.size)
        wave = ready[stamp[ready] == numbers]  # each once, though two of the wave may lead to it
    return Paths(starts, missing == 0)
