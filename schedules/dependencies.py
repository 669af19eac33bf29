"""What does an action need, and from which stage?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schedules.errors import ScheduleError
from schedules.ops import ACTIVATION, COMMUNICATION, GRADIENT, OPS

Edge = tuple[int, int]
Ints = npt.NDArray[np.int64]


class Need(NamedTuple):
    """A value (see `schedules.ops`) and the stage that makes it."""

    value: str
    source: int


class Edges(tuple[Edge, ...]):
    """A plan's edges (source stage, destination stage), the source first; equal to the plain tuple."""

    @classmethod
    def of(cls, pairs: Iterable[Edge]) -> Edges:
        """Checked edges, each once, in the order given. Edges themselves come back as they are."""
        if isinstance(pairs, Edges):
            return pairs
        edges = cls(dict.fromkeys((int(source), int(destination)) for source, destination in pairs))
        for source, destination in edges:
            if not 0 <= source < destination:
                raise ScheduleError(
                    f"({source}, {destination}) is no edge: an edge goes from a stage to a later one"
                )
        return edges

    @cached_property
    def predecessors(self) -> dict[int, tuple[int, ...]]:
        """The stages whose activations a stage takes, ascending; a stage without any is left out."""
        return _grouped((destination, source) for source, destination in self)

    @cached_property
    def successors(self) -> dict[int, tuple[int, ...]]:
        """The stages whose gradients a stage takes, ascending; a stage without any is left out."""
        return _grouped(self)

    @cached_property
    def rows(self) -> dict[Edge, int]:
        """Each edge's index."""
        return {edge: row for row, edge in enumerate(self)}


def chain(num_stages: int) -> Edges:
    """0-1-2-...: the edges of a plan that names none."""
    return Edges.of((stage, stage + 1) for stage in range(num_stages - 1))


def needs(op: str, stage: int, edges: Iterable[Edge]) -> tuple[Need, ...]:
    """All that an action of `stage` needs: the one function that every part of the engine reads.

    A value whose source is on another rank has to be received first; a receive itself needs nothing here.
    The first stage's batch and the last stage's loss are no needs.
    """
    spec, edges = OPS[op], Edges.of(edges)
    own = tuple(Need(value, stage) for value in spec.own)
    if spec.takes is None:
        return own
    sources = {ACTIVATION: edges.predecessors, GRADIENT: edges.successors}[spec.takes]
    return own + tuple(Need(spec.takes, source) for source in sources.get(stage, ()))


def edge_of(value: str, sending: int, receiving: int) -> Edge:
    """The edge that a value travels on: an activation along it, a gradient against it."""
    return (sending, receiving) if value == ACTIVATION else (receiving, sending)


def route_of(value: str, edge: Edge) -> tuple[int, int]:
    """The (sending stage, receiving stage) of a value on an edge: `edge_of` the other way."""
    return edge if value == ACTIVATION else (edge[1], edge[0])


def route(op: str, stage: int, peer: int | None = None) -> tuple[int, int]:
    """The (sending stage, receiving stage) of a communication action."""
    other = chain_peer(op, stage) if peer is None else peer
    return (stage, other) if OPS[op].sends else (other, stage)


def chain_peer(op: str, stage: int) -> int:
    """The other stage of a communication action that names no peer: its neighbour in the chain."""
    return stage + _STEP[op]


def chain_peers(ops: npt.NDArray[np.uint8], stages: npt.NDArray[Any]) -> Ints:
    """`chain_peer` for columns; for an action that has no peer, -1."""
    step = _STEPS[ops]
    return np.where(step == 0, -1, stages + step)


def _grouped(pairs: Iterable[Edge]) -> dict[int, tuple[int, ...]]:
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: tuple(sorted(values)) for key, values in groups.items()}


# Activations go up the chain and gradients down; a receive looks back to where its value comes from.
_STEP = {
    op: (1 if OPS[op].carries == ACTIVATION else -1) * (1 if OPS[op].sends else -1) for op in COMMUNICATION
}
_STEPS = np.zeros(256, np.int64)
for _op, _step in _STEP.items():
    _STEPS[OPS[_op].code] = _step
