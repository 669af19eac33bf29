"""In which order does DualPipeV work? (DeepSeek-V3, arXiv 2412.19437, cut in half as Qi et al. have it.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.action import Action
from schedules.letters import Spelled, spell
from schedules.schedule import Problem
from schedules.shapes import along_vee, vee


@dataclass(frozen=True)
class DualPipeV:
    """A forward of one microbatch beside a whole backward of another, as a pair, so that transfers can hide.

        rank 0  F0  F1  F2  F0' I0' W0' F1' F3&B1'----- .   F2'&B0----- B2'---- .   F3'&B1----- B3'---- ...
        rank 1  .   F0  F0' F1  F1' F2  B0'---- F2'&B0----- F3&B1'----- F3'&B1----- B2'---- B2----- .   ...

    Rank r owns stages r and 2p-1-r, as in ZB-V. Idle (p-1)(F&B + B - 3W) at most, where F&B is a pair's time
    (F + B unless hardware overlaps them); at most 2p + 1 activations of a stage. Only where it fills and
    drains are backwards split.
    Below m = 2p the order is that of 2p microbatches, less those that there are not: in order, no higher in
    peak, idler; a pair that loses one of its actions is none.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return vee(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        return [spelled.order for spelled in _spelled(problem)]

    def pairs(self, problem: Problem) -> Sequence[Sequence[int]]:
        """Per rank, the index in its order of each pair's first action."""
        return [spelled.pairs for spelled in _spelled(problem)]


def _spelled(problem: Problem) -> list[Spelled]:
    along_vee(problem, "dualpipe_v")
    stages = (problem.stages_of(rank) for rank in range(problem.ranks))
    return [spell(_text(problem, own[0]), own, problem.microbatches) for own in stages]


def _text(problem: Problem, r: int) -> str:
    p, m = problem.ranks, max(problem.microbatches, 2 * problem.ranks)
    behind = p - 1 - r  # ranks between this one and the turn
    warm_up = "F" * (2 * behind) + "Ff" * (r + 1) + "i*f" * behind
    steady = "(Fb)(fB)" * (m - 2 * p + r + 1)
    if not behind:  # at the turn the first gradient is this very rank's: nothing to overlap with yet
        steady = steady.replace("(Fb)", "Fb", 1)
    drain = "b(fB)" * behind + ("bB" * (r + 1))[: r + 1] + ("iI" * (r + 1))[r + 1 :]
    return warm_up + steady + drain + "*I" * behind + "*" * (r + 1)
