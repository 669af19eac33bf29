"""Do replicas and ZeRO go with all else that there is: tied weights, dropout, accumulation, weights?"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import Row, cases, covering
from reference import (
    CONV_BATCHNORM,
    DROPOUT,
    INPLACE_FIRST,
    MLP,
    TRANSFORMER,
    Batch,
    Recipe,
    Trained,
    adamw,
    assert_equal,
    build,
    images,
    mlp,
    momentum,
    plain,
    tokens,
    vectors,
)
from replication import (
    CHUNKS,
    Job,
    assert_near,
    assert_within,
    between_processes,
    share,
    train,
)
from torch import Tensor, nn
from torch.nn import functional
from workers import Workers

# AdamW is what most of these train with; where a gradient is 0 but for rounding (a bias before a batch norm,
# or of keys in attention) it makes something of it, and momentum does not.
ZEROS = ["zero=0", "zero=1", "zero=2", "zero=3"]
ALSO = ["zero=2 reduce_every=2", "zero=3 offload", "zero=3 reduce_every=2 offload"]


# -------------------------------------------------------------------------------- the models


def conv_channels_last() -> nn.Sequential:
    """Weights that aren't contiguous, and nothing that looks beyond a sample."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(125, 17),
        nn.ReLU(),
        nn.Linear(17, 5),
    )
    return model.to(memory_format=torch.channels_last)


def tied(*layers: int) -> nn.Sequential:
    """Some of the layers (0, 2, 4 and 6 are linear) have one weight, and a bias each."""
    model = mlp()
    for layer in layers[1:]:
        model[layer].weight = model[layers[0]].weight
    return model


def twice() -> nn.Sequential:
    """One layer stands in two places."""
    model = mlp()
    model[6] = model[0]
    return model


CONV = Recipe("conv", conv_channels_last, images)
TIED = Recipe("tied", functools.partial(tied, 0, 6), vectors)
TWICE = Recipe("twice", twice, vectors)
NEIGHBOURS = Recipe("tied neighbours", functools.partial(tied, 0, 2), vectors)


@pytest.mark.parametrize(
    ("recipe", "sharding", "dp", "checkpoint", "schedule"),
    cases(
        {
            "recipe": [TRANSFORMER, CONV, INPLACE_FIRST],
            "sharding": [*ZEROS, *ALSO],
            "dp": [1, 2, 3],
            "checkpoint": ["never", "except_last", "always"],
            "schedule": ["1f1b", "zb_h1", "interleaved"],
        }
    ),
)
def test_any_layers(recipe: Recipe, sharding: str, dp: int, checkpoint: str, schedule: str) -> None:
    options = f"ranks=2 dp={dp} chunks={CHUNKS} schedule={schedule} checkpoint={checkpoint} {sharding}"
    found = train(Job(recipe, options, {"clip": 1.0, "optimizer": momentum}))
    assert_near(found, plain(recipe, 1, clip=1.0, optimizer=momentum), 1e-5)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("sharding", [*ZEROS, *ALSO])
def test_batch_norm_of_one_replica(sharding: str, checkpoint: str) -> None:
    """(Each of several has statistics of its own.)"""
    options = f"ranks=2 chunks={CHUNKS} checkpoint={checkpoint} {sharding}"
    found = train(Job(CONV_BATCHNORM, options, {"optimizer": momentum}))
    assert_near(found, plain(CONV_BATCHNORM, CHUNKS, optimizer=momentum), 1e-5)


@pytest.mark.parametrize(
    ("sharding", "dp", "schedule", "checkpoint"),
    cases(
        {
            "sharding": [*ZEROS[1:], *ALSO],
            "dp": [1, 2, 3],
            "schedule": ["1f1b", "zb_v"],
            "checkpoint": ["never", "always"],
        }
    ),
)
def test_dropout_does_not_depend_on_sharding(sharding: str, dp: int, schedule: str, checkpoint: str) -> None:
    """Each replica draws its own; how parameters are held has no part in it."""
    found = dropped(dp, schedule, f"{sharding} checkpoint={checkpoint}")
    assert_near(found, dropped(dp, schedule, "zero=0"), 1e-6)


