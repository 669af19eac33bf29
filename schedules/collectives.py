"""Where in a plan do the collectives of data parallelism go?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedules.action import Actions
from schedules.dependencies import Ints
from schedules.errors import ScheduleError
from schedules.ops import OPS, REDUCE_GRAD, RESHARD, UNSHARD
from schedules.plan import IS_COMPUTE, IS_SEND, LIVES, Plan
from schedules.verifier import verify


def add_collectives(
    plan: Plan, *, reduce_every: int | None = None, unshard: bool = False, active_stages: int = 2
) -> Plan:
    """The plan with its collectives put in, verified; those that it has are dropped first.

    With `reduce_every`, and if the plan trains, each stage reduces its weight gradients behind every k-th
    action that adds to them (B or W), counted as its rank comes to them, and behind the last.

    With `unshard`, a rank holds, at each computation, the weights of the next `active_stages` stages of its
    order: of the one at work, and of the one that comes next, which is gathered meanwhile (breadth-first
    pipelines, Lamy-Poirier, arXiv 2211.05953; torch's own lowering has such a window, too).

        order           0F0   0F1   1F0   1F1   2F0   2F1   1B0 ...
        active, of 2    0 1   0 1   1 2   1 2   2 1   2 1   1 ...      1 comes back before it left the window

    Collectives stand in the gap before a computation, behind the last SEND that is there, as another rank
    waits for that, and before the RECVs that follow, so that a stage is gathered while its input is on the
    way: first RESHARD, which makes room, then REDUCE_GRAD, then UNSHARD, of the stage at work first. An
    overlapped pair is one computation of two stages here: both are gathered before it and leave behind it,
    which may make more than `active_stages`. Each carries the microbatch of the computation that it serves:
    UNSHARD the stage's next one, the others its last one.
    """
    _check_number("reduce_every", reduce_every)
    _check_number("active_stages", active_stages)
    bare = plan.without_collectives
    programs, pairs = [], []
    for program, firsts in zip(bare.programs, bare.pairs, strict=True):
        order = _Order.of(program, firsts)
        found = _reductions(order, reduce_every) if reduce_every is not None else []
        found += _gatherings(order, active_stages) if unshard else []
        at, full = _inserted(program, order, found)
        programs.append(full)
        # What stands at a pair's own position goes before the pair.
        pairs.append(tuple(first + int(np.searchsorted(at, first, side="right")) for first in firsts))
    made = dataclasses.replace(bare, programs=tuple(programs), pairs=tuple(pairs))
    verify(made)
    return made


class _Order(NamedTuple):
    """A rank's computations, by index, and the gaps between them.

    program       0F0 0SEND_F0  1RECV_F1 1F1         A pair counts as one: behind it is one gap.
    gaps         ^             ^            ^        Gap g is before the g-th, or behind the last; `places`
                 0             1            2        says where in the program it is: behind its SENDs.
    """

    ops: npt.NDArray[np.uint8]
    stages: Ints
    microbatches: Ints
    before: Ints  # the gap before each
    behind: Ints
    places: Ints

    @classmethod
    def of(cls, program: Actions, firsts: Sequence[int]) -> _Order:
        computes = np.flatnonzero(IS_COMPUTE[program.ops])
        starts = ~np.isin(computes - 1, np.array(firsts, np.int64))  # all but the second of a pair
        before = starts.cumsum() - 1
        stays = IS_COMPUTE[program.ops] | IS_SEND[program.ops]
        after_last = np.maximum.accumulate(np.where(stays, np.arange(1, len(program) + 1), 0))
        after_last = np.concatenate(([0], after_last))
        return cls(
            program.ops[computes],
            program.stages[computes].astype(np.int64),
            program.microbatches[computes].astype(np.int64),
            before,
            before + 1,
            after_last[[*computes[starts].tolist(), len(program)]],
        )


class _Found(NamedTuple):
    """Collectives of one op: by row, the gap where it stands and the computation that it serves."""

    op: str
    gaps: Ints
    serves: Ints


def _reductions(order: _Order, every: int) -> list[_Found]:
    found = []
    for stage in np.unique(order.stages).tolist():
        adds = np.flatnonzero((order.stages == stage) & (LIVES[order.ops] < 0))
        rest = adds[-1:] if len(adds) % every else adds[:0]
        behind = np.concatenate((adds[every - 1 :: every], rest))
        found.append(_Found(REDUCE_GRAD, order.behind[behind], behind))
    return found


def _gatherings(order: _Order, active: int) -> list[_Found]:
    """Between two computations of a stage it stays, unless its window begins only after the first left."""
    indices = np.arange(len(order.stages))
    enters, previous = _windows(order.stages, active)
    fresh = previous < 0
    gap = order.before[np.maximum(enters, previous + 1)]
    again = ~fresh & (gap > order.behind[previous])
    gathered, left = indices[fresh | again], previous[again]
    last = np.setdiff1d(indices, previous)
    leaving = np.concatenate((left, last))
    return [
        _Found(RESHARD, order.behind[leaving], leaving),
        _Found(UNSHARD, gap[gathered], gathered),
    ]


def _windows(stages: Ints, active: int) -> tuple[Ints, Ints]:
    """By computation: the first before it, from where on it is among the next stages; its stage's last one.

    stages      0  0  1  1  2  2  0     A window of 2 reaches the last 0 from where fewer than 2 stages
    enters      0  0  0  2  2  4  4     are between: behind the last use of the second one back, which is 1.
    previous   -1  0 -1  2 -1  4  1
    """
    indices = np.arange(len(stages))
    distinct, rows = np.unique(stages, return_inverse=True)
    used = np.full((len(distinct), len(stages) + 1), -1, np.int64)  # [stage, before]: its last use
    used[rows, indices + 1] = indices
    used = np.maximum.accumulate(used, axis=1)[:, :-1]
    previous = used[rows, indices]
    if len(distinct) < active:
        return np.zeros(len(stages), np.int64), previous
    place = len(distinct) - active
    return np.partition(used, place, axis=0)[place] + 1, previous


def _inserted(program: Actions, order: _Order, found: list[_Found]) -> tuple[Ints, Actions]:
    """Where they are put in, ascending, and the program with them."""
    none = np.empty(0, np.int64)
    kinds = np.repeat([_IN_A_GAP.index(one.op) for one in found], [len(one.gaps) for one in found])
    gaps = np.concatenate([none, *(one.gaps for one in found)])
    serves = np.concatenate([none, *(one.serves for one in found)])
    by_gap = np.lexsort((serves, kinds, gaps))
    at, serves = order.places[gaps[by_gap]], serves[by_gap]
    codes = np.array([OPS[op].code for op in _IN_A_GAP], np.uint8)[kinds[by_gap].astype(np.int64)]
    return at, Actions(
        np.insert(program.ops, at, codes),
        np.insert(program.stages, at, order.stages[serves]),
        np.insert(program.microbatches, at, order.microbatches[serves]),
        np.insert(program.peers, at, -1),
    )


def _check_number(name: str, number: int | None) -> None:
    if number is not None and (not isinstance(number, int | np.integer) or number < 1):
        raise ScheduleError(f"{name}={number!r}: it takes 1, 2, ...")


_IN_A_GAP = (RESHARD, REDUCE_GRAD, UNSHARD)
"""The order of those that share one."""
