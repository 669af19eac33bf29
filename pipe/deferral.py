"""Which weight gradients can wait for W, and how are they made then?

The backward of a Linear is two matrix products: one for its input's gradient, which another rank waits for,
and one
for its weight's, which nobody needs before the optimizer steps. Zero-bubble schedules (Qi et al., arXiv
2401.10241) run them apart, as I and W:

    forward     y = linear(x, w)     w as a constant, so that autograd keeps nothing for it; x is kept
    I           dx = dy @ w          by autograd, which hands dy over in passing
    W           dw += dy.T @ x       from x and dy, which is all that is kept in between

The layers of `_RULES` are split so. What else has parameters is differentiated whole at I, by autograd as
ever: every module is right, and those of the table are fast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipe.errors import PipelineError

# (layer, its input, the gradient of its output) -> the gradients of its weight and of its bias
Rule: TypeAlias = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Use(NamedTuple):
    """One use of a layer in one microbatch, whose weight gradient is still to be made."""

    layer: Any
    inputs: Tensor
    gradient: Tensor  # of the layer's output


class Deferred(NamedTuple):
    """What I leaves for W. `made` are gradients of the same parameters that came about in another way."""

    uses: list[Use]
    made: dict[nn.Parameter, Tensor]


class Deferral:
    """The layers of a stage that can be split, and what their backwards leave undone."""

    def __init__(self, module: nn.Module) -> None:
        # With the parameters that each had when it was looked at: what is put in their place, by
        # torch.func.functional_call say, is somebody else's tensor.
        self._own = {layer: dict(layer._parameters) for layer in _splittable(module)}
        self._parameters = list(dict.fromkeys(p for layer in self._own for p in _parameters(layer)))
        self._anchor = torch.empty(0, requires_grad=True)
        self._uses: list[Use] | None = None  # None outside of `backward`

    @contextmanager
    def active(self) -> Iterator[None]:
        """Splits the layers inside.

        It has to surround a forward and its backward alike: a module of the user's own may run its forward
        again in the backward, and has to find the same layers there.
        """
        layers = [layer for layer in self._own if "forward" not in vars(layer)]
        for layer in layers:
            layer.forward = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def backward(self, run: Callable[[], None]) -> Deferred:
        """Runs a backward, and returns what it leaves undone."""
        self._uses = []
        # A parameter of a split layer may have other uses, whose gradients autograd makes now. All uses of a
        # microbatch are summed before they are added to what was there: so autograd does it, and so the
        # bits agree.
        parameters = [p for p in self._parameters if not _is_listened_to(p)]
        there = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            with self.active():
                run()
        finally:
            uses, self._uses = self._uses, None
            made = {p: p.grad for p in parameters if p.grad is not None}
            for parameter, gradient in zip(parameters, there, strict=True):
                parameter.grad = gradient
        return Deferred(uses, made)

    def _forward(self, layer: Any, input: Tensor) -> Tensor:
        plain = type(layer).forward
        if not torch.is_grad_enabled() or not self._may_wait(layer, input):
            return plain(layer, input)  # type: ignore[no-any-return]
        kept = layer._parameters
        layer._parameters = {name: None if p is None else p.detach() for name, p in kept.items()}
        try:
            output = plain(layer, input)
        finally:
            layer._parameters = kept
        return _caught(self, layer, input.detach(), self._anchor, output)

    def _may_wait(self, layer: Any, input: Tensor) -> bool:
        """Whether autograd may take this use of a layer for one of constants."""
        if type(input) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(input):
            return False
        if isinstance(layer, nn.Linear) and input.dim() > 2 and not input.is_contiguous():
            return False  # computed in another way, with other last bits
        return all(
            layer._parameters.get(name) is own
            and (own is None or (own.requires_grad and not _is_listened_to(own)))
            for name, own in self._own[layer].items()
        )


class _Catch(torch.autograd.Function):
    """Behind a split layer: keeps its input, and puts it down beside its output's gradient."""

    @staticmethod
    def forward(
        ctx: Any, deferral: Deferral, layer: Any, inputs: Tensor, anchor: Tensor, output: Tensor
    ) -> Tensor:
        ctx.deferral, ctx.layer = deferral, layer
        ctx.save_for_backward(inputs)  # autograd notices if somebody writes to it in between
        return output.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        if ctx.deferral._uses is None:
            raise PipelineError(
                f"a {type(ctx.layer).__name__} is differentiated inside of a forward, which a split backward "
                "can't follow: take a schedule without I and W, or make the layer a class of your own"
            )
        ctx.deferral._uses.append(Use(ctx.layer, inputs, gradient))
        return None, None, None, None, gradient


