"""Where do master weights and the optimizer's state live: on the device, in CPU memory, or on disk?"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from pipe.errors import PipelineError

_DISK = "disk:"


class Home:
    """On the device itself.

    Args:
        device: of the stage's parameters and gradients.
    """

    offloads = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Room for a shard."""
        return torch.empty(elements, dtype=dtype, device=self.device)

    def fetch(self, gradient: Tensor) -> Tensor:
        """A shard's gradient, where the update is made; to be used after `wait`."""
        return gradient

    def wait(self) -> None:
        """Until what was fetched is there."""

    def reset(self) -> None:
        """Forgets what was fetched and not used."""

    def settle(self, tensors: Sequence[Tensor]) -> None:
        """Says that these have been used, and won't be for a while."""

    def settle_state(self, optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> None:
        """As `settle`, for the state that an optimizer has of some masters."""


class Host(Home):
    """In CPU memory, pinned where there is a GPU to copy from and to: there the update is made, bucket by
    bucket, while the next bucket's gradient is on its way (ZeRO-Offload, Ren et al., arXiv 2101.06840).
    """

    offloads = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pin = device.type == "cuda"
        # Two buffers take turns: one is computed with while the other one fills.
        self._buffers: list[Tensor | None] = [None, None]
        self._arrivals: list[torch.cuda.Event | None] = []

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=self._pin)

    def fetch(self, gradient: Tensor) -> Tensor:
        buffer = self._buffers.pop(0)
        if buffer is None or buffer.numel() < gradient.numel() or buffer.dtype != gradient.dtype:
            buffer = torch.empty(gradient.numel(), dtype=gradient.dtype, pin_memory=self._pin)
        self._buffers.append(buffer)
        there = buffer[: gradient.numel()]
        there.copy_(gradient, non_blocking=True)
        event = None
        if self._pin:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._arrivals.append(event)
        return there

    def reset(self) -> None:
        self._arrivals.clear()

    def wait(self) -> None:
        event = self._arrivals.pop(0)
        if event is not None:
            event.synchronize()


class Disk(Host):
    """In files that are mapped into memory: pages come as they are needed, and are given back when done with.

    The files have no name from the start, so nothing is left behind whatever happens.

    Args:
        folder: on the disk to use; made if it isn't there.

    Raises:
        PipelineError: nothing can be written there.
    """

    def __init__(self, device: torch.device, folder: str) -> None:
        super().__init__(device)
        self._folder = folder
        # By the address of its tensor, which alone keeps it.
        self._maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise PipelineError(f"offload=disk:{folder} can't be written to: {error.strerror}") from error

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        if not elements:
            return torch.empty(0, dtype=dtype)
        try:
            mapped = _mapped(self._folder, elements * dtype.itemsize)
        except OSError as error:
            size = elements * dtype.itemsize / 1e6
            raise PipelineError(
                f"offload=disk:{self._folder} has no room for {size:.1f} MB more: {error.strerror}"
            ) from error
        tensor = torch.frombuffer(mapped, dtype=dtype)
        self._maps[tensor.untyped_storage().data_ptr()] = mapped
        return tensor

    def settle(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            mapped = self._maps.get(tensor.untyped_storage().data_ptr())
            if mapped is not None:
                # Of a file that is shared this gives back the pages, not what is in them: the system writes
                # that out when it likes.
                mapped.madvise(mmap.MADV_DONTNEED)

    def settle_state(self, optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> None:
        for master in masters:
            state = optimizer.state.get(master, {})
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.numel() < 2:
                    continue
                if value.untyped_storage().data_ptr() not in self._maps:  # fresh from the optimizer
                    moved = self.empty(value.numel(), value.dtype).view(value.shape)
                    state[name] = moved.copy_(value)
            self.settle([value for value in state.values() if isinstance(value, Tensor)])
        self.settle(masters)


def _mapped(folder: str, size: int) -> mmap.mmap:
    """A file without a name, in memory."""
    with tempfile.TemporaryFile(dir=folder) as file:
        # All of it now: a page that finds no room later on kills the process.
        os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)


def home_of(device: torch.device, offload: str | None) -> Home:
    """What `offload=` asks for."""
    if offload is None:
        return Home(device)
    if offload.startswith(_DISK):
        return Disk(device, offload.removeprefix(_DISK))
    return Host(device)
