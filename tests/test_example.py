"""Does the example train alike under every schedule, to the bit, in replicas and in one process as in two?"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import schedules
from pipe import Pipeline

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
SCHEDULES = [name for name in schedules.names() if name != "csv"]
# The same four cuts for every schedule that wants two stages a rank, in the order in which it wants them.
CUTS = {2: "0:0-5,1:5-10", 4: "{}:0-3,{}:3-5,{}:5-8,{}:8-10"}


@functools.cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def curve(options: str, *, dropout: float = 0.1) -> list[float]:
    """The losses of six steps with clipping, on some of the example's own text."""
    gpt = example()
    torch.manual_seed(0)
    model = gpt.gpt(dim=32, heads=2, seq_len=16, dropout=dropout)
    text = torch.frombuffer(bytearray(SCRIPT.read_bytes()), dtype=torch.uint8)
    optimizer = functools.partial(gpt.adamw, lr=3e-3)
    with Pipeline(
        model, options, loss=gpt.loss, optimizer=optimizer, clip=1.0, seed=1, device="cpu"
    ) as pipeline:
        found = gpt.batches(pipeline, gpt.random_windows(text, 6 * 7, 16, 0), 7)
        return [pipeline.step(inputs, targets).item() for inputs, targets in found]


@functools.cache
def expected() -> list[float]:
    return curve("chunks=5 device_map=0:0-5,1:5-10 schedule=gpipe")


@pytest.mark.parametrize("partition", ["the same", "its own"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_the_same_loss_curve(name: str, partition: str) -> None:
    placement = schedules.get(name).placement(2)
    layers = CUTS[len(placement)].format(*placement)
    options = f"device_map={layers}" if partition == "the same" else "ranks=2"
    assert curve(f"chunks=5 schedule={name} {options}") == expected()


@functools.cache
def expected_without_dropout() -> list[float]:
    # Replicas draw numbers of their own.
    return curve("chunks=5 ranks=2", dropout=0.0)


@pytest.mark.parametrize(
    "options",
    [
        "dp=2",
        "dp=3",
        "dp=2 zero=1",
        "dp=2 zero=2",
        "dp=2 zero=3 schedule=zb_h1",
        "dp=1 zero=1 offload",
        "dp=2 zero=2 reduce_every=2 offload",
    ],
)
def test_replicas_and_zero_leave_the_loss_curve_alone(options: str) -> None:
    """Also of a batch of 7, which replicas can't share evenly."""
    found = curve(f"chunks=3 ranks=2 {options}", dropout=0.0)
    assert found == pytest.approx(expected_without_dropout(), rel=1e-5)


@pytest.mark.parametrize("options", ["amp=bf16 zero=1", "amp=fp16 zero=3 offload"])
def test_half_precision_stays_near_the_loss_curve(options: str) -> None:
    found = curve(f"chunks=3 ranks=2 dp=2 {options}", dropout=0.0)
    assert found == pytest.approx(expected_without_dropout(), rel=0.02)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*command: str, options: str = "chunks=5 device_map=0:0-5,1:5-10") -> str:
    """What the example prints on the text of this repository, small."""
    small = ["--steps", "12", "--dim", "16", "--heads", "2", "--seq-len", "32", "--batch-size", "8"]
    result = subprocess.run(
        [*command, str(SCRIPT), *small, "--pipeline", options, "--text", str(SCRIPT), __file__],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(SCRIPT.parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_command_prints_the_same_in_one_process_and_in_two() -> None:
    alone = run(sys.executable)
    assert run(*TORCHRUN) == alone
    assert re.search(r"validation loss +\d+\.\d+ bits per byte", alone)
    assert re.search(r"unigram entropy +\d+\.\d+ bits", alone)
    assert "sample at temperature" in alone


def test_replicas_print_the_same_in_one_process_and_in_two() -> None:
    options = "chunks=2 ranks=1 dp=2 amp=bf16 zero=2 offload"
    assert run(*TORCHRUN, options=options) == run(sys.executable, options=options)
