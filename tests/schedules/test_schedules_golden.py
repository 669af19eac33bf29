"""Are the schedules' orders and pictures those of the literature?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from strict_model import completes, makespan

from schedules import (
    SCHEDULES,
    B,
    DualPipeV,
    F,
    GPipe,
    OneFOneB,
    Problem,
    Schedule,
    ScheduleError,
    build,
    forward_only,
    get,
)

GOLDEN = Path(__file__).parent / "golden"
RANKS = range(1, 9)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 13, 16)


def letters(schedule: Schedule, ranks: int, microbatches: int) -> list[str]:
    """Orders in the notation of the papers: F0' is of a rank's second stage, (F7+B3') an overlapped pair."""
    problem = Problem(schedule.placement(ranks), microbatches)
    pairs = schedule.pairs(problem) if isinstance(schedule, DualPipeV) else [()] * ranks
    rows = []
    for rank, order in enumerate(schedule.orders(problem)):
        stages, firsts = problem.stages_of(rank), set(pairs[rank])
        row = [f"{a.op}{a.microbatch}" + "'" * stages.index(a.stage) for a in order]
        for first in firsts:
            row[first] = f"({row[first]}+{row[first + 1]})"
        rows.append(" ".join(text for place, text in enumerate(row) if place - 1 not in firsts))
    return rows


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*_p4_m8.txt")), ids=lambda path: path.stem)
def test_golden_orders(path: Path) -> None:
    schedule = get(path.name.removesuffix("_p4_m8.txt"))
    assert letters(schedule, 4, 8) == path.read_text().splitlines()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_is_what_is_drawn(name: str) -> None:
    """The docstring's rows of ranks; where they end in ..., as far as they go."""
    rows = re.findall(r"rank [0-9]+ +(\S.*)", SCHEDULES[name].__doc__ or "")
    assert len(rows) >= 2
    microbatches = 1 + max(int(number) for number in re.findall(r"F([0-9]+)", rows[0]))
    schedule = get(name)
    drawn = build(schedule, schedule.placement(len(rows)), microbatches).draw(color=False).splitlines()[2:]
    for row, line in zip(rows, drawn, strict=True):
        assert line.partition("  ")[2].startswith(row.removesuffix("..."))
        assert row.endswith("...") or line.endswith(row)


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("ranks", RANKS)
def test_closed_forms(ranks: int, microbatches: int) -> None:
    p, m = ranks, microbatches
    for schedule, peak in ((GPipe(), [m] * p), (OneFOneB(), [min(m, p - r) for r in range(p)])):
        plan = build(schedule, schedule.placement(p), m)
        assert plan.peak_live == tuple(peak)
        assert plan.in_order and not plan.forward_only
        # Both ends of a transfer block, and still the lowering costs nothing: idle is (p-1)(F+B).
        assert makespan(plan) == (m + p - 1) * 3
        assert [[a.op for a in order].count(B) for order in plan.orders] == [m] * p


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("ranks", RANKS)
def test_forward_only(ranks: int, microbatches: int) -> None:
    for schedule in (GPipe(), OneFOneB()):
        plan = build(schedule, range(ranks), microbatches)
        forward = forward_only(plan)
        assert forward == build(schedule, range(ranks), microbatches, forward_only=True)
        assert forward_only(forward) is forward
        assert forward.forward_only and forward.peak_live == (0,) * ranks
        assert makespan(forward) == microbatches + ranks - 1
        expected = [[a for a in order if a.op == F] for order in plan.orders]
        assert [list(order) for order in forward.orders] == expected


@pytest.mark.parametrize(
    "placement", [(0, 1, 0, 1), (0, 1, 1, 0), (1, 0), (0, 0, 0), (2, 0, 1, 1, 0, 2), (0, 0, 1)]
)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_gpipe_takes_any_placement(placement: tuple[int, ...], microbatches: int) -> None:
    assert completes(build(GPipe(), placement, microbatches))


def test_1f1b_works_by_stage_on_ranks_in_any_order() -> None:
    plan = build(OneFOneB(), (2, 0, 3, 1), 8)
    assert plan.peak_live == (3, 1, 4, 2)
    assert makespan(plan) == 33


def test_1f1b_says_what_it_needs() -> None:
    with pytest.raises(ScheduleError, match=r"one stage per rank.* 0,1,0,1 puts 4 stages on 2 ranks.*gpipe"):
        build(OneFOneB(), (0, 1, 0, 1), 4)
