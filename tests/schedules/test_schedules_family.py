"""Does every named schedule work at every size, as idle and as large as its closed form says?"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest
from strict_model import makespan

from schedules import (
    SCHEDULES,
    Costs,
    Interleaved,
    LoopedBFS,
    Plan,
    Schedule,
    ScheduleError,
    Timeline,
    build,
    get,
    simulate,
)

TABLE = Path(__file__).parent / "golden" / "zero_bubble_tables_5_and_9.csv"
RANKS = range(2, 17)


def sizes(p: int) -> list[int]:
    """Microbatches below, at and above all that the definitions ask for."""
    some = {1, 2, 3, 5, 8, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 4 * p, 33}
    return sorted(some - {0})


@cache
def plan_of(name: str, ranks: int, microbatches: int) -> Plan:
    schedule = get(name)
    return build(schedule, schedule.placement(ranks), microbatches)


@cache
def timeline_of(name: str, ranks: int, microbatches: int) -> Timeline:
    return simulate(plan_of(name, ranks, microbatches))


def idle(timeline: Timeline) -> float:
    """Of the makespan, what no rank can fill: it is as long as a rank's work and this."""
    return timeline.makespan - float(timeline.busy.max())


def span_idle(timeline: Timeline) -> float:
    return timeline.span - float(timeline.busy.max())


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_size_works_in_order_above_the_lower_bound(name: str, p: int) -> None:
    stages = len(get(name).placement(p)) // p
    for m in (*sizes(p), 13):
        timeline = timeline_of(name, p, m)
        assert timeline.plan.in_order
        # Nothing ends before the first microbatch has come to the last rank and back, F I W of all after it.
        assert timeline.makespan >= p - 1 + 3 * m * stages
        assert idle(timeline) >= p - 1 and span_idle(timeline) >= 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_never_waits(name: str) -> None:
    for m in (1, 2, 3, 8):
        timeline = timeline_of(name, 1, m)
        assert timeline.rate == 0 and timeline.plan.in_order


@pytest.mark.parametrize("p", RANKS)
def test_closed_forms_of_idle_time(p: int) -> None:
    for m in sizes(p):
        for name in ("gpipe", "1f1b", "eager_1f1b"):
            assert idle(timeline_of(name, p, m)) == (p - 1) * 3
        if m % p == 0:
            assert idle(timeline_of("interleaved", p, m)) == (p - 1) * 3
        if m >= p:
            assert idle(timeline_of("looped_bfs", p, m)) == (p - 1) * 3
            assert idle(timeline_of("zb_h1", p, m)) == p - 1
        if m >= 2 * p - 1:
            assert span_idle(timeline_of("zb_h2", p, m)) == 0
        assert span_idle(timeline_of("zb_v", p, m)) == 2 * max(0, 2 * p - 1 - m)
        if m >= 2 * p:
            assert idle(timeline_of("dualpipe_v", p, m)) <= 2 * (p - 1)


