"""Do replicas take whatever calls, losses and parameters may be, and survive a call that fails?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import cases
from reference import (
    MLP,
    TRANSFORMER,
    Recipe,
    Trained,
    accumulate,
    adamw,
    build,
    cut,
    mlp,
    momentum,
    plain,
    vectors,
)
from replication import CHUNKS, Job, assert_near, assert_within, between_processes, part, share, train
from torch import Tensor, nn
from torch.nn import functional
from workers import Workers

from pipe import PipelineError

SHARDINGS = [*(f"zero={zero}" for zero in range(4)), "zero=2 reduce_every=3", "zero=3 reduce_every=2 offload"]
SCHEDULES = ["1f1b", "zb_h1", "zb_v"]


# -------------------------------------------------------------------- ready-made microbatches

SIZES = (3, 1, 4, 2, 5, 2)  # dealt out in contiguous runs


def pairs(step: int) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = vectors(sum(SIZES), step)
    return list(zip(inputs.split(SIZES), targets.split(SIZES), strict=True))


def train_pairs(options: str, split: bool) -> Trained:
    """As `microbatches=`, or cut so by a `split=` of the user's."""

    def by_sizes(batch: Tensor, microbatches: int) -> list[Tensor]:
        sizes = SIZES if len(batch) == sum(SIZES) else SIZES[3 * replica : 3 * replica + 3]
        return list(batch.split(sizes))

    replica = 0
    settings = {"split": by_sizes} if split else {}
    with build(f"ranks=2 dp=2 chunks=3 {options}", mlp(), optimizer=adamw, **settings) as pipeline:
        replica = pipeline.replica or 0
        losses = []
        for step in range(3):
            mine = pairs(step)
            if pipeline.replica is not None:
                mine = mine[3 * replica : 3 * replica + 3]
            if split:
                losses.append(pipeline.step(*(torch.cat(list(each)) for each in zip(*mine, strict=True))))
            else:
                losses.append(pipeline.step(microbatches=mine))
        return Trained(pipeline.state_dict(full=True), losses)


def train_pairs_all(jobs: list[tuple[str, bool]]) -> list[Trained]:
    return [train_pairs(*job) for job in jobs]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ready_made_microbatches(sharding: str, split: bool) -> None:
    assert_near(train_pairs(sharding, split), plain(MLP, 1, rows=sum(SIZES), steps=3), 1e-5)


def test_ready_made_microbatches_between_processes(workers: Workers) -> None:
    jobs = [(sharding, split) for sharding in SHARDINGS[:4] for split in (False, True)]
    for job, found in zip(jobs, workers.run(train_pairs_all, 4, jobs)[0], strict=True):
        # (What is joined for `split` lies elsewhere than in one process, and kernels round by that.)
        assert_near(found, train_pairs(*job), 1e-6 if job[1] else 0)


def test_microbatches_that_replicas_can_not_share() -> None:
    with build("ranks=2 dp=2 chunks=4") as pipeline:
        with pytest.raises(ValueError, match="5 microbatches for 2 replicas"):
            pipeline.step(microbatches=pairs(0)[:5])
        pipeline.step(microbatches=pairs(0))


LENGTHS = [(7, 5), (5, 7), (3, 3), (7, 5), (2, 6)]  # of replica 0 and 1, step by step


def other_lengths(options: str) -> Trained:
    """Each replica pads to a length of its own, as loaders do that look at their own share only."""
    settings: dict[str, Any] = {"loss": TRANSFORMER.loss, "weight": Tensor.numel}
    with build(f"ranks=2 dp=2 chunks=4 {options}", TRANSFORMER.model(), **settings) as pipeline:
        losses = []
        for step, lengths in enumerate(LENGTHS):
            batch = TRANSFORMER.data(17, step)
            cut_to = [[t[:, :n] for t in part(batch, r, 2)] for r, n in enumerate(lengths)]
            if pipeline.replica is not None:
                losses.append(pipeline.step(*cut_to[pipeline.replica]))
                continue
            pieces = [zip(*(t.tensor_split(4) for t in own), strict=True) for own in cut_to]
            losses.append(pipeline.step(microbatches=[pair for own in pieces for pair in own]))
        return Trained(pipeline.state_dict(full=True), losses)


