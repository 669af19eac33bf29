"""Does all of it run on a GPU too? (In one process: every rank of every replica on the devices there are.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import cases
from reference import MLP, TRANSFORMER, Recipe, adamw, assert_same, pipelined

pytestmark = pytest.mark.gpu

FACTORS: dict[str, list[Any]] = {
    "recipe": [MLP, TRANSFORMER],
    "zero": [0, 1, 2, 3],
    "amp": ["off", "bf16", "fp16"],
    "offload": ["", "offload"],
    "dp": [1, 2],
    "schedule": ["1f1b", "zb_h1", "looped_bfs(2)"],
}


@pytest.mark.parametrize(
    tuple(FACTORS), cases(FACTORS, valid=lambda row: not row["offload"] or row["zero"] > 0)
)
def test_every_way_trains_alike(
    recipe: Recipe, zero: int, amp: str, offload: str, dp: int, schedule: str
) -> None:
    """As without sharding, on the same device, in the same precision."""
    options = f"ranks=2 dp={dp} chunks=4 schedule={schedule} amp={amp}"
    expected = pipelined(recipe, options, optimizer=adamw, device="cuda")
    found = pipelined(recipe, f"{options} zero={zero} {offload}", optimizer=adamw, device="cuda")
    bitwise = zero < 2 and not offload
    if amp == "off" or bitwise:
        assert_same(found, expected, bitwise=bitwise)
    for mine, theirs in zip(found.losses, expected.losses, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
