"""Does `Auto` find orders as good as it must, in the memory that there is, and the same ones everywhere?"""

from __future__ import annotations

import csv
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from strict_model import completes

from schedules import (
    SCHEDULES,
    Auto,
    Costs,
    Found,
    GPipe,
    Plan,
    Problem,
    ScheduleError,
    Timeline,
    build,
    chain,
    get,
    simulate,
    text_of,
)
from schedules.bounds import lower_bound
from schedules.greedy import construct, rules
from schedules.instance import Instance, Objective
from schedules.local_search import improve

TABLE = Path(__file__).parent / "golden" / "zero_bubble_tables_5_and_9.csv"
PLACEMENTS = [(0,), (0, 0), (0, 1), (0, 1, 2), (2, 0, 1), (0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0),
              (0, 1, 0, 1), (0, 1, 2, 0, 1, 2), (0, 0, 1), (1, 0, 0, 1, 1)]  # fmt: skip


def random_costs(random: Random, stages: int, microbatches: int) -> Costs:
    """Whole numbers, halves and other fractions; by stage, by microbatch or neither; with and without B."""

    def cost(low: float) -> float | list[float] | list[list[float]]:
        scale = (1.0, 0.5, 0.1)[int(random.random() * 3)]
        number = [
            [low + scale * int(random.random() * 9) for _ in range(microbatches)] for _ in range(stages)
        ]
        return (number[0][0], [row[0] for row in number], number)[int(random.random() * 3)]

    def one_in_three() -> bool:
        return random.random() < 1 / 3

    wide = one_in_three()
    return Costs(
        F=cost(0.5),
        B=cost(1.0) if one_in_three() else None,
        I=cost(0.5),
        W=cost(0.0),
        pair=cost(1.0) if one_in_three() else None,
        latency=0.3 if one_in_three() else 0.0,
        bandwidth=2.0 if wide else float("inf"),
        boundary_bytes={(0, 1): 3.0} if wide and stages > 1 else 0.0,
        activation_bytes=cost(0.5) if one_in_three() else 1.0,
        released_at_input=(0.0, 0.5, 0.3)[int(random.random() * 3)],
    )


