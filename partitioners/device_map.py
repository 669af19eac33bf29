"""Which rank owns which layers? The text `0:0-5,1:5-10`, as a value that is right by construction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import NamedTuple

from partitioners.errors import PartitionError, Span

# Not \d and not int(): both take digits of other scripts, and int() takes signs, spaces and underscores too.
_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})-([0-9]{1,9})")


class Range(NamedTuple):
    """Layers `start` up to, not including, `stop`, on `rank`: one stage."""

    rank: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.rank}:{self.start}-{self.stop}"


@dataclass(frozen=True)
class DeviceMap:
    """The stages in layer order, each with its rank.

        0:0-2,1:2-5,0:5-7,1:7-10

        layer   0  1 | 2  3  4 | 5  6 | 7  8  9
        stage     0  |    1    |  2   |    3
        rank      0  |    1    |  0   |    1       the placement: (0, 1, 0, 1)

    A map that exists starts at layer 0, has neither gaps nor overlaps, and gives every rank a stage; only how
    many layers the model has is left to `validate`. Ranges may be given in any order.
    """

    ranges: tuple[Range, ...]
    # Where each range stood in the text parsed, for errors that only the layer count brings out.
    spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        ranges = [Range(*map(int, map(index, entry))) for entry in self.ranges]
        in_order = sorted(range(len(ranges)), key=lambda at: ranges[at].start)
        object.__setattr__(self, "ranges", tuple(ranges[at] for at in in_order))
        if self.spans:
            object.__setattr__(self, "spans", tuple(self.spans[at] for at in in_order))
        self._check_each_range()
        self._check_layers()
        self._check_ranks()

    @classmethod
    def parse(cls, text: str) -> DeviceMap:
        """Reads `RANK:START-STOP,...`; a mistake is a `PartitionError` whose span points into `text`."""
        if not text:
            raise PartitionError("the map is empty: it takes RANK:START-STOP,...", (0, 0))
        ranges, spans, begin = [], [], 0
        for item in text.split(","):
            span = (begin, begin + len(item))
            found = _RANGE.fullmatch(item)
            if found is None:
                raise PartitionError(_misspelt(item), span)
            ranges.append(Range(*map(int, found.groups())))
            spans.append(span)
            begin = span[1] + 1
        return cls(tuple(ranges), tuple(spans))

    @classmethod
    def from_cuts(cls, cuts: Sequence[int], placement: Sequence[int]) -> DeviceMap:
        """Stage s gets layers `cuts[s]` up to `cuts[s + 1]`, on rank `placement[s]`."""
        if len(cuts) != len(placement) + 1:
            raise PartitionError(f"{len(placement)} stages take {len(placement) + 1} cuts, not {len(cuts)}")
        stages = zip(placement, pairwise(cuts), strict=True)
        return cls(tuple(Range(rank, start, stop) for rank, (start, stop) in stages))

    def validate(self, num_layers: int) -> None:
        """Refuses a map that doesn't end where the model does."""
        for at, entry in enumerate(self.ranges):
            if entry.stop > num_layers:
                raise self._error(
                    f"{entry} goes past the last layer: the model has {num_layers} layers, "
                    f"0 to {num_layers - 1}",
                    at,
                )
        end = self.ranges[-1].stop
        if end < num_layers:
            raise self._error(
                f"{_layers(end, num_layers)} to no rank: the map ends at {end}, "
                f"the model has {num_layers} layers",
                len(self.ranges) - 1,
            )

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(entry.rank for entry in self.ranges)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return max(self.placement) + 1

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage."""
        return tuple(range(entry.start, entry.stop) for entry in self.ranges)

    def __str__(self) -> str:
        return ",".join(map(str, self.ranges))

    def _check_each_range(self) -> None:
        if not self.ranges:
            raise PartitionError("the map is empty: it takes RANK:START-STOP,...")
        for at, entry in enumerate(self.ranges):
            if min(entry) < 0:
                raise self._error(f"{entry} has a negative number: ranks and layers count from 0", at)
            if entry.start == entry.stop:
                raise self._error(f"{entry} is empty: STOP isn't included, so it must exceed START", at)
            if entry.start > entry.stop:
                raise self._error(
                    f"{entry} is reversed: it starts at {entry.start}, past its stop {entry.stop}", at
                )

    def _check_layers(self) -> None:
        first = self.ranges[0]
        if first.start != 0:
            raise self._error(f"{_layers(0, first.start)} to no rank: the first range is {first}", 0)
        for at, (left, right) in enumerate(pairwise(self.ranges)):
            if left.stop > right.start:
                shared = _layers(right.start, min(left.stop, right.stop))
                raise self._error(f"{shared} to two ranges, {left} and {right}", at + 1)
            if left.stop < right.start:
                missing = _layers(left.stop, right.start)
                raise self._error(f"{missing} to no rank: {right} follows {left}", at + 1)

    def _check_ranks(self) -> None:
        named = set(self.placement)
        missing = next(rank for rank in range(len(named) + 1) if rank not in named)
        beyond = [at for at, entry in enumerate(self.ranges) if entry.rank > missing]
        if beyond:
            entry = self.ranges[beyond[0]]
            raise self._error(f"rank {missing} is missing: {entry} names rank {entry.rank}", beyond[0])

    def _error(self, message: str, at: int) -> PartitionError:
        return PartitionError(message, self.spans[at] if self.spans else None)


def _layers(start: int, stop: int) -> str:
    if stop - start == 1:
        return f"layer {start} belongs"
    return f"layers {start} to {stop - 1} belong"


def _misspelt(item: str) -> str:
    """Says what is wrong with a text that isn't RANK:START-STOP, for the slips that have been seen."""
    if not item:
        return "a range is missing here: two commas in a row, or one at an end"
    if item != "".join(item.split()):
        return f"'{item}' has a space in it: a map is written without any"
    if not item.isascii():
        return f"'{item}' isn't ASCII: ranks and layers are written in the digits 0 to 9"
    if re.fullmatch(r"[0-9]+:[0-9]+", item):
        rank, start = item.split(":")
        return f"'{item}' lacks its stop: layer {start} alone is {rank}:{start}-{int(start[:9]) + 1}"
    if re.fullmatch(r"[0-9]+-[0-9]+", item):
        return f"'{item}' lacks its rank: write RANK:{item}"
    if re.fullmatch(r"[0-9]+:[0-9]+(-[0-9]+){2,}", item):
        return f"'{item}' has more than START-STOP: a range has no step"
    if re.search(r"(^|[:,-])-[0-9]", item):
        return f"'{item}' has a negative number: ranks and layers count from 0"
    return f"'{item}' isn't of the form RANK:START-STOP"
