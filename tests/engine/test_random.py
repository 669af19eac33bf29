"""Do draws and running statistics belong to the layer, whatever partition, schedule and recomputation?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import product
from reference import (
    CONV_BATCHNORM,
    DROPOUT,
    Recipe,
    Trained,
    assert_same,
    build,
    pipelined,
    plain,
    vectors,
)
from torch import Tensor, nn
from workers import Workers

import schedules

SCHEDULES = [name for name in schedules.names() if name != "csv"]
CHECKPOINTS = ["never", "except_last", "always"]


def drop(ranks: int, schedule: str, checkpoint: str, chunks: int = 4, **settings: Any) -> Trained:
    options = f"ranks={ranks} chunks={chunks} schedule={schedule} checkpoint={checkpoint}"
    return pipelined(DROPOUT, options, seed=7, **settings)


def drop_all(ranks: int) -> list[Trained]:
    rows = product({"schedule": SCHEDULES, "checkpoint": ["never", "always"]})
    return [drop(ranks, **row) for row in rows]


# ------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dropout_is_the_same_everywhere(ranks: int) -> None:
    one = drop(1, "gpipe", "never")
    for found in drop_all(ranks):
        assert_same(found, one)


@pytest.mark.parametrize("ranks", [2, 4])
def test_dropout_is_the_same_between_processes(workers: Workers, ranks: int) -> None:
    one = drop(1, "gpipe", "never")
    for found in workers.run(drop_all, ranks, ranks)[0]:
        assert_same(found, one)


def test_dropout_drops() -> None:
    """Or else the tests above could not fail."""
    still = Recipe("still", lambda: DROPOUT.model().eval(), vectors)
    dropped, kept = drop(2, "gpipe", "never"), pipelined(still, "ranks=2 chunks=4", seed=7)
    assert not torch.equal(dropped.state["0.weight"], kept.state["0.weight"])
    assert dropped.losses != kept.losses


def test_another_seed_draws_other_numbers() -> None:
    one, other = drop(2, "1f1b", "never"), pipelined(DROPOUT, "ranks=2 chunks=4", seed=8)
    assert one.losses != other.losses


def test_the_seed_is_by_default_that_of_the_process() -> None:
    """`dropout()` seeds torch with 0, as many a training script does in its first line."""
    torch.manual_seed(0)
    assert_same(pipelined(DROPOUT, "ranks=3 chunks=4"), pipelined(DROPOUT, "ranks=1 chunks=4", seed=0))


class Recorder(nn.Module):
    """Draws a number in every forward and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.draws.append(torch.rand((), dtype=torch.float64).item())
        return x


def recorded(options: str, steps: int = 3) -> list[list[float]]:
    """What each of three layers drew in all forwards."""
    torch.manual_seed(0)
    recorders = [Recorder() for _ in range(3)]
    model = nn.Sequential(recorders[0], nn.Linear(17, 17), recorders[1], nn.Linear(17, 5), recorders[2])
    with build(options, model, seed=3) as pipeline:
        for number in range(steps):
            pipeline.step(*vectors(8, number), update=number != 1)
    return [recorder.draws for recorder in recorders]


def test_every_call_microbatch_and_layer_draws_for_itself() -> None:
    draws = recorded("ranks=2 chunks=4")
    together = [number for layer in draws for number in layer]
    assert len(together) == len(set(together)) == 3 * 4 * 3  # calls, microbatches, layers


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputation_draws_the_same_again(schedule: str) -> None:
    once = recorded(f"ranks=2 chunks=4 schedule={schedule}")
    twice = recorded(f"ranks=2 chunks=4 schedule={schedule} checkpoint=always")
    for first, second in zip(once, twice, strict=True):
        assert sorted(first * 2) == sorted(second)


def test_layers_in_one_call_draw_nothing_from_the_step_before() -> None:
    """The second step of a pipeline is the second step of any, whatever the first one's batch was."""
    assert [layer[4:8] for layer in recorded("ranks=2 chunks=4")] == [
        layer[4:8] for layer in recorded("ranks=1 chunks=4")
    ]


