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
        self._forwards = {layer: partial(self._forward, layer) for layer in _splittable(module)}
        self._parameters = list(dict.fromkeys(p for layer in self._forwards for p in _parameters(layer)))
        self._anchor = torch.empty(0, requires_grad=True)
        self._uses: list[Use] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Splits the layers inside.

        It has to surround a forward and its backward alike: a module of the user's own may run its forward
        again in the backward, and has to find the same layers there.
        """
        for layer, forward in self._forwards.items():
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._forwards:
                del layer.forward

    def backward(self, run: Callable[[], None]) -> Deferred:
        """Runs a backward, and returns what it leaves undone."""
        self._uses = []
        # A parameter of a split layer may have other uses, whose gradients autograd makes now. All uses of a
        # microbatch are summed before they are added to what was there: so autograd does it, and so the
        # bits agree.
        there = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            with self.active():
                run()
        finally:
            made = {p: p.grad for p in self._parameters if p.grad is not None}
            for parameter, gradient in zip(self._parameters, there, strict=True):
                parameter.grad = gradient
        uses, self._uses = self._uses, []
        return Deferred(uses, made)

    def _forward(self, layer: Any, input: Tensor) -> Tensor:
        plain = type(layer).forward
        if not torch.is_grad_enabled() or type(input) is not Tensor or not _may_wait(layer):
            return plain(layer, input)  # type: ignore[no-any-return]
        kept = layer._parameters
        layer._parameters = {name: None if p is None else p.detach() for name, p in kept.items()}
        try:
            output = plain(layer, input)
        finally:
            layer._parameters = kept
        return _caught(self, layer, input.detach(), self._anchor, output)


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
        ctx.deferral._uses.append(Use(ctx.layer, inputs, gradient))
        return None, None, None, None, gradient


_caught: Callable[..., Tensor] = _Catch.apply


@torch.no_grad()
def add_weight_gradients(deferred: Deferred) -> None:
    """W: makes what I has left undone, and adds it to the parameters' `.grad`."""
    totals = dict(deferred.made)
    for layer, inputs, gradient in deferred.uses:
        made = _RULES[type(layer).forward](layer, inputs, gradient)
        for parameter, part in zip((layer.weight, layer._parameters.get("bias")), made, strict=True):
            if parameter is not None and part is not None:
                part = part.to(parameter.dtype)
                totals[parameter] = totals[parameter] + part if parameter in totals else part
    for parameter, total in totals.items():
        if parameter.grad is None:
            parameter.grad = total
        else:
            parameter.grad += total


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


_RULES: dict[Any, Rule] = {
    nn.Linear.forward: _linear,
    nn.Embedding.forward: _embedding,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
}


def _splittable(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that have a rule; not those of a compiled module, which would compile again each time."""
    if type(module).__name__ == "OptimizedModule":
        return
    if type(module).forward in _RULES and "forward" not in vars(module) and _is_plain(module):
        yield module
    for child in module.children():
        yield from _splittable(child)


def _is_plain(layer: Any) -> bool:
    """Whether a layer has its weight as its own parameter, and uses it as its rule thinks."""
    if type(layer._parameters.get("weight")) is not nn.Parameter:  # parametrized, or distributed
        return False
    if isinstance(layer, nn.Embedding):
        return not layer.sparse and layer.max_norm is None
    padding = getattr(layer, "padding", 0)
    return not isinstance(padding, str) and getattr(layer, "padding_mode", "zeros") == "zeros"


def _parameters(layer: Any) -> list[nn.Parameter]:
    return [p for p in layer._parameters.values() if p is not None]


def _may_wait(layer: Any) -> bool:
    """Whether a layer trains, and nobody listens to its parameters' gradients, which would come late."""
    return all(
        p.requires_grad and not p._backward_hooks and not p._post_accumulate_grad_hooks
        for p in _parameters(layer)
    )
