"""Do the bars of a traced step last as long as what they stand for, and are waits told by their causes?

Layers sleep for known times, so that processes don't compete for cores.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from reference import build
from torch import Tensor, nn
from workers import Workers

import schedules
from pipe.timeline.logdir import read
from pipe.timeline.summary import summarize
from pipe.timeline.trace import Trace, ticks
from schedules import Costs, simulate

FORWARD, BACKWARD = 0.020, 0.030
STEPS = 20
SCHEDULES = {"gpipe": 2, "1f1b": 2, "interleaved(2)": 4, "zb_h1": 2}  # and how many stages


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_s = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeper(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.times = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x * self.scale, *self.times)
        return slept


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(rows: list[tuple[str, list[tuple[float, float]]]]) -> None:
    torch.manual_seed(0)
    for options, times in rows:
        model = nn.Sequential(*(Sleeper(*pair) for pair in times))
        with warnings.catch_warnings(), build(options, model, loss=squares) as pipeline:
            warnings.simplefilter("ignore")  # I does it all: there is nothing to split
            for _ in range(STEPS):
                pipeline.step(torch.ones(4, 3), torch.zeros(4, 3))


@pytest.fixture(scope="module")
def traces(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trace]]:
    """Twenty traced steps of each schedule; in the last row rank 1 takes half as long again."""
    folder = tmp_path_factory.mktemp("truth")
    even = (FORWARD, BACKWARD)
    rows = [
        (f"ranks=2 chunks=4 schedule={name} device_map=uniform tensorboard={folder}/{name}", [even] * stages)
        for name, stages in SCHEDULES.items()
    ]
    slowed = [even, (1.5 * FORWARD, 1.5 * BACKWARD)]
    rows.append((f"ranks=2 chunks=4 device_map=uniform tensorboard={folder}/slowed", slowed))
    workers.run(train, 2, rows, timeout=110)
    return {name: [run.trace(step) for step in run.steps] for name, run in read(folder).items()}


def durations(traces: list[Trace]) -> np.ndarray[Any, Any]:
    """[step, bar], the bars of each member in the same order in every step."""
    return np.array(
        [np.concatenate([(m.end - m.start)[m.is_compute] for m in trace.members]) for trace in traces]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_bars_last_as_long_as_the_layers_sleep(name: str, traces: dict[str, list[Trace]]) -> None:
    kinds = np.concatenate([m.kind[m.is_compute] for m in traces[name][0].members])
    expected = np.select([kinds == "F", kinds == "W"], [FORWARD, 0.0], BACKWARD) * 1e6
    medians = np.median(durations(traces[name]), axis=0)
    assert np.abs(medians - expected).max() < 2000, medians - expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_the_simulators(name: str, traces: dict[str, list[Trace]]) -> None:
    plan = schedules.build(schedules.get(name), traces[name][0].plan.placement, 4)
    expected = simulate(plan, Costs(F=FORWARD, I=BACKWARD, W=0.0)).rate
    found = np.median([summarize(trace).bubble for trace in traces[name]])
    assert abs(found - expected) < 0.03, (found, expected)


def test_causes_sum_to_the_idle_time_exactly(traces: dict[str, list[Trace]]) -> None:
    for steps in traces.values():
        for trace in steps:
            for member in summarize(trace).members:
                assert ticks(list(member.causes.values())).sum() == ticks(member.idle), trace.header.step


def test_a_slow_rank_is_named(traces: dict[str, list[Trace]]) -> None:
    for trace in traces["slowed"]:
        summary = summarize(trace)
        assert summary.slowest is not None and summary.slowest.stage == 1
        assert 1.1 < summary.slowest.ratio < 1.3
        assert "tage 1" in summary.advice[0]
