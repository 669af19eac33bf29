"""Does every optimizer do on shards what it does on whole parameters?"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from covering import cases
from reference import (
    MLP,
    TRANSFORMER,
    Named,
    OptimizerFactory,
    Recipe,
    Trained,
    accumulate,
    adamw,
    assert_same,
    build,
    cut,
    momentum,
    pipelined,
    tokens,
    transformer,
    vectors,
)
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from workers import Workers

from pipe import PipelineError
from pipe.buckets import Entry, arrange

partial = functools.partial
Update = Callable[[optim.Optimizer], Any]


class Shapely(optim.AdamW):
    """A user's own: it looks at shapes, and counts its steps in the group."""

    def __init__(self, named: Any, lr: float) -> None:
        super().__init__(named, lr=lr)
        for group in self.param_groups:
            group["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    assert p.dim() == p.grad.dim() and p.dim() > 0
                    mean = p.grad.mean(dim=-1, keepdim=True) if p.dim() > 1 else p.grad.mean()
                    p.grad.sub_(mean / group["steps"])
        super().step()


def muon(named: Named) -> optim.Optimizer:
    return optim.Muon(named, lr=1e-2)


ELEMENTWISE: dict[str, OptimizerFactory] = {
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adagrad": partial(optim.Adagrad, lr=1e-2),  # has its state from the beginning
    "adagrad from 1": partial(optim.Adagrad, lr=1e-2, initial_accumulator_value=1.0),
    "adam": partial(optim.Adam, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamax": partial(optim.Adamax, lr=1e-2),
    "adamw": partial(optim.AdamW, lr=1e-2),
    "adamw foreach": partial(optim.AdamW, lr=1e-2, foreach=True),
    "adamw one by one": partial(optim.AdamW, lr=1e-2, foreach=False),
    "adamw fused": partial(optim.AdamW, lr=1e-2, fused=True),
    "adamw lr in a tensor": partial(optim.AdamW, lr=torch.tensor(1e-2)),
    "asgd": partial(optim.ASGD, lr=1e-2, t0=2),
    "nadam": partial(optim.NAdam, lr=1e-2),
    "radam": partial(optim.RAdam, lr=1e-2),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "rprop": partial(optim.Rprop, lr=1e-3),
    "sgd": partial(optim.SGD, lr=5e-2),
    "sgd foreach": partial(optim.SGD, lr=5e-2, momentum=0.9, foreach=True),
    "sgd nesterov": partial(optim.SGD, lr=5e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd dampening": partial(optim.SGD, lr=5e-2, momentum=0.9, dampening=0.5, maximize=True),
}
WHOLE: dict[str, OptimizerFactory] = {
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "muon": muon,
    "shapely": partial(Shapely, lr=1e-2),
}
OPTIMIZERS = ELEMENTWISE | WHOLE


def matrices() -> nn.Sequential:
    """All that Muon takes."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(17, 17, bias=False), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(17, 5, bias=False))


MATRICES = Recipe("matrices", matrices, vectors)


def recipe_of(optimizer: str) -> Recipe:
    return MATRICES if optimizer == "muon" else MLP


def plainly(recipe: Recipe, optimizer: OptimizerFactory, *, rows: int = 16, steps: int = 4) -> Trained:
    model = recipe.model()
    updates = optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        updates.zero_grad()
        losses.append(accumulate(model, recipe.loss, cut(recipe.data(rows, step), 4)))
        updates.step()
    return Trained(model.state_dict(), losses)


SMALL_BUCKETS = "bucket_mb=0.0015"  # a layer each, of this width
FACTORS: dict[str, list[Any]] = {
    "optimizer": list(OPTIMIZERS),
    "zero": [0, 1, 2, 3],
    "offload": ["", "offload"],
    "buckets": ["", SMALL_BUCKETS],
    "dp": [2, 1],
    "ranks": [2, 1],
}


@pytest.mark.parametrize(
    tuple(FACTORS), cases(FACTORS, valid=lambda row: bool(row["zero"]) or not row["offload"])
)
def test_shards_step_as_whole_parameters_do(
    optimizer: str, zero: int, offload: str, buckets: str, dp: int, ranks: int
) -> None:
    recipe, factory = recipe_of(optimizer), OPTIMIZERS[optimizer]
    options = f"ranks={ranks} dp={dp} chunks=2 zero={zero} {offload} {buckets}"
    found = pipelined(recipe, options, rows=16, steps=4, optimizer=factory)
    assert_same(found, plainly(recipe, factory), bitwise=False)


def train_all(zero: int) -> list[Trained]:
    return [
        pipelined(
            recipe_of(name),
            f"ranks=2 dp=2 chunks=2 zero={zero} {SMALL_BUCKETS}",
            rows=8,
            steps=2,
            optimizer=OPTIMIZERS[name],
        )
        for name in BETWEEN_PROCESSES
    ]


BETWEEN_PROCESSES = ["adagrad", "adamw fused", "muon", "shapely"]


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_between_processes(workers: Workers, zero: int) -> None:
    """Where a rank has stand-ins for the others' parameters, and no others."""
    found = workers.run(train_all, 4, zero)[0]
    for name, trained in zip(BETWEEN_PROCESSES, found, strict=True):
        one = pipelined(
            recipe_of(name), "chunks=2", rows=8, steps=2, optimizer=OPTIMIZERS[name]
        )  # both replicas were given the same rows
        assert_same(trained, one, bitwise=False)


@pytest.mark.parametrize("options", ["chunks=2", "dp=2 zero=1", "amp=bf16", "dp=2 zero=3"])
def test_an_optimizer_that_wants_a_closure_is_refused(options: str) -> None:
    with pytest.raises(PipelineError, match="LBFGS"):
        build(options, optimizer=lambda named: optim.LBFGS([p for _, p in named]))


@pytest.mark.parametrize("options", ["dp=2", "dp=2 zero=1", "amp=bf16", "dp=2 zero=3", "zero=2"])
def test_an_optimizer_that_wants_sparse_gradients_is_refused(options: str) -> None:
    with pytest.raises(PipelineError, match="SparseAdam"):
        build(options, optimizer=lambda named: optim.SparseAdam([p for _, p in named]))


# ----------------------------------------------------------------- groups and schedulers


def in_groups(named: Named, *, seen: list[Any] | None = None) -> optim.Optimizer:
    """By name and by shape, as people do."""
    if seen is not None:
        seen.extend((name, tuple(p.shape)) for name, p in named)
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": 0.3, "lr": 2e-2},
        {"params": [], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.1, "betas": (0.5, 0.9)},
    ]
    for name, p in named:
        groups[2 if name.startswith("0.") else p.ndim < 2]["params"].append((name, p))
    # With so large an eps, a gradient that is hardly more than rounding stays small.
    return optim.AdamW(groups, lr=1e-2, eps=1e-3)


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "step": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=3e-2, total_steps=6),  # moves betas as well
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda n: 1 / (n + 1), lambda n: 1.0, lambda n: 0.9**n]
    ),
}


