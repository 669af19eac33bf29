"""Does half precision on real replicas compute what it computes in one process, overflows included?"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest
import torch
from reference import (
    CONV_BATCHNORM,
    MLP,
    TRANSFORMER,
    Trained,
    adamw,
    assert_equal,
    assert_same,
    build,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional
from workers import Workers

from pipe import PeerError, PipelineError

REPLICAS = 2
ROWS = [
    (MLP, "amp=fp16 keep_fp32=^4$"),
    (TRANSFORMER, "amp=fp16 zero=3 schedule=zb_h1 keep_fp32=LayerNorm clip=0.5"),
    (TRANSFORMER, "amp=bf16 zero=2 reduce_every=2 schedule=gpipe checkpoint=always"),
    (CONV_BATCHNORM, "amp=bf16 zero=1 keep_batchnorm_fp32 offload"),
    (MLP, "amp=fp16 zero=2 offload loss_scale=256 bucket_mb=0.0015"),
]


def half_of(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """This process's share, or all of it where there are no others."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return batch
    replica = int(os.environ["RANK"]) % REPLICAS
    x, y = (part.tensor_split(REPLICAS)[replica] for part in batch)
    return x, y


def train_all() -> list[Trained]:
    found = []
    for recipe, options in ROWS:
        options = f"ranks=2 dp={REPLICAS} chunks=2 {options}"
        with build(options, recipe.model(), loss=recipe.loss, optimizer=adamw, seed=0) as pipeline:
            losses = [pipeline.step(*half_of(recipe.data(13, step))) for step in range(3)]
            losses.append(pipeline.evaluate(*half_of(recipe.data(13, 3))))
            found.append(Trained(pipeline.state_dict(full=True), losses))
    return found


def test_training_and_evaluation(workers: Workers) -> None:
    one = train_all()
    for rank, found in enumerate(workers.run(train_all, 4)):
        for (recipe, options), trained, expected in zip(ROWS, found, one, strict=True):
            for mine, theirs in zip(trained.losses, expected.losses, strict=True):
                assert_equal(mine, theirs, f"{recipe} under {options} on rank {rank}")
            if rank == 0:
                assert_same(trained, expected)


# --------------------------------------------------------------------------- overflows


class Planted(nn.Linear):
    """Lets the gradient of its weight overflow in one microbatch, where told to."""

    at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * 1.0
        if self.at == 0 and weight.requires_grad:
            weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        self.at = None if self.at is None else self.at - 1
        return functional.linear(x, weight, self.bias)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 17), nn.ReLU(), Planted(17, 17), nn.ReLU(), nn.Linear(17, 5))


def overflow_on_one(zero: int) -> tuple[list[tuple[float, float]], dict[str, Tensor], bool]:
    """Rank 1 of replica 1 only: what each member hears of it, and whether anything moved meanwhile."""
    made, heard, moved = model(), [], False
    with build(f"device_map=0:0-1,1:1-5 dp=2 chunks=2 amp=fp16 zero={zero}", made) as pipeline:
        for step in range(4):
            before = {name: v.clone() for name, v in pipeline.state_dict().items()}
            if step in (1, 2) and os.environ["RANK"] == "3":
                made[2].at = 1
            pipeline.step(*vectors(6, step))
            heard.append((pipeline.metrics["loss_scale"].item(), pipeline.metrics["skipped"].item()))
            after = pipeline.state_dict()
            if step in (1, 2):
                moved = moved or any(not torch.equal(v, before[name]) for name, v in after.items())
        assert pipeline.scaler is not None
        return heard, pipeline.scaler.state_dict(), moved


@pytest.mark.parametrize("zero", range(4))
def test_an_overflow_on_one_member_skips_the_step_on_all(workers: Workers, zero: int) -> None:
    scale = 2.0**16
    for heard, state, moved in workers.run(overflow_on_one, 4, zero):
        assert heard == [(scale, 0), (scale, 1), (scale, 1), (scale / 2, 0)]
        assert state == {"scale": scale / 2, "good_steps": 1, "hysteresis": 0} and not moved


def overflow_at_the_floor() -> tuple[str, str]:
    made = model()
    with build("device_map=0:0-1,1:1-5 dp=2 chunks=4 timeout=20 amp=fp16 zero=2", made) as pipeline:
        assert pipeline.scaler is not None
        pipeline.scaler.load_state_dict({"scale": 1.0, "good_steps": 0, "hysteresis": 2})
        pipeline.step(*vectors(8, 0))
        if os.environ["RANK"] == "3":
            made[2].at = 2
        try:
            pipeline.step(*vectors(8, 0))
        except PipelineError as error:
            return type(error).__name__, str(error)
    return "no error", ""


def test_at_the_floor_every_member_hears_where_it_was(workers: Workers) -> None:
    for rank, (kind, said) in enumerate(workers.run(overflow_at_the_floor, 4)):
        assert kind == (PipelineError if rank == 3 else PeerError).__name__
        assert re.search(r"gradient of 2\.weight \(stage 1\) overflows fp16 in microbatch 2", said), said
