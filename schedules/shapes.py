"""Which shapes of placement do schedules ask for, and does a given one have it?"""

from __future__ import annotations

from schedules.errors import ScheduleError
from schedules.schedule import Problem, shown


def line(ranks: int) -> tuple[int, ...]:
    """One stage a rank: 0 1 2 3."""
    return tuple(range(ranks))


def loop(ranks: int, rounds: int) -> tuple[int, ...]:
    """Round after round through the ranks: 0 1 2 3 0 1 2 3."""
    return tuple(range(ranks)) * rounds


def vee(ranks: int) -> tuple[int, ...]:
    """There and back, so that the first rank has the last stage too: 0 1 2 3 3 2 1 0."""
    return (*range(ranks), *reversed(range(ranks)))


def along_line(problem: Problem, name: str) -> tuple[int, ...]:
    """The ranks in the order of their one stage, or an error that says what the schedule needs."""
    if problem.num_stages == problem.ranks:
        return problem.placement
    raise _misfit(problem, name, "one stage per rank", line(problem.ranks))


def along_loop(problem: Problem, name: str, rounds: int) -> tuple[int, ...]:
    """The ranks in the order of the first round, if all rounds are alike and there are so many."""
    first = problem.placement[: problem.ranks]
    if problem.placement == first * rounds:
        return first
    raise _misfit(
        problem, name, f"{rounds} stages per rank, in {rounds} like rounds", loop(problem.ranks, rounds)
    )


def along_vee(problem: Problem, name: str) -> tuple[int, ...]:
    """The ranks on the way there, if the way back is the same reversed."""
    there = problem.placement[: problem.ranks]
    if problem.placement == there + there[::-1]:
        return there
    raise _misfit(problem, name, "two stages per rank, there and back", vee(problem.ranks))


def _misfit(problem: Problem, name: str, needs: str, would_do: tuple[int, ...]) -> ScheduleError:
    return ScheduleError(
        f"{name} needs {needs}, and placement {shown(problem.placement)} puts {problem.num_stages} stages on "
        f"{problem.ranks} ranks: {shown(would_do)} would do, or gpipe, which takes any placement"
    )