def other_lengths_all(options: list[str]) -> list[Trained]:
    return [other_lengths(each) for each in options]


def test_replicas_whose_boundaries_differ_in_shape(workers: Workers) -> None:
    options = [f"{s} schedule={schedule}" for s in SHARDINGS[::2] for schedule in ("1f1b", "zb_v")]
    for each, found in zip(options, workers.run(other_lengths_all, 4, options)[0], strict=True):
        assert_near(found, other_lengths(each), 0)


def only_what_is_needed(zero: int) -> tuple[Trained, Tensor]:
    """Ranks without the first or the last stage pass None, in each replica."""
    with build(f"ranks=2 dp=2 chunks=4 zero={zero}", mlp(), optimizer=adamw) as pipeline:

        def needed(inputs: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
            return (inputs if pipeline.rank in (None, 0) else None), (
                targets if pipeline.rank in (None, 1) else None
            )

        losses = [pipeline.step(*needed(*share(pipeline, vectors(17, step)))) for step in range(2)]
        inputs, targets = needed(*share(pipeline, vectors(17, 2)))
        losses.append(pipeline.evaluate(inputs, targets))
        return Trained(pipeline.state_dict(full=True), losses), pipeline.predict(inputs)


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_that_pass_nothing(workers: Workers, zero: int) -> None:
    (first, rows), (_, others), *_ = workers.run(only_what_is_needed, 4, zero)
    expected, whole = only_what_is_needed(zero)
    assert_near(first, expected, 0)
    assert torch.equal(torch.cat([rows, others]), whole)


# ------------------------------------------------------------------------------------ metrics


def with_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    right = (output.argmax(1) == target).double().mean()
    return functional.cross_entropy(output, target), {"accuracy": right, "rows": float(len(target))}


def measure() -> list[dict[str, float]]:
    """What the metrics are after each call; one replica has 9 rows and the other 5."""
    found = []
    with build("ranks=2 dp=2 chunks=4", mlp(), loss=with_accuracy) as pipeline:
        inputs, targets = vectors(14, 0)
        mine = slice(0, 14) if pipeline.replica is None else (slice(0, 9), slice(9, 14))[pipeline.replica]
        for call in (pipeline.evaluate, pipeline.step, pipeline.evaluate):
            call(inputs[mine], targets[mine])
            found.append({name: float(value) for name, value in pipeline.metrics.items()})
    return found


def test_metrics_are_means_over_all_replicas(workers: Workers) -> None:
    inputs, targets = vectors(14, 0)
    accuracy = float((mlp()(inputs).argmax(1) == targets).double().mean())
    first, *others = workers.run(measure, 4)
    assert all(other == first for other in others)
    assert [list(each) for each in first] == [["accuracy", "rows"]] * 3
    assert first[0]["accuracy"] == pytest.approx(accuracy)
    assert first[1]["accuracy"] == pytest.approx(accuracy)
    sizes = (3, 2, 2, 2, 2, 1, 1, 1)  # of 9 rows and of 5, in four microbatches each
    assert first[0]["rows"] == pytest.approx(sum(size * size for size in sizes) / 14)
    assert measure()[0]["accuracy"] == pytest.approx(accuracy)


# ---------------------------------------------------------------------- groups, rates, freezing


def by_decay(named: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.3},
        {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.05},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def scheduled(options: str) -> dict[str, Tensor]:
    with build(options, mlp(), optimizer=by_decay, clip=0.1) as pipeline:
        assert pipeline.optimizer is not None
        assert [group["weight_decay"] for group in pipeline.optimizer.param_groups] == [0.3, 0.0]
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(pipeline.optimizer, T_max=5)
        for step in range(4):
            pipeline.step(*share(pipeline, vectors(17, step)))
            rates.step()
        return pipeline.state_dict(full=True)


def scheduled_all(options: list[str]) -> list[dict[str, Tensor]]:
    return [scheduled(each) for each in options]


def scheduled_plainly() -> dict[str, Tensor]:
    model = mlp()
    optimizer = by_decay(list(model.named_parameters()))
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    for step in range(4):
        optimizer.zero_grad()
        accumulate(model, functional.cross_entropy, cut(vectors(17, step), 1))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        rates.step()
    return model.state_dict()


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_groups_and_schedulers(sharding: str, dp: int) -> None:
    found = scheduled(f"ranks=2 dp={dp} chunks={CHUNKS} bucket_mb=0.002 {sharding}")
    assert_near(Trained(found, []), Trained(scheduled_plainly(), []), 1e-5)


def test_groups_and_schedulers_between_processes(workers: Workers) -> None:
    options = [f"ranks=2 dp=2 chunks={CHUNKS} {sharding}" for sharding in SHARDINGS]
    for each, found in zip(options, workers.run(scheduled_all, 4, options)[0], strict=True):
        assert_near(Trained(found, []), Trained(scheduled(each), []), 0)


def freezing(options: str) -> dict[str, Tensor]:
    """A layer is frozen for two steps between others, as in gradual unfreezing."""
    with build(options, model := mlp(), optimizer=decaying, clip=0.1) as pipeline:
        for step in range(5):
            for layer in (0, 6):
                model[layer].requires_grad_(step not in (1, 2))
            pipeline.step(*share(pipeline, vectors(17, step)))
        return pipeline.state_dict(full=True)


def freezing_all(options: list[str]) -> list[dict[str, Tensor]]:
    return [freezing(each) for each in options]


def decaying(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01, weight_decay=0.5)


def freezing_plainly() -> dict[str, Tensor]:
    model = mlp()
    optimizer = decaying(list(model.named_parameters()))
    for step in range(5):
        for layer in (0, 6):
            model[layer].requires_grad_(step not in (1, 2))
        optimizer.zero_grad()
        accumulate(model, functional.cross_entropy, cut(vectors(17, step), 1))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("sharding", "dp", "schedule"),
    cases({"sharding": SHARDINGS, "dp": [1, 2, 3], "schedule": SCHEDULES}),
)
def test_layers_that_are_frozen_for_a_while(sharding: str, dp: int, schedule: str) -> None:
    """In one process the other replicas follow the first one, which is the caller's model."""
    found = freezing(f"ranks=2 dp={dp} chunks={CHUNKS} schedule={schedule} {sharding}")
    assert_near(Trained(found, []), Trained(freezing_plainly(), []), 1e-5)


