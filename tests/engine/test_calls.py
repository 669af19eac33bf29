"""Do step, evaluate, predict and state_dict do what the lines of a plain training loop do?"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import (
    CONV_BATCHNORM,
    DROPOUT,
    MLP,
    Recipe,
    accumulate,
    adamw,
    assert_equal,
    assert_same,
    build,
    cut,
    images,
    mlp,
    momentum,
    pipelined,
    plain,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional
from workers import Workers

import pipe
import schedules
from pipe import DisagreementError, PipelineError
from schedules import Action, B, F, Problem

SCHEDULES = [name for name in schedules.names() if name != "csv"]


# ----------------------------------------------------------------- evaluate, predict, step


def call_all(recipe: Recipe) -> dict[str, Any]:
    """One of each call, after a step that moved the running statistics."""
    with build("ranks=3 chunks=4 schedule=gpipe", recipe.model(), seed=5) as pipeline:
        stepped = pipeline.step(*recipe.data(11, 0))
        inputs, targets = recipe.data(10, 1)
        return {
            "step": stepped,
            "evaluate": pipeline.evaluate(inputs, targets),
            "predict": pipeline.predict(inputs),
            "last": pipeline.predict(inputs, to="last"),
            "state": pipeline.state_dict(full=True),
        }


@pytest.mark.parametrize("recipe", [MLP, DROPOUT, CONV_BATCHNORM], ids=str)
def test_every_rank_gets_the_same_values(workers: Workers, recipe: Recipe) -> None:
    one = call_all(recipe)
    for rank, found in enumerate(workers.run(call_all, 3, recipe)):
        for name in ("step", "evaluate", "predict"):
            assert_equal(found[name], one[name], f"{name} on rank {rank}")
        if rank == 2:
            assert_equal(found["last"], one["predict"], "the last rank's rows")
        else:
            assert found["last"] is None


@pytest.mark.parametrize("recipe", [MLP, DROPOUT, CONV_BATCHNORM], ids=str)
def test_evaluation_is_plain_evaluation(recipe: Recipe) -> None:
    found = call_all(recipe)
    model = recipe.model()
    model.load_state_dict(found["state"])
    model.eval()
    inputs, targets = recipe.data(10, 1)
    with torch.no_grad():
        assert_equal(found["predict"], model(inputs), "predict", bitwise=False)
        assert_equal(found["evaluate"], recipe.loss(model(inputs), targets), "evaluate", bitwise=False)
    assert torch.equal(found["last"], found["predict"])
    assert not any(found[name].requires_grad for name in ("step", "evaluate", "predict"))


class Watch(nn.Module):
    """Notes in which mode it is called, and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[bool, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append((self.training, torch.is_grad_enabled(), x.requires_grad))
        return x


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_evaluation_keeps_no_graph_and_leaves_modes_as_they_were(checkpoint: str) -> None:
    watch = Watch()
    model = nn.Sequential(
        nn.Linear(17, 17), nn.Sequential(nn.BatchNorm1d(17), nn.Dropout()), watch, nn.Linear(17, 5)
    )
    model[1][0].eval()  # type: ignore[index]
    model[0].eval()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    with build(f"ranks=2 chunks=4 checkpoint={checkpoint}", model) as pipeline:
        pipeline.evaluate(*vectors(8, 0))
        pipeline.predict(vectors(8, 0)[0])
        assert watch.modes == [(False, False, False)] * 8
        assert not any(stage.saved for stage in pipeline.stages.values())
        assert all(p.grad is None for p in model.parameters())
        assert [module.training for module in model.modules()] == modes
        watch.modes.clear()
        pipeline.step(*vectors(8, 0))
        # Under checkpointing all are recomputed with a graph; before, the first of its kind has one.
        graphs, without = (4, 0) if checkpoint == "never" else (5, 3)
        assert watch.modes.count((True, True, True)) == graphs
        assert watch.modes.count((True, False, False)) == without == len(watch.modes) - graphs
        assert [module.training for module in model.modules()] == modes


def test_modes_are_as_they_were_after_a_failed_evaluation() -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("told to")

    model = mlp()
    with build("ranks=3 chunks=4", model=model, loss=fails) as pipeline, pytest.raises(ArithmeticError):
        pipeline.evaluate(*vectors(8, 0))
    assert all(module.training for module in model.modules())


def test_evaluation_between_two_accumulating_steps_changes_nothing() -> None:
    with build("ranks=3 chunks=4") as one, build("ranks=3 chunks=4") as other:
        for pipeline in (one, other):
            pipeline.step(*vectors(8, 0), update=False)
            if pipeline is other:
                pipeline.evaluate(*vectors(5, 3))
                pipeline.predict(vectors(5, 3)[0])
            pipeline.step(*vectors(9, 1))
        for name, value in one.state_dict().items():
            assert_equal(other.state_dict()[name], value, name)


def test_predictions_may_be_any_pytree(workers: Workers) -> None:
    one = predict_tree()
    for found in (one, *workers.run(predict_tree, 2)):
        assert set(found) == {"rows", "count", "name", "nothing"}
        assert found["rows"].shape == (10, 17) and torch.equal(found["rows"], one["rows"])
        # A tensor of no dimension is one a microbatch.
        assert (
            found["count"].tolist() == [4.0, 3.0, 3.0]
            and found["name"] == "rows"
            and found["nothing"] is None
        )


class Tree(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"rows": x, "count": torch.tensor(float(len(x))), "name": "rows", "nothing": None}


def predict_tree() -> Any:
    torch.manual_seed(0)
    with build("ranks=2 chunks=3", nn.Sequential(nn.Linear(17, 17), nn.ReLU(), Tree())) as pipeline:
        return pipeline.predict(vectors(10, 0)[0])


# ----------------------------------------------------------------------- state, hooks, peaks


def test_state_dict_has_the_unsplit_models_names(workers: Workers) -> None:
    expected = CONV_BATCHNORM.model().state_dict()
    with build("ranks=3", CONV_BATCHNORM.model()) as pipeline:
        assert list(pipeline.state_dict()) == list(expected)
        CONV_BATCHNORM.model().load_state_dict(pipeline.state_dict())
    full, own = zip(*workers.run(states, 3), strict=True)
    assert full == (list(expected), [], [])
    assert [name for names in own for name in names] == list(expected) and all(own)


def states() -> tuple[list[str], list[str]]:
    with build("ranks=3", CONV_BATCHNORM.model()) as pipeline:
        return list(pipeline.state_dict(full=True)), list(pipeline.state_dict())


def count_hooks() -> list[float]:
    """Forwards and backwards that the hooks of a rank's layers have seen, step by step."""
    model = mlp()
    events: list[str] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, inputs: events.append("before"))
        layer.register_forward_hook(lambda module, inputs, output: events.append("after"))
    counts = []
    with build("ranks=3 chunks=4", model) as pipeline:
        layers = sum(len(stage.layers) for stage in pipeline.stages.values())
        for step in range(3):
            pipeline.step(*vectors(9, step))
            assert events.count("before") == events.count("after")
            counts.append(events.count("before") / layers)
            events.clear()
    return counts


