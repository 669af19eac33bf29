"""Does the example's model learn in half precision what it learns in fp32?"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from test_example import SCRIPT, example

from pipe import Pipeline

STEPS, LAST = 200, 50


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(example(), "BLOCKS", 2)
    yield


def end_of_curve(options: str) -> float:
    """The mean loss of the last steps."""
    gpt = example()
    torch.manual_seed(0)
    model = gpt.gpt(dim=32, heads=2, seq_len=16, dropout=0.0)
    text = torch.frombuffer(bytearray(SCRIPT.read_bytes()), dtype=torch.uint8)
    optimizer = functools.partial(gpt.adamw, lr=4e-3)
    with Pipeline(model, options, loss=gpt.loss, optimizer=optimizer, clip=1.0, device="cpu") as pipeline:
        found = gpt.batches(pipeline, gpt.random_windows(text, STEPS * 8, 16, 0), 8)
        losses = [pipeline.step(x, y).item() for x, y in found]
    assert len(losses) == STEPS
    assert losses[0] > 5.0, "it begins with bytes that are all as likely"
    return sum(losses[-LAST:]) / LAST


@functools.cache
def in_full() -> float:
    return end_of_curve("ranks=2 chunks=2")


@pytest.mark.parametrize(
    "options",
    [
        "amp=fp16",
        "amp=bf16 dp=2 zero=3 offload",
        *(pytest.param(o, marks=pytest.mark.full) for o in ("amp=bf16", "amp=fp16 dp=2 zero=2")),
    ],
)
def test_the_last_losses_are_within_2_percent(options: str) -> None:
    assert in_full() < 4.0, "it has learnt something"
    assert end_of_curve(f"ranks=2 chunks=2 {options}") == pytest.approx(in_full(), rel=0.02)