def test_layers_that_are_frozen_for_a_while_between_processes(workers: Workers) -> None:
    options = [f"ranks=2 dp=2 chunks={CHUNKS} {sharding}" for sharding in SHARDINGS]
    for each, found in zip(options, workers.run(freezing_all, 4, options)[0], strict=True):
        assert_near(Trained(found, []), Trained(freezing(each), []), 0)


@pytest.mark.parametrize("options", ["dp=2", "zero=1", "zero=3 dp=2", "amp=bf16"])
def test_a_group_that_is_added_later(options: str) -> None:
    """It trains, or is refused; it must not be passed over."""
    model = mlp()
    model[2].requires_grad_(False)
    start = model[2].weight.detach().clone()
    with build(f"ranks=2 chunks=4 {options}", model, optimizer=adamw) as pipeline:
        pipeline.step(*vectors(17, 0))
        model[2].requires_grad_(True)
        assert pipeline.optimizer is not None
        try:
            named = [(name, p) for name, p in model.named_parameters() if name.startswith("2.")]
            pipeline.optimizer.add_param_group({"params": named})
            pipeline.step(*vectors(17, 1))
        except (PipelineError, ValueError):
            return
        assert not torch.equal(pipeline.state_dict()["2.weight"], start)


def of_some(named: Any) -> torch.optim.Optimizer:
    return decaying([(name, p) for name, p in named if not name.startswith(("2.", "6.b"))])


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_an_optimizer_of_some_parameters(sharding: str, dp: int) -> None:
    """What it wasn't given stays, and is part of the norm, as in plain training."""
    settings = {"clip": 0.1, "optimizer": of_some}
    found = train(Job(MLP, f"ranks=2 dp={dp} chunks={CHUNKS} {sharding}", settings))
    model, start = mlp(), mlp().state_dict()
    optimizer = of_some(list(model.named_parameters()))
    for step in range(5):
        model.zero_grad()
        accumulate(model, functional.cross_entropy, cut(vectors(17, step), 1))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert_near(Trained(found.state, []), Trained(model.state_dict(), []), 1e-5)
    assert all(torch.equal(found.state[name], start[name]) for name in ("2.weight", "2.bias", "6.bias"))


