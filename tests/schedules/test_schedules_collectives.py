"""Do collectives stand where they should, and does a plan with them still verify, simulate and travel?"""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_model import completes
from test_schedules_simulator import check
from test_schedules_verify import accepted, mutate

from pipe.__main__ import main
from schedules import (
    COLLECTIVES,
    COMPUTE,
    REDUCE_GRAD,
    RESHARD,
    SCHEDULES,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
    Actions,
    B,
    Costs,
    CSVFile,
    F,
    GPipe,
    LoopedBFS,
    OneFOneB,
    Plan,
    ScheduleError,
    W,
    add_collectives,
    build,
    forward_only,
    get,
    needs,
    simulate,
    verify,
)

SIZES = ((1, 1), (1, 4), (2, 1), (2, 5), (3, 4), (4, 8), (4, 3))
INTEGERS = Costs(F=3, B=7, I=4, W=2, latency=2, unshard=2, reduce_grad=5)


@cache
def plan_of(name: str, ranks: int, microbatches: int) -> Plan:
    schedule = get(name)
    return build(schedule, schedule.placement(ranks), microbatches)


def full(name: str, ranks: int, microbatches: int, *, every: int = 2, active: int = 2) -> Plan:
    plan = plan_of(name, ranks, microbatches)
    return add_collectives(plan, reduce_every=every, unshard=True, active_stages=active)


# Where they stand


def test_reductions_stand_behind_every_kth_weight_gradient_and_the_last() -> None:
    plan = build(OneFOneB(), (0, 1), 3)
    assert str(add_collectives(plan, reduce_every=2)).splitlines() == [
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 "
        "0RECV_B1 0B1 0REDUCE_GRAD1 0RECV_B2 0B2 0REDUCE_GRAD2",
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 "
        "1B1 1RECV_F2 1SEND_B1 1REDUCE_GRAD1 1F2 1B2 1SEND_B2 1REDUCE_GRAD2",
    ]


def test_a_stage_in_use_throughout_is_gathered_once() -> None:
    plan = build(OneFOneB(), (0, 1), 2)
    assert str(add_collectives(plan, reduce_every=2, unshard=True)).splitlines() == [
        "rank 0: 0UNSHARD0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD1 0REDUCE_GRAD1",
        "rank 1: 1UNSHARD0 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RESHARD1 1REDUCE_GRAD1",
    ]


def test_the_next_stage_is_gathered_while_one_computes() -> None:
    """
    order         0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1
    of 2 active   0 1 0 1 1 2 1 2 2 1 2 1 2 1 2 1 1 0 1 0 0   0
    of 1          0   0   1   1   2   2   2   2   1   1   0   0
    """
    plan = build(LoopedBFS(3), (0, 0, 0), 2)
    assert str(add_collectives(plan, unshard=True)) == (
        "rank 0: 0UNSHARD0 1UNSHARD0 0F0 0F1 0RESHARD1 2UNSHARD0 1F0 1F1 2F0 2F1 2B0 2B1 2RESHARD1 0UNSHARD0 "
        "1B0 1B1 1RESHARD1 0B0 0B1 0RESHARD1"
    )
    assert str(add_collectives(plan, unshard=True, active_stages=1)) == (
        "rank 0: 0UNSHARD0 0F0 0F1 0RESHARD1 1UNSHARD0 1F0 1F1 1RESHARD1 2UNSHARD0 2F0 2F1 2B0 2B1 2RESHARD1 "
        "1UNSHARD0 1B0 1B1 1RESHARD1 0UNSHARD0 0B0 0B1 0RESHARD1"
    )
    everything = add_collectives(plan, unshard=True, active_stages=3)
    assert everything.unshards == (1, 1, 1) and everything.peak_unsharded == (3,)


