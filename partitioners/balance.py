"""Where should the cuts go? Layer sizes to cut points, so that no stage is larger than it has to be.

Cuts are the stages' ends, zero first: `(0, 5, 10)` makes the stages 0-5 and 5-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from partitioners.errors import PartitionError


def uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Stages of as many layers each; where that leaves a rest, counts differ by one.

        10 layers, 4 stages:   2  3  3  2        9 layers, 4 stages:   2  2  3  2

    The inner stages take the rest, the last of them first, then the last stage, and the first stage never: it
    holds the embedding and, under 1F1B, the most live activations, and the last stage holds the head and the
    loss. These are the cuts of `params` for layers of one size.
    """
    check_counts(num_layers, num_stages)
    size, rest = divmod(num_layers, num_stages)
    counts = [size] * num_stages
    for stage in [*range(num_stages - 2, 0, -1), num_stages - 1][:rest]:
        counts[stage] += 1
    return tuple(accumulate(counts, initial=0))


def params(sizes: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The cuts whose largest stage is smallest, exactly; no stage is empty.

    Among those, in this order: the smallest sum of squared stage sizes (the most even), the fewest layers on
    the first stage, the fewest on the last, the fewest on stage 1, 2, ... So there is one answer, and every
    rank finds it. `sizes` are whole numbers, so that no comparison rounds.
    Time: O(num_stages * len(sizes)^2).
    """
    check_counts(len(sizes), num_stages)
    for layer, size in enumerate(sizes):
        if size < 0:
            raise PartitionError(f"layer {layer} has a negative size, {size}")
    return _most_even(sizes, num_stages, limit=_smallest_limit(sizes, num_stages))


def check_counts(num_layers: int, num_stages: int) -> None:
    """Every stage needs a layer, and there has to be a stage."""
    if num_stages < 1:
        raise PartitionError(f"{num_stages} stages: a pipeline has at least 1")
    if num_layers < num_stages:
        raise PartitionError(f"{num_layers} layers cannot fill {num_stages} stages")


def _smallest_limit(sizes: Sequence[int], num_stages: int) -> int:
    """The size of the largest stage in the best cut, by bisection.

    Fewer stages than asked for are as good: cutting one in two, which the layers suffice for, enlarges none.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(sizes, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(sizes: Sequence[int], limit: int) -> int:
    stages, filled = 1, 0
    for size in sizes:
        filled += size
        if filled > limit:
            stages, filled = stages + 1, size
    return stages


def _most_even(sizes: Sequence[int], num_stages: int, *, limit: int) -> tuple[int, ...]:
    """Dynamic programming from the last stage to the first.

    `best[i]` cuts the layers from i on into the stages so far: (sum of squares, layers on the last stage,
    next cut), smallest first. The three add up or stay as stages are put in front, so the best of a whole is
    made of bests. The limit can't be part of the same minimum (a maximum hides what lies below it): hence
    two passes.
    """
    num_layers = len(sizes)
    before = list(accumulate(sizes, initial=0))
    best: dict[int, tuple[int, int, int]] = {
        start: ((before[-1] - before[start]) ** 2, num_layers - start, num_layers)
        for start in range(num_layers)
        if before[-1] - before[start] <= limit
    }
    next_cuts = [best]
    for stages in range(2, num_stages + 1):
        shorter, best = best, {}
        # Only the start 0 matters once all stages are there.
        for start in range(num_layers - stages + 1) if stages < num_stages else [0]:
            options = []
            for cut in range(start + 1, num_layers - stages + 2):
                size = before[cut] - before[start]
                if size > limit:
                    break
                if cut in shorter:
                    squares, last, _ = shorter[cut]
                    options.append((size * size + squares, last, cut))
            if options:
                # On the first stage fewer layers count before fewer on the last one, elsewhere after.
                is_first = stages == num_stages
                best[start] = min(options, key=lambda o: (o[0], o[2], o[1])) if is_first else min(options)
        next_cuts.append(best)

    cuts = [0]
    for best in reversed(next_cuts):
        cuts.append(best[cuts[-1]][2])
    return tuple(cuts)
