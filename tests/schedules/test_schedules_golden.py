"""Are GPipe's and 1F1B's orders, makespans and peaks those of the literature?"""

from __future__ import annotations

from pathlib import Path

import pytest
from strict_model import completes, makespan

from schedules import B, F, GPipe, OneFOneB, Problem, Schedule, ScheduleError, build, forward_only

GOLDEN = Path(__file__).parent / "golden"
RANKS = range(1, 9)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 13, 16)


def letters(schedule: Schedule, ranks: int, microbatches: int) -> list[str]:
    problem = Problem(tuple(range(ranks)), microbatches)
    return [" ".join(f"{a.op}{a.microbatch}" for a in order) for order in schedule.orders(problem)]


@pytest.mark.parametrize(("name", "schedule"), [("gpipe", GPipe()), ("1f1b", OneFOneB())])
def test_golden_orders(name: str, schedule: Schedule) -> None:
    golden = (GOLDEN / f"{name}_p4_m8.txt").read_text().splitlines()
    assert letters(schedule, 4, 8) == golden


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
