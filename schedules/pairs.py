"""Which neighbouring actions overlap, and how is such a pair written?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from schedules.action import Action, Actions
from schedules.errors import ScheduleError
from schedules.ops import GRADIENT, OPS, F

Pairs = tuple[tuple[int, ...], ...]
"""Per rank, the position in its program of each pair's first action, ascending."""

_CELL = re.compile(r"\(([^;()]*);([^;()]*)\)(?:OVERLAP_F_B)?")
_STARTS_BACKWARD = np.array(
    [spec.code for spec in OPS.values() if spec.backward and spec.takes == GRADIENT], np.uint8
)


def whole_pairs(pairs: Sequence[Iterable[int]], programs: Sequence[Actions]) -> Pairs:
    """The pairs that are pairs: a forward, and right behind it another's B or I. Others are dropped."""
    if not any(pairs):
        return ((),) * len(programs)
    if len(pairs) != len(programs):
        raise ScheduleError(f"pairs of {len(pairs)} ranks for {len(programs)} programs")
    return tuple(map(_whole, pairs, programs))


def text_of_cells(program: Actions, pairs: Iterable[int], suffix: str = "") -> Iterator[str]:
    """The actions as text, each pair as one: `(0F7;1B3)`."""
    firsts, first = set(pairs), ""
    for position, action in enumerate(program):
        if position in firsts:
            first = f"({action};"
        else:
            yield f"{first}{action}){suffix}" if first else str(action)
            first = ""


def parse_cell(text: str) -> tuple[Action, ...]:
    """One action, or the two of a pair: `2F0`, `(0F7;1B3)`, `(0F7;1B3)OVERLAP_F_B`."""
    match = _CELL.fullmatch(text)
    if match is None:
        return (Action.parse(text),)
    first, second = (Action.parse(part.strip()) for part in match.groups())
    if first.op != F or OPS[second.op].takes != GRADIENT:
        raise ScheduleError(
            f"{text!r}: a pair is a forward and a backward, as (0F7;1B3)", span=(0, len(text))
        )
    if (first.stage, first.microbatch) == (second.stage, second.microbatch):
        raise ScheduleError(f"{text!r}: a backward needs its own forward to end first", span=(0, len(text)))
    return first, second


def _whole(firsts: Iterable[int], program: Actions) -> tuple[int, ...]:
    places = np.unique(np.fromiter(firsts, np.int64))
    places = places[(places >= 0) & (places + 1 < len(program))]
    kept = (program.ops[places] == OPS[F].code) & np.isin(program.ops[places + 1], _STARTS_BACKWARD)
    same_stage = program.stages[places] == program.stages[places + 1]
    kept &= ~(same_stage & (program.microbatches[places] == program.microbatches[places + 1]))
    return tuple(places[kept].tolist())


def moved(pairs: Pairs, kept: Sequence[npt.NDArray[np.bool_]]) -> Pairs:
    """The pairs of programs of which only a part was `kept`."""
    return tuple(
        tuple((keep.cumsum() - 1)[list(firsts)].tolist()) if firsts else ()
        for firsts, keep in zip(pairs, kept, strict=True)
    )