def test_each_replica_draws_its_own() -> None:
    one, two = dropped(1, "1f1b", "zero=0"), dropped(2, "1f1b", "zero=0")
    assert all(not torch.equal(two.state[name], value) for name, value in one.state.items())


@functools.cache
def dropped(dp: int, schedule: str, options: str) -> Trained:
    return train(Job(DROPOUT, f"ranks=2 dp={dp} chunks={CHUNKS} schedule={schedule} {options}", {"seed": 3}))


# A weight of two stages of one rank: gradients come to it from both, and its bucket waits for the later one.
V = "device_map=0:0-2,1:2-4,1:4-6,0:6-9"
TWO_STAGES_OF_A_RANK = {
    "gpipe": "device_map=0:0-3,1:3-6,0:6-9",
    "zb_v": V,
    "dualpipe_v": V,
    "v_min": V,
    "interleaved": "device_map=0:0-2,1:2-6,0:6-8,1:8-9",
}


@pytest.mark.parametrize(
    ("sharding", "schedule", "recipe", "dp"),
    cases(
        {
            "sharding": [*ZEROS, *ALSO],
            "schedule": list(TWO_STAGES_OF_A_RANK),
            "recipe": [TIED, TWICE],
            "dp": [1, 2],
        }
    ),
)
def test_a_weight_of_two_stages(sharding: str, schedule: str, recipe: Recipe, dp: int) -> None:
    where = TWO_STAGES_OF_A_RANK[schedule]
    options = f"{where} dp={dp} chunks={CHUNKS} schedule={schedule} {sharding}"
    assert_near(train(Job(recipe, options, {"clip": 0.1})), plain(recipe, 1, clip=0.1), 1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("sharding", [*ZEROS, *ALSO])
def test_a_weight_twice_in_a_stage(sharding: str, schedule: str) -> None:
    for recipe, ranks in ((NEIGHBOURS, 2), (TWICE, 1)):
        options = f"ranks={ranks} dp=2 chunks={CHUNKS} schedule={schedule} {sharding}"
        assert_near(train(Job(recipe, options, {"clip": 0.1})), plain(recipe, 1, clip=0.1), 1e-5)


def norms(recipe: Recipe, options: str) -> list[Tensor]:
    with build(options, recipe.model(), optimizer=adamw, clip=1e6) as pipeline:
        found = []
        for step in range(3):
            pipeline.step(*vectors(17, step))
            found.append(pipeline.metrics["grad_norm"])
        return found


@pytest.mark.parametrize("sharding", [*ZEROS, *ALSO])
def test_a_tied_weight_is_once_in_the_norm(sharding: str) -> None:
    expected = norms(TIED, "chunks=4")
    for dp in (1, 2, 3):
        options = f"device_map=0:0-3,1:3-6,0:6-9 schedule=gpipe chunks=4 dp={dp} {sharding}"
        for mine, plains in zip(norms(TIED, options), expected, strict=True):
            assert_within(mine, plains, 1e-5, "the norm")


# Whatever a transport could get wrong of all this, in one job.
BETWEEN: dict[str, list[Any]] = {
    "recipe": [TRANSFORMER, CONV, TIED, TWICE, DROPOUT],
    "sharding": ["zero=3", "zero=2", "zero=3 reduce_every=2 offload", "zero=1"],
    "checkpoint": ["never", "always"],
}


def options_between(row: Row) -> str:
    is_tied = row["recipe"] in (TIED, TWICE)
    where = f"{V} schedule=zb_v" if is_tied else "ranks=2 schedule=1f1b"
    return f"{where} dp=2 chunks={CHUNKS} checkpoint={row['checkpoint']} {row['sharding']}"


def test_between_processes(workers: Workers) -> None:
    jobs = [
        Job(row["recipe"], options_between(row), {"seed": 3, "clip": 1.0, "steps": 3})
        for row in covering(BETWEEN)
    ]
    for job, found in zip(jobs, between_processes(workers, 4, jobs), strict=True):
        assert_near(found, train(job), 0)


# ------------------------------------------------------------------------------ accumulation


def accumulated(options: str) -> Trained:
    """Three steps, each of them over two calls, between which something is evaluated."""
    with build(options, mlp(), optimizer=adamw, clip=0.1) as pipeline:
        losses = []
        for number in range(3):
            inputs, targets = vectors(17, number)
            for rows, update in ((slice(0, 7), False), (slice(7, 17), True)):
                batch = share(pipeline, (inputs[rows], targets[rows]))
                losses.append(pipeline.step(*batch, update=update))
                if not update:
                    pipeline.evaluate(*batch)
        return Trained(pipeline.state_dict(full=True), losses)


def accumulated_all(options: list[str]) -> list[Trained]:
    return [accumulated(each) for each in options]


@pytest.mark.parametrize(
    ("sharding", "dp", "schedule"),
    cases({"sharding": [*ZEROS, *ALSO], "dp": [1, 2, 3], "schedule": ["gpipe", "1f1b", "zb_h1", "zb_v"]}),
)
def test_accumulation_over_calls(sharding: str, dp: int, schedule: str) -> None:
    """Two calls of 7 and 10 rows are one batch of 17."""
    found = accumulated(f"ranks=2 dp={dp} chunks={CHUNKS} schedule={schedule} {sharding}")
    expected = plain(MLP, 1, steps=3, clip=0.1)
    assert_near(Trained(found.state, []), Trained(expected.state, []), 1e-5)


def test_accumulation_between_processes(workers: Workers) -> None:
    options = [f"ranks=2 dp=2 chunks={CHUNKS} {sharding}" for sharding in (*ZEROS, *ALSO)]
    for each, found in zip(options, workers.run(accumulated_all, 4, options)[0], strict=True):
        assert_near(found, accumulated(each), 0)


# ------------------------------------------------------------------------------------ weights

NOTHING = -100  # what cross_entropy ignores


def masked(first: int, last: int) -> Callable[[int, int], Batch]:
    """Batches whose rows `first` to `last` have no target that counts, and others fewer than seven."""

    def data(rows: int, step: int) -> Batch:
        inputs, targets = tokens(rows, step)
        targets = targets.clone()
        targets[first:last] = NOTHING
        targets[::3, 4:] = NOTHING
        return inputs, targets

    return data


def masked_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def counted(target: Tensor) -> Tensor:
    return (target != NOTHING).sum()


# Under dp=2 and chunks=4, microbatches of replica 0 have 3, 2, 2 and 2 rows, and those of replica 1 two each.
WEIGHTLESS = {"a microbatch": (9, 11), "two of them": (5, 11), "a replica": (9, 17), "the other": (0, 9)}


@functools.cache
def weightless(which: str) -> Recipe:
    return Recipe(which, TRANSFORMER.model, masked(*WEIGHTLESS[which]), masked_loss)


@pytest.mark.parametrize(
    ("sharding", "which", "schedule"),
    cases({"sharding": [*ZEROS, *ALSO], "which": list(WEIGHTLESS), "schedule": ["1f1b", "zb_h1"]}),
)
def test_microbatches_that_weigh_nothing(sharding: str, which: str, schedule: str) -> None:
    recipe, settings = weightless(which), {"steps": 3, "optimizer": momentum}
    options = f"ranks=2 dp=2 chunks={CHUNKS} schedule={schedule} {sharding}"
    found = train(Job(recipe, options, {**settings, "weight": counted}))
    assert_near(found, plain(recipe, 1, **settings), 1e-5)


def weigh_nothing(options: str) -> list[Trained]:
    """A step, one of no weight, another step; and the same without the one between."""
    found = []
    for between in (True, False):
        with build(
            options, mlp(), optimizer=adamw, weight=lambda target: float(target.max() > 0)
        ) as pipeline:
            inputs, targets = share(pipeline, vectors(17, 0))
            losses = [pipeline.step(inputs, targets.clamp(min=1))]
            if between:
                with pytest.warns(UserWarning, match="weight 0"):
                    pipeline.step(inputs, torch.zeros_like(targets))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                losses.append(pipeline.step(inputs, targets.clamp(min=1)))
            found.append(Trained(pipeline.state_dict(full=True), losses))
    return found


@pytest.mark.parametrize("sharding", [*ZEROS, *ALSO])
def test_a_batch_that_weighs_nothing_updates_nothing(sharding: str) -> None:
    for dp in (1, 2):
        with_it, without = weigh_nothing(f"ranks=2 dp={dp} chunks={CHUNKS} {sharding}")
        assert_near(with_it, without, 0)


# ----------------------------------------------------------------------- evaluate and predict


def looked_at(options: str) -> list[Any]:
    """What evaluate, predict and state_dict say before, between and after two steps."""
    found: list[Any] = []
    with build(options, mlp(), optimizer=adamw) as pipeline:
        for number in range(3):
            batch = share(pipeline, vectors(11, 7))
            found.append(pipeline.evaluate(*batch))
            found.append(pipeline.predict(batch[0]))
            found.append(pipeline.predict(batch[0], to="last"))
            found.append(copy.deepcopy(pipeline.state_dict(full=True)))
            if number < 2:
                found.append(pipeline.step(*share(pipeline, vectors(17, number))))
    return found


def looked_at_all(options: list[str]) -> list[Any]:
    return [looked_at(each) for each in options]


@pytest.mark.parametrize(
    ("sharding", "dp", "schedule"),
    cases({"sharding": [*ZEROS, *ALSO], "dp": [1, 2, 3], "schedule": ["1f1b", "zb_v", "interleaved"]}),
)
def test_looking_between_steps(sharding: str, dp: int, schedule: str) -> None:
    """evaluate, predict and state_dict give what the same model gives plainly, and change nothing."""
    check_looks(looked_at(f"ranks=2 dp={dp} chunks={CHUNKS} schedule={schedule} {sharding}"))


def check_looks(found: list[Any]) -> None:
    model, (inputs, targets) = mlp(), vectors(11, 7)
    expected = [mlp().state_dict(), *(plain(MLP, 1, steps=steps).state for steps in (1, 2))]
    for at, state in enumerate(expected):
        loss, rows, last_rows, own = found[5 * at : 5 * at + 4]
        assert_near(Trained(own, []), Trained(state, []), 1e-5)
        model.load_state_dict(own)
        with torch.no_grad():
            output = model(inputs)
        assert_within(loss, functional.cross_entropy(output, targets), 1e-5, "evaluate")
        assert_within(rows, output, 1e-5, "predict")
        assert_equal(last_rows, rows, "to=last")


def test_looking_between_processes(workers: Workers) -> None:
    """Each replica predicts its own rows."""
    options = [f"ranks=2 dp=2 chunks={CHUNKS} {sharding}" for sharding in (*ZEROS, *ALSO)]
    # In the order of a mesh ("pp", "dp"): rank 0 of both replicas, then rank 1 of both.
    members = workers.run(looked_at_all, 4, options)
    for each, (first, second, _, last) in zip(options, zip(*members, strict=True), strict=True):
        alone = looked_at(each)
        for at, expected in enumerate(alone):
            if isinstance(expected, dict):
                assert_near(Trained(first[at], []), Trained(expected, []), 0)
                assert second[at] == {}
            elif expected.dim() == 0:
                assert first[at] == second[at] == last[at] == expected
            elif first[at] is not None:
                assert_equal(torch.cat([first[at], second[at]]), expected, "predict")
                assert_equal(last[at], second[at], "on the last rank")
