"""Does every ZeRO stage, offloaded or not, train as zero=0 does, and that as plain PyTorch does?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from covering import Row, cases, covering
from reference import MLP, Trained, plain
from replication import CHUNKS, Job, assert_near, between_processes, train
from workers import Workers

import schedules

SCHEDULES = [name for name in schedules.names() if name != "csv"]
# Gradients of zero=2 and 3 are reduced behind each microbatch, each second one, or (of 4) once.
SHARDINGS = [
    "zero=0",
    "zero=1",
    "zero=1 offload",
    *(
        f"zero={zero}{every}{offload}"
        for zero in (2, 3)
        for every in ("", " reduce_every=2")
        for offload in ("", " offload")
    ),
    "zero=2 reduce_every=4",
]
FACTORS: dict[str, list[Any]] = {
    "sharding": SHARDINGS,
    "dp": [1, 2, 3],
    "ranks": [1, 2],
    "schedule": SCHEDULES,
    "clip": [None, 0.1],
}
# Four processes, in as few jobs as there are numbers of them. (One replica has nobody to talk to.)
GRIDS = [(2, 2), (1, 3), (1, 2)]
BETWEEN = {
    "grid": GRIDS,
    "sharding": ["zero=3 reduce_every=2 offload", "zero=2", "zero=1"],
    "schedule": SCHEDULES,
    "clip": [0.1, None],
}


def job(row: Row) -> Job:
    options = f"ranks={row['ranks']} dp={row['dp']} chunks={CHUNKS} schedule={row['schedule']}"
    # A bucket a layer or so: what goes on between buckets shall happen too.
    return Job(MLP, f"{options} {row['sharding']} bucket_mb=0.002", {"clip": row["clip"]})


@functools.cache
def unsharded(dp: int, ranks: int, schedule: str, clip: float | None) -> Trained:
    row = {"dp": dp, "ranks": ranks, "schedule": schedule, "clip": clip, "sharding": "zero=0"}
    return train(job(row))


def adds_in_the_same_order(row: Row) -> bool:
    """Whether gradients are summed as zero=0 does: over microbatches first, and then over replicas.

    (The norm that they are clipped to is another sum, of the squares that each shard has.)
    """
    sharding = row["sharding"]
    if row["clip"] is not None:
        return bool(sharding == "zero=0")
    if "zero=1" in sharding or "zero=0" in sharding or "reduce_every=4" in sharding:
        return True
    return row["dp"] == 1 and "reduce_every" not in sharding


def check(found: Trained, row: Row) -> None:
    expected = unsharded(row["dp"], row["ranks"], row["schedule"], row["clip"])
    assert_near(found, expected, 0 if adds_in_the_same_order(row) else 1e-6)
    assert_near(found, plain(MLP, 1, clip=row["clip"]), 1e-5)


@pytest.mark.parametrize(tuple(FACTORS), cases(FACTORS))
def test_in_one_process(sharding: str, dp: int, ranks: int, schedule: str, clip: float | None) -> None:
    row = dict(zip(FACTORS, (sharding, dp, ranks, schedule, clip), strict=True))
    check(train(job(row)), row)


ON_DISK = [(1, 2, 1, "gpipe", 0.1), (2, 1, 2, "zb_h1", None), (3, 3, 2, "interleaved", None)]


@pytest.mark.parametrize(("zero", "dp", "ranks", "schedule", "clip"), ON_DISK)
def test_on_disk(zero: int, dp: int, ranks: int, schedule: str, clip: float | None, tmp_path: Path) -> None:
    row = {"dp": dp, "ranks": ranks, "schedule": schedule, "clip": clip}
    check(
        train(job({**row, "sharding": f"zero={zero} offload=disk:{tmp_path}"})),
        {**row, "sharding": f"zero={zero}"},
    )
    assert not list(tmp_path.iterdir())  # the files have no name


def test_on_disk_between_processes(workers: Workers, tmp_path: Path) -> None:
    row = {"dp": 2, "ranks": 1, "schedule": "1f1b", "clip": None}
    jobs = [job({**row, "sharding": f"zero={zero} offload=disk:{tmp_path}"}) for zero in (1, 2, 3)]
    for zero, found in enumerate(between_processes(workers, 2, jobs), 1):
        check(found, {**row, "sharding": f"zero={zero}"})


@pytest.mark.parametrize(("ranks", "dp"), GRIDS)
def test_between_processes(workers: Workers, ranks: int, dp: int) -> None:
    chosen = [row for row in covering(BETWEEN) if row["grid"] == (ranks, dp)]
    chosen.append({"sharding": "zero=0", "schedule": "1f1b", "clip": None})
    check_between(workers, [{**row, "ranks": ranks, "dp": dp} for row in chosen])


# Of the product, this is what a transport can touch.
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "dp"), [(2, 1), *GRIDS])
def test_between_processes_in_full(workers: Workers, ranks: int, dp: int, schedule: str) -> None:
    one = {"ranks": ranks, "dp": dp, "schedule": schedule, "clip": 0.1}
    check_between(workers, [{**one, "sharding": sharding} for sharding in SHARDINGS])


def check_between(workers: Workers, rows: list[Row]) -> None:
    """Bit for bit what one process gives, and that is right."""
    jobs = [job(row) for row in rows]
    members = rows[0]["ranks"] * rows[0]["dp"]
    for row, each, found in zip(rows, jobs, between_processes(workers, members, jobs), strict=True):
        assert_near(found, train(each), 0)
        check(found, row)
