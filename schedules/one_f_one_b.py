"""In which order do 1F1B and its eager form work? (PipeDream-Flush: Narayanan et al., arXiv 2006.09503.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.action import Action
from schedules.letters import spell
from schedules.schedule import Problem
from schedules.shapes import along_line, line


@dataclass(frozen=True)
class OneFOneB:
    """Forwards until the first gradient is there, then one backward, one forward. Idle (p-1)(F+B).

                 warm-up                  steady state        drain
        rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- .  B3--- .  B4---
        rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- .  B4--- .  .
        rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- .  .  .  .

    Stage s of p keeps at most p - s activations, whatever the number of microbatches.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return line(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        ranks = along_line(problem, "1f1b")
        return _orders(problem, [len(ranks) - stage for stage in range(len(ranks))])


@dataclass(frozen=True)
class Eager1F1B:
    """1F1B with nearly twice the forwards ahead, so that transfers hide behind them. Idle (p-1)(F+B).

        rank 0  F0 F1 F2 F3 F4 .  .  B0--- .  B1--- .  B2--- .  B3--- .  B4---
        rank 1  .  F0 F1 F2 .  B0--- F3 B1--- F4 B2--- .  B3--- .  B4--- .  .
        rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- .  .  .  .

    Stage s of p keeps at most 2(p - s) - 1 activations. At p = 4, m = 8 and with transfers as long as a
    forward, a step takes 39 where 1F1B takes 49.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return line(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        ranks = along_line(problem, "eager_1f1b")
        return _orders(problem, [2 * (len(ranks) - stage) - 1 for stage in range(len(ranks))])


def _orders(problem: Problem, warm_up: Sequence[int]) -> Sequence[Sequence[Action]]:
    """`warm_up[stage]` forwards go out before a gradient comes back."""
    m = problem.microbatches
    stages = [problem.stages_of(rank) for rank in range(problem.ranks)]
    return [spell("F" * min(m, warm_up[s[0]]) + "BF" * m, s, m).order for s in stages]
