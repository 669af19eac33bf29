"""What crosses from one stage to the next: any pytree, packed as tensors and a layout."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipe.errors import PipelineError

Pytree: TypeAlias = Any
Form: TypeAlias = tuple[tuple[int, ...], int]

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

    An odd parcel has a tensor that isn't contiguous, doesn't start on 64 bytes, or may be none the next time,
    since it lies where the stage's input lay. Kernels would see the difference, so it arrives as it left.

    A gradient's parcel has one tensor, or None, for each tensor of the activation that wants one. `works`
    are the transfers still under way into the tensors; `wait` ends them.
    """

    __slots__ = ("layout", "odd", "tensors", "versions", "wants", "works")

    def __init__(
        self,
        tensors: list[Any],
        layout: Layout = ONE_TENSOR,
        wants: tuple[bool, ...] = (),
        works: Sequence[Callable[[], object]] = (),
        odd: bool = False,
    ) -> None:
        self.tensors = tensors
        self.layout = layout
        self.wants = wants
        self.works = works
        self.odd = odd
        self.versions = [version_of(tensor) for tensor in tensors if tensor is not None]

    def check_unwritten(self) -> None:
        """Raises where the sender has written to a tensor since it gave it away."""
        check_unwritten([tensor for tensor in self.tensors if tensor is not None], self.versions)

    def wait(self) -> None:
        works, self.works = self.works, ()
        for work in works:
            work()

    def value(self) -> Pytree:
        return unpack(self.tensors, self.layout)

    def delivered(self, device: torch.device | None = None) -> "Parcel":
        """A copy such as a wire would deliver, sharing nothing with the sender."""
        self.check_unwritten()
        copied = twin_of if self.odd else _fresh
        tensors = [None if t is None else copied(t, device or t.device) for t in self.tensors]
        layout = self.layout
        if layout.travels:
            layout = Layout(layout.spec, layout.kinds, copy.deepcopy(layout.values))
        return Parcel(tensors, layout, self.wants, odd=self.odd)


def _holds_tensor(thing: object, depth: int) -> bool:
    if isinstance(thing, Tensor):
        return True
    if not depth or isinstance(thing, type):
        return False
    inside = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    inside += [getattr(thing, name, None) for name in getattr(thing, "__slots__", ())]
    if isinstance(thing, Mapping):
        inside += thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        inside += thing
    return any(_holds_tensor(value, depth - 1) for value in inside)


def version_of(tensor: Tensor | None) -> int:
    """A number that changes when a tensor is written to. Tensors made in inference mode have none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def check_unwritten(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raises where a tensor was written to since it had a version.

    A layer that returns a workspace of its own writes to it again in the next microbatch, perhaps before the
    last one has left.
    """
    if any(version_of(tensor) != version for tensor, version in zip(tensors, versions, strict=True)):
        raise PipelineError(
            "a stage's output was written to before it had left: a layer that returns a buffer of its own "
            "must return a copy of it"
        )


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
            _refuse_hidden_tensors(leaf)
            kinds.append(_VALUE)
            values.append(leaf)
    return tensors, Layout(spec, tuple(kinds), tuple(values))


def _refuse_hidden_tensors(leaf: object) -> None:
    """A tensor inside of an object would cross as a plain value, and lose its gradient."""
    if not isinstance(leaf, int | float | str | bytes) and _holds_tensor(leaf, depth=3):
        raise TypeError(
            f"a {type(leaf).__name__} with tensors in it can't cross between stages: return a tuple or dict, "
            "or register the class with torch.utils._pytree (register_dataclass, register_pytree_node)"
        )


def unpack(tensors: Sequence[Tensor], layout: Layout) -> Pytree:
    """The pytree that `pack` took apart."""
    if layout.spec is None:
        return tensors[0]
    rest, values = iter(tensors), iter(layout.values)
    leaves = [next(rest) if k == _TENSOR else next(values) if k == _VALUE else None for k in layout.kinds]
    return pytree.tree_unflatten(leaves, layout.spec)


def form_of(tensor: Tensor) -> Form:
    """What kernels can see of a tensor's place in memory: its strides, and its address modulo 64."""
    overlaps = _extent(tensor.shape, tensor.stride()) < tensor.numel()
    return (tensor.contiguous().stride() if overlaps else tensor.stride()), tensor.data_ptr() % 64


def formed(tensor: Tensor, form: Form) -> Tensor:
    """A copy of a tensor in another form."""
    if not tensor.numel():
        return tensor
    return _room(tensor, tensor.shape, form, tensor.device).copy_(tensor).data


def twin_of(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in the tensor's own form, on a device.

    A microbatch is a view of the batch, and kernels choose their path, and so their last bits, by stride and
    alignment: the twin of a view computes what the view would, and may be written to.
    """
    tensor = tensor.detach()
    if tensor.device != device or not tensor.numel():
        return tensor.to(device, copy=True)
    form = tensor.stride(), tensor.data_ptr() % 64
    twin = _room(tensor, tensor.shape, form, device)
    if tensor.is_contiguous():
        twin.copy_(tensor)
    else:  # with whatever lies between: a view that overlaps itself can't be written to
        extent = (_extent(tensor.shape, tensor.stride()),)
        twin.as_strided(extent, (1,)).copy_(tensor.as_strided(extent, (1,)))
    # `.data` cuts the tie to the room: autograd refuses layers that write to a view it doesn't know.
    return twin.data


def _room(like: Tensor, shape: torch.Size, form: Form, device: torch.device) -> Tensor:
    """Memory for a tensor of some form."""
    strides, address = form
    item = like.element_size()
    room = torch.empty(_extent(shape, strides) + 64 // item, dtype=like.dtype, device=device)
    return room.as_strided(shape, strides, (address - room.data_ptr()) % 64 // item)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many items lie from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _fresh(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)
