"""In which order does interleaved 1F1B work? (Narayanan et al., arXiv 2104.04473.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedules.action import Action, Actions
from schedules.gpipe import check_rounds
from schedules.ops import OPS, B, F
from schedules.schedule import Problem
from schedules.shapes import along_loop, loop


@dataclass(frozen=True)
class Interleaved:
    """1F1B on `v` stages a rank, placed in rounds. Idle (p-1)(F+B)/v where p divides m.

        rank 0  F0  F1  F0' F1' F2  .   B0'---- F3  B1'---- F2' B0----- F3' B1----- .   B2'---- .   B3'-...
        rank 1  .   F0  F1  F0' B0'---- F1' B1'---- F2  B0----- F3  B1----- F2' B2'---- F3' B3'---- B2--...

    (F and B are those of all a rank's stages together.) Groups of p microbatches go through the rank's stages
    in turn, and back through them in reverse; rank r keeps at most min(mv, 2(p-1-r) + (v-1)p) + 1 activations
    of a stage. Where p does not divide m, the order is that of the next m that it divides, less the
    microbatches that there are not: in order, no higher in peak, idler. (A smaller last group deadlocks: p=5,
    m=7, v=2.)
    """

    v: int = 2

    def __post_init__(self) -> None:
        check_rounds("interleaved", self.v)

    def placement(self, ranks: int) -> tuple[int, ...]:
        return loop(ranks, self.v)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        along_loop(problem, f"interleaved({self.v})", self.v)
        return [_order(problem.stages_of(rank), problem) for rank in range(problem.ranks)]


def _order(stages: tuple[int, ...], problem: Problem) -> Actions:
    p, v = problem.ranks, len(stages)
    place = np.arange(-(-problem.microbatches // p) * p * v)
    turn, microbatches = place // p % v, place // (p * v) * p + place % p
    forwards = _all(F, np.array(stages)[turn], microbatches)
    backwards = _all(B, np.array(stages)[::-1][turn], microbatches)
    # stages[0] is the rank's place in a round: the further on, the sooner gradients come back.
    warm_up = min(len(place), 2 * (p - 1 - stages[0]) + (v - 1) * p)
    steady = len(place) - warm_up
    order = Actions.join(
        [forwards[:warm_up], Actions.weave(forwards[warm_up:], backwards[:steady]), backwards[steady:]]
    )
    return order.where(order.microbatches < problem.microbatches)


def _all(op: str, stages: np.typing.NDArray[np.int64], microbatches: np.typing.NDArray[np.int64]) -> Actions:
    return Actions(np.full(len(stages), OPS[op].code, np.uint8), stages, microbatches)
