"""What is a schedule, and what is it asked?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from schedules.action import Action
from schedules.costs import Costs
from schedules.errors import ScheduleError

__all__ = ["Problem", "Schedule", "ScheduleError"]


@dataclass(frozen=True)
class Problem:
    """What a schedule may know: which rank owns each stage, how many microbatches there are, and more.

    `costs` gives the ops' times, as `Costs` (a mapping such as {"F": 1.5} becomes one); `memory` is what a
    rank can hold, in the unit of the costs' `activation_bytes`: live activations, unless these say otherwise.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: Costs | Mapping[str, float] | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", check_placement(self.placement))
        check_microbatches(self.microbatches)
        if isinstance(self.costs, Mapping):
            object.__setattr__(self, "costs", Costs(**self.costs))

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 + max(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return self._stages[rank]

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        return stages_by_rank(self.placement)


class Schedule(Protocol):
    """The rule that makes the orders. Two methods, and no base class, are all that one needs.

    A schedule with overlapped pairs has a third, `pairs(problem)`: per rank, the index in its order of each
    pair's first action.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The placement that the schedule wants on so many ranks: each stage's rank."""
        ...

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        """What each rank computes, in order: F, and B or I and W, of its stages and all microbatches."""
        ...


def check_placement(placement: Sequence[int]) -> tuple[int, ...]:
    """The placement as a tuple, if it numbers its ranks 0, 1, ... without a gap."""
    placement = tuple(int(rank) for rank in placement)
    if not placement:
        raise ScheduleError("a placement without stages")
    if min(placement) < 0:
        raise ScheduleError(f"placement {shown(placement)} has rank {min(placement)}: ranks are 0, 1, 2, ...")
    idle = set(range(max(placement) + 1)) - set(placement)
    if idle:
        raise ScheduleError(f"placement {shown(placement)} leaves rank {min(idle)} without a stage")
    return placement


def check_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} microbatches: a step needs at least one")


def stages_by_rank(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    stages: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        stages[rank].append(stage)
    return tuple(map(tuple, stages))


def shown(placement: Sequence[int]) -> str:
    """A placement for an error message: `0,1,0,1`, cut short where it is long."""
    return ",".join(map(str, placement[:16])) + (",..." if len(placement) > 16 else "")