def test_hooks_fire_once_a_microbatch_in_every_step(workers: Workers) -> None:
    """In the first step too: shapes are learnt from real microbatches, never by a run of their own."""
    for counts in (count_hooks(), *workers.run(count_hooks, 3)):
        assert counts == [4, 4, 4]


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "again"),
    [
        ("gpipe", "never", (0, 0)),
        ("gpipe", "always", (4, 4)),
        ("gpipe", "except_last", (4, 4)),  # all forwards, then backward from microbatch 0
        ("1f1b", "never", (0, 0)),
        ("1f1b", "always", (4, 4)),
        ("1f1b", "except_last", (4, 0)),  # on the last rank each backward follows its forward at once
    ],
)
def test_what_is_computed_again(schedule: str, checkpoint: str, again: tuple[int, int]) -> None:
    """Of 4 microbatches, on each of two ranks."""
    watches = Watch(), Watch()
    model = nn.Sequential(nn.Linear(17, 17), watches[0], watches[1], nn.Linear(17, 5))
    options = f"chunks=4 device_map=0:0-2,1:2-4 schedule={schedule} checkpoint={checkpoint}"
    with build(options, model) as pipeline:
        for step in range(3):
            pipeline.step(*vectors(9, step))
            assert tuple(len(watch.modes) - 4 for watch in watches) == again
            for watch in watches:
                watch.modes.clear()


def peaks() -> list[dict[int, int]]:
    found = []
    for microbatches in (1, 2, 4, 8):
        with build(f"ranks=4 chunks={microbatches} schedule=1f1b") as pipeline:
            pipeline.step(*vectors(8, 0))
            assert [pipeline.plan.peak_live[r] for r in pipeline.peak_live] == list(
                pipeline.peak_live.values()
            )
            found.append(pipeline.peak_live)
    return found


