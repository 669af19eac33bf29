"""What should training give? Plain PyTorch's answer, and the engine's, for the same recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from pipe import Pipeline

Batch: TypeAlias = tuple[Any, Any]
Named: TypeAlias = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory: TypeAlias = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """A model, the batch of a given number of rows for a given step, and a mean loss. Travels by name."""

    name: str
    model: Callable[[], nn.Sequential]
    data: Callable[[int, int], Batch]
    loss: Callable[[Any, Any], Any] = functional.cross_entropy

    def __str__(self) -> str:
        return self.name


@dataclass
class Trained:
    """What training left behind: the model's state and each step's mean loss."""

    state: dict[str, Tensor]
    losses: list[Tensor]


def adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def momentum(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=5e-2, momentum=0.9)


# ----------------------------------------------------------------- the two ways to train


@functools.cache
def plain(
    recipe: Recipe,
    chunks: int,
    *,
    rows: int = 17,
    steps: int = 5,
    optimizer: OptimizerFactory = adamw,
    clip: float | None = None,
) -> Trained:
    """One process that accumulates gradients over microbatches, as contract 1 of the design describes."""
    model = recipe.model()
    updates = optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    losses = []
    for number in range(steps):
        updates.zero_grad()
        losses.append(accumulate(model, recipe.loss, cut(recipe.data(rows, number), chunks)))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        updates.step()
    return Trained(model.state_dict(), losses)


def accumulate(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    microbatches: Sequence[Batch],
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Adds the gradients of the weighted mean loss to `.grad`; returns that mean."""
    weights = [rows_of(y) for _, y in microbatches] if weights is None else weights
    values = []
    for (inputs, target), weight in zip(microbatches, weights, strict=True):
        value = loss(model(inputs), target)
        scaled = value * (weight / sum(weights))
        if scaled.requires_grad:
            torch.autograd.backward(scaled)
        values.append(value.detach().double() * (weight / sum(weights)))
    return torch.stack(values).sum()


def build(options: str, model: nn.Sequential | None = None, **settings: Any) -> Pipeline:
    """A pipeline on the CPU with whatever else a test doesn't care about."""
    defaults: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": momentum, "device": "cpu"}
    return Pipeline(mlp() if model is None else model, options, **(defaults | settings))


def pipelined(
    recipe: Recipe,
    options: str,
    *,
    rows: int = 17,
    steps: int = 5,
    optimizer: OptimizerFactory = adamw,
    **settings: Any,
) -> Trained:
    """The engine: in this process, or as this rank of a process group. The state is complete on rank 0."""
    with build(options, recipe.model(), loss=recipe.loss, optimizer=optimizer, **settings) as pipeline:
        losses = [pipeline.step(*recipe.data(rows, number)) for number in range(steps)]
        return Trained(pipeline.state_dict(full=True), losses)


def cut(batch: Batch, chunks: int) -> list[Batch]:
    """Views along dim 0 whose sizes differ by at most one; what has no rows is shared."""
    inputs, targets = batch
    count = min(chunks, rows_of(inputs))
    return list(zip(_pieces(inputs, count), _pieces(targets, count), strict=True))


def rows_of(batch: Any) -> int:
    return next(len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())


def _pieces(batch: Any, count: int) -> list[Any]:
    def piece(index: int) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.tensor_split(count)[index] if t.dim() else t, batch)

    return [piece(index) for index in range(count)]


# ------------------------------------------------------------------------------ comparing


def assert_same(found: Trained, expected: Trained, *, bitwise: bool = True) -> None:
    """The same state, bit for bit unless told otherwise, and the same losses but for rounding."""
    assert list(found.state) == list(expected.state)
    for name, value in expected.state.items():
        assert_equal(found.state[name], value, name, bitwise=bitwise)
    for step, (mine, plains) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert_equal(mine.double(), plains.double(), f"the loss of step {step}", bitwise=False)


def assert_equal(found: Tensor, expected: Tensor, what: str, *, bitwise: bool = True) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    if not bitwise:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")
    elif not torch.equal(found, expected):
        difference = (found.double() - expected.double()).abs().max().item()
        raise AssertionError(f"{what} is not the same, bit for bit: off by up to {difference}")


# --------------------------------------------------------------------- models and batches


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def vectors(rows: int, step: int) -> Batch:
    """17 numbers a row, and one of 5 classes."""
    source = generator(step)
    return torch.randn(rows, 17, generator=source), torch.randint(0, 5, (rows,), generator=source)


def images(rows: int, step: int) -> Batch:
    source = generator(step)
    return torch.randn(rows, 1, 5, 5, generator=source), torch.randint(0, 5, (rows,), generator=source)


def tokens(rows: int, step: int) -> Batch:
    """Seven tokens a row, and the next one for each."""
    text = torch.randint(0, 11, (rows, 8), generator=generator(step))
    return text[:, :-1], text[:, 1:]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def mlp() -> nn.Sequential:
    """9 layers, 17 wide: no row but the first starts on 16 bytes."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(17, 17), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(17, 5))


def conv_batchnorm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(125, 17),
        nn.BatchNorm1d(17),
        nn.Linear(17, 5),
    )


def dropout() -> nn.Sequential:
    """9 layers that draw in several places, one of them in the middle of a layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(17, 17),
        nn.Dropout(0.3),
        nn.GELU(),
        nn.Linear(17, 17),
        nn.Sequential(nn.Linear(17, 17), nn.Dropout(0.5), nn.RReLU()),
        nn.Dropout(0.1),
        nn.Linear(17, 17),
        nn.AlphaDropout(0.2),
        nn.Linear(17, 5),
    )


class Block(nn.Module):
    """Attention and a feed-forward, each around a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        residual: Tensor = x + self.feed(self.second(x))
        return residual


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(18, 3) for _ in range(6)]
    return nn.Sequential(nn.Embedding(11, 18), *blocks, nn.LayerNorm(18), nn.Linear(18, 11))


def inplace_first() -> nn.Sequential:
    """The first layer writes to its input, and so does every other: many a stage begins so."""
    torch.manual_seed(0)
    pairs = [layer for _ in range(4) for layer in (nn.ReLU(inplace=True), nn.Linear(17, 17))]
    return nn.Sequential(*pairs, nn.ReLU(inplace=True), nn.Linear(17, 5))


MLP = Recipe("mlp", mlp, vectors)
CONV_BATCHNORM = Recipe("conv_batchnorm", conv_batchnorm, images)
DROPOUT = Recipe("dropout", dropout, vectors)
TRANSFORMER = Recipe("transformer", transformer, tokens, token_loss)
INPLACE_FIRST = Recipe("inplace_first", inplace_first, vectors)