# ----------------------------------------------------------------------------- odd parameters


class Odd(nn.Module):
    """Parameters of no dimension and of no elements, transposed and of another precision, and of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 17))
        self.turned = nn.Parameter(torch.randn(17, 17).t() / 4)
        self.precise = nn.Parameter(torch.randn(17, dtype=torch.float64))
        self.order = nn.Parameter(torch.arange(17).flip(0), requires_grad=False)
        self.one = nn.Parameter(torch.ones(1, 1, 1))
        self.register_parameter("none", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.factor * (x @ self.turned)[:, self.order] + self.precise.float()
        return x * self.one[0, 0] + self.nothing.sum()


def odd() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Odd(), nn.Linear(17, 17), Odd(), nn.ReLU(), Odd(), nn.Linear(17, 5, bias=False))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17, 17, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.weight).sum(-1)


def with_complex() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 17), Complex(), nn.Linear(17, 17), Complex(), nn.Linear(17, 5))


ODD = Recipe("odd", odd, vectors)
COMPLEX = Recipe("complex", with_complex, vectors)


@pytest.mark.parametrize("recipe", [ODD, COMPLEX], ids=str)
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_odd_parameters(recipe: Recipe, sharding: str, dp: int) -> None:
    settings = {"clip": 0.1, "optimizer": momentum}
    found = train(Job(recipe, f"ranks=2 dp={dp} chunks={CHUNKS} {sharding}", settings))
    assert_near(found, plain(recipe, 1, clip=0.1, optimizer=momentum), 1e-5)


def test_odd_parameters_between_processes(workers: Workers) -> None:
    jobs = [
        Job(recipe, f"ranks=2 dp=2 chunks={CHUNKS} {sharding}", {"clip": 0.1, "optimizer": momentum})
        for recipe in (ODD, COMPLEX)
        for sharding in SHARDINGS
    ]
    for job, found in zip(jobs, between_processes(workers, 4, jobs), strict=True):
        assert_near(found, train(job), 0)


# --------------------------------------------------------------- calls that fail in one process


class Trips(nn.Module):
    """Raises in some call's forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.backwards = -1, -1  # until it raises; below 0: never

    def forward(self, x: Tensor) -> Tensor:
        self.forwards -= 1
        if self.forwards == 0:
            raise ArithmeticError("told to")
        if x.requires_grad:
            x.register_hook(self._back)
        return x

    def _back(self, gradient: Tensor) -> None:
        self.backwards -= 1
        if self.backwards == 0:
            raise ArithmeticError("told to")


def tripping() -> tuple[nn.Sequential, Trips]:
    layers, trips = list(mlp()), Trips()
    layers[5] = trips
    return nn.Sequential(*layers), trips