def scheduled(
    recipe: Recipe, optimizer: optim.Optimizer | None, rates: str, step: Callable[[int], Tensor]
) -> tuple[list[Tensor], list[list[float]]]:
    assert optimizer is not None
    scheduler, losses, seen = SCHEDULERS[rates](optimizer), [], []
    for number in range(4):
        losses.append(step(number))
        if scheduler is not None:
            scheduler.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return losses, seen


GROUPS: dict[str, list[Any]] = {
    "zero": [0, 1, 2, 3],
    "rates": list(SCHEDULERS),
    "dp": [2, 1, 3],
    "buckets": ["", SMALL_BUCKETS],
}


@pytest.mark.parametrize(tuple(GROUPS), cases(GROUPS))
def test_groups_and_schedulers(zero: int, rates: str, dp: int, buckets: str) -> None:
    # Not the transformer: the gradient of an attention's key bias is nothing but rounding.
    recipe, model, seen = MLP, MLP.model(), []
    optimizer = in_groups(list(model.named_parameters()))

    def plain_step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = accumulate(model, recipe.loss, cut(recipe.data(12, number), 4))
        optimizer.step()
        return loss

    losses, expected = scheduled(recipe, optimizer, rates, plain_step)
    options = f"ranks=2 dp={dp} chunks=2 zero={zero} {buckets}"
    factory = partial(in_groups, seen=seen)
    with build(options, recipe.model(), loss=recipe.loss, optimizer=factory) as pipeline:
        own = pipeline.optimizer
        assert own is not None
        mine, found = scheduled(recipe, own, rates, lambda n: pipeline.step(*recipe.data(12, n)))
        assert found == expected
        trained = Trained(pipeline.state_dict(), mine)
        for group, like in zip(own.param_groups, optimizer.param_groups, strict=True):
            assert set(group["param_names"]) == set(like["param_names"])
            assert len(group["param_names"]) == len(group["params"])
            assert {k: v for k, v in group.items() if not k.startswith("param")} == {
                k: v for k, v in like.items() if not k.startswith("param")
            }
    assert_same(trained, Trained(model.state_dict(), losses), bitwise=False)
    assert seen == [(name, tuple(p.shape)) for name, p in recipe.model().named_parameters()]


