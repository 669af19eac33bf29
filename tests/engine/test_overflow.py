"""When one gradient on one rank of one replica overflows, do all ranks skip the step, and go on alike?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import cases
from reference import adamw, assert_equal, build, mlp, vectors
from replication import share
from torch import Tensor, nn
from workers import Workers

from pipe import Pipeline

ZEROS = [0, 1, 2, 3]
SCHEDULES = ["1f1b", "zb_h1"]
MAP = "device_map=0:0-4,1:4-9"
STEPS = 5
STRUCK = 2  # the step in which it happens


class Plant(torch.autograd.Function):
    """Passes activations and their gradients on, and makes up a gradient for a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, value: float) -> Tensor:
        ctx.shape, ctx.value = parameter.shape, value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, gradient.new_full(ctx.shape, ctx.value), None


class Struck(nn.Module):
    """Has one parameter, and its gradient is what it is told to be: no other is touched."""

    def __init__(self) -> None:
        super().__init__()
        self.victim = nn.Parameter(torch.zeros(3))
        self.value = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Plant.apply(x, self.victim, self.value)  # type: ignore[no-any-return]


def model(rank: int) -> nn.Sequential:
    layers = list(mlp())
    layers[1 if rank == 0 else 5] = Struck()
    return nn.Sequential(*layers)


def strike(pipeline: Pipeline, rank: int, replica: int, value: float) -> None:
    """Arms, or disarms, the layer of one rank of one replica."""
    for each in pipeline._replicas:
        if each.place.replica == replica:
            for module in each.modules():
                if isinstance(module, Struck) and pipeline.rank in (None, rank):
                    module.value = value


def run(options: str, rank: int, replica: int, value: float = float("inf")) -> dict[str, Any]:
    """Five steps, the third of which is struck; what is there to see of each."""
    found: dict[str, Any] = {"skipped": [], "scalers": [], "states": [], "losses": []}
    with build(f"{MAP} dp=2 chunks=4 {options}", model(rank), optimizer=adamw, clip=1.0) as pipeline:
        for step in range(STEPS):
            strike(pipeline, rank, replica, value if step == STRUCK else 0.0)
            found["losses"].append(pipeline.step(*share(pipeline, vectors(17, step))).item())
            assert pipeline.scaler is not None
            found["skipped"].append(pipeline.metrics["skipped"].item())
            found["scalers"].append(pipeline.scaler.state_dict())
            state = pipeline.state_dict(full=True)
            found["states"].append({name: tensor.clone() for name, tensor in state.items()})
    return found


def check(found: dict[str, Any], *, dynamic: bool = True) -> None:
    """Skipped once; nothing moved then, and everything before and after."""
    assert found["skipped"] == [float(step == STRUCK) for step in range(STEPS)]
    good = [scaler["good_steps"] for scaler in found["scalers"]]
    assert good == [1, 2, 0, 1, 2]
    left = [scaler["hysteresis"] for scaler in found["scalers"]]
    assert left == ([2, 2, 1, 1, 1] if dynamic else [2] * 5)
    assert len({scaler["scale"] for scaler in found["scalers"]}) == 1  # it gives way at the second overflow
    states = found["states"]
    for step in range(1, STEPS):
        for name, before in states[step - 1].items():
            if step == STRUCK:
                assert_equal(states[step][name], before, name)
            elif name.endswith("weight"):
                assert not torch.equal(states[step][name], before), (step, name)
    assert all(value.isfinite().all() for value in states[-1].values())


@pytest.mark.parametrize(
    ("zero", "schedule", "rank", "replica", "value"),
    cases(
        {
            "zero": ZEROS,
            "schedule": SCHEDULES,
            "rank": [0, 1],
            "replica": [0, 1],
            "value": [float("inf"), float("nan"), float("-inf")],
        }
    ),
)
def test_in_one_process(zero: int, schedule: str, rank: int, replica: int, value: float) -> None:
    check(run(f"amp=fp16 zero={zero} schedule={schedule}", rank, replica, value))