@pytest.mark.parametrize(
    ("sharding", "schedule", "after", "where"),
    cases(
        {
            "sharding": SHARDINGS,
            "schedule": SCHEDULES,
            "after": [1, 2, 4],
            "where": ["forwards", "backwards"],
        }
    ),
)
def test_a_step_that_fails_leaves_nothing_behind(
    sharding: str, schedule: str, after: int, where: str
) -> None:
    """In one process the next step trains as if nothing had been; reductions and gathers begin anew."""
    states = []
    for fails in (False, True):
        model, trips = tripping()
        options = f"ranks=2 dp=2 chunks={CHUNKS} schedule={schedule} {sharding}"
        with build(options, model, optimizer=adamw) as pipeline:
            losses = []
            for step in range(3):
                if fails:
                    setattr(trips, where, after)
                    with pytest.raises(ArithmeticError):
                        pipeline.step(*vectors(17, 10 + step))
                    setattr(trips, where, -1)
                    pipeline.evaluate(*vectors(17, 0))
                losses.append(pipeline.step(*vectors(17, step)))
            states.append(Trained(pipeline.state_dict(), losses))
    assert_near(states[1], states[0], 0)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_evaluation_that_fails_keeps_what_was_accumulated(sharding: str, schedule: str) -> None:
    states = []
    for fails in (False, True):
        model, trips = tripping()
        options = f"ranks=2 dp=2 chunks={CHUNKS} schedule={schedule} {sharding}"
        with build(options, model, optimizer=adamw) as pipeline:
            losses = []
            for step in range(2):
                losses.append(pipeline.step(*vectors(8, step), update=False))
                for call in (pipeline.evaluate, lambda x, y, pipe=pipeline: pipe.predict(x)) if fails else ():
                    trips.forwards = 3
                    with pytest.raises(ArithmeticError):
                        call(*vectors(17, 0))
                losses.append(pipeline.step(*vectors(9, step)))
            states.append(Trained(pipeline.state_dict(), losses))
    assert_near(states[1], states[0], 0)


class Copies(nn.Module):
    """Can't be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of me only")

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_that_can_not_be_copied() -> None:
    model = nn.Sequential(nn.Linear(17, 17), Copies(), nn.Linear(17, 5))
    build("ranks=2 zero=3", model).close()
    with pytest.raises(PipelineError, match="makes none: TypeError: there is one of me only"):
        build("ranks=2 dp=2", model)


# ------------------------------------------------------------------- parameters between calls


def test_sharded_parameters_are_not_to_be_read() -> None:
    """Their shapes are there; their values are NaN, not what somebody else's memory holds."""
    with build("ranks=2 dp=2 zero=3 chunks=4", model := mlp(), optimizer=adamw) as pipeline:
        for number in range(2):
            for name, parameter in model.named_parameters():
                assert parameter.isnan().all(), name
                assert parameter.shape == dict(mlp().named_parameters())[name].shape
                assert parameter.grad is None
            assert all(value.isfinite().all() for value in pipeline.state_dict().values())
            pipeline.step(*vectors(17, number))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_callers_model_is_the_first_replica(zero: int) -> None:
    """It can be used and read as before; the other replicas are copies with equal values."""
    with build(f"ranks=2 dp=3 zero={zero} chunks=4", model := mlp(), optimizer=adamw) as pipeline:
        for step in range(2):
            pipeline.step(*vectors(17, step))
        for name, value in pipeline.state_dict().items():
            assert torch.equal(dict(model.named_parameters())[name], value)
        for replica in pipeline._replicas[1:]:
            copies = [p for stage in replica.stages.values() for p in stage.module.parameters()]
            for mine, leading in zip(copies, model.parameters(), strict=True):
                assert mine is not leading and torch.equal(mine, leading)
        inputs = vectors(17, 2)[0]
        assert_within(pipeline.predict(inputs), model(inputs), 1e-5, "predict")