def test_a_factory_sees_the_model_before_it_is_cast() -> None:
    seen: list[Any] = []

    def look(named: Named) -> optim.Optimizer:
        seen.extend((name, p.dtype, p.shape, p.requires_grad) for name, p in named)
        return adamw(named)

    with build("ranks=2 dp=2 zero=3 amp=bf16", transformer(), optimizer=look):
        pass
    assert seen == [(name, torch.float32, p.shape, True) for name, p in transformer().named_parameters()]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "shapely"])
def test_hooks_of_the_optimizer_fire_once_a_step(optimizer: str, zero: int) -> None:
    recipe, factory = recipe_of(optimizer), OPTIMIZERS[optimizer]
    fired: list[str] = []
    # torch hears of each `step` there is, and that of a subclass calls another.
    heard = 2 if optimizer == "shapely" else 1
    with build(f"ranks=2 dp=2 chunks=2 zero={zero} {SMALL_BUCKETS}", recipe.model(), optimizer=factory) as p:
        losses = [p.step(*recipe.data(16, 0))]
        assert p.optimizer is not None
        p.optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
        p.optimizer.register_step_post_hook(lambda *_: fired.append("after"))
        losses += [p.step(*recipe.data(16, step)) for step in range(1, 4)]
        found = Trained(p.state_dict(), losses)
    assert fired == [*["before"] * heard, *["after"] * heard] * 3
    assert_same(found, plainly(recipe, factory), bitwise=False)


@pytest.mark.parametrize("zero", range(4))
def test_a_subclass_counts_its_own_steps(zero: int) -> None:
    with build(f"ranks=2 dp=2 chunks=2 zero={zero} {SMALL_BUCKETS}", optimizer=WHOLE["shapely"]) as pipeline:
        for step in range(3):
            pipeline.step(*vectors(8, step))
        assert pipeline.optimizer is not None
        assert [group["steps"] for group in pipeline.optimizer.param_groups] == [3]


@pytest.mark.parametrize("zero", range(4))
def test_adam_counts_one_step_a_step(zero: int) -> None:
    """Though the engine steps bucket by bucket."""
    with build(f"ranks=2 dp=2 chunks=2 zero={zero} {SMALL_BUCKETS}", optimizer=adamw) as pipeline:
        for step in range(3):
            pipeline.step(*vectors(8, step))
        assert pipeline.optimizer is not None
        params = [p for group in pipeline.optimizer.param_groups for p in group["params"]]
        assert len(pipeline.optimizer.state) == len(params)
        assert {float(pipeline.optimizer.state[p]["step"]) for p in params} == {3.0}


