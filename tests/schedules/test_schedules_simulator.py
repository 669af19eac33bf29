"""Does the simulator say when things run, what ranks wait for, and what they hold?"""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    COMPUTE,
    SCHEDULES,
    Costs,
    F,
    GPipe,
    OneFOneB,
    Plan,
    Problem,
    ScheduleError,
    Timeline,
    build,
    get,
    needs,
    simulate,
)
from schedules import graph as graph_module
from schedules.graph import longest_paths

INTEGERS = Costs(F=3, B=7, I=4, W=2, latency=2, activation_bytes=10, released_at_input=0.25)


def plan_of(name: str, ranks: int, microbatches: int) -> Plan:
    schedule = get(name)
    return build(schedule, schedule.placement(ranks), microbatches)


def plainly(plan: Plan, costs: Costs, latency: float) -> float:
    """The makespan, by running each rank until it waits: as plain as can be, for plans without pairs."""
    times = {op: costs.times(op, plan.num_stages, plan.microbatches) for op in COMPUTE}
    made: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * plan.ranks, [0] * plan.ranks
    orders = [list(order) for order in plan.orders]
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                stage, op, m, _ = order[at[rank]]
                wanted = [
                    need for need in needs(op, stage, plan.edges) if need.value in ("activation", "gradient")
                ]
                if any((need.value, need.source, m) not in made for need in wanted):
                    break
                far = [
                    made[n.value, n.source, m] + latency * (plan.placement[n.source] != rank) for n in wanted
                ]
                clock[rank] = max([clock[rank], *far]) + float(times[op][stage, m])
                if op != "W":
                    made["activation" if op == F else "gradient", stage, m] = clock[rank]
                at[rank] += 1
                moving = True
    assert all(at[rank] == len(order) for rank, order in enumerate(orders))
    return max(clock)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 7), st.integers(0, 3), st.data())
def test_against_a_plain_run(
    name: str, ranks: int, microbatches: int, latency: int, data: st.DataObject
) -> None:
    """Costs by stage and microbatch, whole numbers, so that times compare exactly."""
    plan = dataclasses.replace(plan_of(name, ranks, microbatches), pairs=())
    numbers = st.integers(0, 5)
    rows = st.lists(
        st.lists(numbers, min_size=microbatches, max_size=microbatches),
        min_size=plan.num_stages,
        max_size=plan.num_stages,
    )
    costs = Costs(F=data.draw(rows), I=data.draw(rows), W=data.draw(rows), latency=latency)
    timeline = simulate(plan, costs)
    assert timeline.makespan == plainly(plan, costs, latency)
    check(timeline)


