"""Do overlapped pairs survive the way through text and lowering, and run as one?"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from schedules import (
    SCHEDULES,
    Action,
    Actions,
    B,
    Costs,
    CSVFile,
    DualPipeV,
    F,
    OneFOneB,
    Plan,
    Problem,
    ScheduleError,
    build,
    forward_only,
    get,
    simulate,
    verify,
)

# Rank 0 does the second microbatch's forward and the first one's backward at once.
#
#     rank 0   F0 F1 .  .  (F2  B0-----) B1--- B2---
TEXT = """
    rank 0: 0F0 0F1 (0F2;0B0) 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
"""


def dualpipe(ranks: int, microbatches: int) -> Plan:
    return build(DualPipeV(), DualPipeV().placement(ranks), microbatches)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
def test_pairs_round_trip(ranks: int, microbatches: int, tmp_path: Path) -> None:
    plan = dualpipe(ranks, microbatches)
    file = tmp_path / "plan.csv"
    file.write_text(plan.to_csv())
    for again in (Plan.parse(str(plan)), Plan.from_csv(plan.to_csv()), plan_of(file)):
        assert again == plan and again.pairs == plan.pairs and again.digest == plan.digest
    orders = plan.compute_only
    file.write_text(orders.to_csv())
    assert Plan.from_csv(file) == orders
    assert plan_of(file) == plan  # lowered again


def plan_of(file: Path) -> Plan:
    schedule = CSVFile(str(file))
    return build(schedule, schedule.placement(schedule.ranks), schedule.microbatches)


def test_cells_of_both_texts() -> None:
    plan = Plan.parse(TEXT)
    assert plan.pairs == ((2,), ())
    assert plan.to_csv() == "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert str(plan).splitlines()[0] == "rank 0: 0F0 0F1 (0F2;0B0) 0B1 0B2"
    assert Plan.from_csv("0F0,0F1,(0F2; 0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n") == plan


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("(0F0;0B0", "is no action"),
        ("(0F0;0B0)OVERLAP", "is no action"),
        ("(0F0)OVERLAP_F_B", "is no action"),
        ("(0F0;0B0;0B1)", "is no action"),
        ("(0B0;0F0)", "a pair is a forward and a backward"),
        ("(0F0;0W0)", "a pair is a forward and a backward"),
        ("(0F0;0B0)", "a backward needs its own forward"),
        ("(0F0;0X0)", "unknown op 'X'"),
    ],
)
def test_what_is_no_pair(cell: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"rank 0, column 1: .*{message}"):
        Plan.from_csv(f"0F1,{cell}\n")


def test_lowering_keeps_a_pair_together() -> None:
    plan = dualpipe(3, 7)
    assert [len(pairs) for pairs in plan.pairs] == [len(pairs) for pairs in plan.compute_only.pairs]
    assert sum(map(len, plan.pairs)) == 6 + 7 + 7
    for program, firsts in zip(plan.programs, plan.pairs, strict=True):
        for first in firsts:
            assert (program[first].op, program[first + 1].op) == (F, B)
    verify(plan)


def test_what_is_no_longer_a_pair_is_dropped() -> None:
    plan = dualpipe(2, 4)
    rank, first = next((rank, pairs[0]) for rank, pairs in enumerate(plan.pairs) if pairs)
    for changed in (
        lambda program: [*program[: first + 1], Action(0, "W", 0), *program[first + 1 :]],
        lambda program: program[:first] + program[first + 1 :],
        lambda program: [*program[:first], program[first + 1], program[first], *program[first + 2 :]],
    ):
        programs = list(plan.programs)
        programs[rank] = Actions.of(changed(list(programs[rank])))
        mutant = dataclasses.replace(plan, programs=tuple(programs))
        assert first not in mutant.pairs[rank]
    assert not any(forward_only(plan).pairs)
    assert dataclasses.replace(plan, pairs=()).pairs == ((), ())
    assert dataclasses.replace(plan, pairs=()).digest != plan.digest


def test_a_pair_is_one_unit_of_a_cost_of_its_own() -> None:
    plan = Plan.parse(TEXT)
    timeline = simulate(plan)
    assert timeline.starts.tolist()[2:4] == [4, 4] and timeline.ends.tolist()[2:4] == [7, 7]
    assert timeline.makespan == 12 and timeline.busy.tolist() == [9, 9]
    unpaired = simulate(dataclasses.replace(plan, pairs=()))
    assert unpaired.starts.tolist()[2:4] == [2, 4]
    assert simulate(plan, Costs(pair=2)).ends.tolist()[2:4] == [6, 6]
    assert simulate(plan, Costs(pair=(1.5, 9))).ends.tolist()[2] == 5.5
    assert timeline.draw(color=False).splitlines()[2] == "rank 0  F0 F1 .  .  F2&B0--- B1--- .  B2---"


def test_dualpipe_at_p4_m8() -> None:
    plan = dualpipe(4, 8)
    assert simulate(plan).makespan == 54
    assert simulate(dataclasses.replace(plan.compute_only, pairs=())).makespan == 51
    assert simulate(plan, Costs(pair=2)).makespan < 51  # where hardware overlaps the two


def test_pairs_that_wait_for_each_other() -> None:
    """Rank 1's forward needs what rank 0 makes in the very pair that needs rank 1's backward."""
    plan = Plan.parse("rank 0: 0F0 (0F1;0B0) 0B1\nrank 1: 1F0 1F1 1B0 1B1")
    ring = "rank 0 stands at #1 0F1, waits for #2 1B0 of rank 1"
    with pytest.raises(ScheduleError, match=ring):
        simulate(plan)
    assert simulate(dataclasses.replace(plan, pairs=())).makespan == 9


class Paired(OneFOneB):
    """A user's schedule with pairs."""

    def __init__(self, answer: object) -> None:
        object.__setattr__(self, "answer", answer)

    def pairs(self, problem: Problem) -> object:
        return self.answer  # type: ignore[attr-defined]


def test_what_a_schedule_answers_for_its_pairs() -> None:
    # Rank 0 of 1F1B does F0 F1 B0 F2 B1 B2, rank 1 F0 B0 F1 B1 F2 B2.
    assert build(Paired([[3], []]), (0, 1), 3).compute_only.pairs == ((3,), ())
    assert not any(build(Paired([[0, 99], [0]]), (0, 1), 3).pairs)
    with pytest.raises(ScheduleError, match=r"Paired\.pairs returned no sequence of sequences of int: None"):
        build(Paired(None), (0, 1), 3)
    with pytest.raises(ScheduleError, match="returned no sequence of sequences of int"):
        build(Paired([["3"], []]), (0, 1), 3)
    with pytest.raises(ScheduleError, match="pairs of 1 ranks for 2 programs"):
        build(Paired([[3]]), (0, 1), 3)


@pytest.mark.parametrize("microbatches", [3, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_what_we_write_and_we_what_it_writes(name: str, microbatches: int) -> None:
    pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import _Action

    schedule = get(name)
    whole = build(schedule, schedule.placement(4), microbatches)
    for plan in (whole, whole.compute_only):
        rows = [row.split(",") for row in plan.to_csv().splitlines()]
        written = [",".join(str(_Action.from_str(cell)) for cell in row) for row in rows]
        assert Plan.from_csv("\n".join(written)) == plan == Plan.parse(str(plan))
