"""What crosses from one stage to the next: any pytree, packed as tensors and a layout."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Pytree: TypeAlias = Any

# How a leaf travels: as a tensor, as a part of the structure (None), or as a pickled value.
_TENSOR, _NONE, _VALUE = range(3)


@dataclass(frozen=True)
class Layout:
    """The structure around the tensors of a pytree, and its leaves that are no tensors."""

    spec: Any
    kinds: tuple[int, ...]
    values: tuple[Any, ...] = ()

    @property
    def travels(self) -> bool:
        """Whether plain values are aboard, which may differ from one microbatch to the next."""
        return bool(self.values)


# Almost every boundary is one tensor: that case has no spec, and must not pay for a pytree.
ONE_TENSOR = Layout(None, (_TENSOR,))


class Meta(NamedTuple):
    """What a receiver has to know of a tensor before it can receive it."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> "Meta":
        return Meta(tensor.shape, tensor.dtype, tensor.requires_grad)


class Parcel:
    """A value on its way: its tensors, their layout, and which of them want a gradient back.

    A gradient's parcel has one tensor, or None, for each tensor of the activation that wants one. `works`
    are the transfers still under way into the tensors; `wait` ends them.
    """

    __slots__ = ("layout", "tensors", "wants", "works")

    def __init__(
        self,
        tensors: list[Any],
        layout: Layout = ONE_TENSOR,
        wants: tuple[bool, ...] = (),
        works: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.tensors = tensors
        self.layout = layout
        self.wants = wants
        self.works = works

    def wait(self) -> None:
        works, self.works = self.works, ()
        for work in works:
            work()

    def value(self) -> Pytree:
        return unpack(self.tensors, self.layout)

    def delivered(self, device: torch.device | None = None) -> "Parcel":
        """A copy such as a wire would deliver: fresh, contiguous, sharing nothing with the sender."""
        tensors = [
            None if t is None else torch.empty(t.shape, dtype=t.dtype, device=device or t.device).copy_(t)
            for t in self.tensors
        ]
        layout = self.layout
        if layout.travels:
            layout = Layout(layout.spec, layout.kinds, copy.deepcopy(layout.values))
        return Parcel(tensors, layout, self.wants)


def pack(value: Pytree) -> tuple[list[Tensor], Layout]:
    """The tensors of a pytree, in order, and the layout that `unpack` needs to put them back."""
    if isinstance(value, Tensor):
        return [value], ONE_TENSOR
    leaves, spec = pytree.tree_flatten(value)
    tensors: list[Tensor] = []
    kinds: list[int] = []
    values: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append(_TENSOR)
            tensors.append(leaf)
        elif leaf is None:
            kinds.append(_NONE)
        else:
            kinds.append(_VALUE)
            values.append(leaf)
    return tensors, Layout(spec, tuple(kinds), tuple(values))


def unpack(tensors: Sequence[Tensor], layout: Layout) -> Pytree:
    """The pytree that `pack` took apart."""
    if layout.spec is None:
        return tensors[0]
    rest, values = iter(tensors), iter(layout.values)
    leaves = [next(rest) if k == _TENSOR else next(values) if k == _VALUE else None for k in layout.kinds]
    return pytree.tree_unflatten(leaves, layout.spec)


def twin_of(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the tensor's strides and its address modulo 64.

    A microbatch is a view of the batch, and kernels choose their path, and so their last bits, by stride and
    alignment: the twin of a view computes what the view would, and may be written to.
    """
    if tensor.device != device or not tensor.numel():
        return tensor.detach().to(device, copy=True)
    item = tensor.element_size()
    shape, strides = tensor.shape, tensor.stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    room = torch.empty(extent + 64 // item, dtype=tensor.dtype, device=device)
    start = (tensor.data_ptr() - room.data_ptr()) % 64 // item
    if tensor.is_contiguous():
        twin = room.as_strided(shape, strides, start).copy_(tensor.detach())
    else:  # whatever lies between: a view that overlaps itself can't be written to
        room[start : start + extent].copy_(tensor.detach().as_strided((extent,), (1,)))
        twin = room.as_strided(shape, strides, start)
    # `.data` cuts the tie to `room`: autograd refuses layers that write to a view it doesn't know.
    return twin.data