@pytest.mark.parametrize("modes", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "costs", [Costs(), INTEGERS, dataclasses.replace(INTEGERS, bandwidth=2, boundary_bytes=6)]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_time_adds_up(name: str, costs: Costs, modes: tuple[bool, bool]) -> None:
    for ranks, microbatches in ((1, 3), (2, 5), (4, 8), (5, 3)):
        timeline = simulate(plan_of(name, ranks, microbatches), costs, rendezvous=modes[0], blocking=modes[1])
        check(timeline)


def check(timeline: Timeline) -> None:
    """What holds of any timeline of whole-numbered times."""
    plan, bubble = timeline.plan, timeline.bubble
    assert all((part >= 0).all() for part in bubble)
    assert np.array_equal(bubble.total + timeline.busy, np.full(plan.ranks, timeline.makespan))
    assert timeline.rate == pytest.approx(float(bubble.total.sum()) / (plan.ranks * timeline.makespan or 1))
    assert timeline.span <= timeline.makespan
    for rank in range(plan.ranks):
        held = timeline.held(rank)
        assert (np.diff(held.times) >= 0).all() and held.live.max() == plan.peak_live[rank]
        assert held.live[-1] == 0 and held.size[-1] == pytest.approx(0)
    check_critical(timeline)


def check_critical(timeline: Timeline) -> None:
    """From the first start to the last end, each behind the one before it."""
    path = timeline.critical_path
    numbers = [int(timeline.offsets[rank]) + position for rank, position, _ in path]
    starts, ends = timeline.starts[numbers], timeline.ends[numbers]
    assert starts[0] == 0 and ends[-1] == timeline.makespan
    assert (ends[:-1] <= starts[1:]).all()
    if timeline.costs.latency == 0 and timeline.costs.boundary_bytes == 0:
        assert (ends[:-1] == starts[1:]).all()


def test_where_the_time_goes() -> None:
    """
    rank 0   F0 F1 .  .  .  .  B0--- .  B1---       latency 1 between the two
    rank 1   .  .  F0 B0--- F1 B1--- .  .  .
    """
    timeline = simulate(build(OneFOneB(), (0, 1), 2), Costs(latency=1))
    bubble = timeline.bubble
    assert timeline.makespan == 11
    assert bubble.warm_up.tolist() == [0, 2] and bubble.drain.tolist() == [0, 3]
    assert bubble.gradient.tolist() == [3, 0] and bubble.communication.tolist() == [2, 0]
    assert bubble.activation.tolist() == [0, 0]
    assert [str(action) for _, _, action in timeline.critical_path] == [
        "0F0",
        "1F0",
        "1B0",
        "1F1",
        "1B1",
        "0B1",
    ]


def test_unequal_stages_and_microbatches() -> None:
    plan = build(GPipe(), (0, 1), 2)
    assert simulate(plan, Costs(F=(1, 5), B=1)).makespan == 1 + 10 + 2 + 1
    assert simulate(plan, Costs(F=[[1, 1], [1, 9]], B=1)).makespan == 1 + 10 + 2 + 1
    assert simulate(plan, Costs(F=np.array([1, 5]), B=1)).makespan == 14
    assert Costs(F=np.array([1, 5])) == Costs(F=(1, 5)) and hash(Costs(F=[1, 5])) == hash(Costs(F=(1, 5)))


def test_edges_of_their_own() -> None:
    plan = build(GPipe(), (0, 1, 2), 1)
    assert simulate(plan, Costs(latency={(0, 1): 5})).makespan == 9 + 10
    assert simulate(plan, Costs(boundary_bytes=6, bandwidth={(1, 2): 2})).makespan == 9 + 6
    assert simulate(plan, Costs(boundary_bytes={(0, 1): 8}, bandwidth=4, latency=1)).makespan == 9 + 4 + 4


def test_a_channel_carries_one_value_after_the_other() -> None:
    """Four values of 3 units each leave rank 0 from 1 on: the last has arrived at 13."""
    plan = build(GPipe(), (0, 1), 4, forward_only=True)
    assert simulate(plan, Costs(boundary_bytes=3, bandwidth=1)).makespan == 1 + 4 * 3 + 1
    assert simulate(plan, Costs(latency=3)).makespan == 4 + 3 + 1


def test_bytes_over_time() -> None:
    plan = Plan.parse("rank 0: 0F0 0F1 0I0 0W0 0I1 0W1")
    timeline = simulate(plan, Costs(activation_bytes=[[8, 4]], released_at_input=0.5))
    held = timeline.held(0)
    assert held.times.tolist() == [0, 1, 3, 4, 5, 6]
    assert held.live.tolist() == [1, 2, 2, 1, 1, 0] and held.size.tolist() == [8, 12, 8, 4, 2, 0]
    assert timeline.peak_bytes.tolist() == [12] and timeline.peak_live == (2,)


def test_blocking_costs() -> None:
    """Strictly, what a SEND waits for holds its rank up; 1F1B pays 2 (p-1) transfers and more."""
    plan = build(OneFOneB(), range(4), 8)
    costs = Costs(latency=1)
    eager = simulate(plan, costs).makespan
    blocking = simulate(plan, costs, blocking=True).makespan
    strict = simulate(plan, costs, rendezvous=True, blocking=True).makespan
    assert eager <= blocking <= strict and strict > eager


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (lambda: Costs(F=-1), "F=-1: a number is finite, and no less than 0"),
        (lambda: Costs(W=float("nan")), "W=nan"),
        (lambda: Costs(I=float("inf")), "I=inf"),
        (lambda: Costs(F="fast"), "F='fast': it takes a number, one a stage"),  # type: ignore[arg-type]
        (lambda: Costs(F=[[1, 2], [3]]), "it takes a number, one a stage, or"),
        (lambda: Costs(F={(0, 1): 1}), "it takes a number, one a stage, or"),  # type: ignore[arg-type]
        (lambda: Costs(latency=[1, 2]), "a mapping of edges to numbers"),  # type: ignore[arg-type]
        (lambda: Costs(bandwidth=0), "bandwidth=0: a bandwidth is more than 0"),
        (lambda: Costs(released_at_input=1.5), "a share is 0 to 1"),
        (lambda: Costs(F=(1, 2, 3)), r"F has shape \(3,\): it takes a number, one a stage \(2,\)"),
        (lambda: Costs(latency={(0, 2): 1}), r"\(0, 2\) is no edge of the plan"),
    ],
)
def test_what_are_no_costs(costs: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(build(OneFOneB(), (0, 1), 2), costs())  # type: ignore[operator]


def test_costs_of_a_problem() -> None:
    assert Problem((0,), 1, {"F": 2.0}).costs == Costs(F=2.0)
    assert build(OneFOneB(), (0, 1), 2, costs={"F": 2.0}) == build(OneFOneB(), (0, 1), 2)


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(ScheduleError, match="nothing takes its saved activation"):
        simulate(Plan.parse("rank 0: 0F0 0F1 0B0"))


def test_forward_only() -> None:
    timeline = simulate(build(OneFOneB(), range(3), 4, forward_only=True))
    assert timeline.makespan == 6 and timeline.peak_live == (0, 0, 0)
    assert timeline.peak_bytes.tolist() == [0, 0, 0]


def test_small_and_large_graphs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    nodes = 300
    ends = np.sort(generator.integers(0, nodes, (900, 2)), axis=1)
    ends = ends[ends[:, 0] < ends[:, 1]]
    arguments = (generator.random(nodes), ends[:, 0], ends[:, 1], generator.random(len(ends)))
    small = longest_paths(*arguments)
    monkeypatch.setattr(graph_module, "_FEW", 0)
    large = longest_paths(*arguments)
    assert np.array_equal(small.starts, large.starts) and large.done.all()


def test_drawing_with_costs_and_colour() -> None:
    timeline = simulate(build(OneFOneB(), (0, 1), 2), Costs(F=0.5, B=1, latency=0.5))
    assert timeline.draw(color=False).splitlines() == [
        "F forward, B backward; number = microbatch; . bubble; a column = 0.5",
        "  time  0              2.5            5",
        "rank 0  F0 F1 .  .  .  .  B0--- .  B1---",
        "rank 1  .  .  F0 B0--- F1 B1--- .  .  .",
    ]
    assert "\x1b[44;97mF0\x1b[0m" in timeline.draw(color=True)
    plain = simulate(build(OneFOneB(), (0, 1), 2))
    assert plain.draw(color=False) == plain.plan.draw(color=False)


def test_drawing_of_very_unequal_actions() -> None:
    rows = simulate(build(OneFOneB(), (0, 1), 2), Costs(F=0, B=1)).draw(color=False).splitlines()[2:]
    assert rows == ["rank 0  .  B0 B1", "rank 1  B0 B1 ."]
    long = simulate(build(OneFOneB(), (0, 1), 2), Costs(F=1e-6, B=1)).draw(color=False)
    assert max(map(len, long.splitlines()[1:])) < 1000
    assert simulate(build(OneFOneB(), (0,), 1), Costs(F=0, B=0)).draw(color=False)


def test_files(tmp_path: Path) -> None:
    timeline = simulate(plan_of("dualpipe_v", 3, 7))
    timeline.svg(tmp_path / "plan.svg")
    picture = ElementTree.parse(tmp_path / "plan.svg").getroot()
    titles = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert "F0: 0 to 1" in titles and any("&B" in str(title) for title in titles)
    timeline.chrome_trace(tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == {0, 1, 2}
    assert max(event["ts"] + event["dur"] for event in spans) == timeline.makespan
    pairs = sum(map(len, timeline.plan.pairs))
    assert len(spans) == len(titles) == sum(map(len, timeline.plan.programs)) - pairs
