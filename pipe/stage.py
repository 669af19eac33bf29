"""One stage at work: its layers forward and backward, and the activations it keeps in between."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipe.boundary import ONE_TENSOR, Parcel, Pytree, pack, twin_of, unpack, version_of
from pipe.call import Call, Prediction
from pipe.deferral import Deferral, Deferred, add_weight_gradients
from pipe.errors import PipelineError
from pipe.precision import Precision
from pipe.randomness import generators
from pipe.shards import Holding

Loss: TypeAlias = Callable[[Any, Any], Any]


class Keep(Enum):
    """What a forward leaves behind for its backward."""

    GRAPH = "autograd's graph"
    INPUT = "only the input: the backward runs the forward again"
    NOTHING = "nothing: there will be no backward, or none that matters"


class Kept(NamedTuple):
    """What a module had for a buffer."""

    module: nn.Module
    name: str
    value: Tensor | None


class Saved(NamedTuple):
    """What a stage keeps of a microbatch between its forward and its backward."""

    roots: list[Tensor]  # the outputs that require a gradient, or the loss
    gradients: list[Tensor | None]  # filled by the backward: one for each input that wants one
    recompute: Parcel | None = None
    buffers: Sequence[Kept] = ()  # as the first forward found them: the second one shall find the same


class _Entry(torch.autograd.Function):
    """Where autograd's graph of a stage begins: hands its inputs on and catches their gradients.

    A plain leaf would do but for layers that write to their input in place, which autograd forbids on
    leaves; these outputs are no leaves, and no views either (`.data`).
    """

    @staticmethod
    def forward(ctx: Any, caught: list[Tensor | None], anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.caught[:] = gradients
        return (None,) * (2 + len(gradients))


_AS_IT_IS = nullcontext()  # the call has set the grad mode that most forwards want
_enter: Callable[..., tuple[Tensor, ...]] = _Entry.apply


class Stage:
    """A contiguous run of layers of the unsplit model.

    Args:
        index: the stage's index in layer order.
        module: its layers, under the names that they have in the unsplit model.
        first_layer: the index of its first layer in the unsplit model.
        precision: what computes in half precision, where something does.
    """

    def __init__(
        self,
        index: int,
        module: nn.Sequential,
        *,
        first_layer: int,
        is_first: bool,
        is_last: bool,
        device: torch.device,
        loss: Loss | None,
        precision: Precision | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.is_first = is_first
        self.is_last = is_last
        self.device = device
        self.loss = loss
        self.holding: Holding | None = None  # of its parameters, where gradients aren't left to autograd
        self._precision = precision
        self.layers = list(module._modules.values())  # `children()` leaves out a layer that stands twice
        self.layer_range = range(first_layer, first_layer + len(self.layers))
        self.saved: dict[int, Saved] = {}
        self.deferred: dict[int, Deferred] = {}
        self.whole_backwards = 0  # I that left nothing for W, though there were weights
        self._deferral = Deferral(module)
        self._wants: dict[int, tuple[bool, ...]] = {}  # by `Call.keys`: which outputs want a gradient
        self._generators = generators(device)
        self._anchor = torch.empty(0, requires_grad=True)
        self._modules = list(module.modules())
        self._parameters = list(module.parameters())
        self._buffers = [
            (m, name)
            for m in self._modules
            if not isinstance(m, torch.jit.ScriptModule)
            for name in m._buffers
        ]
        self._written_buffers: set[tuple[nn.Module, str]] = {
            (m, name) for m in self._modules if isinstance(m, _NormBase) for name in m._buffers
        }

    def __repr__(self) -> str:
        layers = self.layer_range
        return f"Stage({self.index}, layers {layers.start} to {layers.stop - 1}, on {self.device})"

    def fingerprint(self) -> tuple[bool, ...]:
        """What shapes the outputs beside the input: which parameters train, which modules are training."""
        return (*(p.requires_grad for p in self._parameters), *(m.training for m in self._modules))

    def trained(self) -> tuple[bool, ...]:
        """Which parameters train."""
        return tuple([p.requires_grad for p in self._parameters])

    def admit(self, parcel: Parcel) -> Parcel:
        """A microbatch of the batch as the layers shall have it: theirs, on the stage's device, and lowered
        where they compute in half precision.
        """
        copied = self._copy(parcel)
        if self._precision is not None:
            copied.tensors = [self._precision.lower(tensor) for tensor in copied.tensors]
        return copied

    def _copy(self, parcel: Parcel) -> Parcel:
        """A copy that the layers may write to."""
        return Parcel(
            [twin_of(tensor, self.device) for tensor in parcel.tensors], parcel.layout, parcel.wants
        )

    def forget_shapes(self) -> None:
        """Forgets what was learnt by `Call.keys`."""
        self._wants.clear()

    # ------------------------------------------------------------------ forward

    def forward(
        self, microbatch: int, parcel: Parcel, call: Call, keep: Keep, *, split: bool = False
    ) -> Parcel | None:
        """Runs the layers on one microbatch.

        Args:
            parcel: the stage's input, which is the stage's own: layers may write to it.
            keep: what the backward will need.
            split: whether it will be split in two, I and W.

        Returns:
            What the next stage gets; None from the last stage, whose loss or prediction goes into the call.
        """
        caught: list[Tensor | None] = []
        wants = self._wants.get(call.keys[microbatch]) if keep is Keep.INPUT else None
        # Without a graph nobody knows which outputs want a gradient: the first forward of its kind makes
        # one to see.
        graph = keep is Keep.GRAPH or (keep is Keep.INPUT and wants is None)
        source = parcel
        if keep is Keep.INPUT:
            source = self._copy(parcel)  # layers may write to their input, and the backward needs it again
            versions, kept = self._buffer_versions(), self._kept_buffers()
        value = self._enter(source, caught) if graph else source.value()
        with (
            self._deferral.active() if split and graph else _AS_IT_IS,
            _AS_IT_IS if graph == call.trains else torch.set_grad_enabled(graph),
        ):
            if call.seeds is None:
                for layer in self.layers:
                    value = layer(value)
            else:
                seeds = call.seeds[microbatch]
                for number, layer in zip(self.layer_range, self.layers, strict=True):
                    for generator in self._generators:
                        generator.manual_seed(seeds[number])
                    value = layer(value)
            if self.is_last:
                outgoing, roots = None, self._conclude(microbatch, value, call, keep)
            else:
                outgoing, roots = _outgoing(value, source)
        if keep is Keep.GRAPH:
            self.saved[microbatch] = Saved(roots, caught)
        elif keep is Keep.INPUT:
            self._note_written_buffers(versions)
            self.saved[microbatch] = Saved([], [], parcel, kept)
            wants = self._wants.setdefault(call.keys[microbatch], outgoing.wants if outgoing else ())
            if outgoing is not None:
                outgoing.wants = wants
        elif call.trains:
            self.saved[microbatch] = Saved([], [])
        return outgoing

    def _enter(self, parcel: Parcel, caught: list[Tensor | None]) -> Pytree:
        """The input as autograd shall see it; `caught` will get the gradients of what wants one."""
        if not any(parcel.wants):
            return parcel.value()
        caught.extend([None] * sum(parcel.wants))
        if parcel.layout.spec is None:
            return _enter(caught, self._anchor, parcel.tensors[0])[0]
        chosen = [tensor for tensor, wanted in zip(parcel.tensors, parcel.wants, strict=True) if wanted]
        entered = iter(_enter(caught, self._anchor, *chosen))
        tensors = [next(entered) if w else t for t, w in zip(parcel.tensors, parcel.wants, strict=True)]
        return unpack(tensors, parcel.layout)

    def _conclude(self, microbatch: int, output: Pytree, call: Call, keep: Keep) -> list[Tensor]:
        """The pipeline's end: keeps a prediction, or returns the loss as the backward's root."""
        if self._precision is not None:
            output = self._precision.raised(output)
        if call.predicts:
            call.predictions[microbatch] = Prediction(output)
            return []
        # A microbatch of weight 0 has no mean (a masked one would be NaN); a recomputed one gets its loss
        # there.
        if keep is Keep.INPUT or not call.weights[microbatch]:
            return []
        assert self.loss is not None
        result = self.loss(output, call.target(microbatch, self.device))
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(metrics, Mapping):
            kind = type(metrics).__name__
            raise TypeError(f"loss must return the mean loss, or (mean loss, {{name: value}}), not {kind}")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise ValueError(
                f"loss must return the microbatch's mean loss, a tensor of one number, not {got}"
            )
        if keep is Keep.GRAPH and not loss.requires_grad and any(t.requires_grad for t in pack(output)[0]):
            raise ValueError(
                "loss returned a tensor without a gradient, though the output has one: is it detached?"
            )
        loss = loss.reshape(()) if loss.dim() else loss
        call.record(microbatch, loss.detach(), metrics)
        return [loss] if loss.requires_grad else []

    # ----------------------------------------------------------------- backward

    def backward(self, microbatch: int, parcel: Parcel | None, call: Call) -> Parcel:
        """Adds a microbatch's gradients to the parameters' `.grad`.

        Args:
            parcel: the gradients of the outputs that want one; None on the last stage, which begins at its
                loss.

        Returns:
            The gradients of the inputs that want one, None where the stage made no use of an input.
        """
        saved = self._restored(microbatch, call, split=False)
        self._run_backward(microbatch, saved, parcel, call)
        if self.holding is not None:
            self.holding.collect(self.index, microbatch, leave=True)
        return Parcel(saved.gradients)

    def backward_input(self, microbatch: int, parcel: Parcel | None, call: Call) -> Parcel:
        """I: as `backward`, but leaves to `backward_weight` what no other rank waits for."""
        saved = self._restored(microbatch, call, split=True)
        deferred = self._deferral.backward(partial(self._run_backward, microbatch, saved, parcel, call))
        if saved.roots and not deferred.uses:
            self._count_whole_backward()
        self.deferred[microbatch] = deferred
        if self.holding is not None:
            self.holding.collect(self.index, microbatch, leave=False)
        return Parcel(saved.gradients)

    def backward_weight(self, microbatch: int) -> None:
        """W: adds the weight gradients that `backward_input` has left."""
        deferred = self.deferred.pop(microbatch, None)
        if deferred is None:
            raise PipelineError(f"there is no I of microbatch {microbatch} on stage {self.index} to finish")
        add_weight_gradients(deferred)
        if self.holding is not None:
            self.holding.collect(self.index, microbatch, leave=True)

    def _restored(self, microbatch: int, call: Call, *, split: bool) -> Saved:
        """What the forward saved; under activation checkpointing, after running it again."""
        saved = self.saved.pop(microbatch, None)
        if saved is None:
            raise PipelineError(
                f"there is no F of microbatch {microbatch} on stage {self.index} to go back through"
            )
        if saved.recompute is None:
            return saved
        with self._as_before(saved.buffers):
            self.forward(microbatch, saved.recompute, call, Keep.GRAPH, split=split)
        return self.saved.pop(microbatch)

    def _run_backward(self, microbatch: int, saved: Saved, parcel: Parcel | None, call: Call) -> None:
        roots: list[Tensor] = saved.roots
        if parcel is None:
            gradients: list[Tensor] = [call.factor(microbatch, loss) for loss in roots]
        else:
            if len(roots) != len(parcel.tensors):
                raise PipelineError(
                    f"{len(roots)} outputs of stage {self.index} want a gradient in microbatch {microbatch}, "
                    f"and {len(parcel.tensors)} did in the first of its kind: this must not depend on data"
                )
            pairs = [(r, g) for r, g in zip(roots, parcel.tensors, strict=True) if g is not None]
            roots, gradients = [r for r, _ in pairs], [g for _, g in pairs]
        if roots:
            torch.autograd.backward(roots, gradients)

    def _count_whole_backward(self) -> None:
        if not self.whole_backwards and any(p.requires_grad and p.dim() > 1 for p in self._parameters):
            warnings.warn(
                f"no layer of stage {self.index} can be split: its I does the whole backward, its W nothing",
                stacklevel=2,
            )
        self.whole_backwards += 1

    # ----------------------------------------------- buffers, under recomputation

    def _buffer_versions(self) -> list[tuple[nn.Module, str, Tensor | None, int]]:
        found = ((module, name, module._buffers.get(name)) for module, name in self._buffers)
        return [(module, name, buffer, version_of(buffer)) for module, name, buffer in found]

    def _note_written_buffers(self, before: list[tuple[nn.Module, str, Tensor | None, int]]) -> None:
        for module, name, buffer, version in before:
            now = module._buffers.get(name)
            if now is not buffer or version_of(now) != version:
                self._written_buffers.add((module, name))

    def _kept_buffers(self) -> list[Kept]:
        """Copies of the buffers that forwards write to; of all, before any forward has shown which."""
        written = self._written_buffers if self._wants else self._buffers
        kept = ((module, name, module._buffers.get(name)) for module, name in written)
        return [Kept(module, name, None if value is None else value.clone()) for module, name, value in kept]

    @contextmanager
    def _as_before(self, kept: Sequence[Kept]) -> Iterator[None]:
        """Lets a recomputation find, and write to, what the first forward found; whose writes stay."""
        now = [(module, name, module._buffers.get(name)) for module, name, _ in kept]
        for module, name, value in kept:
            module._buffers[name] = value
        try:
            yield
        finally:
            for module, name, value in now:
                module._buffers[name] = value


def _outgoing(value: Pytree, source: Parcel) -> tuple[Parcel, list[Tensor]]:
    """What leaves a stage, cut from its graph, and the outputs that the backward will begin with."""
    if isinstance(value, Tensor):
        tensors, layout = [value], ONE_TENSOR
    else:
        tensors, layout = pack(value)
    wants = tuple([tensor.requires_grad for tensor in tensors])
    odd = any([_is_odd(tensor, source) for tensor in tensors])
    parcel = Parcel([tensor.detach() for tensor in tensors], layout, wants, odd=odd)
    return parcel, [tensor for tensor in tensors if tensor.requires_grad]


def _is_odd(tensor: Tensor, source: Parcel) -> bool:
    """See `Parcel`."""
    address = tensor.data_ptr()
    return (
        address % 64 != 0
        or not tensor.is_contiguous()
        or any([address == entered.data_ptr() for entered in source.tensors])
    )