def test_the_engine_counts_the_activations_that_live(workers: Workers) -> None:
    """Under 1F1B they are min(m, P - r)."""
    expected = [{r: min(m, 4 - r) for r in range(4)} for m in (1, 2, 4, 8)]
    assert peaks() == expected
    between = workers.run(peaks, 4)
    assert [
        {r: p for part in parts for r, p in part.items()} for parts in zip(*between, strict=True)
    ] == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engine_counts_what_the_plan_says(schedule: str) -> None:
    with build(f"ranks=4 chunks=6 schedule={schedule}") as pipeline:
        pipeline.step(*vectors(12, 0))
        assert tuple(pipeline.peak_live.values()) == pipeline.plan.peak_live


ENGINE = str(Path(pipe.__file__).parent)


class Inspector(nn.Module):
    """Notes the engine's frames above it."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[list[str]] = []

    def forward(self, x: Tensor) -> Tensor:
        frame, names = sys._getframe(), []
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename.startswith(ENGINE):
                names.append(frame.f_code.co_name)
        self.stacks.append(names)
        return x


def test_three_frames_stand_above_the_users_module() -> None:
    inspector = Inspector()
    with build("ranks=2 chunks=2", nn.Sequential(nn.Linear(17, 17), inspector, nn.Linear(17, 5))) as pipeline:
        pipeline.step(*vectors(4, 0))
    assert inspector.stacks == [["forward", "execute", "step"]] * 2


# ------------------------------------------------------------------------------- optimizers


def by_decay(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Matrices decay, vectors don't."""
    groups = [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.3},
        {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.05},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def scheduled(recipe: Recipe) -> tuple[dict[str, Tensor], list[float]]:
    with build("ranks=3 chunks=4", recipe.model(), optimizer=by_decay) as pipeline:
        assert pipeline.optimizer is not None
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(pipeline.optimizer, T_max=5)
        seen = []
        for step in range(5):
            pipeline.step(*recipe.data(17, step))
            rates.step()
            seen += [float(rate) for rate in rates.get_last_lr()]
        return pipeline.state_dict(full=True), seen


