"""When can each node of a graph start, at the earliest? (Longest paths, by Kahn's algorithm in numpy.)"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Paths(NamedTuple):
    """`starts` holds each node's earliest start. Nodes that are on a cycle, or behind one, are not `done`."""

    starts: Ints
    done: npt.NDArray[np.bool_]


def longest_paths(durations: Ints, sources: Ints, targets: Ints) -> Paths:
    """A node starts when all nodes with an edge to it have ended. Linear in nodes and edges.

    Nodes go in waves: a wave is all nodes whose last predecessor was in the wave before.

        wave 0      1      2      3          Wide graphs are fast (numpy works through a wave at once);
             a ---> b ---> d ---> f          a graph as narrow as a chain pays some 20 us a node.
             '----> c -----^
    """
    first, after = _grouped_by_source(len(durations), sources, targets)
    missing = np.bincount(targets, minlength=len(durations))  # predecessors that have not ended
    starts = np.zeros(len(durations), durations.dtype)
    stamp = np.empty(len(durations), np.int64)
    wave = np.flatnonzero(missing == 0)
    while wave.size:
        low = first[wave]
        counts = first[wave + 1] - low
        ends = counts.cumsum()
        edges = np.arange(ends[-1]) + np.repeat(low - ends + counts, counts)
        reached = after[edges]
        np.maximum.at(starts, reached, np.repeat(starts[wave] + durations[wave], counts))
        np.subtract.at(missing, reached, 1)
        ready = reached[missing[reached] == 0]
        stamp[ready] = numbers = np.arange(ready.size)
        wave = ready[stamp[ready] == numbers]  # each once, though two of the wave may lead to it
    return Paths(starts, missing == 0)


def _grouped_by_source(nodes: int, sources: Ints, targets: Ints) -> tuple[Ints, Ints]:
    """Compressed rows: what node n leads to is `after[first[n] : first[n + 1]]`."""
    first = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(sources, minlength=nodes), out=first[1:])
    return first, targets[np.argsort(sources, kind="stable")]
