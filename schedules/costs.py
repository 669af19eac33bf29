"""How long do ops and transfers take, and how much memory do activations hold?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from schedules.dependencies import Edge, Edges
from schedules.errors import ScheduleError
from schedules.ops import OPS, B, I, W

Cost = float | Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[Any]
"""One number for all; one a stage; or one a stage and microbatch, `[stage][microbatch]`."""
PerEdge = float | Mapping[Edge, float]
"""One number for all edges, or one by edge (source stage, destination stage)."""


_PER_EDGE = ("latency", "bandwidth", "boundary_bytes")


@dataclass(frozen=True)
class Costs:
    """What the simulator knows of model and machine. Times are in one unit of your choice, bytes are bytes.

    A value: numbers and arrays are kept as tuples, so that equal costs are equal and have equal hashes.
    """

    F: Cost = OPS["F"].cost
    """Time of a forward."""
    B: Cost | None = None
    """Time of a whole backward; I + W unless given."""
    I: Cost = OPS["I"].cost  # noqa: E741 - the field's own letter
    """Time of a backward's input-gradient part."""
    W: Cost = OPS["W"].cost
    """Time of its weight-gradient part."""
    pair: Cost | None = None
    """Time of an overlapped pair, by its forward's stage (and microbatch); the sum of both unless given."""
    unshard: Cost = 0.0
    """Time in which a stage's weights are gathered from its replicas."""
    reduce_grad: Cost = 0.0
    """Time in which a stage's weight gradients are reduced over them."""
    latency: PerEdge = 0.0
    """Time from the end of a value's maker to the start of its taker on another rank, beside its bytes'."""
    bandwidth: PerEdge = float("inf")
    """Bytes per unit of time, each way; a channel carries one value after the other."""
    boundary_bytes: PerEdge = 0.0
    """Bytes of one microbatch's activation, and of its gradient, on an edge."""
    activation_bytes: Cost = 1.0
    """Bytes that one microbatch keeps on its stage from its F until its B, or W."""
    released_at_input: Cost = 0.0
    """The share of these bytes that a split backward frees at the end of I already: 0 to 1."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _checked(field.name, value))
        if np.max(self.released_at_input, initial=0) > 1:
            raise ScheduleError(f"released_at_input={self.released_at_input}: a share is 0 to 1")

    def times(self, op: str, stages: int, microbatches: int) -> npt.NDArray[np.float64]:
        """[stage, microbatch]: how long an op takes."""
        if op == B and self.B is None:
            return self.times(I, stages, microbatches) + self.times(W, stages, microbatches)
        name = op.lower() if OPS[op].collective else op
        return spread(name, getattr(self, name), stages, microbatches)

    def wires(self, edges: Edges) -> npt.NDArray[np.float64]:
        """[edge]: how long a value's bytes occupy the channel."""
        return _by_edge(self.boundary_bytes, edges, 0.0) / _by_edge(self.bandwidth, edges, float("inf"))

    def latencies(self, edges: Edges) -> npt.NDArray[np.float64]:
        """[edge]: how long a value travels, beside that."""
        return _by_edge(self.latency, edges, 0.0)


def spread(name: str, cost: Cost, stages: int, microbatches: int) -> npt.NDArray[np.float64]:
    """[stage, microbatch] of a number, of one a stage, or of one a stage and microbatch."""
    array = np.asarray(cost, np.float64)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim and array.shape not in ((stages, 1), (stages, microbatches)):
        raise ScheduleError(
            f"{name} has shape {np.shape(cost)}: it takes a number, one a stage ({stages},), "
            f"or one a stage and microbatch ({stages}, {microbatches})"
        )
    return np.broadcast_to(array, (stages, microbatches))


def _by_edge(value: Any, edges: Edges, otherwise: float) -> npt.NDArray[np.float64]:
    if not isinstance(value, tuple):
        return np.full(len(edges), value, np.float64)
    named: dict[Edge, float] = dict(value)
    strangers = named.keys() - set(edges)
    if strangers:
        raise ScheduleError(f"{min(strangers)} is no edge of the plan")
    return np.array([named.get(edge, otherwise) for edge in edges], np.float64)


def _checked(name: str, value: Any) -> Any:
    """As numbers and tuples; what is no number, negative or without end is refused."""
    by_edge = isinstance(value, Mapping)
    if by_edge:
        value = tuple(sorted((tuple(edge), number) for edge, number in value.items()))
    else:
        value = _tuples(value)
    if isinstance(value, tuple) and by_edge != (name in _PER_EDGE):
        raise ScheduleError(f"{name}={value!r}: {_takes(name)}")
    try:
        numbers = np.asarray([number for _, number in value] if by_edge else value, np.float64)
    except (TypeError, ValueError):
        raise ScheduleError(f"{name}={value!r}: {_takes(name)}") from None
    if name == "bandwidth":
        fine, rule = numbers > 0, "a bandwidth is more than 0"
    else:
        fine, rule = (numbers >= 0) & np.isfinite(numbers), "a number is finite, and no less than 0"
    if not fine.all():
        raise ScheduleError(f"{name}={value!r}: {rule}")
    return value


def _takes(name: str) -> str:
    if name in _PER_EDGE:
        return "it takes a number, or a mapping of edges to numbers, as {(0, 1): 0.5}"
    return "it takes a number, one a stage, or one a stage and microbatch"


def _tuples(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