_caught: Callable[..., Tensor] = _Catch.apply


@torch.no_grad()
def add_weight_gradients(deferred: Deferred) -> None:
    """W: makes what I has left undone, and adds it to the parameters' `.grad`."""
    totals = dict(deferred.made)
    for layer, inputs, gradient in deferred.uses:
        made = _RULES[type(layer)](layer, inputs, gradient)
        for parameter, part in zip((layer.weight, layer._parameters.get("bias")), made, strict=True):
            if parameter is not None and part is not None:
                part = part.to(parameter.dtype)
                totals[parameter] = _sum(totals[parameter], part) if parameter in totals else part
    for parameter, total in totals.items():
        there = parameter.grad
        if there is None or there.is_sparse or total.is_sparse:
            parameter.grad = total if there is None else _sum(there, total)
        else:
            there += total


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Of tensors that may be sparse: a dense one can't be added to a sparse one, but the other way round."""
    return other + one if one.is_sparse else one + other


def _linear(layer: nn.Linear, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    rows = gradient.reshape(-1, gradient.shape[-1])
    # Under autocast the layer has worked on a cast of its input.
    columns = inputs.reshape(-1, inputs.shape[-1]).to(gradient.dtype)
    return rows.t().mm(columns), None if layer.bias is None else rows.sum(0)


def _embedding(layer: nn.Embedding, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    made = torch.ops.aten.embedding_dense_backward(
        gradient, inputs, layer.num_embeddings, padding, layer.scale_grad_by_freq
    )
    return made, None


def _convolution(layer: Any, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    if gradient.dim() < layer.weight.dim():  # one image, and no batch
        gradient, inputs = gradient.unsqueeze(0), inputs.unsqueeze(0)
    _, weight, bias = torch.ops.aten.convolution_backward(
        gradient,
        inputs.to(gradient.dtype),
        layer.weight.to(gradient.dtype),
        None if layer.bias is None else [layer.out_channels],
        list(layer.stride),
        list(layer.padding),
        list(layer.dilation),
        False,  # not transposed
        [0] * len(layer.stride),
        layer.groups,
        [False, True, layer.bias is not None],
    )
    return weight, bias


# Of these classes themselves: a subclass may do anything with its weight.
_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}


def _splittable(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that have a rule; not those of a compiled module, which would compile again each time."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return
    if type(module) in _RULES and _is_plain(module):
        yield module
    for child in module.children():
        yield from _splittable(child)


def _is_plain(layer: Any) -> bool:
    """Whether a layer has its weight as its own parameter, and uses it as its rule thinks."""
    weight = layer._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.is_complex() or not weight.numel():
        return False  # parametrized, distributed, ...
    if isinstance(layer, nn.Embedding):
        return not layer.sparse and layer.max_norm is None
    padding = getattr(layer, "padding", 0)
    return not isinstance(padding, str) and getattr(layer, "padding_mode", "zeros") == "zeros"


def _parameters(layer: Any) -> list[nn.Parameter]:
    return [p for p in layer._parameters.values() if p is not None]


def _is_listened_to(parameter: nn.Parameter) -> bool:
    """Whether somebody wants to hear of a parameter's gradient as it is made: later would be too late."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
