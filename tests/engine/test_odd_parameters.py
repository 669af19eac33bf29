"""Do flat buffers hold parameters of every layout, kind and owner as plain training does?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import cases
from reference import (
    Batch,
    OptimizerFactory,
    Recipe,
    Trained,
    accumulate,
    adamw,
    assert_same,
    build,
    cut,
    generator,
    images,
    momentum,
    pipelined,
    vectors,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations


def channels_last() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(45, 5)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def transposed() -> nn.Sequential:
    """Dense, in another order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 13), nn.ReLU(), nn.Linear(13, 5))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def with_gaps() -> nn.Sequential:
    """Every second element of something larger."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 13), nn.ReLU(), nn.Linear(13, 5))
    model[0].weight = nn.Parameter(torch.randn(13, 34)[:, ::2])
    return model


class Recurrent(nn.Module):
    """A layer that keeps a list of its parameters, and may want them in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 6, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x.unsqueeze(-1))[0][:, -1]
        return found


def recurrent() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Recurrent(), nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 5))


def parametrized() -> nn.Sequential:
    torch.manual_seed(0)
    first = parametrizations.weight_norm(nn.Linear(17, 17))
    return nn.Sequential(first, nn.ReLU(), parametrizations.orthogonal(nn.Linear(17, 17)), nn.Linear(17, 5))


class Scaled(nn.Module):
    """A parameter of no dimension, one of no elements, and lists and dicts of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(3, 0))
        self.shifts = nn.ParameterList([torch.zeros(17), torch.ones(1)])
        self.named = nn.ParameterDict({"last": torch.ones(17)})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (x * self.scale + self.shifts[0]) * self.shifts[1] * self.named["last"]
        return found + self.nothing.sum()


def scaled() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 17), Scaled(), nn.ReLU(), Scaled(), nn.Linear(17, 5))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17, 17, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs().to(x.dtype)


def complex_numbers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 17), Complex(), nn.Linear(17, 5))


def sparse() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(11, 17, mode="sum", sparse=True), nn.ReLU(), nn.Linear(17, 5))


def words(rows: int, step: int) -> Batch:
    source = generator(step)
    return torch.randint(0, 11, (rows, 4), generator=source), torch.randint(0, 5, (rows,), generator=source)


def mixed() -> nn.Sequential:
    """Layers that are in half precision already, and in double."""
    torch.manual_seed(0)

    class To(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.dtype)

    layers = [nn.Linear(17, 17), To(torch.float64), nn.Linear(17, 17).double(), To(torch.float32)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(17, 5))


def tied() -> nn.Sequential:
    """One weight in two layers, and a layer that stands twice."""
    torch.manual_seed(0)
    twice, first, third = nn.Linear(17, 17), nn.Linear(17, 17), nn.Linear(17, 17)
    third.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), twice, nn.Tanh(), third, twice, nn.Linear(17, 5))


RECIPES = [
    Recipe("channels last", channels_last, images),
    Recipe("transposed", transposed, vectors),
    Recipe("with gaps", with_gaps, vectors),
    Recipe("recurrent", recurrent, vectors),
    Recipe("parametrized", parametrized, vectors),
    Recipe("scaled", scaled, vectors),
    Recipe("complex", complex_numbers, vectors),
    Recipe("sparse", sparse, words),
    Recipe("mixed", mixed, vectors),
    Recipe("tied", tied, vectors),
]


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for _, p in named], lr=1e-2)


def plainly(recipe: Recipe, optimizer: OptimizerFactory, chunks: int) -> Trained:
    """As `reference.plain`, and sparse gradients are made dense."""
    model = recipe.model()
    updates = optimizer(list(model.named_parameters()))
    losses = []
    for step in range(3):
        updates.zero_grad()
        losses.append(accumulate(model, recipe.loss, cut(recipe.data(12, step), chunks)))
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        updates.step()
    return Trained(model.state_dict(), losses)


FACTORS: dict[str, list[Any]] = {
    "recipe": RECIPES,
    "zero": [0, 1, 2, 3],
    "dp": [2, 1, 3],
    "stages": [1, 2],
    "offload": ["", "offload"],
    "optimizer": [momentum, adamw, adafactor],
    "schedule": ["1f1b", "zb_h1"],
}


def is_possible(row: dict[str, Any]) -> bool:
    if row["recipe"].name in ("complex", "scaled") and row["optimizer"] is adafactor:
        return False  # it takes no complex numbers, and nothing without elements
    if row["recipe"].name == "tied" and row["stages"] == 2:
        return False  # over one rank only; see below
    if row["recipe"].name == "sparse" and row["zero"] == 0 and row["dp"] == 1:
        return False  # gradients are autograd's own
    return row["zero"] > 0 or not row["offload"]


@pytest.mark.filterwarnings("ignore:no layer of stage", "ignore:RNN module weights")
@pytest.mark.parametrize(tuple(FACTORS), cases(FACTORS, valid=is_possible))
def test_training(
    recipe: Recipe,
    zero: int,
    dp: int,
    stages: int,
    offload: str,
    optimizer: OptimizerFactory,
    schedule: str,
) -> None:
    options = f"ranks={stages} dp={dp} chunks={6 // dp} zero={zero} schedule={schedule} {offload}"
    found = pipelined(recipe, options, rows=12, steps=3, optimizer=optimizer)
    assert_same(found, plainly(recipe, optimizer, 6), bitwise=False)


@pytest.mark.parametrize("zero", range(4))
# A buffer has no gaps, and a sparse sum is ordered otherwise.
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.name not in ("with gaps", "sparse")], ids=str)
def test_one_replica_is_plain_training_bit_for_bit(recipe: Recipe, zero: int) -> None:
    found = pipelined(recipe, f"chunks=6 zero={zero}", rows=12, steps=3, optimizer=momentum)
    assert_same(found, plainly(recipe, momentum, 6))


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.name not in ("parametrized", "mixed")], ids=str)
def test_in_half_precision(recipe: Recipe, zero: int) -> None:
    """What can be computed in it (there is no orthogonal matrix of halves) comes close to fp32."""
    options = f"dp=2 chunks=3 zero={zero}"
    found = pipelined(recipe, f"{options} amp=bf16", rows=12, steps=3, optimizer=momentum)
    full = pipelined(recipe, options, rows=12, steps=3, optimizer=momentum)
    for mine, fulls in zip(found.losses, full.losses, strict=True):
        torch.testing.assert_close(mine, fulls, rtol=0.1, atol=0.02)
    for name, value in full.state.items():
        if value.is_floating_point() and "running" not in name:
            assert found.state[name].dtype == torch.float32, name


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("model", [channels_last, transposed, scaled, parametrized])
def test_parameters_keep_shape_and_strides(model: Callable[[], nn.Sequential], zero: int) -> None:
    """As the modules see them when they compute."""
    made, seen = model(), {}

    def look(module: nn.Module, *_: Any) -> None:
        for name, p in module.named_parameters(recurse=False):
            seen[f"{id(module)} {name}"] = (p.shape, p.stride())

    expected = {
        f"{id(module)} {name}": (p.shape, p.stride())
        for module in made.modules()
        for name, p in module.named_parameters(recurse=False)
    }
    for layer in made:
        for module in layer.modules():
            module.register_forward_pre_hook(look)
    data = images if model is channels_last else vectors
    with build(f"dp=2 chunks=2 zero={zero}", made, optimizer=adamw) as pipeline:
        for step in range(2):
            pipeline.step(*data(8, step))
    found = {key: seen[key] for key in expected if key in seen}  # the copies' are others
    assert found and found == {key: expected[key] for key in found}
