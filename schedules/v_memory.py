"""In which order do V-Half and V-Min work? (Controllable memory: Qi et al., arXiv 2405.15362.)"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from schedules.action import Action
from schedules.letters import spell
from schedules.schedule import Problem
from schedules.shapes import along_vee, vee


@dataclass(frozen=True)
class VHalf:
    """Half of 1F1B's memory: at most floor((p+2)/2) microbatches a rank (of two stages each), V-shaped.

        rank 0  F0  F1  .   .   .   F0' I0' F2  W0' F1' I1' W1' I0  W0  .   F2' I2' I1  W2' W1  .   I2  W2
        rank 1  .   F0  .   .   F0' F1  .   I0' F1' W0' F2  I0  I1' W0  F2' W1' I1  I2' W1  W2' I2  W2  .
        rank 2  .   .   F0  F0' .   .   F1  F1' I0' I0  W0' F2  W0  F2' I1' I1  W1' W1  I2' I2  W2' W2  .

    Every microbatch takes the same way through the ranks, 6 slots behind the one before, on which no two
    meet: see `_Rank`. At p = 4, m = 8 and equal costs a step takes 53 slots; ZB-V takes 51, in a third more
    memory. Any m will do; where it is small, the idle time is more.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return vee(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        along_vee(problem, "v_half")
        p = problem.ranks
        d = 3 if p % 2 == 0 else 0
        ways = [(2 * r, 3 * p - r - 2, 3 * p + d + 2 * r - 1, 6 * p + d - r - 2) for r in range(p)]
        return _orders(problem, ways, memory=2 * ((p + 2) // 2))


@dataclass(frozen=True)
class VMin:
    """A third of 1F1B's memory: at most floor((p+4)/3) microbatches a rank (of two stages each), V-shaped.

        rank 0  F0  F1  .   .   .   F0' I0' W0' .   F1' F2  I0  I1' W0  W1' F2' I2' I1  W2' W1  .   I2  W2
        rank 1  .   F0  .   .   F0' F1  .   I0' F1' W0' I0  F2  W0  I1' F2' W1' I1  I2' W1  W2' I2  W2  .
        rank 2  .   .   F0  F0' .   .   F1  F1' I0' I0  W0' W0  F2  F2' I1' I1  W1' W1  I2' I2  W2' W2  .

    As V-Half, on shorter ways. At p = 4, m = 8 and equal costs a step takes 59 slots where ZB-V takes 51.
    Any m will do; where it is small, the idle time is more.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return vee(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        along_vee(problem, "v_min")
        p = problem.ranks
        d = 2 if p % 3 == 0 else 0
        ways = [(r, 2 * p - r - 1, 2 * p + d + r, 4 * p + d - r - 1) for r in range(p)]
        return _orders(problem, ways, memory=2 * ((p + 4) // 3))


_Way = tuple[int, int, int, int]
"""The slots in which a rank does F, F', I', I of microbatch 0; those of microbatch k are 6k later."""


def _orders(problem: Problem, ways: Sequence[_Way], *, memory: int) -> Sequence[Sequence[Action]]:
    ranks = problem.placement[: problem.ranks]
    texts = dict(zip(ranks, _squeezed(ways, problem.microbatches, memory), strict=True))
    return [
        spell(texts[rank], problem.stages_of(rank), problem.microbatches).order
        for rank in range(problem.ranks)
    ]


def _squeezed(ways: Sequence[_Way], microbatches: int, memory: int) -> list[str]:
    """Each rank's letters (see `schedules.letters`): the ways, run slot by slot as early as inputs allow."""
    ranks = [_Rank(place, way, microbatches, memory) for place, way in enumerate(ways)]
    while any(rank.ahead or rank.owed for rank in ranks):
        begun = [(rank, letter) for rank in ranks if (letter := rank.step(ranks))]
        assert begun, "the ways have no ring"
        for rank, letter in begun:
            rank.done[letter] += 1  # at the slot's end
    return ["".join(rank.text) for rank in ranks]


class _Rank:
    """A rank that does one thing a slot.

                 the ways of p = 2, V-Min
        rank 0   F0  .   .   F0' I0' .   F1  I0  .   F1' I1' .   .   I1
        rank 1   .   F0  F0' .   .   I0' I0  F1  F1' .   .   I1' I1

    In each slot, the first of these that is ready: the next on the way, the one after it if that is no
    forward, an F before the first F' (the ways leave that room empty), the W that is owed longest. A W is
    thus done when the rank would wait, or when memory is full.
    """

    def __init__(self, place: int, way: _Way, microbatches: int, memory: int) -> None:
        slots = [
            (slot + 6 * k, letter)
            for slot, letter in zip(way, "FfiI", strict=True)
            for k in range(microbatches)
        ]
        self.ahead = deque(letter for _, letter in sorted(slots))
        self.place = place
        self.memory = memory
        self.early = min(memory - 2 - place, microbatches)
        self.live = 0
        self.owed: deque[str] = deque()
        self.done = dict.fromkeys("FfiIwW", 0)
        self.text: list[str] = []

    def step(self, ranks: Sequence[_Rank]) -> str | None:
        """Takes up what this slot is for, if anything."""
        letter = self._next(ranks)
        if letter is not None:
            self.ahead.remove(letter)  # near the front
            self.live += letter in "Ff"
            self.owed.extend(letter.translate(_OWES) if letter in "iI" else "")
        elif self.owed:
            letter = self.owed.popleft()
            self.live -= 1
        else:
            return None
        self.text.append(letter)
        return letter

    def _next(self, ranks: Sequence[_Rank]) -> str | None:
        ahead = self.ahead
        if ahead and self._is_ready(ahead[0], ranks):
            return ahead[0]
        if len(ahead) > 1 and ahead[1] in "iI" and ahead[1] != ahead[0] and self._is_ready(ahead[1], ranks):
            return ahead[1]
        may_hurry = self.done["F"] < self.early and not self.done["f"]
        return "F" if may_hurry and self._is_ready("F", ranks) else None

    def _is_ready(self, letter: str, ranks: Sequence[_Rank]) -> bool:
        """Whether its memory and its input (a neighbour's, or at the ends of the V its own) are there."""
        if letter in "Ff" and self.live >= self.memory:
            return False
        forth = letter in "Fi"  # down the ranks; f and I come back up
        source = self.place - 1 if forth else self.place + 1
        if source < 0:
            return letter == "F" or self.done["f"] > self.done["i"]
        if source == len(ranks):
            return self.done["F" if letter == "f" else "i"] > self.done[letter]
        return ranks[source].done[letter] > self.done[letter]


_OWES = str.maketrans("iI", "wW")
