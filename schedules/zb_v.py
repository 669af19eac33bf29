"""In which order does ZB-V work? (Zero bubble on a V-shaped placement: Qi et al., arXiv 2401.10241.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.action import Action
from schedules.letters import spell
from schedules.schedule import Problem
from schedules.shapes import along_vee, vee


@dataclass(frozen=True)
class ZBV:
    """No bubble in a rank's span where F = I = W and m >= 2p - 1, in 1F1B's memory (2p of a stage).

        rank 0  F0  F1  F2  F0' I0' W0' F1' I1' W1' F3  I0  W0  F2' I2' W2' I1  W1  F3' I3' W3' I2  W2  ...
        rank 1  .   F0  F0' F1  F1' I0' W0' F2  I0  W0  F2' I1' W1' F3  I1  W1  F3' I2' W2' I2  I3' I3  ...

    Rank r owns stages r and 2p-1-r: microbatches go down the ranks and come back up, so that the last stage,
    from which the gradients start, is on the first rank. Below m = 2p - 1 the order is that of 2p - 1
    microbatches, less those that there are not: in order, no higher in peak, idler.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return vee(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        along_vee(problem, "zb_v")
        stages = (problem.stages_of(rank) for rank in range(problem.ranks))
        return [spell(_text(problem, own[0]), own, problem.microbatches).order for own in stages]


def _text(problem: Problem, r: int) -> str:
    p, m = problem.ranks, max(problem.microbatches, 2 * problem.ranks - 1)
    warm_up = "F" * (2 * (p - r) - 1) + "fF" * r + "fiw" * (p - r)
    steady = "FIWfiw" * (m - p)
    drain = "Ii" * r + "IW" * (p - r)
    return warm_up + steady + drain + "w" * r + "W" * r
