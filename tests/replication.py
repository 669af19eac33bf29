"""How do tests train replicas? In one process with the whole batch, between processes each with its share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from reference import Batch, OptimizerFactory, Recipe, Trained, adamw, build
from torch import Tensor
from torch.utils import _pytree as pytree
from workers import Workers

from pipe import Pipeline

CHUNKS = 4
ROWS = 17  # no number of replicas divides them


class Job(NamedTuple):
    """One training run, for a list of which processes are started once."""

    recipe: Recipe
    options: str
    settings: Mapping[str, Any] = {}


def train(job: Job) -> Trained:
    return replicated(job.recipe, job.options, **job.settings)


def train_all(jobs: list[Job]) -> list[Trained]:
    return [train(job) for job in jobs]


def between_processes(workers: Workers, members: int, jobs: list[Job]) -> list[Trained]:
    """What rank 0 of replica 0 has of each job; the others have seen the same losses."""
    by_member = workers.run(train_all, members, jobs, timeout=30 + 2 * len(jobs))
    for job, first, *others in zip(jobs, *by_member, strict=True):
        for other in others:
            assert other.losses == first.losses and not other.state, job
    return by_member[0]


def replicated(
    recipe: Recipe,
    options: str,
    *,
    rows: int = ROWS,
    steps: int = 5,
    optimizer: OptimizerFactory = adamw,
    **settings: Any,
) -> Trained:
    """As `reference.pipelined`: the batch is the global one, of which each replica gets its share."""
    with build(options, recipe.model(), loss=recipe.loss, optimizer=optimizer, **settings) as pipeline:
        losses = [pipeline.step(*share(pipeline, recipe.data(rows, number))) for number in range(steps)]
        return Trained(pipeline.state_dict(full=True), losses)


def share(pipeline: Pipeline, batch: Batch) -> Batch:
    """What this process is to give the pipeline of a global batch."""
    return batch if pipeline.replica is None else part(batch, pipeline.replica, pipeline.dp)


def part(batch: Any, replica: int, replicas: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.tensor_split(replicas)[replica], batch)


def assert_near(found: Trained, expected: Trained, off_by: float) -> None:
    """Every parameter, buffer and loss but for so much (in absolute numbers; 0: bit for bit)."""
    assert list(found.state) == list(expected.state)
    for name, value in expected.state.items():
        assert found.state[name].dtype == value.dtype, name
        assert_within(found.state[name], value, off_by, name)
    for step, (mine, plains) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert_within(mine, plains, max(off_by, 1e-6), f"the loss of step {step}")


def assert_within(found: Tensor, expected: Tensor, off_by: float, what: str) -> None:
    assert found.shape == expected.shape, what
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (found.to(wide) - expected.to(wide)).abs().max().item() if found.numel() else 0.0
    assert difference <= off_by, f"{what} is off by up to {difference:.3g}"
    assert torch.isfinite(found).all() or torch.equal(found, expected), what
