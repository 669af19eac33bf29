"""How does a file become a schedule?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from schedules.action import Action
from schedules.errors import ScheduleError
from schedules.plan import Plan
from schedules.schedule import Problem, shown


@dataclass(frozen=True)
class CSVFile:
    """The orders, or whole programs, of a CSV file (see `Plan.from_csv`), read when it is made.

    The file fixes ranks, placement and the number of microbatches: to ask for others is a `ScheduleError`.
    """

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))
        _ = self.plan  # a file that cannot be read fails here, not at the first step

    @cached_property
    def plan(self) -> Plan:
        """The file as it is: neither lowered nor verified."""
        try:
            return Plan.from_csv(Path(self.path))
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"cannot read {self.path}: {error}") from error
        except ScheduleError as error:
            raise ScheduleError(
                f"{self.path}: {error}", rank=error.rank, position=error.position, action=error.action
            ) from None

    @property
    def ranks(self) -> int:
        return self.plan.ranks

    @property
    def microbatches(self) -> int:
        return self.plan.microbatches

    def placement(self, ranks: int) -> tuple[int, ...]:
        if ranks != self.ranks:
            raise ScheduleError(f"{self.path} has {self.ranks} ranks, not {ranks}")
        return self.plan.placement

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        if problem.placement != self.placement(problem.ranks):
            raise ScheduleError(
                f"{self.path} has placement {shown(self.plan.placement)}, not {shown(problem.placement)}"
            )
        if problem.microbatches != self.microbatches:
            raise ScheduleError(
                f"{self.path} has {self.microbatches} microbatches, not {problem.microbatches}"
            )
        return self.plan.programs

    def pairs(self, problem: Problem) -> Sequence[Sequence[int]]:
        return self.plan.pairs
