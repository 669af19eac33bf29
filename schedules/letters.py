"""How does a rank's order look as a string of letters?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedules.action import Actions
from schedules.ops import OPS, B, F, I, W


class Spelled(NamedTuple):
    """An order, and the index in it of each overlapped pair's first action."""

    order: Actions
    pairs: tuple[int, ...]


def spell(text: str, stages: tuple[int, ...], microbatches: int) -> Spelled:
    """Reads letters; every stage takes its microbatches in order, so its k-th F is that of microbatch k.

        F B I W   of the rank's first stage        *    the W that the rank owes longest, of either stage
        f b i w   of its second one                ( )  around an overlapped pair

        "FF" + "BF" * 2   of stage 3   is   3F0 3F1 3B0 3F2 3B1 3F3

    Microbatches from `microbatches` on are left out: an order may say more than there is to do, as "BF" does
    here of 3F3 where there are three. A pair of which one is left out is none. `*` and W, w do not mix.
    """
    characters = np.frombuffer(text.encode(), np.uint8)
    is_letter = _IS_LETTER[characters]
    first_of_pair = is_letter.cumsum()[characters == ord("(")]  # so many letters stand before it
    letters = characters[is_letter]
    ops, second, count = _OPS[letters], _SECOND[letters], _counted(letters)
    owed, due = np.flatnonzero(letters == ord("*")), np.flatnonzero(ops == OPS[I].code)
    due = due[: len(owed)]  # first in, first out
    second[owed], count[owed] = second[due], count[due]
    order = Actions(ops, np.array(stages)[second], count)
    kept = count < microbatches
    place = kept.cumsum() - 1
    whole = kept[first_of_pair] & kept[first_of_pair + 1]
    return Spelled(order.where(kept), tuple(place[first_of_pair[whole]].tolist()))


def _counted(letters: np.typing.NDArray[np.uint8]) -> np.typing.NDArray[np.int32]:
    """How often each letter stood before; B and I, either of which starts a backward, count as one."""
    count, same = np.empty(len(letters), np.int32), _SAME[letters]
    for letter in np.unique(same):
        places = np.flatnonzero(same == letter)
        count[places] = np.arange(len(places))
    return count


_OPS = np.full(256, OPS[W].code, np.uint8)
_SECOND = np.zeros(256, np.intp)
_IS_LETTER = np.zeros(256, np.bool_)
for _op in (F, B, I, W):
    for _letter in (_op, _op.lower()):
        _OPS[ord(_letter)] = OPS[_op].code
        _IS_LETTER[ord(_letter)] = True
    _SECOND[ord(_op.lower())] = 1
_IS_LETTER[ord("*")] = True
_SAME = np.arange(256)
_SAME[[ord(B), ord(B.lower())]] = [ord(I), ord(I.lower())]