def test_both_stages_of_a_pair_are_gathered_before_it_and_leave_behind_it() -> None:
    plan = plan_of("dualpipe_v", 2, 4)
    made = add_collectives(plan, reduce_every=2, unshard=True, active_stages=1)
    row = str(made).splitlines()[0]
    assert (
        " 0UNSHARD3 (0F3;3B1) 0SEND_F3 3SEND_B1 3REDUCE_GRAD1 3RECV_F2 0RECV_B0 (3F2;0B0) 0RESHARD0 " in row
    )
    assert made.peak_unsharded == (2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("every", "active"), [(1, 1), (2, 2), (3, 1), (99, 3)])
def test_every_schedule_with_collectives(name: str, every: int, active: int) -> None:
    for ranks, microbatches in SIZES:
        plan = plan_of(name, ranks, microbatches)
        made = full(name, ranks, microbatches, every=every, active=active)
        assert made.without_collectives == plan and made.compute_only == plan.compute_only
        assert made.orders == plan.orders and sum(map(len, made.pairs)) == sum(map(len, plan.pairs))
        assert made.peak_live == plan.peak_live and made.in_order and made.has_collectives
        assert made.reductions == (-(-microbatches // every),) * plan.num_stages
        assert all(1 <= count for count in made.unshards) and completes(made)
        assert add_collectives(made, reduce_every=every, unshard=True, active_stages=active) == made
        assert add_collectives(made) == plan and not plan.has_collectives
        for rank in range(ranks):
            check_places(made, rank, every)
            if not any(plan.pairs):
                assert held(made.programs[rank]) == windows(plan.orders[rank], active)
                assert made.peak_unsharded[rank] == min(active, len(plan.stages_of(rank)))


def windows(order: Actions, active: int) -> list[set[int]]:
    """At each computation, the next stages of the order, plainly."""
    stages = [action.stage for action in order]
    return [set(list(dict.fromkeys(stages[place:]))[:active]) for place in range(len(stages))]


def held(program: Actions) -> list[set[int]]:
    """At each computation, the stages that are unsharded."""
    now: set[int] = set()
    found = []
    for stage, op, _, _ in program:
        if op == UNSHARD:
            now.add(stage)
        elif op == RESHARD:
            now.remove(stage)
        elif op in COMPUTE:
            found.append(set(now))
    assert not now
    return found


def check_places(plan: Plan, rank: int, every: int) -> None:
    """In each gap SENDs, RESHARD, REDUCE_GRAD and UNSHARD come in this order, each for its computation."""
    adds = dict.fromkeys(plan.stages_of(rank), 0)
    program = list(plan.programs[rank])
    for gap, following in gaps(program):
        ops = [action.op for action in gap if action.op in (*COLLECTIVES, SEND_F, SEND_B)]
        rank_of = {SEND_F: 0, SEND_B: 0, RESHARD: 1, REDUCE_GRAD: 2, UNSHARD: 3}
        assert [rank_of[op] for op in ops] == sorted(rank_of[op] for op in ops)
        for action in gap:
            at = program.index(action, following - len(gap))
            if action.op == UNSHARD:
                assert served(program[at:], action.stage) == action.microbatch
            elif action.op in (RESHARD, REDUCE_GRAD):
                assert served(program[:at][::-1], action.stage) == action.microbatch
            if action.op == REDUCE_GRAD:
                behind = [a for a in program[:at] if a.stage == action.stage and a.op in (B, W)]
                assert len(behind) % every == 0 or len(behind) == plan.microbatches
                adds[action.stage] += 1
    assert adds == {stage: plan.reductions[stage] for stage in plan.stages_of(rank)}


def gaps(program: list[Action]) -> Iterator[tuple[list[Action], int]]:
    """What stands between two computations, and where the second one is."""
    gap: list[Action] = []
    for position, action in enumerate([*program, Action(0, F, 0)]):
        if action.op in COMPUTE:
            yield gap, position
            gap = []
        else:
            gap.append(action)


def served(actions: list[Action], stage: int) -> int:
    return next(action.microbatch for action in actions if action.stage == stage and action.op in COMPUTE)


def test_forward_only_plans() -> None:
    trained = full("interleaved(4)", 2, 4)
    forward = forward_only(trained)
    assert forward == forward_only(trained.without_collectives) and not forward.has_collectives
    made = add_collectives(forward, reduce_every=1, unshard=True)
    assert made.reductions == (0,) * 8 and min(made.unshards) >= 1 and made.forward_only and completes(made)
    assert forward_only(made) == forward  # they're dropped here too
    assert simulate(made, Costs(unshard=1)).makespan > simulate(forward).makespan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduce_every": 0}, "reduce_every=0: it takes 1, 2, ..."),
        ({"reduce_every": 1.5}, r"reduce_every=1\.5: it takes"),
        ({"unshard": True, "active_stages": 0}, "active_stages=0: it takes"),
    ],
)
def test_what_add_collectives_refuses(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        add_collectives(plan_of("1f1b", 2, 2), **arguments)  # type: ignore[arg-type]


# Text


@pytest.mark.parametrize("name", SCHEDULES)
def test_they_round_trip(name: str, tmp_path: Path) -> None:
    made = full(name, 3, 4)
    file = tmp_path / "plan.csv"
    file.write_text(made.to_csv())
    for again in (Plan.parse(str(made)), Plan.from_csv(file)):
        assert again == made and again.digest == made.digest
    schedule = CSVFile(str(file))
    assert build(schedule, made.placement, 4) == made
    assert made.digest != made.without_collectives.digest


def test_digests_of_plans_without_collectives_are_as_they_were() -> None:
    """Files and sessions of an earlier version may hold them."""
    assert plan_of("1f1b", 2, 3).digest == "f022ba1b1b5a2610c82118751d0611d2ff68ee014d707efca8b625393d796d8b"
    assert (
        plan_of("dualpipe_v", 2, 5).digest
        == "7f684cf03552fb08d12bdc462b2f64ce1627157aeaa7c4ffe5e3cb3a50fdc653"
    )


# What torch 2.9 makes of looped BFS on two ranks, rank 0's row: _add_reduce_grad(_add_unshard_reshard(...)).
TORCH = (
    "0UNSHARD,2UNSHARD,0F0,0F1,0RESHARD,4UNSHARD,2F0,2F1,4F0,4F1,4B0,4B1,4REDUCE_GRAD,4RESHARD,0UNSHARD,"
    "2B0,2B1,2REDUCE_GRAD,2RESHARD,0B0,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1F0,1F1,3F0,3F1,5F0,5F1,5B0,5B1,3B0,3B1,1B0,1B1,1REDUCE_GRAD\n"
)


def test_rows_as_torch_writes_them(tmp_path: Path) -> None:
    """Without microbatches: an UNSHARD gets that of its stage's next computation, the others of its last."""
    plan = Plan.from_csv(TORCH)
    assert str(plan.programs[0]) == (
        "0UNSHARD0 2UNSHARD0 0F0 0F1 0RESHARD1 4UNSHARD0 2F0 2F1 4F0 4F1 4B0 4B1 4REDUCE_GRAD1 4RESHARD1 "
        "0UNSHARD0 2B0 2B1 2REDUCE_GRAD1 2RESHARD1 0B0 0B1 0REDUCE_GRAD1 0RESHARD1"
    )
    (tmp_path / "torch.csv").write_text(TORCH)
    lowered = build(CSVFile(str(tmp_path / "torch.csv")), plan.placement, 2)
    assert lowered.without_transfers == plan and lowered.is_lowered and not plan.is_lowered
    assert lowered.without_collectives == build(LoopedBFS(3), plan.placement, 2)
    assert held(lowered.programs[0]) == windows(lowered.orders[0], 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0RESHARD,0F0\n", r"rank 0, column 0: '0RESHARD' takes .* of stage 0 before it, and there is none"),
        ("0F0\n,1F0,,1UNSHARD\n", r"rank 1, column 3: '1UNSHARD' takes .* of stage 1 behind it, and there"),
        ("0F0,0UNSHARD0>1\n", "only a SEND goes to a stage"),
        ("0F0,0SHARD0\n", r"unknown op 'SHARD' \(did you mean (RE|UN)SHARD\?\)"),
        ("0F0,1UNSHARD0\n", r"the plan has 1 stages"),
    ],
)
def test_what_is_no_collective(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(Plan.from_csv(text))


def test_a_collective_has_no_peer() -> None:
    with pytest.raises(ScheduleError, match=r"#0 0UNSHARD0<1: a collective has no peer"):
        Actions.of([Action(0, UNSHARD, 0, 1)])
    plan = Plan.parse("rank 0: 0UNSHARD0 0F0 0RESHARD0")
    columns = plan.programs[0]
    peers = np.array([1, -1, -1])
    bad = Actions(columns.ops, columns.stages, columns.microbatches, peers)
    with pytest.raises(ScheduleError, match="a collective has no peer"):
        verify(dataclasses.replace(plan, programs=(bad,)))


# Proof


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0UNSHARD0 0B0 0RESHARD0", r"rank 0, #0 0F0: stage 0 is not unsharded"),
        ("0UNSHARD0 0F0 0RESHARD0 0B0", r"rank 0, #3 0B0: stage 0 is not unsharded"),
        ("0UNSHARD0 0F0 0UNSHARD0 0B0 0RESHARD0", r"rank 0, #2 0UNSHARD0: stage 0 is unsharded already"),
        ("0F0 0B0 0RESHARD0", r"rank 0, #2 0RESHARD0: stage 0 is not unsharded"),
        ("0UNSHARD0 0F0 0RESHARD0 0RESHARD0 0UNSHARD0 0B0 0RESHARD0", r"#3 0RESHARD0: stage 0 is not unsha"),
        ("0UNSHARD0 0F0 0B0", r"rank 0, #2 0B0: stage 0 stays unsharded: no RESHARD of it follows"),
        (
            "0F0 0REDUCE_GRAD0 0B0",
            r"rank 0, #1 0REDUCE_GRAD0: stage 0 has no weight gradient that is not red",
        ),
        ("0F0 0I0 0REDUCE_GRAD0 0W0 0REDUCE_GRAD0", r"rank 0, #2 0REDUCE_GRAD0: stage 0 has no weight grad"),
        ("0F0 0B0 0REDUCE_GRAD0 0REDUCE_GRAD0", r"rank 0, #3 0REDUCE_GRAD0: stage 0 has no weight gradient"),
        ("0F0 0F1 0B0 0REDUCE_GRAD0 0B1", r"rank 0, #4 0B1: stage 0 never reduces this weight gradient"),
        ("0F0 0REDUCE_GRAD0", r"rank 0, #1 0REDUCE_GRAD0: stage 0 has no weight gradient"),
        ("0F0 1F0 1B0 0B0 0REDUCE_GRAD0 1REDUCE_GRAD0 1REDUCE_GRAD0", r"#6 1REDUCE_GRAD0: stage 1 has no"),
        ("0F0 0B0 1REDUCE_GRAD0\nrank 1: 1F0 1B0", r"rank 0, #2 1REDUCE_GRAD0: stage 1 lives on rank 1"),
        ("0F0 0B0 0REDUCE_GRAD1", None),
    ],
)
def test_refusals_name_the_place(text: str, message: str | None) -> None:
    plan = Plan.parse(f"rank 0: {text}")
    assert not accepted(plan) and not completes(plan)
    if message is not None:
        with pytest.raises(ScheduleError, match=message) as caught:
            verify(plan)
        assert caught.value.rank is not None and caught.value.position is not None and caught.value.action


