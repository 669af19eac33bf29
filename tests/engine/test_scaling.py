"""Does the loss scale grow, give way and stop as it should, and does an overflow cost its step only?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from covering import cases
from reference import adamw, assert_equal, build, mlp, momentum, vectors
from torch import Tensor, nn
from torch.nn import functional

from pipe import Pipeline, PipelineError
from pipe.precision import LossScaler

START = 2.0**16


# --------------------------------------------------------------------------- the rule


def test_a_scale_begins_at_2_to_the_16() -> None:
    scaler = LossScaler()
    assert scaler.scale == START == scaler.tensor(torch.device("cpu")).item()
    assert scaler.state_dict() == {"scale": START, "good_steps": 0, "hysteresis": 2}


def test_it_doubles_after_1000_good_steps() -> None:
    scaler = LossScaler()
    for step in range(1, 3001):
        scaler.update(overflow=False)
        assert scaler.scale == START * 2 ** (step // 1000), step
    assert scaler.state_dict()["good_steps"] == 0


def test_an_overflow_begins_the_count_anew() -> None:
    scaler = LossScaler()
    for overflow in [*[False] * 999, True, *[False] * 999]:
        scaler.update(overflow)
    assert scaler.scale == START
    scaler.update(overflow=False)
    assert scaler.scale == START * 2


def test_it_gives_way_at_the_second_overflow_and_each_that_follows() -> None:
    """The first one is forgiven; it needn't be followed by the second."""
    scaler = LossScaler()
    seen = []
    for overflow in (True, False, False, True, True, False, True):
        scaler.update(overflow)
        seen.append(scaler.scale / START)
    assert seen == [1, 1, 1, 1 / 2, 1 / 4, 1 / 4, 1 / 8]


def test_growth_forgives_again() -> None:
    scaler = LossScaler()
    for overflow in [True, True, True, *[False] * 1000]:
        scaler.update(overflow)
    assert scaler.scale == START / 2
    scaler.update(overflow=True)
    assert scaler.scale == START / 2
    scaler.update(overflow=True)
    assert scaler.scale == START / 4


def test_it_stops_at_1_and_at_2_to_the_32() -> None:
    scaler = LossScaler()
    for count in range(40):
        assert scaler.at_floor == (count >= 17)  # 16 halvings behind the one that is forgiven
        scaler.update(overflow=True)
    assert scaler.scale == 1.0 and scaler.at_floor
    scaler.load_state_dict({"scale": 2.0**31, "good_steps": 0, "hysteresis": 2})
    for _ in range(3000):
        scaler.update(overflow=False)
    assert scaler.scale == 2.0**32 and not scaler.at_floor


def test_tensors_follow_the_scale() -> None:
    scaler, device = LossScaler(), torch.device("cpu")
    for scale in (START, START, START / 2, START / 4):
        tensor = scaler.tensor(device)
        if tensor.item() != scale:
            pytest.fail(f"{tensor} and not {scale}")
        assert tensor is scaler.tensor(device)
        scaler.update(overflow=True)


def test_a_state_goes_round() -> None:
    one, other = LossScaler(), LossScaler()
    for overflow in [True, True, *[False] * 700]:
        one.update(overflow)
    other.load_state_dict(one.state_dict())
    for overflow in [*[False] * 300, True, True]:
        one.update(overflow)
        other.update(overflow)
        assert one.state_dict() == other.state_dict()
        assert one.tensor(torch.device("cpu")) == other.tensor(torch.device("cpu"))


def test_a_state_that_lacks_something() -> None:
    with pytest.raises(PipelineError, match=r"lacks.*hysteresis"):
        LossScaler().load_state_dict({"scale": 1.0, "good_steps": 0})


def test_a_fixed_scale_never_changes() -> None:
    scaler = LossScaler(1024.0)
    for overflow in [*[True] * 5, *[False] * 2001]:
        scaler.update(overflow)
        assert scaler.scale == 1024.0 and not scaler.at_floor
    assert scaler.state_dict()["scale"] == 1024.0
    scaler = LossScaler(1.0)
    assert not scaler.at_floor, "it isn't one that could have given way"


# ----------------------------------------------------------------------- in the engine


class Planted(nn.Linear):
    """Lets the gradient of its weight overflow in one microbatch of a step, where told to."""

    def __init__(self) -> None:
        super().__init__(17, 17)
        self.at: int | None = None
        self.value = math.inf
        self._forwards = 0

    def plant(self, microbatch: int | None, value: float = math.inf) -> None:
        self.at, self.value, self._forwards = microbatch, value, 0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * 1.0
        if self.at == self._forwards and weight.requires_grad:
            weight.register_hook(lambda gradient: torch.full_like(gradient, self.value))
        self._forwards += 1
        return functional.linear(x, weight, self.bias)


def planted() -> tuple[nn.Sequential, Planted]:
    torch.manual_seed(0)
    layer = Planted()
    return nn.Sequential(nn.Linear(17, 17), nn.ReLU(), layer, nn.ReLU(), nn.Linear(17, 5)), layer


def scales(pipeline: Pipeline) -> tuple[float, float]:
    return pipeline.metrics["loss_scale"].item(), pipeline.metrics["skipped"].item()


ENGINE: dict[str, list[Any]] = {
    "zero": [0, 1, 2, 3],
    "dp": [1, 2],
    "schedule": ["1f1b", "zb_h1"],
    "value": [math.inf, -math.inf, math.nan],
    "optimizer": [adamw, momentum],
}


