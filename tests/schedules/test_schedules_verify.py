"""Does `verify` accept exactly what a strict executor completes?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_model import completes, makespan

from schedules import (
    COMMUNICATION,
    OPS,
    SCHEDULES,
    SEND_F,
    Action,
    Actions,
    B,
    F,
    GPipe,
    I,
    OneFOneB,
    Plan,
    Problem,
    Schedule,
    ScheduleError,
    W,
    build,
    chain,
    get,
    verify,
)

SKIP = ((0, 1), (1, 2), (0, 2))


class SplitBackward:
    """GPipe with its backward in two parts: all I, then all W. Any placement."""

    def placement(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def orders(self, problem: Problem) -> list[list[Action]]:
        microbatches = range(problem.microbatches)
        orders = []
        for rank in range(problem.ranks):
            stages = problem.stages_of(rank)
            order = [Action(s, F, m) for s in stages for m in microbatches]
            for s in reversed(stages):
                order += [Action(s, I, m) for m in microbatches]
            orders.append(order + [Action(s, W, m) for s in stages for m in microbatches])
        return orders


def accepted(plan: Plan) -> bool:
    try:
        verify(plan)
    except ScheduleError:
        return False
    return True


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    microbatches = draw(st.integers(1, 4))
    if draw(st.booleans()):
        named = get(draw(st.sampled_from(list(SCHEDULES))))
        forward_only = draw(st.booleans())
        return build(named, named.placement(draw(st.integers(1, 3))), microbatches, forward_only=forward_only)
    if draw(st.booleans()):
        schedule: Schedule = OneFOneB()
        placement = tuple(draw(st.permutations(range(draw(st.integers(1, 4))))))
    else:
        anywhere: list[Schedule] = [GPipe(), SplitBackward()]
        schedule = draw(st.sampled_from(anywhere))
        placement = draw(
            st.sampled_from([(0,), (0, 1), (0, 1, 0), (0, 1, 1, 0), (0, 0, 1), (1, 0, 2), (0, 1, 2, 3)])
        )
    edges = set(chain(len(placement)))
    for _ in range(draw(st.integers(0, 2)) if len(placement) > 2 else 0):
        source = draw(st.integers(0, len(placement) - 2))
        edges.add((source, draw(st.integers(source + 1, len(placement) - 1))))
    return build(schedule, placement, microbatches, edges=sorted(edges), forward_only=draw(st.booleans()))


@st.composite
def mutants(draw: st.DrawFn) -> Plan:
    return mutate(draw, draw(plans()))


def mutate(draw: Callable[..., Any], plan: Plan) -> Plan:
    """The plan with one action dropped, doubled, swapped, moved (perhaps to another rank) or altered."""
    programs = [list(program) for program in plan.programs]
    places = [(r, i) for r, program in enumerate(programs) for i in range(len(program))]
    rank, position = draw(st.sampled_from(places))
    program, action = programs[rank], programs[rank][position]
    near = st.integers(max(0, position - 3), min(len(program) - 1, position + 3))
    how = draw(st.sampled_from(["drop", "double", "swap", "move", "migrate", "alter"]))
    if how == "drop":
        del program[position]
    elif how == "double":
        program.insert(draw(st.integers(0, len(program))), action)
    elif how == "swap":
        other = draw(near)
        program[position], program[other] = program[other], action
    elif how == "move":
        program.insert(draw(near), program.pop(position))
    elif how == "migrate":
        target = programs[draw(st.integers(0, plan.ranks - 1))]
        del program[position]
        target.insert(draw(st.integers(0, len(target))), action)
    else:
        op = draw(st.sampled_from(list(OPS)))
        program[position] = Action(
            draw(st.integers(0, plan.num_stages)),
            op,
            draw(st.integers(0, plan.microbatches)),
            draw(st.none() | st.integers(0, plan.num_stages)) if op in COMMUNICATION else None,
        )
    return dataclasses.replace(plan, programs=tuple(map(Actions.of, programs)))


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_mutant_of_a_named_schedule_slips_through(name: str, data: st.DataObject) -> None:
    schedule = get(name)
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    plan = mutate(data.draw, build(schedule, schedule.placement(ranks), microbatches))
    assert accepted(plan) == completes(plan), str(plan)


@settings(max_examples=200, deadline=None)
@given(plans())
def test_what_is_built_completes(plan: Plan) -> None:
    assert completes(plan)


@settings(max_examples=1000, deadline=None)
@given(mutants())
def test_verify_accepts_exactly_what_the_strict_executor_completes(plan: Plan) -> None:
    assert accepted(plan) == completes(plan), str(plan)


def test_an_extra_edge_is_lowered_and_printed() -> None:
    plan = build(GPipe(), (0, 1, 2), 1, edges=SKIP)
    assert str(plan).splitlines() == [
        "rank 0: 0F0 0SEND_F0 0SEND_F0>2 0RECV_B0<2 0RECV_B0 0B0",
        "rank 1: 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "rank 2: 2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0 2SEND_B0>0",
    ]
    assert Plan.parse(str(plan), edges=SKIP) == plan


def test_a_plan_written_by_hand_with_an_extra_edge() -> None:
    text = """
        rank 0: 0F0 0SEND_F0 0SEND_F0>2 0RECV_B0<2 0RECV_B0 0B0
        rank 1: 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0
        rank 2: 2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0>0 2SEND_B0
    """
    plan = Plan.parse(text)
    assert set(plan.edges) == set(SKIP)
    verify(plan)
    assert plan.programs[0][2] == Action(0, SEND_F, 0, 2) and str(plan.programs[0][2]) == "0SEND_F0>2"
    without = dataclasses.replace(plan, edges=chain(3))
    with pytest.raises(ScheduleError, match=r"rank 0, #2 0SEND_F0>2: no edge"):
        verify(without)


def test_split_backward_by_hand() -> None:
    text = """
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1F0 1I0 1RECV_F1 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1
    """
    plan = Plan.parse(text)
    verify(plan)
    assert completes(plan) and plan.in_order and plan.peak_live == (2, 2)


def test_a_deadlock_draws_its_ring() -> None:
    # Both ranks send first: each waits for the other's receive.
    text = """
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """
    with pytest.raises(ScheduleError) as caught:
        verify(Plan.parse(text))
    assert str(caught.value).splitlines() == [
        "deadlock: 2 ranks wait for each other",
        "  .-> rank 0 stands at #3 0SEND_F1, waits for #4 1RECV_F1 of rank 1",
        "  |   rank 1 stands at #3 1SEND_B0, waits for #4 0RECV_B0 of rank 0",
        "  '-----'",
    ]
    assert caught.value.cycle == ((0, 3, Action(0, SEND_F, 1)), (1, 3, Action(1, "SEND_B", 0)))


def test_an_order_that_deadlocks_draws_its_ring() -> None:
    class Early:
        def placement(self, ranks: int) -> tuple[int, ...]:
            return tuple(range(ranks))

        def orders(self, problem: Problem) -> list[list[Action]]:
            first = [Action(0, F, 0), Action(0, B, 0), Action(0, F, 1), Action(0, B, 1)]
            return [first, [Action(1, F, 0), Action(1, F, 1), Action(1, B, 0), Action(1, B, 1)]]

    with pytest.raises(ScheduleError, match=r"rank 0 stands at #1 0B0, waits for #2 1B0 of rank 1") as caught:
        build(Early(), (0, 1), 2)
    assert caught.value.cycle == ((0, 1, Action(0, B, 0)), (1, 1, Action(1, F, 1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 0F0 0B0", r"rank 0, #1 0F0: done already, at #0 of rank 0"),
        (
            "rank 0: 0B0 0F0",
            r"rank 0, #0 0B0: needs the saved activation of stage 0, which only #1 0F0 brings",
        ),
        ("rank 0: 0F0 0I0", r"rank 0, #1 0I0: nothing takes its deferred weight gradient: 0W0 is missing"),
        ("rank 0: 0F0 0B0 0I0 0W0", r"rank 0, #2 0I0: its saved activation is taken already"),
        ("rank 0: 0F0 0B0 0W0", r"rank 0, #2 0W0: takes a deferred weight gradient that 0I0 never made"),
        ("rank 0: 0F1 0B1 0B0", r"rank 0 never does 0F0"),
        ("rank 0: 0F0 0F1 0B0", r"rank 0, #1 0F1: nothing takes its saved activation: 0B1 or 0I1 is missing"),
        ("rank 0: 0F0 1F0 0SEND_F0", r"#2 0SEND_F0: both stages are on this rank"),
        ("rank 0: 0F0 1RECV_F0\nrank 1: 1F0", r"rank 0, #1 1RECV_F0: stage 1 lives on rank 1"),
        ("rank 0: 0F0 0SEND_F0\nrank 1: 1F0", r"rank 0, #1 0SEND_F0: no partner: rank 1 lacks the RECV_F"),
        ("rank 0: 0F0\nrank 1: 1F0", r"activation of microbatch 0 never travels between stages 0 and 1"),
        ("rank 0: 0F0 0SEND_F0\nrank 1: 1F0 1RECV_F0", r"rank 1, #0 1F0: needs the activation of stage 0"),
        (
            "rank 0: 0F0 0SEND_F0 0RECV_B0\nrank 1: 1RECV_F0 1F0 1SEND_B0",
            r"forward-only plan has no gradients",
        ),
        (
            "rank 0: 0F0 0F1 0SEND_F1 0SEND_F0\nrank 1: 1RECV_F0 1RECV_F1 1F0 1F1",
            r"rank 0, #2 0SEND_F1: is number 0 on its channel, where rank 1 first stands at #0 1RECV_F0",
        ),
    ],
)
def test_refusals_name_the_place(text: str, message: str) -> None:
    plan = Plan.parse(text)
    assert not completes(plan)
    with pytest.raises(ScheduleError, match=message) as caught:
        verify(plan)
    assert caught.value.rank is not None


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 1), (4, 8)])
def test_receives_put_off_to_the_backward_deadlock_or_cost(ranks: int, microbatches: int) -> None:
    """One order, two lowerings: a receive that stands at its consumer stalls the sender."""
    plan = build(OneFOneB(), range(ranks), microbatches)
    late = []
    consumer = {"RECV_F": F, "RECV_B": B}
    for program in plan.programs:  # each receive right before its consumer
        receives = {(a.stage, consumer[a.op], a.microbatch): a for a in program if a.op in consumer}
        moved: list[Action] = []
        for action in program:
            if action.op not in consumer:
                moved += [receives[action[:3]]] if action[:3] in receives else []
                moved.append(action)
        late.append(moved)
    mutant = dataclasses.replace(plan, programs=tuple(map(Actions.of, late)))
    assert accepted(mutant) == completes(mutant)
    if completes(mutant):
        assert makespan(mutant) >= makespan(plan)