# ---------------------------------------------------------------------- the caller's stream


class Flawed(nn.Module):
    """Draws, and fails when it is told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        if self.fails:
            raise ArithmeticError("told to")
        return x


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_callers_stream_is_untouched(checkpoint: str) -> None:
    model = DROPOUT.model()
    flawed = Flawed()
    model.append(flawed)
    options = f"ranks=2 chunks=4 checkpoint={checkpoint}"
    with build(options, model, seed=7) as pipeline:
        torch.manual_seed(99)
        before = torch.get_rng_state()
        pipeline.step(*vectors(8, 0))
        pipeline.step(*vectors(8, 1), update=False)
        assert torch.equal(torch.get_rng_state(), before)
        flawed.fails = True
        with pytest.raises(ArithmeticError, match="told to"):
            pipeline.step(*vectors(8, 2))
        assert torch.equal(torch.get_rng_state(), before)


def keeps_the_stream() -> bool:
    with build("chunks=4", DROPOUT.model()) as pipeline:
        before = torch.get_rng_state()
        pipeline.step(*vectors(8, 0))
        return torch.equal(torch.get_rng_state(), before)


def test_the_callers_stream_is_untouched_between_processes(workers: Workers) -> None:
    assert workers.run(keeps_the_stream, 3) == [True] * 3


# --------------------------------------------------------------------- running statistics


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_running_statistics_are_updated_once(ranks: int, schedule: str, checkpoint: str) -> None:
    found = pipelined(
        CONV_BATCHNORM, f"ranks={ranks} chunks=4 schedule={schedule} checkpoint={checkpoint}", steps=2
    )
    assert_same(found, plain(CONV_BATCHNORM, 4, steps=2))
    counts = {name: int(n) for name, n in found.state.items() if name.endswith("num_batches_tracked")}
    assert counts == {f"{layer}.num_batches_tracked": 2 * 4 for layer in (1, 4, 8)}


def normalize_all() -> list[Trained]:
    return [pipelined(CONV_BATCHNORM, f"chunks=4 checkpoint={kind}", steps=2) for kind in CHECKPOINTS]


def test_running_statistics_are_updated_once_between_processes(workers: Workers) -> None:
    for found in workers.run(normalize_all, 2)[0]:
        assert_same(found, plain(CONV_BATCHNORM, 4, steps=2))


class Counting(nn.Module):
    """Keeps statistics of its own, in one of the ways in which people write to buffers."""

    count: Tensor
    average: Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", None if how == "from nothing" else torch.zeros(17))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.how == "in place":
            assert self.average is not None
            self.count += 1
            self.average.mul_(0.9).add_(mean, alpha=0.1)
        else:
            self.count = self.count + 1
            self.average = mean if self.average is None else self.average * 0.9 + mean * 0.1
        return x


def counting(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(17, 17), Counting(how), nn.Linear(17, 17), nn.Sequential(Counting(how)), nn.Linear(17, 5)
    )


def counting_in_place() -> nn.Sequential:
    return counting("in place")


def counting_by_reassignment() -> nn.Sequential:
    return counting("by reassignment")


def counting_from_nothing() -> nn.Sequential:
    return counting("from nothing")


COUNTING = {
    "in place": Recipe("in place", counting_in_place, vectors),
    "by reassignment": Recipe("by reassignment", counting_by_reassignment, vectors),
    "from nothing": Recipe("from nothing", counting_from_nothing, vectors),
}


@pytest.mark.parametrize("how", COUNTING)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_modules_own_statistics_are_updated_once(how: str, checkpoint: str, chunks: int) -> None:
    """A recomputation writes to copies, of every buffer that the first forward was seen to write to."""
    found = pipelined(COUNTING[how], f"ranks=2 chunks={chunks} checkpoint={checkpoint}", steps=2)
    assert_same(found, plain(COUNTING[how], chunks, steps=2))
    assert int(found.state["1.count"]) == 2 * chunks
