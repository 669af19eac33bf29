"""Random numbers that belong to a layer, so that no partition, schedule or recomputation changes them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Seeds: TypeAlias = list[list[int]]
Numbers: TypeAlias = npt.NDArray[np.uint64]


def generators(device: torch.device) -> list[torch.Generator]:
    """torch's default generators that a layer on this device draws from: the CPU's and the device's."""
    found = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[device.index])
    return found


@contextmanager
def preserved(sources: Sequence[torch.Generator]) -> Iterator[None]:
    """Leaves the caller's random stream as it was."""
    states = [source.get_state() for source in sources]
    try:
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.set_state(state)


def layer_seeds(seed: int, call: int, replica: int, microbatches: int, layers: int) -> Seeds:
    """A seed for each microbatch (rows) and layer (columns), each a hash of all five numbers."""
    row = np.zeros(1, dtype=np.uint64)
    for number in (seed, call, replica):
        row = _mix(row ^ np.uint64(number & 0xFFFF_FFFF_FFFF_FFFF))
    rows = _mix(row ^ np.arange(microbatches, dtype=np.uint64)[:, None])
    # Generators take signed 64-bit seeds.
    table: Seeds = (_mix(rows ^ np.arange(layers, dtype=np.uint64)) >> np.uint64(1)).tolist()
    return table


def _mix(x: Numbers) -> Numbers:
    """SplitMix64's step and finalizer (Steele, Lea and Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Numbers = x ^ (x >> np.uint64(31))
    return mixed