# ------------------------------------------------------------------------------- balance


def without_gaps() -> nn.Sequential:
    """Parameters of very different sizes, all of them multiples of the alignment."""
    torch.manual_seed(0)
    widths = [(17, 32), (32, 96), (96, 160), (160, 32), (32, 32)]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in widths))


def shard_sizes(optimizer: OptimizerFactory, options: str) -> list[list[int]]:
    """Elements of each replica, by rank."""
    with build(options, without_gaps(), optimizer=optimizer) as pipeline:
        return [
            [
                sum(piece.stop - piece.start for held in replica.holdings[rank].held for piece in held.pieces)
                for replica in pipeline._replicas
            ]
            for rank in range(pipeline.ranks)
        ]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dp", [2, 3])
def test_elementwise_shards_are_equal_but_for_the_alignment(dp: int, zero: int) -> None:
    for options in (f"ranks=2 dp={dp} zero={zero}", f"dp={dp} zero={zero}"):
        sizes = shard_sizes(adamw, options)
        assert all(max(shards) - min(shards) < 32 * dp for shards in sizes)
        assert sum(sum(shards) for shards in sizes) == sum(p.numel() for p in without_gaps().parameters())


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("buckets", ["", "bucket_mb=0.01"])
def test_whole_parameters_are_dealt_out_within_the_largest(buckets: str, dp: int, zero: int) -> None:
    largest = max(p.numel() for p in without_gaps().parameters())
    for sizes in shard_sizes(WHOLE["shapely"], f"ranks=2 dp={dp} zero={zero} {buckets}"):
        assert max(sizes) - min(sizes) <= largest


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
@pytest.mark.parametrize("whole", [False, True])
def test_buckets_hold_every_element_once(whole: bool, shards: int) -> None:
    shapes = [(3, 4), (5,), (), (0, 3), (100, 7), (31,), (33,), (64, 64)]
    entries = [
        Entry(i, str(i), nn.Parameter(torch.empty(shape)), (i // 4,), i % 2, torch.float32)
        for i, shape in enumerate(shapes)
    ]
    found: dict[int, int] = {}
    for bucket in arrange(entries, shards=shards, bucket_mb=0.003, whole=whole):
        assert len(bucket.cuts) == shards + 1 and bucket.cuts[0] == 0
        assert all(slot.start * bucket.dtype.itemsize % 64 == 0 for slot in bucket.slots)
        for shard in range(shards):
            for piece in bucket.pieces(range(bucket.cuts[shard], bucket.cuts[shard + 1])):
                found[piece.slot.index] = found.get(piece.slot.index, 0) + piece.stop - piece.start
                assert piece.is_whole or not whole
        assert len({entries[slot.index].stages for slot in bucket.slots}) == 1
        assert len({entries[slot.index].group for slot in bucket.slots}) == 1
    assert found == {entry.index: entry.parameter.numel() for entry in entries}


# ------------------------------------------------------------------- few that are trained


class Adapted(nn.Module):
    """A frozen layer, and a small detour that is trained."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.relu(self.base(x)) + self.up(self.down(x))
        return found


def adapted() -> nn.Sequential:
    """Ends that are frozen, a rank without anything to train, and one with."""
    torch.manual_seed(0)
    frozen = [nn.Linear(17, 17).requires_grad_(False) for _ in range(2)]
    return nn.Sequential(*frozen, Adapted(17, 2), Adapted(17, 3), nn.Linear(17, 5).requires_grad_(False))


ADAPTED = Recipe("adapted", adapted, vectors)
FROZEN: dict[str, list[Any]] = {
    "zero": [0, 1, 2, 3],
    "optimizer": ["adamw", "shapely", "sgd foreach"],
    "dp": [1, 2, 3],
    "schedule": ["1f1b", "zb_h1", "gpipe"],
    "map": ["0:0-2,1:2-5", "0:0-5", "0:0-3,1:3-4,2:4-5"],
    "clip": [None, 0.1],
}


@pytest.mark.filterwarnings("ignore:no layer of stage")
@pytest.mark.parametrize(tuple(FROZEN), cases(FROZEN))
def test_a_frozen_base(
    zero: int, optimizer: str, dp: int, schedule: str, map: str, clip: float | None
) -> None:
    factory = OPTIMIZERS[optimizer]
    if clip is not None:
        factory = partial(clipped, factory)
    options = f"device_map={map} dp={dp} chunks={4 if dp == 1 else 2} schedule={schedule} zero={zero}"
    found = pipelined(ADAPTED, options, rows=12, steps=4, optimizer=OPTIMIZERS[optimizer], clip=clip)
    assert_same(found, plainly(ADAPTED, factory, rows=12), bitwise=False)
    before = adapted().state_dict()
    assert all(
        torch.equal(value, before[name]) == (".up" not in name and ".down" not in name)
        for name, value in found.state.items()
    )


def clipped(factory: OptimizerFactory, named: Named) -> optim.Optimizer:
    """A plain optimizer that clips before it steps."""
    made = factory(named)
    parameters = [p for _, p in named]
    made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, 0.1) and None)
    return made


@pytest.mark.parametrize("zero", range(4))
def test_an_optimizer_over_some_of_what_trains(zero: int) -> None:
    """The rest has gradients, which nobody steps with."""

    def last_only(named: Named) -> optim.Optimizer:
        return momentum([(name, p) for name, p in named if name.startswith("8.")])

    found = pipelined(MLP, f"ranks=2 dp=2 chunks=2 zero={zero}", rows=16, steps=4, optimizer=last_only)
    assert_same(found, plainly(MLP, last_only), bitwise=False)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("zero", range(4))
def test_freezing_and_thawing_on_the_way(zero: int, dp: int) -> None:
    """What is frozen for some steps stays as it is, its moments too, and goes on from there."""

    def freeze(model: nn.Sequential, step: int) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(not (step in (1, 2) and name.startswith(("0.", "4.w"))))

    model = MLP.model()
    updates = adamw(list(model.named_parameters()))
    losses = []
    for step in range(5):
        freeze(model, step)
        updates.zero_grad()
        losses.append(accumulate(model, MLP.loss, cut(MLP.data(16, step), 4)))
        updates.step()
    mine, found = MLP.model(), []
    with build(f"ranks=2 dp={dp} chunks={4 // dp} zero={zero}", mine, optimizer=adamw) as pipeline:
        for step in range(5):
            freeze(mine, step)
            found.append(pipeline.step(*MLP.data(16, step)))
        trained = Trained(pipeline.state_dict(), found)
    assert_same(trained, Trained(model.state_dict(), losses), bitwise=False)


@pytest.mark.parametrize("zero", range(4))
def test_the_optimizers_state_dict(zero: int) -> None:
    """It can be taken and put back, as any optimizer's."""
    with (
        build(f"ranks=2 dp=2 chunks=2 zero={zero}", optimizer=adamw, seed=0) as one,
        build(f"ranks=2 dp=2 chunks=2 zero={zero}", optimizer=adamw, seed=0) as other,
    ):
        for step in range(4):
            one.step(*vectors(8, step))
            other.step(*vectors(8, step))
            assert one.optimizer is not None
            one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        for name, value in other.state_dict().items():
            assert torch.equal(one.state_dict()[name], value), name


def test_names_survive_on_every_rank(workers: Workers) -> None:
    for names in workers.run(names_of, 4):
        assert names and all(name.split(".")[0].isdigit() for name in names)
    assert sorted({name for names in workers.run(names_of, 4) for name in names}) == sorted(
        name for name, _ in transformer().named_parameters()
    )


def names_of() -> Sequence[str]:
    with build("ranks=2 zero=1", transformer(), loss=TRANSFORMER.loss, optimizer=in_groups) as pipeline:
        pipeline.step(*tokens(8, 0))
        assert pipeline.optimizer is not None
        return [name for group in pipeline.optimizer.param_groups for name in group["param_names"]]
