"""How many bytes a parameter does each rank hold, under which ZeRO stage?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory import Bytes, live_bytes, live_tensors, only_new, storages
from reference import adamw, build
from torch import Tensor, nn
from workers import Workers

from pipe import Pipeline

WIDTH = 192
LAYERS = 9
BUCKET_MB = 0.3  # two layers
REPLICAS = 3


def wide(layers: int = LAYERS) -> nn.Sequential:
    """Whole buckets that three replicas can share without a rest."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(0, WIDTH, (rows,))


# ------------------------------------------------------- between the last gradient and the step


class Scales:
    """Looks at memory whenever gradients are final and not yet used."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.seen: list[Bytes] = []
        self._pipeline = pipeline
        self._gradients = pipeline._updates._gradients
        self._scale = self._gradients.scale
        self._gradients.scale = self.scale  # type: ignore[method-assign]

    def scale(self, factor: float) -> Tensor | None:
        self.seen.append(live_bytes(self._pipeline))
        return self._scale(factor)


def hold_all(settings: list[str]) -> list[tuple[float, float]]:
    return [hold(options) for options in settings]


def hold(options: str) -> tuple[float, float]:
    """Bytes a parameter on the device and on the host, once there is a state of the optimizer."""
    options = f"dp={REPLICAS} chunks=3 bucket_mb={BUCKET_MB} {options}"
    with only_new(), build(options, wide(), optimizer=adamw) as pipeline:
        scales = Scales(pipeline)
        for _ in range(3):
            pipeline.step(*batch(6))  # of this replica
    parameters = LAYERS * WIDTH * WIDTH
    return scales.seen[2].device / parameters, scales.seen[2].host / parameters


# Half parameters, the fp32 gradient, then master weights and two moments in fp32.
BYTES = {
    "zero=0": 2 + 4 + 12,
    "zero=1": 2 + 4 + 12 / REPLICAS,
    "zero=2": 2 + 16 / REPLICAS,
    "zero=2 reduce_every=2": 2 + 16 / REPLICAS + 4,
    "zero=3": 16 / REPLICAS,
    "zero=3 reduce_every=3": 16 / REPLICAS + 4,
}


def test_bytes_a_parameter(workers: Workers) -> None:
    settings = [f"amp=bf16 {zero}" for zero in BYTES]
    for found in workers.run(hold_all, REPLICAS, settings, timeout=100):
        for (device, host), (zero, expected) in zip(found, BYTES.items(), strict=True):
            assert device == pytest.approx(expected, rel=0.03), zero
            assert host == 0


def hold_a_stage(settings: list[str]) -> list[float]:
    """Bytes on the device for a parameter of the rank's own, of two ranks with two replicas each."""
    found = []
    for options in settings:
        options = f"device_map=0:0-4,1:4-6 dp=2 chunks=3 bucket_mb={BUCKET_MB} {options}"
        with only_new(), build(options, wide(6), optimizer=adamw) as pipeline:
            scales = Scales(pipeline)
            for _ in range(2):
                pipeline.step(*batch(6))
            layers = 4 if pipeline.rank == 0 else 2
        found.append(scales.seen[1].device / (layers * WIDTH * WIDTH))
    return found


def test_a_rank_holds_its_own_stage_only(workers: Workers) -> None:
    zeros = {"zero=0": 18, "zero=1": 6 + 6, "zero=2": 2 + 8, "zero=3": 8}
    for found in workers.run(hold_a_stage, 4, [f"amp=bf16 {zero}" for zero in zeros]):
        assert found == pytest.approx(list(zeros.values()), rel=0.05)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offload_takes_masters_and_state_off_the_device(
    workers: Workers, tmp_path: Any, offload: str
) -> None:
    place = f"disk:{tmp_path}" if offload == "disk" else "cpu"
    zeros = ["zero=1", "zero=2", "zero=3"]
    for found in workers.run(hold_all, REPLICAS, [f"amp=bf16 offload={place} {zero}" for zero in zeros]):
        for (device, host), zero in zip(found, zeros, strict=True):
            assert device == pytest.approx(BYTES[zero] - 12 / REPLICAS, rel=0.03), zero
            # And two buckets for gradients on their way, however many there are.
            buffers = 2 * (4 / REPLICAS) * (2 / LAYERS)
            assert 12 / REPLICAS <= host < 12 / REPLICAS + 1.01 * buffers, zero


# ------------------------------------------------------------------------ parameters of ZeRO-3


class Peak:
    """The most bytes of half-precision weights that were there when any layer went forward or backward."""

    def __init__(self, model: nn.Sequential) -> None:
        self.bytes = 0
        self.looks = 0
        for layer in model:
            layer.register_forward_hook(self.look)
            layer.register_full_backward_hook(self.look)

    def look(self, *_: Any) -> None:
        halves = [t for t in live_tensors() if t.dtype == torch.bfloat16]
        gradients = storages(t.grad for t in halves if t.is_leaf and t.grad is not None)
        self.looks += 1
        self.bytes = max(self.bytes, sum(n for s, n in storages(halves).items() if s not in gradients))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_stages_at_most_are_unsharded(replicas: int) -> None:
    """Four of a rank's own, one after the other: the one at work, and the one that comes next."""
    schedule = "schedule=looped_bfs(4) device_map=0:0-2,0:2-4,0:4-6,0:6-8"
    options = f"dp={replicas} zero=3 amp=bf16 chunks=2 {schedule}"
    with only_new():
        model = wide(8)
        peak = Peak(model)
        with build(options, model, optimizer=adamw) as pipeline:
            for _ in range(2):
                pipeline.step(*batch(4 * replicas))
    stage = 2 * WIDTH * WIDTH * 2
    assert peak.looks == 8 * 2 * 2 * 2
    assert stage <= peak.bytes / replicas < 2.2 * stage  # with a few activations


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_between_calls_a_sharded_parameter_has_its_shape_and_nans(amp: str) -> None:
    dtype = torch.float32 if amp == "off" else torch.bfloat16
    with build(f"dp=2 zero=3 amp={amp} chunks=2", wide(2)) as pipeline:
        for call in (None, pipeline.step, pipeline.evaluate, lambda x, y: pipeline.predict(x)):
            if call is not None:
                call(*batch(4))
            for parameter in pipeline.stages[0].module.parameters():
                assert parameter.shape == (WIDTH, WIDTH) and parameter.dtype == dtype
                assert parameter.isnan().all()
                assert parameter.untyped_storage().size() == parameter.element_size()
        assert all(value.isfinite().all() for value in pipeline.state_dict().values())