@pytest.mark.parametrize(tuple(ENGINE), cases(ENGINE))
def test_an_overflow_costs_its_step_and_nothing_else(
    zero: int, dp: int, schedule: str, value: float, optimizer: Any
) -> None:
    """Neither parameters nor the optimizer's state move, and what follows is as if the step hadn't been."""
    options = f"ranks=2 dp={dp} chunks=3 amp=fp16 zero={zero} schedule={schedule}"
    model, layer = planted()
    with (
        build(options, model, optimizer=optimizer, seed=0) as pipeline,
        build(options, planted()[0], optimizer=optimizer, seed=0) as other,
    ):
        seen = []
        for step in range(6):
            overflows = step in (1, 3, 4)
            layer.plant(1 if overflows else None, value)
            before = {name: v.clone() for name, v in pipeline.state_dict().items()}
            pipeline.step(*vectors(12, step))
            seen.append(scales(pipeline))
            if overflows:
                for name, v in pipeline.state_dict().items():
                    assert_equal(v, before[name], name)
            else:
                other.step(*vectors(12, step))
        # A step's metrics tell of the scale that it was made with.
        assert seen == [
            (START, 0),
            (START, 1),
            (START, 0),
            (START, 1),
            (START / 2, 1),
            (START / 4, 0),
        ]
        assert pipeline.scaler is not None and other.scaler is not None
        assert pipeline.scaler.state_dict() == {"scale": START / 4, "good_steps": 1, "hysteresis": -1}
        for name, v in other.state_dict().items():
            assert_equal(pipeline.state_dict()[name], v, name, bitwise=False)


def test_an_overflow_of_a_call_that_accumulates_skips_the_update() -> None:
    model, layer = planted()
    with build("ranks=2 chunks=3 amp=fp16", model) as pipeline:
        before = {name: v.clone() for name, v in pipeline.state_dict().items()}
        layer.plant(0)
        pipeline.step(*vectors(9, 0), update=False)
        layer.plant(None)
        pipeline.step(*vectors(9, 1))
        assert scales(pipeline) == (START, 1)
        assert all(torch.equal(v, before[name]) for name, v in pipeline.state_dict().items())
        pipeline.step(*vectors(9, 1))
        assert scales(pipeline) == (START, 0)
        assert not any(torch.equal(v, before[name]) for name, v in pipeline.state_dict().items())


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_at_the_floor_an_overflow_names_the_culprit(schedule: str, zero: int, dp: int) -> None:
    model, layer = planted()
    options = f"device_map=0:0-1,1:1-5 dp={dp} chunks=4 amp=fp16 schedule={schedule} zero={zero}"
    with build(options, model) as pipeline:
        assert pipeline.scaler is not None
        pipeline.scaler.load_state_dict({"scale": 1.0, "good_steps": 0, "hysteresis": 0})
        pipeline.step(*vectors(16, 0))
        assert scales(pipeline) == (1, 0)
        layer.plant(2)
        with pytest.raises(PipelineError, match=r"gradient of 2\.weight.*stage 1.*microbatch 2") as raised:
            pipeline.step(*vectors(16, 0))
        assert "bf16" in str(raised.value), "what may help"
        layer.plant(None)
        pipeline.step(*vectors(16, 0))  # nothing is left of it
        assert scales(pipeline) == (1, 0)


def test_above_the_floor_nothing_is_looked_at_on_the_way() -> None:
    model, layer = planted()
    with build("ranks=2 chunks=4 amp=fp16", model) as pipeline:
        assert pipeline.scaler is not None
        pipeline.scaler.load_state_dict({"scale": 2.0, "good_steps": 0, "hysteresis": 1})
        layer.plant(2)
        pipeline.step(*vectors(8, 0))
        assert scales(pipeline) == (2, 1) and pipeline.scaler.at_floor


def test_a_scale_that_is_fixed() -> None:
    model, layer = planted()
    with build("ranks=2 chunks=4 amp=fp16 loss_scale=1024", model) as pipeline:
        for step in range(4):
            layer.plant(0 if step % 2 else None)
            pipeline.step(*vectors(8, step))
            assert scales(pipeline) == (1024, step % 2)


def test_fixed_scales_give_the_same_updates() -> None:
    """A power of two changes no bit of what neither over- nor underflows."""
    states = []
    for scale in (512, 4096):
        with build(f"ranks=2 chunks=4 amp=fp16 loss_scale={scale}", mlp()) as pipeline:
            for step in range(3):
                pipeline.step(*vectors(8, step))
            states.append(pipeline.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", ["amp=bf16", "amp=off", "amp=bf16 zero=2 dp=2"])
def test_without_fp16_there_is_no_scaler(options: str) -> None:
    with build(f"ranks=2 chunks=2 {options}") as pipeline:
        pipeline.step(*vectors(8, 0))
        assert pipeline.scaler is None
        assert "loss_scale" not in pipeline.metrics and "skipped" not in pipeline.metrics


def test_losses_and_metrics_are_not_scaled() -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        value = functional.cross_entropy(output, target)
        return value, {"twice": value * 2}

    with build("ranks=2 chunks=4 amp=fp16 clip=0.5", loss=loss) as pipeline:
        value = pipeline.step(*vectors(8, 0))
        assert 0 < value < 10
        assert pipeline.metrics["twice"] == pytest.approx(2 * value.item(), rel=1e-5)
        assert 0 < pipeline.metrics["grad_norm"] < 10
        assert set(pipeline.metrics) == {"twice", "grad_norm", "loss_scale", "skipped"}
