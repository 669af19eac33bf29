"""Does every schedule, partition and number of microbatches give plain training's parameters, bit for bit?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from covering import Row, cases, covering, product
from reference import (
    CONV_BATCHNORM,
    INPLACE_FIRST,
    MLP,
    TRANSFORMER,
    OptimizerFactory,
    Recipe,
    Trained,
    adamw,
    assert_same,
    momentum,
    pipelined,
    plain,
)
from workers import Workers

import schedules

# A schedule is tested by being in the table. (A CSV file is somebody's plan: see test_calls.)
SCHEDULES = [name for name in schedules.names() if name != "csv"]
CHUNKS: dict[str, Callable[[int], int]] = {
    "1": lambda ranks: 1,
    "P-1": lambda ranks: max(1, ranks - 1),
    "P": lambda ranks: ranks,
    "P+1": lambda ranks: ranks + 1,
    "8": lambda ranks: 8,
}
FACTORS: dict[str, list[Any]] = {
    "schedule": SCHEDULES,
    "ranks": [1, 2, 3, 4],
    "chunks": list(CHUNKS),
    "recipe": [MLP, CONV_BATCHNORM, TRANSFORMER, INPLACE_FIRST],
    "rows": [16, 17],
    "checkpoint": ["never", "except_last", "always"],
    "optimizer": [adamw, momentum],
    "clip": [None, 0.1],
}
BETWEEN_PROCESSES = {**FACTORS, "ranks": [2, 3, 4]}
PAIRS = covering(BETWEEN_PROCESSES)


def train(row: Row) -> Trained:
    return pipelined(
        row["recipe"],
        f"ranks={row['ranks']} chunks={CHUNKS[row['chunks']](row['ranks'])} "
        f"schedule={row['schedule']} checkpoint={row['checkpoint']}",
        rows=row["rows"],
        optimizer=row["optimizer"],
        clip=row["clip"],
    )


def train_all(rows: list[Row]) -> list[Trained]:
    return [train(row) for row in rows]


def expected(row: Row) -> Trained:
    chunks = CHUNKS[row["chunks"]](row["ranks"])
    return plain(row["recipe"], chunks, rows=row["rows"], optimizer=row["optimizer"], clip=row["clip"])


@pytest.mark.parametrize(tuple(FACTORS), cases(FACTORS))
def test_in_one_process(
    schedule: str,
    ranks: int,
    chunks: str,
    recipe: Recipe,
    rows: int,
    checkpoint: str,
    optimizer: OptimizerFactory,
    clip: float | None,
) -> None:
    row = dict(
        zip(FACTORS, (schedule, ranks, chunks, recipe, rows, checkpoint, optimizer, clip), strict=True)
    )
    assert_same(train(row), expected(row))


def check_between_processes(workers: Workers, rows: list[Row]) -> None:
    """One job for many cases: a pipeline is quickly made, a process isn't."""
    ranks = rows[0]["ranks"]
    by_rank = workers.run(train_all, ranks, rows, timeout=30 + len(rows))
    for row, *found in zip(rows, *by_rank, strict=True):
        assert_same(found[0], expected(row))
        for other in found[1:]:
            assert other.losses == found[0].losses and not other.state, row


@pytest.mark.parametrize("ranks", BETWEEN_PROCESSES["ranks"])
def test_between_processes(workers: Workers, ranks: int) -> None:
    check_between_processes(workers, [row for row in PAIRS if row["ranks"] == ranks])


# One process has the whole product. Of it, this is what a transport can touch: not the optimizer, and of the
# models one whose boundaries change in size, and one whose stages write to them.
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", [TRANSFORMER, INPLACE_FIRST], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", BETWEEN_PROCESSES["ranks"])
def test_between_processes_in_full(workers: Workers, ranks: int, schedule: str, recipe: Recipe) -> None:
    one = {**FACTORS, "ranks": [ranks], "schedule": [schedule], "recipe": [recipe], "optimizer": [adamw]}
    check_between_processes(workers, product(one))


# Any contiguous cut will do, and a rank may own several stages.
MAPS = [
    "0:0-1,1:1-9",
    "0:0-8,1:8-9",
    "0:0-3,1:3-4,2:4-9",
    "0:0-2,1:2-5,0:5-7,1:7-9",
    "0:0-2,1:2-4,1:4-6,0:6-9",
    "0:0-4,0:4-9",
    "1:0-4,0:4-9",
    "2:0-1,0:1-2,1:2-3,1:3-4,2:4-5,0:5-6,0:6-7,2:7-8,1:8-9",
]


@pytest.mark.parametrize("checkpoint", FACTORS["checkpoint"])
@pytest.mark.parametrize("device_map", MAPS)
def test_cuts_and_placements(device_map: str, checkpoint: str) -> None:
    found = pipelined(
        MLP, f"chunks=5 schedule=gpipe checkpoint={checkpoint} device_map={device_map}", clip=0.1
    )
    assert_same(found, plain(MLP, 5, clip=0.1))


def test_cuts_and_placements_between_processes(workers: Workers) -> None:
    for ranks in (2, 3):
        maps = [text for text in MAPS if len({part.split(":")[0] for part in text.split(",")}) == ranks]
        for found in workers.run(train_maps, ranks, maps)[0]:
            assert_same(found, plain(MLP, 5, clip=0.1))


def train_maps(maps: list[str]) -> list[Trained]:
    return [pipelined(MLP, f"chunks=5 schedule=gpipe device_map={text}", clip=0.1) for text in maps]
