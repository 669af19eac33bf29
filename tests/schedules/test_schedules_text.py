"""Do actions and plans survive the way through text, and do mistakes in it say where they are?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import (
    COMMUNICATION,
    OPS,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    Actions,
    B,
    CSVFile,
    F,
    GPipe,
    OneFOneB,
    Plan,
    Problem,
    ScheduleError,
    build,
)

NUMBERS = st.integers(0, 5000)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    op = draw(st.sampled_from(list(OPS)))
    peer = draw(st.none() | NUMBERS) if op in COMMUNICATION else None
    return Action.parse(str(Action(draw(NUMBERS), op, draw(NUMBERS), peer)))


@given(actions())
def test_text_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.lists(actions(), max_size=20), st.slices(20))
def test_columns_round_trip(items: list[Action], part: slice) -> None:
    columns = Actions.of(items)
    assert list(columns) == items and [columns[i] for i in range(len(items))] == items
    assert list(columns[part]) == items[part] and columns[part] == Actions.of(items[part])
    assert hash(columns) == hash(Actions.of(items))


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, F, 0), "2F0"),
        (Action(12, B, 345), "12B345"),
        (Action(2, SEND_F, 0), "2SEND_F0"),
        (Action(0, SEND_F, 0, 3), "0SEND_F0>3"),
        (Action(3, RECV_F, 0, 0), "3RECV_F0<0"),
        (Action(3, SEND_B, 1, 0), "3SEND_B1>0"),
        (Action(0, RECV_B, 1, 3), "0RECV_B1<3"),
        (Action(0, SEND_F, 0, 1), "0SEND_F0"),
    ],
)
def test_text_of_an_action(action: Action, text: str) -> None:
    assert str(action) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no action"),
        ("F0", "is no action"),
        ("2F", "is no action"),
        ("2F0 ", "is no action"),
        ("٢F0", "is no action"),
        ("2SND_F0", r"unknown op 'SND_F' \(did you mean SEND_F\?\)"),
        ("2f0", r"did you mean F\?"),
        ("2F0>3", "only a SEND"),
        ("0SEND_F0<3", "only a SEND"),
        ("3RECV_F0>0", "only a SEND"),
        ("99999999999F0", "a number over 2147483647"),
    ],
)
def test_what_is_no_action(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Action.parse(text)


def test_columns_are_compact_and_read_only() -> None:
    program = OneFOneB().orders(Problem((0, 1), 100))[0]
    assert isinstance(program, Actions)
    columns = (program.ops, program.stages, program.microbatches, program.peers)
    assert sum(column.itemsize for column in columns) == 13
    assert not any(column.flags.writeable for column in columns)
    assert isinstance(program[-1].stage, int) and not isinstance(program[-1].stage, np.integer)


def test_equal_programs_have_equal_columns() -> None:
    assert Actions.of([Action(0, SEND_F, 0, 1)]) == Actions.of([Action(0, SEND_F, 0)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_plans_round_trip(ranks: int, microbatches: int, tmp_path: Path) -> None:
    plan = build(OneFOneB(), range(ranks), microbatches)
    file = tmp_path / "plan.csv"
    file.write_text(plan.to_csv())
    for again in (Plan.parse(str(plan)), Plan.from_csv(plan.to_csv()), Plan.from_csv(file)):
        assert again == plan and again.digest == plan.digest


def test_digest_tells_plans_apart() -> None:
    plans = [build(s, range(2), m) for s in (GPipe(), OneFOneB()) for m in (2, 3)]
    plans += [build(GPipe(), (1, 0), 2), build(GPipe(), range(2), 2, forward_only=True)]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert build(GPipe(), range(2), 2).digest == plans[0].digest


def test_empty_cells_are_bubbles() -> None:
    plan = Plan.from_csv("0F0,,,0B0\r\n,1F0,1B0,\r\n\r\n")
    assert [str(program) for program in plan.programs] == ["0F0 0B0", "1F0 1B0"]
    assert plan.placement == (0, 1) and plan.edges == ((0, 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "without ranks"),
        ("0F0,0X0\n", r"rank 0, column 1: '0X0': unknown op 'X'"),
        ("0F0\n,1F0,one\n", r"rank 1, column 2: 'one' is no action"),
        ("0F0\n,,\n1F0\n", r"rank 1 is missing"),
        ("0F0\n\n1F0\n", r"rank 1 is missing"),
        ("0F0\n1F0,0B0\n", r"rank 1, #1 0B0: stage 0 is on rank 0 too"),
        ("0F0\n2F0\n", r"stage 1 is never used, though stage 2 is"),
        ("0SEND_F0\n", r"no rank computes anything"),
    ],
)
def test_what_is_no_csv_plan(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Plan.from_csv(text)


def test_a_file_is_a_schedule(tmp_path: Path) -> None:
    plan = build(OneFOneB(), range(3), 5)
    whole, orders = tmp_path / "whole.csv", tmp_path / "orders.csv"
    whole.write_text(plan.to_csv())
    orders.write_text("\n".join(",".join(map(str, order)) for order in plan.orders))
    for path in (whole, orders):
        file = CSVFile(str(path))
        assert (file.ranks, file.microbatches) == (3, 5)
        assert build(file, file.placement(3), 5) == plan
        assert build(file, file.placement(3), 5, forward_only=True).forward_only
        with pytest.raises(ScheduleError, match="has 3 ranks, not 4"):
            file.placement(4)
        with pytest.raises(ScheduleError, match="has 5 microbatches, not 6"):
            build(file, range(3), 6)
        with pytest.raises(ScheduleError, match="has placement 0,1,2, not 2,1,0"):
            build(file, (2, 1, 0), 5)


def test_a_file_may_have_other_edges(tmp_path: Path) -> None:
    plan = build(GPipe(), range(3), 2, edges=[(0, 1), (1, 2), (0, 2)])
    (tmp_path / "skip.csv").write_text(plan.to_csv())
    assert build(CSVFile(str(tmp_path / "skip.csv")), range(3), 2) == plan


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"cannot read .*none\.csv"):
        CSVFile(str(tmp_path / "none.csv"))


def test_a_file_with_communication_is_not_lowered_again(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    with pytest.raises(ScheduleError, match=r"rank 1, #3 1SEND_B0: no partner: rank 0 lacks the RECV_B"):
        build(CSVFile(str(tmp_path / "bad.csv")), range(2), 1)


def test_drawing() -> None:
    assert build(OneFOneB(), range(3), 5).draw().splitlines() == [
        "F forward, B-- backward (2 columns); number = microbatch; . bubble",
        "  time  0              5              10             15             20",
        "rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- .  B3--- .  B4---",
        "rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- .  B4--- .  .",
        "rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- .  .  .  .",
    ]
    assert build(GPipe(), (0, 1, 0), 1).draw().splitlines() == [
        "F forward, B-- backward (2 columns); number = microbatch; ' = the rank's next stage; . bubble",
        "  time  0                   5",
        "rank 0  F0  .   F0' B0'---- .   .   B0-----",
        "rank 1  .   F0  .   .   .   B0----- .   .",
    ]
