"""Does half precision compute what a model cast by hand does, with masters, sums and losses in fp32?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import cases
from reference import (
    CONV_BATCHNORM,
    MLP,
    TRANSFORMER,
    OptimizerFactory,
    Recipe,
    Trained,
    adamw,
    assert_equal,
    assert_same,
    build,
    cut,
    mlp,
    momentum,
    pipelined,
    rows_of,
    vectors,
)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from workers import Workers

import schedules
from pipe import OptionError

SCHEDULES = [name for name in schedules.names() if name != "csv"]
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


# --------------------------------------------------------------- the same, cast by hand

# Lowers some of a model's modules, and returns what computes in fp32 as the caller wants it.
Lower = Callable[[nn.Sequential, torch.dtype], None]


def everything(model: nn.Sequential, dtype: torch.dtype) -> None:
    model.to(dtype)


def all_but_batchnorm(model: nn.Sequential, dtype: torch.dtype) -> None:
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.float()


def all_but(*kept: str) -> Lower:
    """Leaves some layers, whose inputs it casts up and whose outputs it casts down, but for the last's."""

    def lower(model: nn.Sequential, dtype: torch.dtype) -> None:
        model.to(dtype)
        for name in kept:
            layer = model.get_submodule(name).float()
            layer.register_forward_pre_hook(lambda _, args: lowered(args, torch.float32))
            if layer is not model[-1]:
                layer.register_forward_hook(lambda _, args, output: output.to(dtype))

    return lower