def one_vector() -> nn.Sequential:
    """Only the last layer has a bias: the other ranks' second group is empty."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(17, 17, bias=False), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(17, 5))


@pytest.mark.parametrize("recipe", [MLP, Recipe("one vector", one_vector, vectors)], ids=str)
def test_schedulers_and_groups_work_as_they_do_plainly(workers: Workers, recipe: Recipe) -> None:
    model = recipe.model()
    optimizer = by_decay(list(model.named_parameters()))
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        accumulate(model, recipe.loss, cut(recipe.data(17, step), 4))
        optimizer.step()
        rates.step()
        seen += [float(rate) for rate in rates.get_last_lr()]
    for state, learning_rates in (scheduled(recipe), workers.run(scheduled, 3, recipe)[0]):
        assert learning_rates == seen
        for name, value in model.state_dict().items():
            assert_equal(state[name], value, name)


def test_a_rank_without_parameters_trains_along(workers: Workers) -> None:
    for learning_rates in workers.run(train_nothing, 3):
        assert learning_rates == [0.02]


def train_nothing() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 17), nn.ReLU(), nn.Linear(17, 5))
    with build("device_map=0:0-1,1:1-2,2:2-3 clip=0.1", model, optimizer=adamw) as pipeline:
        assert pipeline.optimizer is not None
        before = pipeline.evaluate(*vectors(8, 0))
        for group in pipeline.optimizer.param_groups:
            group["lr"] = 0.02
        for _ in range(2):
            pipeline.step(*vectors(8, 0))
        assert pipeline.evaluate(*vectors(8, 0)) < before
        return [group["lr"] for group in pipeline.optimizer.param_groups]


def test_without_an_optimizer() -> None:
    with build("ranks=3 chunks=4", optimizer=None) as pipeline:
        pipeline.evaluate(*vectors(8, 0))
        pipeline.predict(vectors(8, 0)[0])
        with pytest.raises(PipelineError, match="step needs an optimizer"):
            pipeline.step(*vectors(8, 0))
        pipeline.step(*vectors(8, 0), update=False)  # gradients can be had without one
        assert all(p.grad is not None for p in pipeline.stages[0].module.parameters())


def test_without_a_loss() -> None:
    with build("ranks=3 chunks=4", loss=None) as pipeline:
        pipeline.predict(vectors(8, 0)[0])
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(PipelineError, match="needs a loss"):
                call(*vectors(8, 0))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda named: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0),
            "2 tensors that it was not given",
        ),
        (lambda named: None, "returned NoneType"),
    ],
)
def test_what_is_no_optimizer(optimizer: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        build("ranks=3 chunks=4", optimizer=optimizer)


def differ() -> str:
    rank = torch.distributed.get_rank()
    try:
        build("ranks=2", optimizer=functools.partial(torch.optim.SGD, lr=0.1 * (rank + 1)))
    except DisagreementError as error:
        return str(error)
    return "no error"


def test_optimizers_that_differ_between_ranks_are_refused(workers: Workers) -> None:
    for message in workers.run(differ, 2):
        assert "optimizer" in message and "0.1" in message and "0.2" in message


def test_bare_parameters_are_allowed_too() -> None:
    """A factory may take the names off."""

    def bare(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=5e-2, momentum=0.9)

    assert_same(pipelined(MLP, "ranks=3 chunks=4", optimizer=bare), plain(MLP, 4, optimizer=momentum))


# ------------------------------------------------------------------ other people's schedules


class DepthFirst:
    """A user's class: two methods, no base."""

    def placement(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def orders(self, problem: Problem) -> list[list[Action]]:
        return [
            [Action(stage, op, m) for m in range(problem.microbatches) for op in (F, B)]
            for stage in range(problem.num_stages)
        ]


class LastInFirstOut(DepthFirst):
    """Its backwards run in reverse order, which is legal, and adds gradients up in another order."""

    def orders(self, problem: Problem) -> list[list[Action]]:
        m = range(problem.microbatches)
        return [
            [*(Action(s, F, i) for i in m), *(Action(s, B, i) for i in reversed(m))]
            for s in range(problem.num_stages)
        ]


def test_a_schedule_of_the_users_own(workers: Workers) -> None:
    for found in (depth_first(), workers.run(depth_first, 3)[0]):
        assert_same(found, plain(MLP, 5))


def depth_first() -> Any:
    return pipelined(MLP, "ranks=3 chunks=5", schedule=DepthFirst())


def test_backwards_out_of_order_train_to_rounding(workers: Workers) -> None:
    with build("ranks=3 chunks=5", schedule=LastInFirstOut()) as pipeline:
        assert not pipeline.plan.in_order
    for found in (out_of_order(), workers.run(out_of_order, 3)[0]):
        assert_same(found, plain(MLP, 5, optimizer=momentum), bitwise=False)


def out_of_order() -> Any:
    return pipelined(MLP, "ranks=3 chunks=5", schedule=LastInFirstOut(), optimizer=momentum)


def test_a_schedule_that_deadlocks_never_runs() -> None:
    class Stubborn(DepthFirst):
        def orders(self, problem: Problem) -> list[list[Action]]:
            return [order[::-1] for order in super().orders(problem)]

    with pytest.raises(schedules.ScheduleError):
        build("ranks=3 chunks=4", schedule=Stubborn())


@pytest.mark.parametrize("lowered", [True, False], ids=["programs", "orders"])
def test_a_plan_from_a_csv_file(workers: Workers, tmp_path: Path, lowered: bool) -> None:
    """Whole programs, or computations to which the engine adds the communication."""
    plan = schedules.build(DepthFirst(), (0, 1, 2), 5)
    cells = plan.programs if lowered else plan.orders
    file = tmp_path / "plan.csv"
    file.write_text("".join(",".join(map(str, row)) + "\n" for row in cells))
    for found in (follow(str(file)), workers.run(follow, 3, str(file))[0]):
        assert_same(found, plain(MLP, 5))
    with build(f"schedule=csv({file})") as pipeline:
        assert pipeline.chunks == 5 and pipeline.ranks == 3
        with pytest.raises(ValueError, match="4 microbatches, but the CSV plan is for 5"):
            pipeline.step(*vectors(4, 0))
        with pytest.raises(ValueError, match="1 microbatch, but the CSV plan is for 5"):
            pipeline.step(microbatches=[vectors(4, 0)])
        # Forwards alone need no order of the file's.
        inputs, targets = vectors(17, 0)
        rows = torch.cat([pipeline.predict(inputs[:3]), pipeline.predict(inputs[3:])])
        torch.testing.assert_close(rows, pipeline.predict(inputs))
        assert pipeline.evaluate(inputs[:1], targets[:1]).isfinite()


def follow(file: str) -> Any:
    return pipelined(MLP, f"schedule=csv({file})")


def build_otherwise_on_rank_1() -> str:
    """What a rank hears whose script picks another schedule than the others' does."""
    schedule = schedules.GPipe() if os.environ["RANK"] == "1" else schedules.OneFOneB()
    with pytest.raises(DisagreementError) as raised:
        build("chunks=4", schedule=schedule)
    return str(raised.value)


def test_a_rank_with_another_plan_is_named(workers: Workers) -> None:
    for said in workers.run(build_otherwise_on_rank_1, 3):
        assert re.search(r"different plans: rank 0: 'OneFOneB .*rank 1: 'GPipe .*rank 2: 'OneFOneB", said)


# ------------------------------------------------------------------------------- precision


def mlp_in_double() -> nn.Sequential:
    return mlp().double()


def vectors_in_double(rows: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(rows, step)
    return inputs.double(), targets


DOUBLE = Recipe("double", mlp_in_double, vectors_in_double)


def train_in_double() -> Any:
    return pipelined(DOUBLE, "ranks=3 chunks=7", clip=0.1)


def test_double_precision(workers: Workers) -> None:
    """Nothing on the way (factors, norms, losses) is rounded to single precision."""
    for found in (train_in_double(), workers.run(train_in_double, 3)[0]):
        expected = plain(DOUBLE, 7, clip=0.1)
        assert_same(found, expected)
        for mine, plains in zip(found.losses, expected.losses, strict=True):
            assert mine.dtype == torch.float64
            torch.testing.assert_close(mine, plains, rtol=1e-14, atol=0.0)


def under_autocast(long: bool) -> Any:
    """One region around each step, or one around all."""
    with build("ranks=3 chunks=4") as pipeline:
        losses = []
        with torch.autocast("cpu", torch.bfloat16, enabled=long):
            for step in range(5):
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(pipeline.step(*vectors(9, step)).item())
        losses.append(pipeline.step(*vectors(9, 9)).item())  # and without: the boundaries are fp32 again
        return pipeline.state_dict(full=True), losses


@pytest.mark.parametrize("long", [False, True])
def test_autocast_around_a_step(workers: Workers, long: bool) -> None:
    """In one long region weights cast to bf16 are kept, and must not outlive an optimizer step."""
    model = mlp()
    updates = momentum(list(model.named_parameters()))
    losses = []
    for step in range(6):
        updates.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=step < 5):
            batch = cut(vectors(9, 9 if step == 5 else step), 4)
            losses.append(accumulate(model, functional.cross_entropy, batch).item())
        updates.step()
    for state, found in (under_autocast(long), workers.run(under_autocast, 3, long)[0]):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in model.state_dict().items():
            assert_equal(state[name], value, name, bitwise=False)


# ------------------------------------------------------------------------------ beginnings, ends


def test_a_pipeline_that_failed_in_one_process_goes_on() -> None:
    """An interactive session survives a mistake: nothing of the failed call is left in the next."""
    with build("ranks=2 chunks=4") as pipeline, build("ranks=2 chunks=4") as other:
        inputs, targets = vectors(9, 0)
        with pytest.raises(RuntimeError):
            pipeline.step(inputs[:, :3], targets)
        for step in range(2):
            assert pipeline.step(*vectors(9, step)) == other.step(*vectors(9, step))


def test_a_closed_pipeline_says_so() -> None:
    pipeline = build("ranks=3 chunks=4")
    pipeline.close()
    pipeline.close()
    with pytest.raises(PipelineError, match="closed"):
        pipeline.step(*vectors(8, 0))


def test_an_error_in_a_layer_says_where_it_happened() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("told to")

    model = nn.Sequential(nn.Linear(17, 17), nn.ReLU(), Broken(), nn.Linear(17, 5))
    with build("chunks=2 device_map=0:0-2,1:2-4", model) as pipeline:
        with pytest.raises(ArithmeticError, match="told to") as caught:
            pipeline.step(*vectors(8, 0))
    said = " ".join(getattr(caught.value, "__notes__", [])) + str(caught.value)
    assert "rank 1, stage 1 (layers 2 to 3), action 1F0" in said and "microbatch 0" in said


def test_images_too() -> None:
    """The batch may have any shape behind dim 0."""
    with build("ranks=2 chunks=4", CONV_BATCHNORM.model()) as pipeline:
        assert pipeline.predict(images(6, 0)[0]).shape == (6, 5)
