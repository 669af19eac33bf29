"""Where does a parameter lie in the flat buffers that are reduced (gradients) and gathered (shards)?

    parameters    a (3 x 4)        b (5)      c (2 x 3)
    bucket        |aaaaaaaaaaaa....|bbbbb.....|cccccc..|      each starts on 64 bytes
    shards        |-- replica 0 --|-- replica 1 -|-- replica 2 --|

A shard cuts through parameters, which an optimizer that works element by element never notices. One that
looks at a whole parameter (Muon, Adafactor) gets whole ones: then each replica's parameters lie side by side,
and the shards end where they do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

# In elements: 64 bytes of the smallest floating type that parameters have, so that kernels find a view of a
# bucket as well aligned as a tensor of its own.
_ALIGNMENT = 32


@dataclass(frozen=True)
class Entry:
    """A parameter that is to find a place.

    Args:
        index: its place among the parameters of the unsplit model.
        stages: whose backwards add to its gradient.
        group: the optimizer's param group, or None where no optimizer has it.
        dtype: that it computes in.
        over: the name of the ranks that its gradient is reduced over.
    """

    index: int
    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]
    group: int | None
    dtype: torch.dtype
    over: str = "dp"


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket: elements `start` to `stop`."""

    index: int
    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    start: int
    stop: int

    def elements(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of a value of the parameter's shape, as its elements lie in the bucket."""
        dense = torch.empty_strided(self.shape, self.strides, dtype=dtype).copy_(value.detach())
        return dense.as_strided((dense.numel(),), (1,))

    def view(self, flat: Tensor, offset: int = 0) -> Tensor:
        """The parameter in a flat buffer that begins with the bucket's element `offset`."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start - offset)


class Piece(NamedTuple):
    """What a shard has of a parameter: elements `start` to `stop` of the bucket."""

    slot: Slot
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return (self.start, self.stop) == (self.slot.start, self.slot.stop)

    def view(self, flat: Tensor, offset: int = 0) -> Tensor:
        """Itself, in a flat buffer that begins with the bucket's element `offset`; shaped, if it is whole."""
        if self.is_whole:
            return self.slot.view(flat, offset)
        return flat[self.start - offset : self.stop - offset]


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced as one.

    Args:
        stages: whose backwards add to its gradients.
        group: the optimizer's param group, or None where no optimizer has them.
        dtype: that they compute in.
        cuts: shard r is elements `cuts[r]` to `cuts[r + 1]`.
        over: the name of the ranks that its gradients are reduced over.
    """

    stages: tuple[int, ...]
    group: int | None
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    cuts: tuple[int, ...]
    over: str

    @property
    def size(self) -> int:
        """In elements."""
        return self.cuts[-1]

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type that gradients are added up in: sums of halves lose bits, and overflow."""
        return torch.promote_types(self.dtype, torch.float32)

    def pieces(self, share: range) -> Iterator[Piece]:
        """What lies in some part of the bucket."""
        for slot in self.slots:
            if slot.start == slot.stop:  # no elements: the first share has it
                if share.start == 0:
                    yield Piece(slot, slot.start, slot.stop)
                continue
            start, stop = max(slot.start, share.start), min(slot.stop, share.stop)
            if start < stop:
                yield Piece(slot, start, stop)


def arrange(
    entries: Iterable[Entry], *, shards: int, bucket_mb: float, whole: bool = False
) -> Iterator[Bucket]:
    """Fills buckets, in the order of the entries, with parameters that are treated alike.

    Args:
        shards: how many equal parts a bucket is cut into.
        bucket_mb: MB of gradients that a bucket holds; a larger parameter has one of its own.
        whole: cut between parameters only.
    """
    kinds: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((entry.stages, entry.group, entry.dtype, entry.over), []).append(entry)
    loads = [0] * shards
    for alike in kinds.values():
        for chosen in _filled(alike, bucket_mb):
            if whole:
                slots, cuts = _whole(chosen, loads)
            else:
                slots, end = _laid_out(chosen, 0)
                share = _aligned(-(-end // shards))
                cuts = [share * shard for shard in range(shards + 1)]
            one = chosen[0]
            yield Bucket(one.stages, one.group, one.dtype, tuple(slots), tuple(cuts), one.over)


def _filled(entries: Sequence[Entry], bucket_mb: float) -> Iterator[list[Entry]]:
    room = bucket_mb * 1e6
    chosen: list[Entry] = []
    used = 0
    for entry in entries:
        size = entry.parameter.numel() * torch.promote_types(entry.dtype, torch.float32).itemsize
        if chosen and used + size > room:
            yield chosen
            chosen, used = [], 0
        chosen.append(entry)
        used += size
    yield chosen


def _whole(entries: Sequence[Entry], loads: list[int]) -> tuple[list[Slot], list[int]]:
    """Each parameter to the replica that has least so far, the largest first (Graham's rule)."""
    owners: list[list[Entry]] = [[] for _ in loads]
    for entry in sorted(entries, key=lambda entry: -entry.parameter.numel()):
        owner = loads.index(min(loads))
        owners[owner].append(entry)
        loads[owner] += entry.parameter.numel()
    slots, cuts = [], [0]
    for owned in owners:
        placed, end = _laid_out(sorted(owned, key=lambda entry: entry.index), cuts[-1])
        slots += placed
        cuts.append(end)
    return slots, cuts


def _laid_out(entries: Sequence[Entry], start: int) -> tuple[list[Slot], int]:
    slots = []
    for entry in entries:
        stop = start + entry.parameter.numel()
        slots.append(
            Slot(entry.index, entry.name, entry.parameter.shape, _dense(entry.parameter), start, stop)
        )
        start = _aligned(stop)
    return slots, start


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """A parameter's own strides (channels last, say) where it lies without gaps."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