@pytest.mark.parametrize("p", RANKS)
def test_peaks_of_live_activations(p: int) -> None:
    ranks = range(p)
    for m in sizes(p):
        exact = {
            "gpipe": [m] * p,
            "1f1b": [min(m, p - r) for r in ranks],
            "eager_1f1b": [min(m, 2 * (p - r) - 1) for r in ranks],
            "looped_bfs": [2 * m] * p,
            "zb_h1": [min(m, p)] * p,
            "zb_h2": [min(m, 2 * p - 1)] * p,
        }
        for name, peaks in exact.items():
            assert plan_of(name, p, m).peak_live == tuple(peaks), name
        within = {
            "interleaved": ([min(2 * m, 2 * (p - r) + p - 1) for r in ranks], m % p == 0),
            "zb_v": ([min(2 * m, 2 * p)] * p, m >= 2 * p - 1),
            "dualpipe_v": ([min(2 * m, 2 * p + 1)] * p, m >= 2 * p),
            "v_half": ([2 * ((p + 2) // 2)] * p, False),
            "v_min": ([2 * ((p + 4) // 3)] * p, False),
        }
        for name, (bounds, reached) in within.items():
            found = plan_of(name, p, m).peak_live
            assert all(peak <= bound for peak, bound in zip(found, bounds, strict=True)), name
            assert not reached or found == tuple(bounds), name


def test_makespans_at_p4_m8() -> None:
    expected = {
        "gpipe": 33, "1f1b": 33, "eager_1f1b": 33, "interleaved": 57, "looped_bfs": 57, "zb_h1": 27,
        "zb_h2": 27, "zb_v": 51, "v_half": 53, "v_min": 59, "dualpipe_v": 54,
        "auto": 27,
    }  # fmt: skip
    assert {name: timeline_of(name, 4, 8).makespan for name in SCHEDULES} == expected
    spans = {name: timeline_of(name, 4, 8).span for name in ("zb_h1", "zb_h2", "zb_v")}
    assert spans == {"zb_h1": 27, "zb_h2": 24, "zb_v": 48}
    peaks = {name: max(plan_of(name, 4, 8).peak_live) for name in ("v_half", "v_min")}
    assert peaks == {"v_half": 6, "v_min": 4}


def test_transfers_hide_behind_eager_forwards() -> None:
    costs = Costs(latency=1)
    assert simulate(plan_of("1f1b", 4, 8), costs).makespan == 49
    assert simulate(plan_of("eager_1f1b", 4, 8), costs).makespan == 39


def test_v_shapes_at_p8_m32() -> None:
    """The rates of the controllable-memory paper; 1F1B's is .1795."""
    rates = {name: 1 - 192 / timeline_of(name, 8, 32).span for name in ("v_half", "v_min")}
    assert round(rates["v_half"], 4) <= 0.0813 and round(rates["v_min"], 4) <= 0.1233


@pytest.mark.parametrize(
    "row", tuple(csv.DictReader(TABLE.open())), ids=lambda row: f"{row['model']}-{row['m']}"
)
def test_zero_bubble_table_5(row: dict[str, str]) -> None:
    """All cells of 1F1B, ZB-H1 and ZB-H2, to the four digits printed (arXiv 2401.10241)."""
    p, m = int(row["p"]), int(row["m"])
    forward, inputs, weight, latency = (float(row[key]) for key in ("TF", "TB", "TW", "Tcomm"))
    costs = Costs(F=forward, I=inputs, W=weight, latency=latency)
    for column, name in (("1F1B", "1f1b"), ("ZB-H1", "zb_h1"), ("ZB-H2", "zb_h2")):
        span = simulate(plan_of(name, p, m), costs).span
        rate = (span - m * (forward + inputs + weight)) / span
        assert f"{rate:.4f}" == row[column], name


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_strict_rendezvous_runs_come_to_an_end(name: str, p: int) -> None:
    """Both ends of a transfer block, and still it costs nothing, but for interleaved."""
    for m in sorted({1, p - 1, p, p + 1, 2 * p + 1}):
        plan = plan_of(name, p, m)
        strict = simulate(plan, rendezvous=True, blocking=True).makespan
        if name != "interleaved":
            assert strict == timeline_of(name, p, m).makespan
        if any(plan.pairs):
            assert makespan(plan) <= strict  # the engine, and the model, run the two in turn
        else:
            assert makespan(plan) == strict


@pytest.mark.parametrize("v", [1, 3, 4])
@pytest.mark.parametrize("make", [Interleaved, LoopedBFS])
def test_other_numbers_of_rounds(make: type[Interleaved] | type[LoopedBFS], v: int) -> None:
    for p in (1, 2, 3, 5, 8):
        for m in (1, 2, p, 7, 2 * p):
            schedule = make(v)
            plan = build(schedule, schedule.placement(p), m)
            assert plan.in_order
            if m % p == 0:
                assert idle(simulate(plan)) == (p - 1) * 3
    if make is Interleaved and v == 1:
        assert build(Interleaved(1), range(4), 8) == plan_of("eager_1f1b", 4, 8)


@pytest.mark.parametrize(
    ("name", "ranks_in_order"),
    [(name, order) for name in SCHEDULES for order in [(1, 0), (2, 0, 1), (3, 1, 0, 2)]],
)
def test_ranks_may_stand_in_any_order(name: str, ranks_in_order: tuple[int, ...]) -> None:
    schedule: Schedule = get(name)
    straight = schedule.placement(len(ranks_in_order))
    plan = build(schedule, [ranks_in_order[rank] for rank in straight], 5)
    same = plan_of(name, len(ranks_in_order), 5)
    assert simulate(plan).makespan == simulate(same).makespan
    assert [plan.peak_live[rank] for rank in ranks_in_order] == list(same.peak_live)


@pytest.mark.parametrize(
    ("text", "placement", "message"),
    [
        ("eager_1f1b", (0, 1, 0, 1), "eager_1f1b needs one stage per rank.* 0,1 would do, or gpipe"),
        (
            "interleaved",
            (0, 1),
            r"interleaved\(2\) needs 2 stages per rank, in 2 like rounds.* 0,1,0,1 would",
        ),
        ("interleaved", (0, 1, 1, 0), r"interleaved\(2\) needs 2 stages per rank"),
        ("interleaved(2)", (0, 1) * 3, r"interleaved\(2\) needs 2 stages per rank"),
        ("looped_bfs(3)", (0, 1, 0, 1), r"looped_bfs\(3\) needs 3 stages per rank.* 0,1,0,1,0,1 would do"),
        ("zb_h1", (0, 0), "zb_h1 needs one stage per rank"),
        ("zb_h2", (0, 0), "zb_h2 needs one stage per rank"),
        ("zb_v", (0, 1, 0, 1), "zb_v needs two stages per rank, there and back.* 0,1,1,0 would do"),
        ("v_half", (0,), "v_half needs two stages per rank.* 0,0 would do"),
        ("v_min", (0, 1, 2), "v_min needs two stages per rank.* 0,1,2,2,1,0 would do"),
        ("dualpipe_v", (0, 1, 2), "dualpipe_v needs two stages per rank"),
    ],
)
def test_what_a_schedule_needs(text: str, placement: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(get(text), placement, 4)


@pytest.mark.parametrize("v", [0, -1, "2", True])
def test_what_is_no_number_of_rounds(v: object) -> None:
    for make in (Interleaved, LoopedBFS):
        with pytest.raises(ScheduleError, match=r"a rank has 1, 2, \.\.\. stages"):
            make(v)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("p", [*range(1, 17), 23, 24, 32, 48])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size(name: str, p: int) -> None:
    schedule = get(name)
    for m in range(1, 3 * p + 3) if p <= 16 else sizes(p):
        plan = build(schedule, schedule.placement(p), m)
        assert plan.in_order
        simulate(plan)
