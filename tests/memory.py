"""How many bytes does a process hold in tensors, and how many of them in the host's pool?"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from pipe import Pipeline


class Bytes(NamedTuple):
    """What there is on the device, and of masters and state that were offloaded."""

    device: int
    host: int


@contextmanager
def only_new() -> Iterator[None]:
    """Overlooks all that is there already, which also makes looking quick."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes(pipeline: Pipeline) -> Bytes:
    """All tensors of this process. Each storage counts once, with the size that it has at the moment."""
    sizes = storages(live_tensors())
    host = sum(sizes.pop(storage, 0) for storage in storages(_host_pool(pipeline)))
    return Bytes(sum(sizes.values()), host)


def live_tensors() -> Iterator[Tensor]:
    for thing in gc.get_objects():
        # Asked of the type: `isinstance` would wake up lazy proxies.
        if issubclass(type(thing), Tensor) and thing.layout == torch.strided and not thing.is_meta:
            yield thing


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Sizes in bytes, by the storage's address as an object (a storage of no bytes has no other)."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.size() for storage in found}


def _host_pool(pipeline: Pipeline) -> Iterator[Tensor]:
    """What is the CPU's where masters are offloaded, and where gradients arrive there."""
    for held in (held for replica in pipeline._replicas for held in replica.held()):
        if not held.home.offloads:
            continue
        yield from (tensor for tensor in vars(held.home).get("_buffers", ()) if tensor is not None)
        for master in held.masters:
            yield master
            state = pipeline.optimizer.state.get(master, {}) if pipeline.optimizer is not None else {}
            yield from (value for value in state.values() if isinstance(value, Tensor))