def random_orders(random: Random, instance: Instance) -> list[list[int]]:
    """As ranks come to them when each does, in turn, whatever it can: no ring, every action in order."""
    m, codes = instance.microbatches, range(3 * instance.stages)
    done = dict.fromkeys(codes, 0)
    orders: list[list[int]] = [[] for _ in range(instance.ranks)]
    while any(done[code] < m for code in codes):
        can = [
            code for code in codes if done[code] < m
            and (code % 3 == 0 or done[code - 1] > done[code])
            and (instance.source[code] < 0 or done[instance.source[code]] > done[code])
        ]  # fmt: skip
        code = can[int(random.random() * len(can))]
        orders[instance.placement[code // 3]].append(code)
        done[code] += 1
    return orders


def value_of(timeline: Timeline, objective: str) -> float:
    return timeline.span if objective == "span" else timeline.makespan


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_the_search_sees_what_the_simulator_sees(placement: tuple[int, ...]) -> None:
    """Exactly: the same starts, ends, makespan, span and peak, whatever the costs."""
    random = Random(1)
    for m in (1, 2, 5, 8):
        costs = random_costs(random, len(placement), m)
        objectives: tuple[Objective, ...] = ("makespan", "span")
        instances = [Instance(Problem(placement, m, costs), name, float("inf")) for name in objectives]
        orders = random_orders(random, instances[0])
        actions = instances[0].actions(orders)
        timeline = simulate(Plan(placement, m, actions, chain(len(placement))), costs)
        assert instances[0].coded(actions) == orders
        assert instances[0].peak(orders) == timeline.peak_bytes.max()
        for instance in instances:
            nodes = [instance.nodes(order) for order in orders]
            outcome = instance.run(nodes)
            assert outcome is not None and all(map(instance.fits, orders))
            assert outcome.value == value_of(timeline, instance.objective)
            numbers = [node for rank in nodes for node in rank]
            assert [outcome.starts[node] for node in numbers] == timeline.starts.tolist()
            assert [outcome.ends[node] for node in numbers] == timeline.ends.tolist()


def test_orders_that_wait_in_a_ring_have_no_value() -> None:
    instance = Instance(Problem((0, 1, 1, 0), 1), "makespan", float("inf"))
    first, second = instance.coded(build(get("gpipe"), (0, 1, 1, 0), 1).orders)
    assert instance.run([instance.nodes(first), instance.nodes(second)]) is not None
    swapped = [9, 0, 10, 11, 1, 2]  # the last stage's F before the first one's
    assert instance.run([instance.nodes(swapped), instance.nodes(second)]) is None


def check(found: Found, problem: Problem, auto: Auto) -> None:
    """What holds of any answer: right, as good as it says, within memory, above the bound."""
    plan = build(auto, problem.placement, problem.microbatches, costs=problem.costs, memory=problem.memory)
    assert isinstance(problem.costs, Costs)
    timeline = simulate(plan, problem.costs)
    assert plan.in_order and completes(plan)
    assert value_of(timeline, auto.objective) == found.value
    assert timeline.peak_bytes.max() == pytest.approx(found.peak, rel=1e-12)
    assert problem.memory is None or found.peak <= problem.memory * (1 + 1e-9)
    assert found.bound <= found.value and found.gap >= 0


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_never_worse_than_a_named_schedule_that_fits(placement: tuple[int, ...]) -> None:
    random = Random(2)
    stages, ranks = len(placement), 1 + max(placement)
    for turn in range(8):
        m = (1, 2, 3, 5, 8)[turn % 5]
        costs = random_costs(random, stages, m)
        size = np.max(costs.activation_bytes)
        memory = float(size) * stages * (0.7 + 2 * random.random()) if turn % 2 else None
        problem = Problem(placement, m, costs, memory)
        objectives: tuple[Objective, ...] = ("makespan", "span")
        auto = Auto(iterations=25, objective=objectives[turn // 2 % 2])
        try:
            found = auto.search(problem)
        except ScheduleError:
            assert memory is not None and memory < size * max(map(placement.count, range(ranks)))
            continue
        check(found, problem, auto)
        for name in (*SCHEDULES, "interleaved(1)", "looped_bfs(1)"):
            try:
                named = build(GPipe() if name == "auto" else get(name), placement, m)
            except ScheduleError:
                continue
            timeline = simulate(named, costs)
            if memory is None or timeline.peak_bytes.max() <= memory:
                assert found.value <= value_of(timeline, auto.objective), name
                assert found.bound <= value_of(timeline, auto.objective) * (1 + 1e-12), name


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_any_size_in_any_memory(p: int, m: int) -> None:
    for memory in (1, 2, p, 2 * p):
        problem = Problem(range(p), m, Costs(), memory)
        auto = Auto(iterations=20)
        found = auto.search(problem)
        check(found, problem, auto)
        assert found.value >= p - 1 + 3 * m
        assert found.value >= m // memory * (2 * p + 1)  # the references' bound, in this memory
        assert found.bound >= max(p - 1 + 3 * m, m // memory * (2 * p + 1))
        if p == 1:
            assert found.value == 3 * m


@pytest.mark.parametrize(
    ("objective", "memory", "m", "costs", "best", "proven"),
    [
        ("makespan", 4, 8, Costs(), 27, True),
        ("span", 7, 8, Costs(), 24, True),
        ("makespan", 3, 8, Costs(), 31, False),
        ("makespan", 2, 8, Costs(), 41, False),
        ("span", 4, 8, Costs(F=2, I=2), 49, True),
        ("span", 8, 8, Costs(F=2, I=2), 45, True),
        ("makespan", 4, 6, Costs(F=10, I=10, W=5, latency=1), 207, True),
        ("span", 4, 6, Costs(F=10, I=10, W=5, latency=1), 207, True),
    ],
)
def test_optima_at_p4(
    objective: Objective, memory: int, m: int, costs: Costs, best: float, proven: bool
) -> None:
    """What CP-SAT proves; where `proven`, the lower bound does, too."""
    found = Auto(memory, objective=objective).search(Problem(range(4), m, costs))
    assert found.value == best and found.peak <= memory
    assert (found.bound == best and found.gap == 0) is proven


def test_several_stages_a_rank() -> None:
    """V-shaped, 45 at p4 m7 is proven; split backwards mend the loop: 51 where interleaved takes 57."""
    vee, loop = (0, 1, 2, 3, 3, 2, 1, 0), (0, 1, 2, 3, 0, 1, 2, 3)
    assert [Auto().search(Problem(vee, 7)).value, Auto().search(Problem(vee, 8)).value] == [45, 51]
    assert Auto(6, 50).search(Problem(vee, 8)).value <= 53
    assert Auto(4, 50).search(Problem(vee, 8)).value <= 59
    assert Auto(8, 50).search(Problem(loop, 8)).value == 51


def rows() -> list[dict[str, str]]:
    return list(csv.DictReader(TABLE.open()))


def rate_of(row: dict[str, str], memory: int, iterations: int | None) -> float:
    """To four digits, as printed. `memory` counts microbatches, of which I frees one half and W the other."""
    p, m = int(row["p"]), int(row["m"])
    forward, inputs, weight, latency = (float(row[key]) for key in ("TF", "TB", "TW", "Tcomm"))
    costs = Costs(F=forward, I=inputs, W=weight, latency=latency, released_at_input=0.5)
    auto, problem = Auto(memory, iterations, objective="span"), Problem(range(p), m, costs)
    found = auto.search(problem)
    timeline = simulate(build(auto, problem.placement, m, costs=costs), costs)
    assert timeline.span == found.value and timeline.peak_bytes.max() == found.peak <= memory
    return round((found.value - m * (forward + inputs + weight)) / found.value, 4)


def in_full(row: dict[str, str]) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.full,) if int(row["p"]) > 16 else ()


@pytest.mark.parametrize(("column", "times"), [("ZB-1p", 1), ("ZB-2p", 2)])
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=in_full(row), id=f"{row['model']}-{row['m']}") for row in rows()]
)
def test_zero_bubble_table_5(row: dict[str, str], column: str, times: int) -> None:
    """At or below every cell; from 16 ranks on by rule of thumb alone (arXiv 2401.10241)."""
    iterations = None if int(row["p"]) == 8 else 0
    assert rate_of(row, times * int(row["p"]), iterations) <= float(row[column])


@pytest.mark.full
@pytest.mark.timeout(600)
def test_zero_bubble_table_5_by_default() -> None:
    """With the default iterations: at or below every cell, and below most that leave room for it."""
    for row in rows():
        one, two = (rate_of(row, times * int(row["p"]), None) for times in (1, 2))
        print(f"{row['model']:>6} {row['m']:>4}   {row['ZB-1p']} {one:.4f}   {row['ZB-2p']} {two:.4f}")
        assert one <= float(row["ZB-1p"]) and two <= float(row["ZB-2p"])
        if row["model"] == "6.2B":
            assert two < float(row["ZB-2p"])


def test_the_same_plan_in_every_process() -> None:
    code = (
        "from schedules import Auto, build\n"
        "costs = dict(F=[3, 1.1, 2.7], I=[2, 2.3, 2], W=[1.9, 2.2, 1], latency=0.3)\n"
        "for placement in ((0, 1, 2), (1, 0, 1)):\n"
        "    print(build(Auto(3, 300), placement, 6, costs=costs).digest)\n"
    )
    digests = set()
    for seed in ("0", "1", "4711"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        digests.add(run.stdout)
    assert len(digests) == 1


def test_more_iterations_are_no_worse_and_seeds_differ() -> None:
    problem = Problem(range(4), 12, Costs(F=[5, 6, 4, 7], I=[6, 5, 7, 5], W=[4, 6, 5, 3], latency=1), 4)
    found = [Auto(iterations=number).search(problem) for number in (0, 30, 300)]
    assert [answer.tried for answer in found] == [0, 30, 300]
    assert found[0].value >= found[1].value >= found[2].value
    assert Auto(iterations=300).search(problem) is found[2], "the last answers are kept"
    seeds = {Auto(iterations=300, seed=seed).search(problem).orders for seed in range(4)}
    assert len(seeds) > 1


def test_local_search_keeps_what_it_has_to() -> None:
    problem = Problem(range(3), 6, Costs(F=[3, 5, 4], I=[4, 6, 2], W=[5, 1, 3], released_at_input=0.5), 3)
    instance = Instance(problem, "makespan", 3)
    orders = construct(instance, next(iter(rules(instance))))
    before = instance.run([instance.nodes(order) for order in orders])
    kept = [list(order) for order in orders]
    better, tried = improve(instance, orders, 500, Random(0), lower_bound(instance))
    after = instance.run([instance.nodes(order) for order in better])
    assert before is not None and after is not None
    assert orders == kept and after.value < before.value and 0 < tried <= 500
    assert all(map(instance.fits, better))
    assert improve(instance, better, 500, Random(0), after.value) == (better, 0)


def test_its_memory_and_the_problem_s() -> None:
    """The lesser counts; so does what activations weigh."""
    assert Auto().search(Problem(range(4), 8, memory=3)).peak == 3
    assert Auto(3).search(Problem(range(4), 8, memory=5)).peak == 3
    assert Auto(5).search(Problem(range(4), 8, memory=3)).peak == 3
    costs = Costs(activation_bytes=[400, 100, 100, 100])
    plan = build(Auto(1200), range(4), 8, costs=costs)
    assert simulate(plan, costs).peak_bytes.max() <= 1200 and plan.peak_live[0] == 3


def test_names_and_numbers() -> None:
    assert get("auto") == Auto() and get("auto(8)") == Auto(8) and get("auto(8, 100, 1)") == Auto(8, 100, 1)
    for text in ("auto", "auto(8)", "auto(8,100,1)"):
        assert text_of(get(text)) == text
    for schedule in (Auto(1.5), Auto(iterations=5), Auto(8, 100, 1, "span")):
        assert text_of(schedule) is None
    assert Auto().placement(3) == (0, 1, 2)
    assert dataclasses.replace(Auto(8), memory=None) == Auto()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get("auto(0)"), "a memory of 0 holds nothing"),
        (lambda: Auto(float("nan")), "a memory of nan holds nothing"),
        (lambda: Auto(iterations=-1), "-1 iterations"),
        (lambda: Auto(objective="time"), "'time' is neither 'makespan' nor 'span'"),
        (lambda: build(Auto(0.5), (0, 1), 2), "memory 0.5 cannot hold a microbatch on rank 0, which takes 1"),
        (lambda: build(Auto(1), (0, 1, 1), 2), "memory 1 cannot hold a microbatch on rank 1, which takes 2"),
        (lambda: build(Auto(), (0, 1), 2, costs=Costs(F=(1, 2, 3))), r"F has shape \(3,\)"),
    ],
)
def test_what_it_refuses(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ScheduleError, match=message):
        make()
