"""When a rank fails, do the others end in seconds, and does each say which one failed, where and why?

Rank 2 of 4 fails in its second step (or rank 3, in what only the last stage has).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripts import processes
from scripts.processes import Outcome

Run = Callable[..., Outcome]

# From the failure to the end of the last process. The acceptance is 15 s; an idle machine needs a fraction
# of a second.
SOON = 15.0

# place: where it must say that it happened
IN_A_STEP = {
    "forward": "rank 2, stage 2 (layers 4 to 5), action 2F1",
    "backward": "rank 2, stage 2 (layers 4 to 5), action 2B1",
    "loss": "rank 3, stage 3 (layers 6 to 7), action 3F1",
    "forward_hook": "rank 2, stage 2 (layers 4 to 5), action 2F1",
    "forward_pre_hook": "rank 2, stage 2 (layers 4 to 5), action 2F1",
    "backward_hook": "rank 2, stage 2 (layers 4 to 5), action 2B1",
    "parameter_hook": "rank 2, stage 2 (layers 4 to 5), action 2B1",
}
ELSEWHERE = {
    "weight": "rank 3 can't take part in step",
    "split": "rank 3 can't take part in step",
    "optimizer": "rank 2 could not build its pipeline",
    "optimizer_step": "rank 2",
    "between": "rank 2, between two calls",
}
PLACES = IN_A_STEP | ELSEWHERE


def culprit(place: str) -> int:
    return 3 if place in ("loss", "weight", "split") else 2


def check_ended(outcome: Outcome, within: float = SOON) -> None:
    assert outcome.left == [], outcome
    assert max(outcome.seconds) < within, outcome


def check_said(outcome: Outcome, place: str, why: str = "RuntimeError: boom: that went wrong") -> None:
    """Every rank's own error output says which rank, where and why."""
    for number, rank in enumerate(outcome.ranks):
        assert why in rank.err, outcome
        if number != culprit(place):
            assert f"PeerError: {PLACES[place]}" in rank.err, outcome
        elif place in IN_A_STEP:
            assert f"in {PLACES[place]}" in rank.err, outcome
        if place in IN_A_STEP:
            assert "microbatch 1" in rank.err, outcome


# ------------------------------------------------------------------------- errors as raised


def test_every_rank_raises_where_it_happened_and_new_pipelines_work() -> None:
    """All in the same four processes, one failure after the other, and a whole pipeline at the end."""
    outcome = processes.fork("faults", places=list(PLACES), limit=60)
    assert all(rank.code == 0 for rank in outcome.ranks), outcome
    for index, (place, where) in enumerate(PLACES.items()):
        for number, value in enumerate(outcome.values):
            error = value["errors"][index]
            assert error is not None, (place, number)
            assert error["type"] == ("RuntimeError" if number == culprit(place) else "PeerError"), (
                place,
                number,
                error,
            )
            assert "boom: that went wrong" in error["text"], (place, number, error)
            if number != culprit(place) or place in IN_A_STEP:
                assert where in error["text"], (place, number, error)
            assert error["seconds"] < SOON, (place, number, error)
    assert len({str(value["losses"]) for value in outcome.values}) == 1


def test_a_failed_pipeline_says_so_and_a_new_one_trains() -> None:
    outcome = processes.fork("after_a_failure")
    whole = processes.fork("train", ranks=0).values[0]["losses"]
    for value in outcome.values:
        assert value is not None, outcome
        assert "boom" in value["first"]["text"] and "2F1" in value["first"]["text"]
        assert value["again"]["type"] == "PipelineError"
        assert "closed since a call failed" in value["again"]["text"]
        assert value["losses"] == whole[:2]


def test_a_second_pipeline_outlives_the_failure_of_the_first() -> None:
    outcome = processes.fork("one_survives")
    for value in outcome.values:
        assert value is not None, outcome
        assert "2F1" in value["error"]["text"]
    assert outcome.values[0]["parameters"] == in_process("one_pipeline", count=2)


def in_process(program: str, **arguments: Any) -> Any:
    return processes.fork(program, ranks=0, **arguments).values[0]


# ----------------------------------------------------------------- processes as they end


