"""Is a backward in two parts, I and W, the backward that it was, for whatever a module does?"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import Recipe, assert_same, pipelined, plain, vectors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pipe.boundary import Parcel
from pipe.call import Call
from pipe.deferral import Use
from pipe.stage import Keep, Stage

WIDTH = 17


class Twice(nn.Module):
    """One weight with three uses, of which one is no Linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh()) + x @ self.inner.weight


class Checkpointed(nn.Module):
    """The user's own recomputation, which runs a forward inside of the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return found


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Cube.apply(self.linear(x) / 4)
        return found


class Rows(nn.Module):
    """Applies a module of sequences, or images, to plain rows."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.module, self.shape = module, shape

    def forward(self, x: Tensor) -> Tensor:
        found = self.module(x.view(len(x), *self.shape))
        return (found[0] if isinstance(found, tuple) else found).reshape(len(x), -1)


class Words(nn.Module):
    """Rows -> the embeddings of which of their entries are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 3, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x > 0).long()).sum(1).repeat(1, 6)[:, :WIDTH]


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


def doubling() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "frozen bias": lambda: frozen(nn.Linear(WIDTH, WIDTH), "bias"),
    "frozen weight": lambda: frozen(nn.Linear(WIDTH, WIDTH), "weight"),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "one weight, three uses": Twice,
    "no parameters": nn.Tanh,
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "custom function": Custom,
    "hook on a weight": doubling,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "conv1d": lambda: Rows(nn.Conv1d(1, 1, 3, padding=1), (1, WIDTH)),
    "conv1d, reflected": lambda: Rows(nn.Conv1d(1, 1, 3, padding=1, padding_mode="reflect"), (1, WIDTH)),
    "conv2d": lambda: Rows(nn.Conv2d(1, 2, (1, 3), stride=(1, 2), bias=False), (1, 1, WIDTH)),
    "embedding": Words,
    "lstm": lambda: Rows(nn.LSTM(1, 1, batch_first=True), (WIDTH, 1)),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 1, 32, dropout=0.0),
}


class Model:
    """A recipe's model, which travels by name: a kind of layer between two plain ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self) -> nn.Sequential:
        torch.manual_seed(0)
        odd = KINDS[self.kind]()
        width = odd(torch.zeros(1, WIDTH)).shape[1]
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), odd, nn.Linear(width, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5)
        )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_module_has_its_gradients(kind: str, mode: str, ranks: int) -> None:
    recipe = Recipe(kind, Model(kind), vectors, cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a stage without a layer to split says so: see below
        found = pipelined(recipe, f"chunks=4 ranks={ranks} schedule=zb_h1 checkpoint={mode}", clip=0.5)
    # A recomputed LSTM is equal to rounding (docs/engine.md).
    assert_same(found, plain(recipe, 4, clip=0.5), bitwise=(kind, mode) != ("lstm", "always"))


def stage_of(*layers: nn.Module) -> tuple[Stage, Call]:
    """A stage in the middle, and a call of one microbatch."""
    stage = Stage(
        1,
        nn.Sequential(*layers),
        first_layer=1,
        is_first=False,
        is_last=False,
        device=torch.device("cpu"),
        loss=None,
    )
    return stage, Call(True, 1, [0], [1.0], 1.0)


def run_input_part(stage: Stage, call: Call, rows: int = 8) -> Parcel:
    stage.forward(0, Parcel([torch.randn(rows, WIDTH)], wants=(True,)), call, Keep.GRAPH, split=True)
    return stage.backward_input(0, Parcel([torch.randn(rows, WIDTH)]), call)


def test_the_input_part_leaves_the_weight_products_undone() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    stage, call = stage_of(layer, nn.Tanh())
    gradients = run_input_part(stage, call)
    assert gradients.tensors[0].shape == (8, WIDTH)
    assert layer.weight.grad is None and layer.bias.grad is None
    stage.backward_weight(0)
    assert layer.weight.grad is not None and layer.bias.grad is not None
    assert not stage.deferred and not stage.saved


def test_what_waits_is_each_layers_input_and_output_gradient_and_nothing_else() -> None:
    """The activation between the two layers lives on as the second one's input; the graph does not."""
    stage, call = stage_of(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
    graph: list[Any] = []
    stage.module[1].register_forward_hook(lambda module, inputs, output: graph.append(weakref.ref(output)))
    run_input_part(stage, call)
    kept = [tensor for use in stage.deferred[0].uses for tensor in (use.inputs, use.gradient)]
    assert sorted(tuple(tensor.shape) for tensor in kept) == [(8, WIDTH), (8, WIDTH), (8, 64), (8, 64)]
    assert all(tensor.grad_fn is None for tensor in kept) and not stage.deferred[0].made
    gc.collect()
    assert graph[0]() is None


def test_modules_are_left_as_they_were() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    stage, call = stage_of(layer)
    before = set(vars(layer))
    run_input_part(stage, call)
    assert set(vars(layer)) == before and isinstance(layer.weight, nn.Parameter)


def test_an_input_changed_in_place_is_noticed() -> None:
    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x.tanh()
            y = self.linear(x)
            x.add_(1)
            return y + x.detach()

    stage, call = stage_of(Spoils())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_input_part(stage, call)


def test_a_stage_that_cannot_be_split_says_so_once_and_counts() -> None:
    stage, call = stage_of(Rows(nn.LSTM(1, 1, batch_first=True), (WIDTH, 1)))
    with pytest.warns(UserWarning, match="no layer of stage 1 can be split"):
        run_input_part(stage, call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage.backward_weight(0)
        run_input_part(stage, call)
    assert stage.whole_backwards == 2


def test_weights_without_an_input_part_are_refused() -> None:
    stage, _ = stage_of(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(RuntimeError, match="no I of microbatch 3"):
        stage.backward_weight(3)


def test_a_use_is_a_layer_its_input_and_its_outputs_gradient() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    stage, call = stage_of(layer, layer)  # one layer that stands twice: two uses, one sum
    run_input_part(stage, call)
    assert [type(use) for use in stage.deferred[0].uses] == [Use, Use]
    stage.backward_weight(0)
    assert layer.weight.grad is not None
