"""Does SyncBatchNorm take its statistics over the replicas, and over nobody else?"""

from __future__ import annotations

import pytest
import torch
from reference import CONV_BATCHNORM, Trained, assert_same, build, conv_batchnorm, momentum, plain
from torch import nn
from workers import Workers

from pipe import PipelineError


def model() -> nn.Sequential:
    converted: nn.Sequential = nn.SyncBatchNorm.convert_sync_batchnorm(conv_batchnorm())
    return converted


def train(rows: list[str]) -> list[tuple[Trained, float]]:
    """Each replica on its share; the last step's batch is evaluated, too."""
    found = []
    for options in rows:
        with build(options, model(), optimizer=momentum) as pipeline:
            losses = []
            for step in range(4):
                x, y = CONV_BATCHNORM.data(17, step)
                share = [part.tensor_split(pipeline.dp)[pipeline.replica] for part in (x, y)]
                losses.append(pipeline.step(*share))
            evaluated = pipeline.evaluate(*share).item()
            found.append((Trained(pipeline.state_dict(full=True), losses), evaluated))
    return found


@pytest.mark.parametrize(
    ("processes", "rows"),
    [
        (2, ["ranks=1 dp=2 chunks=1", "ranks=2 dp=1 chunks=1"]),
        (
            4,
            [
                "ranks=2 dp=2 chunks=1 zero=1",
                "ranks=1 dp=4 chunks=1 zero=3",
                "ranks=2 dp=2 chunks=1 schedule=zb_h1 checkpoint=always",
            ],
        ),
    ],
)
def test_replicas_train_as_one_on_the_whole_batch(workers: Workers, processes: int, rows: list[str]) -> None:
    """One microbatch a replica: batch norm over all of them is batch norm of the whole batch."""
    expected = plain(CONV_BATCHNORM, 1, steps=4, optimizer=momentum)
    for found, *_ in zip(*workers.run(train, processes, rows), strict=True):
        assert_same(found[0], expected, bitwise=False)


def test_several_microbatches_in_half_precision(workers: Workers) -> None:
    everyone = workers.run(train, 4, ["ranks=2 dp=2 chunks=3 amp=bf16 zero=2", "ranks=1 dp=4 chunks=2"])
    for results in zip(*everyone, strict=True):
        assert len({evaluated for _, evaluated in results}) == 1
        losses = [torch.stack(trained.losses) for trained, _ in results]
        assert all(torch.equal(one, losses[0]) for one in losses) and losses[0].isfinite().all()


def test_in_one_process_it_can_not_wait() -> None:
    with build("ranks=1 dp=2", model()) as pipeline:
        with pytest.raises(PipelineError, match="can't run meanwhile in the same process"):
            pipeline.step(*CONV_BATCHNORM.data(17, 0))


def test_alone_it_is_batch_norm() -> None:
    with build("ranks=2 chunks=4", model(), optimizer=momentum) as pipeline:
        for step in range(4):
            pipeline.step(*CONV_BATCHNORM.data(17, step))
        state = pipeline.state_dict()
    expected = plain(CONV_BATCHNORM, 4, steps=4, optimizer=momentum)
    assert all(torch.equal(state[name], value) for name, value in expected.state.items())
