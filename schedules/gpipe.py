"""In which order do GPipe and looped breadth-first work? (arXiv 1811.06965, 2211.05953.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.action import Action, Actions
from schedules.errors import ScheduleError
from schedules.ops import B, F
from schedules.schedule import Problem
from schedules.shapes import along_loop, line, loop


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards (Huang et al.). Idle (p-1)(F+B); every activation is live at the turn.

        rank 0   F0 F1 F2 .  .  .  .  .  .  B0--- B1--- B2---
        rank 1   .  F0 F1 F2 .  .  .  B0--- B1--- B2--- .  .
        rank 2   .  .  F0 F1 F2 B0--- B1--- B2--- .  .  .  .

    Any placement will do: a rank with several stages works through them in stage order, and back again.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return line(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        return _orders(problem)


@dataclass(frozen=True)
class LoopedBFS:
    """GPipe's order on `v` stages a rank, in rounds (Lamy-Poirier). Idle (p-1)(F+B)/v where m >= p.

        rank 0  F0  F1  F2  F0' F1' F2' .   .   .   B0'---- B1'---- B2'---- B0----- B1----- B2-----
        rank 1  .   F0  F1  F2  F0' F1' F2' B0'---- B1'---- B2'---- B0----- B1----- B2----- .   .

    (F and B are those of all a rank's stages together.) The forwards of a stage are done before those of the
    rank's next one. The paper's backwards descend; ours ascend, so that weight gradients add up in microbatch
    order, at no cost in time.
    """

    v: int = 2

    def __post_init__(self) -> None:
        check_rounds("looped_bfs", self.v)

    def placement(self, ranks: int) -> tuple[int, ...]:
        return loop(ranks, self.v)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        along_loop(problem, f"looped_bfs({self.v})", self.v)
        return _orders(problem)


def check_rounds(name: str, v: object) -> None:
    if not isinstance(v, int) or isinstance(v, bool) or v < 1:
        raise ScheduleError(f"{name}({v}): a rank has 1, 2, ... stages")


def _orders(problem: Problem) -> Sequence[Sequence[Action]]:
    return [_order(problem.stages_of(rank), problem.microbatches) for rank in range(problem.ranks)]


def _order(stages: tuple[int, ...], microbatches: int) -> Actions:
    forwards = [Actions.run(stage, F, 0, microbatches) for stage in stages]
    backwards = [Actions.run(stage, B, 0, microbatches) for stage in reversed(stages)]
    return Actions.join([*forwards, *backwards])
