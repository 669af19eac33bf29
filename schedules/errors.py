"""What does a wrong schedule, order or plan raise?"""

from __future__ import annotations

# An `Action`, as the tuple that it is: what makes errors comes after them.
ActionTuple = tuple[int, str, int, "int | None"]

Standing = tuple[int, int, ActionTuple]
"""Where a rank stands: (rank, position in its program, the action there)."""


class ScheduleError(ValueError):
    """A schedule, order, plan or schedule name that cannot be used, with what is known about the culprit.

    `rank`, `position` and `action` say where it is, `cycle` holds a deadlock's ring of standing ranks, and
    `span` is the (start, end) of the offending part where the mistake is in a text.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        position: int | None = None,
        action: ActionTuple | None = None,
        cycle: tuple[Standing, ...] | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.position = position
        self.action = action
        self.cycle = cycle
        self.span = span
