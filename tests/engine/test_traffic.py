"""Does a step send between replicas what the theory says, to the byte?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import Row, cases, covering
from reference import adamw, build
from torch import Tensor, nn
from workers import Workers

from partitioners import DeviceMap
from schedules import UNSHARD

# Of layers without biases that two and three replicas can share: nothing is filled up.
WIDTHS = [(64, 96), (96, 96), (96, 64), (64, 96)]
LAYERS = [a * b for a, b in WIDTHS]
FACTORS: dict[str, list[Any]] = {
    "dp": [2, 3],
    "zero": [0, 1, 2, 3],
    "amp": ["off", "fp16", "bf16"],
    "k": [1, 2, 3],
    "chunks": [1, 3, 4],
    "schedule": ["1f1b", "gpipe", "looped_bfs", "zb_h1"],
    "bucket_mb": [0.03, 25],
}
BETWEEN_PROCESSES: dict[str, list[Any]] = {
    "dp": [2],
    "zero": [0, 1, 2, 3],
    "amp": ["off", "bf16"],
    "k": [1, 2],
    "chunks": [3],
    "schedule": ["1f1b", "looped_bfs"],
    "bucket_mb": [0.03],
}
STAGES = {
    "1f1b": "0:0-2,1:2-4",
    "gpipe": "0:0-1,1:1-4",
    "looped_bfs": "0:0-1,1:1-2,0:2-3,1:3-4",
    "zb_h1": "0:0-3,1:3-4",
}
Traffic = dict[int, dict[str, int]]


def is_possible(row: Row) -> bool:
    return row["zero"] >= 2 or row["k"] == 1


def narrow() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in WIDTHS))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 64), torch.randint(0, 96, (rows,))


def options(row: Row) -> str:
    every = f"reduce_every={row['k']}" if row["zero"] >= 2 else ""
    return (
        f"dp={row['dp']} zero={row['zero']} amp={row['amp']} chunks={row['chunks']} {every} "
        f"bucket_mb={row['bucket_mb']} schedule={row['schedule']} device_map={STAGES[row['schedule']]}"
    )


def sent(row: Row, rows: int) -> tuple[Traffic, Traffic]:
    """What a step sends, by theory and as counted, by rank."""
    with build(options(row), narrow(), optimizer=adamw) as pipeline:
        for _ in range(2):  # what is sent at construction and in the first step is over
            pipeline.step(*batch(rows))
        return theory(pipeline, row), pipeline.traffic


def theory(pipeline: Any, row: Row) -> Traffic:
    share = (row["dp"] - 1) / row["dp"]
    size = 4 if row["amp"] == "off" else 2
    found: Traffic = {}
    for rank in pipeline.traffic:
        stages = {
            index: sum(LAYERS[layer] for layer in layers)
            for index, layers in enumerate(DeviceMap.parse(STAGES[row["schedule"]]).stages)
            if pipeline.plan.placement[index] == rank
        }
        elements = sum(stages.values())
        reductions = -(-row["chunks"] // row["k"]) if row["zero"] >= 2 else 1
        if row["zero"] == 3:
            unsharded = [a.stage for a in pipeline.plan.programs[rank] if a.op == UNSHARD]
            assert set(unsharded) == set(stages)
            gathered = sum(stages[stage] for stage in unsharded) * size
        else:
            gathered = elements * (size if row["zero"] else 4)
        found[rank] = {
            "reduce": round(reductions * elements * 4 * share),
            "gather": round(gathered * share),
        }
    return found


@pytest.mark.parametrize(tuple(FACTORS), cases(FACTORS, valid=is_possible))
def test_in_one_process(
    dp: int, zero: int, amp: str, k: int, chunks: int, schedule: str, bucket_mb: float
) -> None:
    row = dict(zip(FACTORS, (dp, zero, amp, k, chunks, schedule, bucket_mb), strict=True))
    expected, found = sent(row, 4 * dp)
    assert list(found) == [0, 1]
    assert found == expected


def sent_by_all(rows: list[Row]) -> list[tuple[Traffic, Traffic]]:
    return [sent(row, 4) for row in rows]


def test_between_processes(workers: Workers) -> None:
    """Two ranks of two replicas: each counts for itself, and the replicas send the same."""
    rows = covering(BETWEEN_PROCESSES, valid=is_possible)
    by_member = workers.run(sent_by_all, 4, rows, timeout=100)
    for at, row in enumerate(rows):
        in_process = sent(row, 8)[1]
        for member, found in enumerate(by_member):
            expected, counted = found[at]
            assert counted == expected == {member // 2: in_process[member // 2]}, row


def test_one_replica_sends_nothing() -> None:
    for zero in range(4):
        with build(f"ranks=2 zero={zero} amp=bf16 chunks=2", narrow(), optimizer=adamw) as pipeline:
            pipeline.step(*batch(4))
            assert not any(any(kinds.values()) for kinds in pipeline.traffic.values())


@pytest.mark.parametrize("zero", range(4))
def test_what_other_calls_send_is_not_the_next_steps(zero: int) -> None:
    """Evaluation gathers ZeRO-3's parameters, and a state dict the master weights."""
    with build(f"ranks=2 dp=2 zero={zero} amp=bf16 chunks=2", narrow(), optimizer=adamw) as pipeline:
        pipeline.step(*batch(4))
        before = pipeline.traffic
        pipeline.evaluate(*batch(4))
        pipeline.predict(batch(4)[0])
        pipeline.state_dict(full=True)
        assert pipeline.traffic == before
        pipeline.step(*batch(4))
        assert pipeline.traffic == before


@pytest.mark.parametrize("zero", range(4))
def test_calls_that_accumulate(zero: int) -> None:
    """Gradients that are kept in full wait for the update; shards get theirs at once."""
    with build(f"dp=2 zero={zero} chunks=2", narrow(), optimizer=adamw) as pipeline:
        pipeline.step(*batch(4))
        whole = pipeline.traffic[0]
        pipeline.step(*batch(4), update=False)
        part = pipeline.traffic[0]
        assert part.get("reduce", 0) == (whole["reduce"] if zero >= 2 else 0)
        assert part.get("gather", 0) == (whole["gather"] if zero == 3 else 0)
        pipeline.step(*batch(4))
        assert pipeline.traffic[0] == whole
