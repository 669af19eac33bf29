"""What is trained may be a copy of the parameters: is it noticed when others write, read or look at them?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import MLP, adamw, assert_equal, build, conv_batchnorm, images, mlp, momentum
from torch import Tensor, nn
from torch.nn import functional
from workers import Workers

from pipe import DisagreementError, PeerError, PipelineError

COPIES = [
    "amp=bf16",
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=1 offload",
    "dp=2 zero=2 amp=bf16",
    "dp=3 amp=fp16 zero=1 offload",
]


@pytest.mark.parametrize("options", COPIES)
def test_writes_between_steps_are_noticed(options: str) -> None:
    model = mlp()
    with build(f"ranks=2 chunks=2 {options}", model) as pipeline:
        pipeline.step(*MLP.data(17, 0))
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        with pytest.raises(PipelineError, match=r"0\.weight was written to since .*load_state_dict"):
            pipeline.step(*MLP.data(17, 1))


@pytest.mark.parametrize("options", ["", *COPIES, "zero=3", "dp=2 zero=3 amp=bf16", "zero=2 offload"])
def test_a_state_is_loaded_into_what_is_trained(options: str) -> None:
    """Training goes on as if the pipeline had been built with it (but for the optimizer's state)."""
    torch.manual_seed(5)
    other = mlp()
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    with build(f"ranks=2 chunks=2 {options}", other, optimizer=sgd) as pipeline:
        expected = [pipeline.step(*MLP.data(17, step)) for step in range(3)]
        trained = pipeline.state_dict(full=True)
    with build(f"ranks=2 chunks=2 {options}", optimizer=sgd) as pipeline:
        pipeline.step(*MLP.data(17, 7))
        pipeline.load_state_dict(state)
        found = pipeline.state_dict(full=True)
        assert all(torch.equal(found[name], value) for name, value in state.items())
        assert [pipeline.step(*MLP.data(17, step)) for step in range(3)] == expected
        for name, value in pipeline.state_dict(full=True).items():
            assert_equal(value, trained[name], name)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def test_a_state_that_lacks_something() -> None:
    with build("ranks=2 amp=bf16") as pipeline, pytest.raises(KeyError, match=r"the state lacks 0\.weight"):
        pipeline.load_state_dict({})


def test_a_full_state_is_a_copy() -> None:
    with build("ranks=2 chunks=2") as pipeline:
        before = pipeline.state_dict(full=True)
        kept = {name: value.clone() for name, value in before.items()}
        pipeline.step(*MLP.data(17, 0))
        assert all(torch.equal(before[name], value) for name, value in kept.items())


class Clamped(nn.Linear):
    """A layer that holds its weights down in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("options", ["amp=bf16", "dp=2", "zero=3"])
def test_a_layer_that_writes_to_its_weights_is_refused(options: str) -> None:
    model = nn.Sequential(Clamped(17, 17), nn.ReLU(), nn.Linear(17, 5))
    with build(f"ranks=2 chunks=2 {options}", model) as pipeline:
        with pytest.raises(PipelineError, match=r"a layer writes to 0\.weight in its forward"):
            pipeline.step(*MLP.data(17, 0))


@pytest.mark.parametrize("options", ["dp=2", "zero=1", "zero=3", "amp=bf16 zero=1 dp=2"])
def test_attributes_of_parameters_are_there_for_the_optimizer(options: str) -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(getattr(parameter, "lr_scale", 1.0))
            return super().step(closure)

    model = mlp()
    before = model[2].weight.clone()
    model[2].weight.lr_scale = 0.0
    with build(
        f"ranks=2 chunks=2 {options}", model, optimizer=lambda named: Scaled(named, lr=0.1)
    ) as pipeline:
        pipeline.step(*MLP.data(17, 0))
        assert torch.equal(pipeline.state_dict()["2.weight"], before)


def test_hooks_of_parameters_are_the_copies_too() -> None:
    model = mlp()
    before = model[2].weight.clone()
    model[2].weight.register_hook(torch.zeros_like)
    with build("ranks=2 dp=2 chunks=2", model, optimizer=momentum) as pipeline:
        pipeline.step(*MLP.data(17, 0))
        assert torch.equal(pipeline.state_dict()["2.weight"], before)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_between_accumulation_and_update(zero: int) -> None:
    """As in plain training, what was accumulated is stepped with."""

    def train(options: str) -> dict[str, Tensor]:
        model = mlp()
        with build(f"ranks=1 chunks=2 bucket_mb=0.0003 {options}", model, optimizer=sgd) as pipeline:
            pipeline.step(*MLP.data(16, 0), update=False)
            model[0].requires_grad_(False)
            pipeline.step(*MLP.data(16, 1))
            return pipeline.state_dict(full=True)

    expected = train("")
    for name, value in train(f"dp=2 zero={zero}").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_frozen_after_an_overflow(zero: int) -> None:
    model = mlp()
    planted = [True]

    def plant(gradient: Tensor) -> Tensor:
        return gradient * float("inf") if planted[0] else gradient

    model[0].weight.register_hook(plant)
    with build(f"ranks=1 chunks=2 dp=2 zero={zero} amp=fp16 bucket_mb=0.0003", model) as pipeline:
        pipeline.step(*MLP.data(16, 0))
        assert pipeline.metrics["skipped"] == 1
        planted[0] = False
        model[0].requires_grad_(False)
        pipeline.step(*MLP.data(16, 1))
        assert pipeline.metrics["skipped"] == 0


def test_a_view_that_somebody_keeps_turns_into_nan() -> None:
    kept = []
    model = mlp()
    model[2].register_forward_hook(lambda module, args, output: kept.append(module.weight.detach()))
    with build("ranks=1 dp=2 zero=3 chunks=2", model) as pipeline:
        for step in range(2):
            pipeline.step(*MLP.data(16, step))
        assert all(view.isnan().all() for view in kept)
        assert not any(value.isnan().any() for value in pipeline.state_dict().values())


def test_replicas_are_evaluated_with_the_statistics_that_are_saved() -> None:
    model = conv_batchnorm()
    with build("ranks=2 dp=2 chunks=2", model, optimizer=momentum) as pipeline:
        pipeline.step(*images(16, 0))
        rows = pipeline.predict(images(16, 1)[0])
        saved = conv_batchnorm()
        saved.load_state_dict(pipeline.state_dict(full=True))
        torch.testing.assert_close(rows, saved.eval()(images(16, 1)[0]))


def test_a_fixed_loss_scale_that_always_overflows_is_told_once() -> None:
    with build("ranks=1 chunks=1 amp=fp16 loss_scale=1e9") as pipeline:
        with pytest.warns(UserWarning, match="10 updates in a row were skipped") as caught:
            for step in range(12):
                pipeline.step(*MLP.data(16, step))
        assert len(caught) == 1


# ------------------------------------------------------------------------------ between processes


def settings_apart() -> str:
    with build("ranks=2 dp=2 chunks=2 timeout=20", optimizer=adamw) as pipeline:
        pipeline.step(*MLP.data(8, 0))
        assert pipeline.optimizer is not None
        if pipeline.replica == 1:
            pipeline.optimizer.param_groups[0]["lr"] = 0.5
        try:
            pipeline.step(*MLP.data(8, 1))
        except DisagreementError as error:
            return str(error)
        return ""


def test_learning_rates_that_drift_apart(workers: Workers) -> None:
    for text in workers.run(settings_apart, 4):
        assert "different settings by now" in text


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 3 and self.training and self.armed:
            raise ValueError("broken")
        return x

    armed = False


def fails_while_alive() -> float:
    """Rank 3 fails in a step and lives on: how long until this rank knows?"""
    import time

    breaks = Breaks()
    model = nn.Sequential(*mlp(), breaks)
    pipeline = build("ranks=2 dp=2 zero=3 chunks=4 timeout=25", model, optimizer=adamw)
    pipeline.step(*MLP.data(8, 0))
    breaks.armed = True
    begun = time.monotonic()
    with pytest.raises((PeerError, ValueError)):
        pipeline.step(*MLP.data(8, 1))
    return time.monotonic() - begun


def test_a_failure_under_zero_3_is_known_at_once(workers: Workers) -> None:
    assert max(workers.run(fails_while_alive, 4)) < 12


def weightless() -> str:
    model = nn.Sequential(nn.Linear(17, 17), nn.SyncBatchNorm(17), nn.Linear(17, 5))
    with build("dp=2 chunks=2", model, weight=lambda t: (t >= 0).sum(), loss=ignoring) as pipeline:
        x, y = MLP.data(8, 0)
        if pipeline.replica == 0:
            y[4:] = -100
        try:
            pipeline.step(x, y)
        except ValueError as error:
            return str(error)
        return ""


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=-100)


def test_synchronized_statistics_of_a_microbatch_that_weighs_nothing(workers: Workers) -> None:
    for text in workers.run(weightless, 2):
        assert "microbatch 1 weighs nothing on some replicas" in text
