"""In which order does GPipe work? (Huang et al., arXiv 1811.06965.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.action import Action, Actions
from schedules.ops import B, F
from schedules.schedule import Problem


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards. Idle (p-1)(F+B); every activation is live at the turn.

        rank 0   F0 F1 F2 .  .  .  .  .  .  B0--- B1--- B2---
        rank 1   .  F0 F1 F2 .  .  .  B0--- B1--- B2--- .  .
        rank 2   .  .  F0 F1 F2 B0--- B1--- B2--- .  .  .  .

    Any placement will do: a rank with several stages works through them in stage order, and back again.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        return [_order(problem.stages_of(rank), problem.microbatches) for rank in range(problem.ranks)]


def _order(stages: tuple[int, ...], microbatches: int) -> Actions:
    forwards = [Actions.run(stage, F, 0, microbatches) for stage in stages]
    backwards = [Actions.run(stage, B, 0, microbatches) for stage in reversed(stages)]
    return Actions.join([*forwards, *backwards])