def test_stages_may_differ() -> None:
    """One is sharded and reduces once, one reduces by microbatch, one has nothing to do with it."""
    verify(Plan.parse("rank 0: 0UNSHARD0 0F0 1F0 2F0 2B0 1B0 1REDUCE_GRAD0 0B0 0RESHARD0 0REDUCE_GRAD0"))


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_mutant_slips_through(name: str, data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    every, active = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    plan = mutate(data.draw, full(name, ranks, microbatches, every=every, active=active))
    assert accepted(plan) == completes(plan), str(plan)


# Time


def test_where_the_time_goes() -> None:
    """
    rank 0   .  .  F0 F1 .  .  B0--- .  B1--- .  .    U takes 2, and rank 0 waits for it
             U----                            R----   R takes 2, and the step ends with it
    rank 1   .  .  .  F0 B0--- F1 B1--- .  .  .  .
             U----                      R----
    """
    plan = add_collectives(build(OneFOneB(), (0, 1), 2), reduce_every=2, unshard=True)
    timeline = simulate(plan, Costs(unshard=2, reduce_grad=2))
    assert timeline.makespan == timeline.span == 13
    bubble = timeline.bubble
    assert bubble.warm_up.tolist() == [0, 3] and bubble.drain.tolist() == [0, 2]
    assert bubble.gradient.tolist() == [3, 0] and bubble.communication.tolist() == [4, 2]
    assert " ".join(str(action) for _, _, action in timeline.critical_path) == (
        "0UNSHARD0 0F0 1F0 1B0 1F1 1B1 0B1 0REDUCE_GRAD1"
    )
    spans = timeline.collectives
    assert list(map(str, spans.actions)) == ["0UNSHARD0", "0REDUCE_GRAD1", "1UNSHARD0", "1REDUCE_GRAD1"]
    assert spans.ranks.tolist() == [0, 0, 1, 1]
    assert spans.starts.tolist() == [0, 11, 0, 9] and spans.ends.tolist() == [2, 13, 2, 11]
    assert timeline.draw(color=False).splitlines()[2:] == [
        "rank 0  .  .  F0 F1 .  .  B0--- .  B1--- .  .",
        "rank 1  .  .  .  F0 B0--- F1 B1--- .  .  .  .",
    ]


def test_a_stage_is_gathered_while_another_computes() -> None:
    """0 is gathered before all, 1 during 0's work, 2 during 1's, and 0 again during 1's backwards."""
    plan = add_collectives(build(LoopedBFS(3), (0, 0, 0), 2), unshard=True)
    assert simulate(plan, Costs(unshard=1)).makespan == 18 + 1
    assert simulate(plan, Costs(unshard=(2, 3, 2))).makespan == 18 + 2 + 1
    assert simulate(plan, Costs(unshard=(0, 0, 9))).makespan == 18 + 7
    assert simulate(plan).makespan == 18


@pytest.mark.parametrize("modes", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_at_no_cost_nothing_changes(name: str, modes: tuple[bool, bool]) -> None:
    by_costs = (Costs(), Costs(F=3, B=7, I=4, W=2, latency=2, bandwidth=2, boundary_bytes=6))
    for ranks, microbatches in ((1, 3), (2, 5), (4, 8)):
        plan, made = plan_of(name, ranks, microbatches), full(name, ranks, microbatches)
        for costs in by_costs:
            before, after = (
                simulate(one, costs, rendezvous=modes[0], blocking=modes[1]) for one in (plan, made)
            )
            assert np.array_equal(before.starts, after.starts) and np.array_equal(before.ends, after.ends)
            assert (before.makespan, before.span) == (after.makespan, after.span)
            assert all(map(np.array_equal, before.bubble, after.bubble))
            assert before.critical_path == after.critical_path
            assert before.draw(color=False) == after.draw(color=False)


@pytest.mark.parametrize("modes", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "costs", [INTEGERS, dataclasses.replace(INTEGERS, bandwidth=2, boundary_bytes=6, unshard=9)]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_time_adds_up(name: str, costs: Costs, modes: tuple[bool, bool]) -> None:
    for ranks, microbatches in ((1, 3), (2, 5), (4, 8), (5, 3)):
        for active in (1, 2):
            plan = full(name, ranks, microbatches, active=active)
            timeline = simulate(plan, costs, rendezvous=modes[0], blocking=modes[1])
            bubble = timeline.bubble
            assert all((part >= 0).all() for part in bubble)
            assert np.array_equal(bubble.total + timeline.busy, np.full(ranks, timeline.makespan))
            assert bubble.communication.sum() > 0 and timeline.span <= timeline.makespan
            path = [action for _, _, action in timeline.critical_path]
            assert path[0].op == UNSHARD and path[-1].op == REDUCE_GRAD


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.data())
def test_against_a_plain_run(
    name: str, ranks: int, microbatches: int, latency: int, data: st.DataObject
) -> None:
    every, active = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    bare = dataclasses.replace(plan_of(name, ranks, microbatches), pairs=())
    plan = add_collectives(bare, reduce_every=every, unshard=True, active_stages=active)
    by_stage = st.lists(st.integers(0, 6), min_size=plan.num_stages, max_size=plan.num_stages)
    costs = Costs(
        F=data.draw(by_stage),
        I=data.draw(by_stage),
        W=data.draw(by_stage),
        unshard=data.draw(by_stage),
        reduce_grad=data.draw(by_stage),
        latency=latency,
    )
    assert simulate(plan, costs).makespan == plainly(plan, costs, latency)


def plainly(plan: Plan, costs: Costs, latency: float) -> float:
    """The makespan, by running each rank, and its stream of collectives, until it waits."""
    shape = plan.num_stages, plan.microbatches
    times = {op: costs.times(op, *shape) for op in (*COMPUTE, UNSHARD, REDUCE_GRAD)}
    made: dict[tuple[str, int, int], float] = {}
    gathered: dict[int, float] = {}
    clock, stream = [0.0] * plan.ranks, [0.0] * plan.ranks
    programs = [iter(program) for program in plan.without_transfers.programs]
    heads = [next(program) for program in programs]
    left = set(range(plan.ranks))
    while left:
        for rank in sorted(left):
            stage, op, m, _ = heads[rank]
            far = [n for n in needs(op, stage, plan.edges) if n.value in ("activation", "gradient")]
            if any((need.value, need.source, m) not in made for need in far):
                continue
            if op in (UNSHARD, REDUCE_GRAD):
                stream[rank] = max(stream[rank], clock[rank]) + float(times[op][stage, m])
                gathered[stage] = stream[rank] if op == UNSHARD else gathered[stage]
            elif op in COMPUTE:
                arrivals = [
                    made[n.value, n.source, m] + latency * (plan.placement[n.source] != rank) for n in far
                ]
                clock[rank] = max(clock[rank], gathered[stage], *arrivals, 0) + float(times[op][stage, m])
                if op != W:
                    made["activation" if op == F else "gradient", stage, m] = clock[rank]
            head = next(programs[rank], None)
            if head is None:
                left.remove(rank)
            else:
                heads[rank] = head
    return max(*clock, *stream)


def test_plans_without_collectives_pay_nothing() -> None:
    timeline = simulate(plan_of("1f1b", 2, 2), Costs(unshard=5, reduce_grad=5))
    assert timeline.makespan == 9 and not len(timeline.collectives.actions)
    check(timeline)


def test_costs_that_are_none() -> None:
    plan = full("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match=r"unshard has shape \(3,\)"):
        simulate(plan, Costs(unshard=(1, 2, 3)))
    with pytest.raises(ScheduleError, match=r"reduce_grad=-1: a number is finite"):
        Costs(reduce_grad=-1)


def test_a_plan_that_does_not_hold_is_not_simulated() -> None:
    with pytest.raises(ScheduleError, match="stays unsharded"):
        simulate(Plan.parse("rank 0: 0UNSHARD0 0F0 0B0"))


def test_pictures_have_a_lane_for_collectives(tmp_path: Path) -> None:
    timeline = simulate(full("dualpipe_v", 2, 4), Costs(unshard=1, reduce_grad=0.5))
    timeline.svg(tmp_path / "plan.svg")
    picture = ElementTree.parse(tmp_path / "plan.svg").getroot()
    titles = [str(element.text) for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    count = len(timeline.collectives.actions)
    assert sum(title.startswith((UNSHARD, REDUCE_GRAD)) for title in titles) == count > 4
    timeline.chrome_trace(tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    lane = [event for event in events if event["ph"] == "X" and event["tid"] >= 2]
    assert len(lane) == count and {event["tid"] for event in lane} == {2, 3}
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 0, collectives", "rank 1", "rank 1, collectives"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == timeline.makespan


# Commands


def test_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.csv"
    sizes, zero = ["-p", "2", "-m", "2"], ["--zero", "3", "--unshard", "2", "--reduce", "2"]
    assert main(["simulate", "1f1b", *sizes, *zero, "--reduce-every", "2", "--csv", str(file)]) == 0
    assert "makespan 13, span 13" in capsys.readouterr().out
    made = add_collectives(plan_of("1f1b", 2, 2), reduce_every=2, unshard=True)
    assert Plan.from_csv(file) == made
    assert main(["verify", str(file)]) == 0
    out = capsys.readouterr().out
    assert "8 computations, 8 sends and receives, 6 collectives" in out
    assert "reductions a stage  1 1" in out and "peak unsharded      1 1" in out
    assert main(["draw", f"csv({file})"]) == 0
    assert capsys.readouterr().out.rstrip() == made.draw(color=False)
    assert main(["simulate", f"csv({file})", "--unshard", "2"]) == 0
    assert "makespan 11, span 11" in capsys.readouterr().out
    assert main(["simulate", f"csv({file})", "--zero", "1", "--reduce", "3"]) == 0
    assert "makespan 12, span 12" in capsys.readouterr().out
    assert main(["compare", "--zero", "2", "--reduce-every", "3", "--reduce", "2"]) == 0
    rows = {row.split()[0]: row.split()[1] for row in capsys.readouterr().out.splitlines()}
    assert set(rows) > {"1f1b", "dualpipe_v", "auto"} and rows["1f1b"] == "35"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_a_zero_stage_needs(zero: int, tmp_path: Path) -> None:
    file = tmp_path / "plan.csv"
    arguments = ["simulate", "interleaved", "-p", "2", "-m", "4", "--zero", str(zero), "--csv", str(file)]
    assert main(arguments) == 0
    plan = Plan.from_csv(file)
    assert plan.reductions == (1 if zero < 2 else 4,) * 4 and plan.unshards == (1 if zero == 3 else 0,) * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate 1f1b --reduce 1", "what the plan lacks, REDUCE_GRAD: --zero puts it in"),
        ("compare --zero 2 --unshard 1", "what the plan lacks, UNSHARD: --zero 3 puts it in"),
        ("simulate 1f1b --zero 1 --reduce-every 2", "--reduce-every needs --zero 2 or 3"),
        ("simulate 1f1b --zero 3 --unshard 1,2,3", "unshard has shape (3,)"),
    ],
)
def test_wrong_input(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate 1f1b --zero 4", "--zero"),
        ("compare --reduce-every 0", "'0' is no count"),
        ("simulate 1f1b --zero 2 --reduce -1", "--reduce"),
    ],
)
def test_wrong_options(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_gpipe_of_one_rank() -> None:
    """No transfers at all: the gaps are where the computations meet."""
    made = add_collectives(build(GPipe(), (0,), 2), reduce_every=1, unshard=True)
    assert str(made) == "rank 0: 0UNSHARD0 0F0 0F1 0B0 0REDUCE_GRAD0 0B1 0RESHARD1 0REDUCE_GRAD1"