@pytest.mark.parametrize("more", ["reduce_every=2", "offload", "loss_scale=1024"])
def test_in_one_process_with_more(more: str) -> None:
    for zero in (2, 3):
        check(run(f"amp=fp16 zero={zero} {more}", 1, 1), dynamic="loss_scale" not in more)


WHERE = [(rank, replica) for rank in (0, 1) for replica in (0, 1)]
JOBS = [(zero, schedule) for zero in ZEROS for schedule in SCHEDULES]


def run_all(jobs: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    return [run(*job) for job in jobs]


def check_between(workers: Workers, jobs: list[tuple[str, int, int]]) -> None:
    by_member = workers.run(run_all, 4, jobs, timeout=60 + len(jobs))
    for job, first, *others in zip(jobs, *by_member, strict=True):
        check(first)
        for other in others:
            for what in ("skipped", "scalers", "losses"):
                assert other[what] == first[what], (job, what)
        alone = run(*job)
        for state, same in zip(first["states"], alone["states"], strict=True):
            for name, value in same.items():
                assert_equal(state[name], value, name)


def test_between_processes(workers: Workers) -> None:
    """Each ZeRO stage and schedule, the culprit being another one each time."""
    jobs = [
        (f"amp=fp16 zero={zero} schedule={schedule}", *WHERE[index % 4])
        for index, (zero, schedule) in enumerate(JOBS)
    ]
    check_between(workers, jobs)


@pytest.mark.full
@pytest.mark.parametrize(("rank", "replica"), WHERE)
def test_between_processes_in_full(workers: Workers, rank: int, replica: int) -> None:
    check_between(workers, [(f"amp=fp16 zero={z} schedule={s}", rank, replica) for z, s in JOBS])


@pytest.mark.parametrize("zero", ZEROS)
def test_accumulated_gradients_are_dropped_with_the_step(zero: int) -> None:
    """An overflow in the first of two calls is one in the step that they make; the next two start anew."""
    with build(f"{MAP} dp=2 chunks=4 amp=fp16 zero={zero}", model(1), optimizer=adamw) as pipeline:
        start = {name: value.clone() for name, value in pipeline.state_dict().items()}
        for struck in (True, False):
            strike(pipeline, 1, 1, float("inf") if struck else 0.0)
            pipeline.step(*vectors(9, 0), update=False)
            strike(pipeline, 1, 1, 0.0)
            pipeline.step(*vectors(9, 1))
            assert bool(pipeline.metrics["skipped"]) == struck
            for name, value in pipeline.state_dict().items():
                assert torch.equal(value, start[name]) == (struck or "victim" in name), name


@pytest.mark.parametrize("zero", ZEROS)
def test_the_scale_gives_way_at_the_second_overflow(zero: int) -> None:
    with build(f"{MAP} dp=2 chunks=4 amp=fp16 zero={zero}", model(1), optimizer=adamw) as pipeline:
        assert pipeline.scaler is not None
        strike(pipeline, 1, 0, float("inf"))
        scales = []
        for step in range(4):
            pipeline.step(*vectors(9, step))
            scales.append(pipeline.scaler.scale)
            assert pipeline.metrics["loss_scale"] == [2.0**16, *scales][step]
        assert scales == [2.0**16, 2.0**15, 2.0**14, 2.0**13]


NAMED = r"the gradient of 5\.victim \(stage 1\) overflows fp16 in microbatch 0.* amp=bf16"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", ZEROS)
def test_at_the_floor_an_overflow_is_an_error(zero: int, schedule: str) -> None:
    options = f"{MAP} dp=2 chunks=4 amp=fp16 zero={zero} schedule={schedule}"
    with build(options, model(1), optimizer=adamw) as pipeline:
        assert pipeline.scaler is not None
        pipeline.scaler.load_state_dict({"scale": 1.0, "good_steps": 0, "hysteresis": 1})
        pipeline.step(*vectors(9, 0))
        strike(pipeline, 1, 1, float("inf"))
        with pytest.raises(RuntimeError, match=NAMED):
            pipeline.step(*vectors(9, 1))
        strike(pipeline, 1, 1, 0.0)
        pipeline.step(*vectors(9, 1))
        assert not pipeline.metrics["skipped"]