def _full(cases: Sequence[Any]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


@pytest.mark.parametrize(
    ("run", "place"),
    [
        (processes.torchrun, "forward"),
        (processes.fork, "backward"),
        *_full([(processes.torchrun, place) for place in PLACES if place != "forward"]),
        *_full([(processes.launch, place) for place in PLACES]),
        *_full([(processes.fork, place) for place in PLACES if place != "backward"]),
        *_full([(processes.spawn, "forward"), (processes.spawn, "between")]),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_all_four_processes_end_and_say_why(run: Run, place: str) -> None:
    outcome = run("fault", place=place)
    check_ended(outcome)
    check_said(outcome, place)
    if run in (processes.fork, processes.spawn):
        assert [rank.code for rank in outcome.ranks] == [1, 1, 1, 1], outcome
    else:
        assert outcome.code != 0, outcome


# how: what the others must give as the reason
WAYS = {
    "warning": "UserWarning: boom: a warning",
    "key": "KeyError: ('boom', 7)",
    "bare": "_Strange: boom number 7",
    "memory": "MemoryError: boom: out of memory",
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit: 3",
    "exit_ok": "SystemExit: 0",
}
SHOWN = ("exit", "forward")
CODES = {"interrupt": -2, "exit": 3, "exit_ok": 0}


@pytest.mark.parametrize(
    ("how", "place"),
    [
        SHOWN,
        *_full(
            [
                (h, p)
                for h in WAYS
                for p in ("forward", "backward", "between")
                if (h, p) != ("exit", "forward")
            ]
        ),
    ],
)
def test_other_ways_to_fail(how: str, place: str) -> None:
    """Errors that are no `Exception`, or can't be copied, or end a script quietly, as `sys.exit(0)` does."""
    outcome = processes.fork("fault", place=place, how=how)
    check_ended(outcome)
    for number, rank in enumerate(outcome.ranks):
        if number == 2:
            assert rank.code == CODES.get(how, 1), outcome
        else:
            assert rank.code == 1, outcome
            assert f"PeerError: {PLACES[place]}" in rank.err and WAYS[how] in rank.err, outcome


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("kill", "forward"),
        *_full([("kill", "backward"), ("kill", "between"), ("vanish", "forward"), ("vanish", "between")]),
    ],
)
def test_a_rank_that_vanishes_is_named(how: str, place: str) -> None:
    """SIGKILL, or `os._exit(0)`: nothing is left to say a word."""
    outcome = processes.fork("fault", place=place, how=how)
    check_ended(outcome)
    for number in (0, 1, 3):
        rank = outcome.ranks[number]
        assert rank.code == 1, outcome
        last = rank.err.strip().splitlines()[-1]
        assert "PeerError" in last and "rank 2" in last, outcome


@pytest.mark.full
def test_a_rank_that_vanishes_under_torchrun() -> None:
    outcome = processes.torchrun("fault", place="forward", how="kill")
    check_ended(outcome)
    assert outcome.code != 0


@pytest.mark.parametrize("how", ["error", "exit_ok", "interrupt"])
@pytest.mark.full
def test_outside_of_a_call_without_with(how: str) -> None:
    """Nobody catches what the script raises between two calls; a closed connection tells the others."""
    outcome = processes.fork("fault", place="between", how=how, guarded=False)
    check_ended(outcome)
    for number in (0, 1, 3):
        assert outcome.ranks[number].code == 1, outcome
        assert "PeerError" in outcome.ranks[number].err and "rank 2" in outcome.ranks[number].err, outcome


@pytest.mark.parametrize("how", ["close", *_full([("return",)])])
def test_a_rank_that_stops_early_is_named(how: str) -> None:
    """Rank 2's loop is shorter: it closes its pipeline while the others go on."""
    outcome = processes.fork("leave_early", how=how)
    check_ended(outcome)
    for number in (0, 1, 3):
        error = outcome.values[number]
        assert error is not None and error["type"] == "PeerError", outcome
        assert "rank 2" in error["text"], error


# --------------------------------------------------------------------------- silent ranks


@pytest.mark.parametrize(
    ("place", "rank"),
    [("forward", 2), *_full([("backward", 2), ("between", 2), ("forward", 0), ("forward", 3)])],
)
def test_a_silent_rank_is_named_within_about_the_timeout(place: str, rank: int) -> None:
    """It sleeps for 7 s; the timeout is 2. Nobody waits for it to wake."""
    outcome = processes.fork("silent", place=place, rank=rank, timeout=2)
    for number, error in enumerate(outcome.values):
        assert error is not None and outcome.raised is not None, outcome
        if number != rank:
            assert error["type"] == "PeerError", error
            assert f"rank {rank} gave no sign of life for 2 s (timeout=2)" in error["text"], error
            assert 1.5 < error["at"] - outcome.raised < 6, error


def test_a_rank_without_a_pipeline_is_named() -> None:
    """It never gets to its `Pipeline(...)`; the others' timeout is 2 s."""
    outcome = processes.fork("one_without_pipeline")
    for number in (0, 1, 3):
        error = outcome.values[number]
        assert error is not None, outcome
        assert "PipelineError" in error["kinds"] and re.search(r"ranks? \[?2\b", error["text"]), error
        assert error["seconds"] < 2 + 5, error


def test_ctrl_c_leaves_nothing_behind() -> None:
    outcome = processes.interrupted("train_on", ranks=2, options="chunks=4 ranks=2")
    check_ended(outcome)
    assert outcome.code != 0
