"""How replicas of a rank put gradients together and get shards back: the interface, and it in one process."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pipe.errors import PipelineError

# Whether a collective is done. Between processes asking waits, and the answer is yes.
Pending: TypeAlias = Callable[[], bool]

REDUCE, GATHER = "reduce", "gather"


class Across(Protocol):
    """The replicas of one rank, seen from one of them.

    Both collectives work in place on a flat tensor of which replica r has the part `cuts[r]` to
    `cuts[r + 1]`, start at once and are called in the same order by all. The tensor must stay as it is until
    they are done.
    """

    size: int
    index: int
    # Bytes that this replica has sent, by kind of collective; whoever reads may clear it.
    sent: Counter[str]

    def reduce_scatter(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        """Leaves in this replica's part the sum of all replicas' (in their order); the rest is lost."""

    def all_gather(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        """Fills the other replicas' parts with what they have there."""

    def align(self, tensors: Sequence[Tensor]) -> None:
        """Gives all replicas what the first one has in these; waits for it."""


def done() -> bool:
    """Of what needs no waiting."""
    return True


def share(flat: Tensor, cuts: Sequence[int], replica: int) -> Tensor:
    """One replica's part of a flat tensor."""
    return flat[cuts[replica] : cuts[replica + 1]]


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """The sum from left to right, so that every transport gives the same bits; `out` may be one of them."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    out.copy_(total)


def note_sent(sent: Counter[str], kind: str, flat: Tensor, cuts: Sequence[int], replica: int) -> None:
    """Counts what one collective sends: everybody their part, or one's own to everybody."""
    own = cuts[replica + 1] - cuts[replica]
    elements = cuts[-1] - own if kind == REDUCE else own * (len(cuts) - 2)
    sent[kind] += elements * flat.element_size()


class Alone:
    """A rank without other replicas."""

    size, index = 1, 0

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def reduce_scatter(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        return done

    def all_gather(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        return done

    def align(self, tensors: Sequence[Tensor]) -> None:
        """There is nobody else."""


class Board:
    """Where the replicas of one rank that live in one process meet: the last to come does the work."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._posted: dict[int, dict[int, tuple[str, Tensor, Sequence[int]]]] = {}
        self._counts = [0] * size  # collectives that each replica has begun

    def post(self, replica: int, kind: str, flat: Tensor, cuts: Sequence[int]) -> int:
        """Begins a replica's next collective, and returns its number."""
        number = self._counts[replica]
        self._counts[replica] += 1
        there = self._posted.setdefault(number, {})
        there[replica] = (kind, flat, cuts)
        if len(there) == self.size:
            del self._posted[number]
            if len({(kind, flat.numel()) for kind, flat, _ in there.values()}) > 1:
                raise PipelineError("the replicas of a rank do different collectives")
            flats = [there[index][1] for index in range(self.size)]
            (_reduce if kind == REDUCE else _gather)(flats, cuts)
        return number

    def is_done(self, number: int) -> bool:
        return number < min(self._counts)

    def clear(self) -> None:
        """Begins anew, after a call that failed."""
        self._posted.clear()
        self._counts = [max(self._counts)] * self.size


@torch.no_grad()
def _reduce(flats: Sequence[Tensor], cuts: Sequence[int]) -> None:
    for index, flat in enumerate(flats):
        sum_in_order([share(other, cuts, index) for other in flats], share(flat, cuts, index))


@torch.no_grad()
def _gather(flats: Sequence[Tensor], cuts: Sequence[int]) -> None:
    for index, flat in enumerate(flats):
        for other in flats:
            if other is not flat:
                share(other, cuts, index).copy_(share(flat, cuts, index))


class InProcessAcross:
    """One replica at a board."""

    def __init__(self, board: Board, index: int) -> None:
        self.size, self.index = board.size, index
        self.sent: Counter[str] = Counter()
        self._board = board

    def reduce_scatter(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        return self._post(REDUCE, flat, cuts)

    def all_gather(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        return self._post(GATHER, flat, cuts)

    def align(self, tensors: Sequence[Tensor]) -> None:
        """They are copies of the first one already."""

    def _post(self, kind: str, flat: Tensor, cuts: Sequence[int]) -> Pending:
        note_sent(self.sent, kind, flat, cuts, self.index)
        number = self._board.post(self.index, kind, flat, cuts)
        return lambda: self._board.is_done(number)
