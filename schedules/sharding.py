"""Does each stage have its weights when it computes, and is each of its gradients reduced?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedules.dependencies import Ints
from schedules.errors import ScheduleError
from schedules.index import Columns, Index
from schedules.ops import OPS, REDUCE_GRAD
from schedules.plan import GATHERS, IS_COMPUTE, LIVES

_REDUCE_GRAD = OPS[REDUCE_GRAD].code


def check_collectives(index: Index) -> None:
    """The part of `schedules.verify` that concerns UNSHARD, RESHARD and REDUCE_GRAD.

    A stage that is ever unsharded computes between an UNSHARD and the next RESHARD, and nowhere else. A stage
    that ever reduces does so behind its last weight gradient, and each time has one that is not reduced yet.

    Collectives close no ring of waiting, so there is no more to prove. All replicas run the same programs:

        replica 0, rank 0   .. SEND .. REDUCE_GRAD ..      Laid on top of each other, a ring through several
                                            |              replicas becomes one in a single replica's
        replica 1, rank 0   .. SEND .. REDUCE_GRAD ..      programs, where a collective, which meets only
                                                           itself, is a mere point of one rank's program.
    Take these points out, and the ring is one of transfers alone: the proof for transfers excludes it.
    """
    if index.has_collectives:
        columns = Columns.of(index.plan)
        _check_gathered(index, columns)
        _check_reduced(index, columns)


def _check_gathered(index: Index, columns: Columns) -> None:
    change = GATHERS[columns.ops].astype(np.int64)
    computes = IS_COMPUTE[columns.ops] & _is_of_any(index, columns, change > 0)
    numbers, firsts = _by_stage(columns, computes | (change != 0))
    if not numbers.size:
        return
    change = change[numbers]
    held = change.cumsum()
    before = held[firsts] - change[firsts]  # what the stages before left behind
    held -= np.repeat(before, np.diff([*firsts.tolist(), numbers.size]))
    wrong = held != np.where(change > 0, 1, 1 + change)
    if wrong.any():
        number = numbers[wrong].min()
        already = change[numbers == number] > 0
        raise _error(index, columns, number, "is unsharded already" if already else "is not unsharded")
    lasts = np.append(firsts[1:], numbers.size) - 1
    left = numbers[lasts[held[lasts] > 0]]
    if left.size:
        raise _error(index, columns, left[0], "stays unsharded: no RESHARD of it follows")


def _check_reduced(index: Index, columns: Columns) -> None:
    reduces = columns.ops == _REDUCE_GRAD
    adds = (LIVES[columns.ops] < 0) & _is_of_any(index, columns, reduces)
    numbers, firsts = _by_stage(columns, adds | reduces)
    if not numbers.size:
        return
    is_reduce = reduces[numbers]
    fresh = np.append(False, ~is_reduce[:-1])  # a weight gradient stands right before it
    fresh[firsts] = False
    in_vain = numbers[is_reduce & ~fresh]
    if in_vain.size:
        raise _error(index, columns, in_vain.min(), "has no weight gradient that is not reduced yet")
    lasts = np.append(firsts[1:], numbers.size) - 1
    left = numbers[lasts[~is_reduce[lasts]]]
    if left.size:
        raise _error(index, columns, left[0], "never reduces this weight gradient: no REDUCE_GRAD follows")


def _is_of_any(index: Index, columns: Columns, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """By action: whether any of the chosen ones is of its stage."""
    stages = np.zeros(index.plan.num_stages, np.bool_)
    stages[columns.stages[chosen]] = True
    return stages[columns.stages]


def _by_stage(columns: Columns, chosen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The numbers of the chosen actions, stage after stage, and where each stage begins among them."""
    numbers = np.flatnonzero(chosen)
    numbers = numbers[np.argsort(columns.stages[numbers], kind="stable")]
    firsts = np.flatnonzero(np.diff(columns.stages[numbers], prepend=-1))
    return numbers, firsts


def _error(index: Index, columns: Columns, number: np.int64, reason: str) -> ScheduleError:
    return index.error(int(number), f"stage {columns.stages[number]} {reason}")
