"""What happened in one traced step, on every member? A value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from schedules import Plan

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Letters = npt.NDArray[np.str_]
Bools = npt.NDArray[np.bool_]

COMPUTE = "FBIW"
"""The kinds of event that are computation: forward, whole backward, its input part, its weight part."""
KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "s": "a SEND held the rank up",
    "r": "waits for a value",
    "g": "reduces gradients",
    "u": "waits for weights (UNSHARD)",
    "o": "optimizer",
    "c": "agreement",
}
"""What each letter of `Member.kind` means."""
VALUES = {"a": "activation", "g": "gradient", "-": ""}
"""What each letter of `Member.value` means."""
TICKS = 10
"""Times are kept in tenths of a microsecond: sums of so many whole ticks are exact."""


class TraceError(ValueError):
    """A trace that cannot be read, or that does not hold together; the message says why."""


@dataclass(frozen=True, eq=False)
class Sends:
    """A member's SENDs, one a row: which value of which microbatch left which stage for which, and when."""

    microbatch: Ints
    source: Ints
    destination: Ints
    value: Letters
    left: Floats

    @classmethod
    def none(cls) -> Sends:
        """Of a member that sent nothing."""
        none = np.empty(0, np.int64)
        return cls(none, none, none, np.empty(0, "<U1"), np.empty(0))


@dataclass(frozen=True, eq=False)
class Member:
    """One rank of one replica in a step: columns, one row an event, in ascending order of `start`.

    Times are in microseconds, from when the first member of all began. `kind` has the letters of `KINDS`;
    stage and microbatch are -1 where there is none. `peer` (a rank) and `value` belong to `s` and `r`.
    `live` and `memory` (bytes, or None where unknown) are those after the event.
    """

    member: int
    rank: int
    replica: int
    host: str
    device: str
    begin: float
    finish: float
    kind: Letters
    stage: Ints
    microbatch: Ints
    peer: Ints
    value: Letters
    start: Floats
    end: Floats
    live: Ints
    memory: Ints | None = None
    sends: Sends = field(default_factory=Sends.none)

    @cached_property
    def is_compute(self) -> Bools:
        """Which events are computation."""
        return np.isin(self.kind, list(COMPUTE))


@dataclass(frozen=True)
class Clock:
    """Which clock told the times, "cpu" or "cuda", and by how many microseconds each member's may be off."""

    kind: str
    error: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the simulator makes of a step: times of each member's computations, in the order of its events."""

    duration: float
    starts: tuple[Floats, ...]
    ends: tuple[Floats, ...]


@dataclass(frozen=True)
class Header:
    """What the members of a step have in common. `layers[s]` is the range of stage s, `plan` a CSV text.

    `layer_sizes`, if known, says how a stage's time is shared out over its layers: parameters, say.
    """

    step: int
    wall_time: float
    options: str
    schedule: str
    ranks: int
    replicas: int
    microbatches: int
    placement: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    layer_names: tuple[str, ...]
    plan: str
    duration: float
    clock: Clock
    scalars: Mapping[str, float] = field(default_factory=dict, hash=False)
    predicted: Prediction | None = field(default=None, compare=False)
    layer_sizes: tuple[float, ...] | None = None

    @property
    def num_stages(self) -> int:
        return len(self.placement)


@dataclass(frozen=True, eq=False)
class Trace:
    """A step: `members[rank * replicas + replica]`."""

    header: Header
    members: tuple[Member, ...]

    @cached_property
    def plan(self) -> Plan:
        """The plan that ran. Raises a `schedules.ScheduleError` where the text is none."""
        return _plan(self.header.plan)

    def replace(self, **changes: Any) -> Trace:
        """With other values in the header."""
        return Trace(dataclasses.replace(self.header, **changes), self.members)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.header.placement) if owner == rank)

    def name_of(self, member: Member) -> str:
        """What a person calls it: its rank, and its replica where there are several."""
        return f"rank {member.rank}" + (f", replica {member.replica}" if self.header.replicas > 1 else "")


def ticks(times: npt.ArrayLike) -> Ints:
    """Times in whole ticks."""
    return np.rint(np.asarray(times, np.float64) * TICKS).astype(np.int64)


@lru_cache(maxsize=8)
def _plan(text: str) -> Plan:
    # The steps of a run share a plan, and reading one of 16 ranks x 256 microbatches takes half a second.
    return Plan.from_csv(text)