def lowered(batch: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def plain_in_half(
    recipe: Recipe,
    chunks: int,
    amp: str,
    *,
    lower: Lower = everything,
    optimizer: OptimizerFactory = adamw,
    steps: int = 3,
) -> Trained:
    """One process, a lowered copy of fp32 master weights, and each microbatch's gradient added up in fp32.

    An overflow skips a step; the second one, and each that follows, halves the scale.
    """
    dtype, overflows = HALVES[amp], 0
    scale = 2.0**16 if amp == "fp16" else 1.0
    model = recipe.model()
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    lower(model, dtype)
    follow(model, masters)
    updates = optimizer(list(masters.items()))
    losses = []
    for number in range(steps):
        inputs, targets = recipe.data(17, number)
        sums: dict[str, Tensor] = {}
        values = []
        for x, y in cut((inputs, targets), chunks):
            share = rows_of(y) / 17
            loss = recipe.loss(model(lowered(x, dtype)).float(), y)
            loss.backward(torch.tensor(share) * scale)
            values.append(loss.detach().double() * share)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                gradient, parameter.grad = parameter.grad.float(), None
                sums[name] = sums[name] + gradient if name in sums else gradient
        losses.append(torch.stack(values).sum())
        if not all(total.isfinite().all() for total in sums.values()):
            overflows += 1
            scale /= 2.0 if overflows > 1 else 1.0
            continue
        for name, master in masters.items():
            master.grad = sums[name] / scale
        updates.step()
        follow(model, masters)
    return Trained(model.state_dict() | {name: p.detach() for name, p in masters.items()}, losses)


def follow(model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(masters[name])


@functools.cache
def expected(recipe: Recipe, chunks: int, amp: str, optimizer: OptimizerFactory) -> Trained:
    return plain_in_half(recipe, chunks, amp, optimizer=optimizer)


FACTORS: dict[str, list[Any]] = {
    "schedule": [*SCHEDULES, "interleaved(3)"],
    "ranks": [1, 2, 3],
    "amp": ["bf16", "fp16"],
    "zero": [0, 1, 2, 3],
    "recipe": [MLP, CONV_BATCHNORM, TRANSFORMER],
    "checkpoint": ["never", "except_last", "always"],
}


def fits(row: dict[str, Any]) -> bool:
    stages = len(schedules.get(row["schedule"]).placement(row["ranks"]))
    return stages <= len(row["recipe"].model())


@pytest.mark.parametrize(tuple(FACTORS), cases(FACTORS, valid=fits))
def test_one_replica_is_plain_training_bit_for_bit(
    schedule: str,
    ranks: int,
    amp: str,
    zero: int,
    recipe: Recipe,
    checkpoint: str,
) -> None:
    chunks, optimizer = (4, adamw) if ranks < 3 else (7, momentum)
    found = pipelined(
        recipe,
        f"ranks={ranks} chunks={chunks} schedule={schedule} amp={amp} zero={zero} checkpoint={checkpoint}",
        steps=3,
        optimizer=optimizer,
    )
    assert_same(found, expected(recipe, chunks, amp, optimizer))


def on_processes() -> list[Trained]:
    return [
        pipelined(recipe, f"chunks=4 amp={amp} zero={zero} schedule={schedule}", steps=3)
        for recipe, amp, zero, schedule in BETWEEN_PROCESSES
    ]


BETWEEN_PROCESSES = [
    (MLP, "fp16", 0, "zb_h1"),
    (CONV_BATCHNORM, "bf16", 1, "1f1b"),
    (TRANSFORMER, "bf16", 2, "1f1b"),
    (TRANSFORMER, "fp16", 3, "zb_h1"),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_between_processes(workers: Workers, ranks: int) -> None:
    by_rank = workers.run(on_processes, ranks, timeout=100)
    for (recipe, amp, *_), *found in zip(BETWEEN_PROCESSES, *by_rank, strict=True):
        assert_same(found[0], expected(recipe, 4, amp, adamw))
        for other in found[1:]:
            assert other.losses == found[0].losses


# ------------------------------------------------------------------------ what is cast


class Buffers(nn.Module):
    """A buffer of every kind, and of a type that is nobody's business."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(17))
        self.register_buffer("wide", torch.ones(17, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("mask", torch.ones(17, dtype=torch.bool))
        self.register_buffer("nothing", None)
        self.register_buffer("eight", torch.ones(2).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def with_buffers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(17, 17),
        nn.Sequential(nn.BatchNorm1d(17), Buffers()),
        nn.LayerNorm(17),
        nn.BatchNorm1d(17),
        nn.Linear(17, 5),
    )


def types(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("amp", list(HALVES))
def test_all_that_floats_is_cast(amp: str, zero: int) -> None:
    half = HALVES[amp]
    other = {"count": torch.int64, "mask": torch.bool, "eight": torch.float8_e4m3fn}
    other |= {"num_batches_tracked": torch.int64}
    with build(f"ranks=2 chunks=4 amp={amp} zero={zero}", with_buffers()) as pipeline:
        pipeline.step(*vectors(8, 0))
        for stage in pipeline.stages.values():
            for name, dtype in types(stage.module).items():
                assert dtype == other.get(name.split(".")[-1], half), name


@pytest.mark.parametrize("zero", range(4))
def test_keep_batchnorm_keeps_exactly_that(zero: int) -> None:
    options = f"ranks=2 chunks=4 amp=bf16 keep_batchnorm_fp32 zero={zero}"
    with build(options, with_buffers()) as pipeline:
        pipeline.step(*vectors(8, 0))
        for stage in pipeline.stages.values():
            for module in stage.module.modules():
                wanted = torch.float32 if isinstance(module, _BatchNorm) else torch.bfloat16
                own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                assert {t.dtype for _, t in own if t.element_size() in (2, 4)} <= {wanted}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("amp", list(HALVES))
def test_training_with_batchnorm_in_fp32(amp: str, zero: int) -> None:
    options = f"ranks=2 chunks=4 amp={amp} keep_batchnorm_fp32 zero={zero}"
    found = pipelined(CONV_BATCHNORM, options, steps=3)
    assert_same(found, plain_in_half(CONV_BATCHNORM, 4, amp, lower=all_but_batchnorm))


# ------------------------------------------------------------------------ what is kept


NORMS = [f"{block}.{name}" for block in range(1, 7) for name in ("first", "second")]
KEPT = {
    "^4$": ["4"],  # a name
    "^[08]$": ["0", "8"],  # both ends: the last one's output stays as it is
    "LayerNorm": [*NORMS, "7"],  # a class
    r"^3\.feed": ["3.feed"],  # the outermost module that is found
    "^1$|Embedding": ["0", "1"],
}
KEEPING = {"pattern": list(KEPT), "amp": list(HALVES), "zero": [0, 1, 3]}


@pytest.mark.parametrize(tuple(KEEPING), cases(KEEPING))
def test_keep_fp32(pattern: str, amp: str, zero: int) -> None:
    recipe, kept = TRANSFORMER, KEPT[pattern]
    found = pipelined(recipe, f"ranks=3 chunks=4 amp={amp} keep_fp32={pattern} zero={zero}", steps=3)
    assert_same(found, plain_in_half(recipe, 4, amp, lower=all_but(*kept)))


class Sees(nn.Module):
    """Notes the types of what it is given, and passes it on."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.types.append(pytree.tree_map_only(Tensor, lambda t: t.dtype, x))
        return x


class SeesInFull(Sees):
    """Another class, for a pattern to find."""


def test_a_layer_that_is_kept_gets_fp32_and_gives_half() -> None:
    sees = [Sees(), SeesInFull(), Sees(), SeesInFull()]
    model = nn.Sequential(nn.Linear(17, 17), sees[0], sees[1], sees[2], nn.Linear(17, 5), sees[3])
    with build("chunks=1 device_map=0:0-2,1:2-6 amp=bf16 keep_fp32=InFull", model) as pipeline:
        pipeline.step(*vectors(8, 0))
        assert pipeline.predict(vectors(8, 0)[0]).dtype == torch.float32
    half, full = torch.bfloat16, torch.float32
    assert [one.types for one in sees] == [[half] * 2, [full] * 2, [half] * 2, [full] * 2]


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 17), nn.ReLU(), nn.Linear(17, 17), nn.Linear(17, 5))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (mlp, "keep_fp32=Conv", "keep_fp32=Conv finds no layer"),
        (mlp, "keep_fp32=^9", "finds no layer"),
        (tied, "keep_fp32=^2$", r"2\.weight belongs to two layers, of which one is kept"),
        (tied, "keep_fp32=^0$", "belongs to two layers, of which one is kept"),
    ],
)
def test_what_can_not_be_kept(model: Callable[[], nn.Sequential], options: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        build(f"chunks=4 amp=fp16 {options}", model())
    error = raised.value
    assert isinstance(error, ValueError) and error.text[slice(*error.span)] == options.split("=")[1]


def test_a_tied_weight_of_two_layers_that_are_kept() -> None:
    with build("chunks=4 amp=bf16 keep_fp32=^0$|^2$", tied()) as pipeline:
        pipeline.step(*vectors(8, 0))
        assert pipeline.stages[0].module[0].weight.dtype == torch.float32
        assert pipeline.stages[0].module[3].weight.dtype == torch.bfloat16


# ----------------------------------------------------------------------- what travels


class Tree(nn.Module):
    """From a row of numbers to a tree of tensors and plain values."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x, "ids": x.argmax(-1), "more": [x > 0, (x * 2, 0.5)]}


class Root(nn.Module):
    def forward(self, tree: Any) -> Tensor:
        x, (above, (twice, half)) = tree["x"], tree["more"]
        found: Tensor = torch.where(above, x, twice * half) + tree["ids"].unsqueeze(-1).to(x.dtype)
        return found


@pytest.mark.parametrize("amp", list(HALVES))
def test_boundaries_travel_in_half(amp: str) -> None:
    sees = [Sees(), Sees(), Sees()]
    layers = [nn.Linear(17, 17), sees[0], nn.Linear(17, 17), Tree(), sees[1], Root(), nn.Linear(17, 5)]
    with build(f"chunks=2 device_map=0:0-1,1:1-4,2:4-6,3:6-7 amp={amp}", nn.Sequential(*layers)) as pipeline:
        pipeline.step(*vectors(8, 0))
        pipeline.evaluate(*vectors(8, 0))
    half = HALVES[amp]
    assert sees[0].types == [half] * 4
    assert sees[1].types == [{"x": half, "ids": torch.int64, "more": [torch.bool, (half, 0.5)]}] * 4


def test_inputs_are_cast_wherever_they_are_in_a_tree() -> None:
    sees = Sees()
    inputs = {
        "x": torch.randn(4, 17),
        "ids": torch.zeros(4, dtype=torch.int64),
        "more": [torch.ones(4, 17, dtype=torch.bool), (torch.randn(4, 17, dtype=torch.float64), 0.5)],
    }
    before = pytree.tree_map_only(Tensor, torch.clone, inputs)
    targets = torch.rand(4, 5)
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append((output.dtype, target.dtype))
        return (output - target).square().mean()

    model = nn.Sequential(sees, Root(), nn.Linear(17, 5))
    with build("chunks=2 ranks=2 amp=bf16", model, loss=loss) as pipeline:
        pipeline.step(inputs, targets)
    half = torch.bfloat16
    assert sees.types == [{"x": half, "ids": torch.int64, "more": [torch.bool, (half, 0.5)]}] * 2
    assert seen == [(torch.float32, torch.float32)] * 2
    for mine, was in zip(pytree.tree_leaves(inputs), pytree.tree_leaves(before), strict=True):
        assert mine is was or (mine.dtype == was.dtype and torch.equal(mine, was)), "the caller's own"


class Ends(nn.Module):
    """A tree for the loss."""

    def forward(self, x: Tensor) -> Any:
        return {"logits": x, "best": x.argmax(-1)}


@pytest.mark.parametrize("amp", list(HALVES))
def test_the_loss_and_predictions_are_in_fp32(amp: str) -> None:
    seen = []

    def loss(output: Any, target: Tensor) -> Tensor:
        seen.append((output["logits"].dtype, output["best"].dtype))
        return nn.functional.cross_entropy(output["logits"], target)

    with build(f"chunks=2 ranks=2 amp={amp}", nn.Sequential(*mlp(), Ends()), loss=loss) as pipeline:
        inputs, targets = vectors(8, 0)
        assert pipeline.step(inputs, targets).dtype == torch.float32
        assert pipeline.evaluate(inputs, targets).dtype == torch.float32
        rows = pipeline.predict(inputs)
    assert set(seen) == {(torch.float32, torch.int64)} and len(seen) == 4
    assert rows["logits"].dtype == torch.float32 and rows["best"].dtype == torch.int64


def judge(recipe: Recipe, amp: str) -> tuple[Tensor, Tensor, Tensor]:
    with build(f"ranks=3 chunks=4 amp={amp}", recipe.model(), loss=recipe.loss) as pipeline:
        pipeline.step(*recipe.data(11, 0))
        inputs, targets = recipe.data(10, 1)
        return pipeline.evaluate(inputs, targets), pipeline.predict(inputs), pipeline.step(inputs, targets)


@pytest.mark.parametrize("recipe", [TRANSFORMER, pytest.param(MLP, marks=pytest.mark.full)], ids=str)
def test_every_rank_gets_the_same_fp32_loss(workers: Workers, recipe: Recipe) -> None:
    one = judge(recipe, "fp16")
    for rank, found in enumerate(workers.run(judge, 3, recipe, "fp16")):
        for value, same in zip(found, one, strict=True):
            assert value.dtype == torch.float32
            assert_equal(value, same, f"on rank {rank}")


# ------------------------------------------------------------------------ sums in fp32


def one_layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 5))


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("amp", list(HALVES))
def test_64_equal_microbatches_add_up_exactly(amp: str, zero: int) -> None:
    """In bf16 the sum would be off: a small number is lost on a big one."""
    (x, y), dtype = vectors(1, 0), HALVES[amp]
    model = one_layer().to(dtype)
    scale = 2.0**16 if amp == "fp16" else 1.0
    loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
    loss.backward(torch.tensor(1 / 64) * scale)

    gradients: list[Tensor] = []
    with build(f"chunks=64 amp={amp} zero={zero}", one_layer()) as pipeline:
        assert pipeline.optimizer is not None
        pipeline.optimizer.register_step_pre_hook(
            lambda optimizer, *_: gradients.extend(
                p.grad.clone() for group in optimizer.param_groups for p in group["params"]
            )
        )
        pipeline.step(x.repeat(64, 1), y.repeat(64))
    naive = torch.zeros_like(model[0].weight)
    for _ in range(64):
        naive += model[0].weight.grad
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert_equal(gradient, parameter.grad.float() * (64 / scale), "the gradient")
    assert not torch.equal(gradients[0], naive.float() / scale)


# ----------------------------------------------------------------------- state dicts


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dp", [1, 2])
def test_state_dicts_hold_the_masters(dp: int, zero: int) -> None:
    """To the last bit of fp32: before any step, they are the model's own."""
    model = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with build(f"ranks=2 dp={dp} chunks=2 amp=bf16 zero={zero}", model) as pipeline:
        for full in (False, True):
            state = pipeline.state_dict(full=full)
            assert list(state) == list(before)
            for name, value in before.items():
                assert_equal(state[name], value, name)
        pipeline.step(*vectors(8, 0))
        after = pipeline.state_dict()
        assert all(value.dtype == torch.float32 for value in after.values())
        assert any(not torch.equal(value, value.bfloat16().float()) for value in after.values())
