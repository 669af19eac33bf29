"""Does the small face of the package (needs, problems, plans, users' classes, names) keep its word?"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strict_model import completes

from schedules import (
    ACTIVATION,
    DEFERRED,
    GRADIENT,
    OPS,
    RECV_F,
    SAVED,
    SCHEDULES,
    SEND_B,
    SEND_F,
    Action,
    Actions,
    B,
    CSVFile,
    Edges,
    F,
    GPipe,
    I,
    Interleaved,
    Need,
    OneFOneB,
    Plan,
    Problem,
    ScheduleError,
    W,
    build,
    chain,
    get,
    names,
    needs,
    registry,
    route,
    text_of,
)
from schedules.graph import longest_paths

GOLDEN = Path(__file__).parent / "golden"


def test_needs_on_the_chain() -> None:
    edges = chain(4)
    assert needs(F, 0, edges) == ()
    assert needs(F, 2, edges) == (Need(ACTIVATION, 1),)
    assert needs(B, 1, edges) == (Need(SAVED, 1), Need(GRADIENT, 2))
    assert needs(I, 3, edges) == (Need(SAVED, 3),)
    assert needs(W, 2, edges) == (Need(DEFERRED, 2),)
    assert needs(SEND_F, 2, edges) == (Need(ACTIVATION, 2),)
    assert needs(SEND_B, 2, edges) == (Need(GRADIENT, 2),)
    assert needs(RECV_F, 2, edges) == ()


def test_needs_over_other_edges() -> None:
    edges = ((0, 1), (1, 2), (0, 2))
    assert needs(F, 2, edges) == (Need(ACTIVATION, 0), Need(ACTIVATION, 1))
    assert needs(B, 0, edges) == (Need(SAVED, 0), Need(GRADIENT, 1), Need(GRADIENT, 2))
    assert Edges.of(edges) == edges
    with pytest.raises(ScheduleError, match=r"\(2, 1\) is no edge"):
        Edges.of([(2, 1)])


def test_routes() -> None:
    assert route(SEND_F, 2) == (2, 3) and route(RECV_F, 2) == (1, 2)
    assert route(SEND_B, 2) == (2, 1) and route("RECV_B", 2) == (3, 2)
    assert route(SEND_F, 0, 3) == (0, 3) and route(RECV_F, 3, 0) == (0, 3)


def test_codes_of_ops_differ() -> None:
    assert len({spec.code for spec in OPS.values()}) == len(OPS)


def test_problem() -> None:
    problem = Problem((0, 1, 1, 0), 4)
    assert (problem.ranks, problem.num_stages) == (2, 4)
    assert problem.stages_of(0) == (0, 3) and problem.stages_of(1) == (1, 2)


@pytest.mark.parametrize(
    ("placement", "microbatches", "message"),
    [
        ((), 1, "without stages"),
        ((0, 2), 1, "0,2 leaves rank 1 without a stage"),
        ((0, -1), 1, "has rank -1"),
        ((0,), 0, "0 microbatches"),
    ],
)
def test_what_is_no_problem(placement: tuple[int, ...], microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Problem(placement, microbatches)
    with pytest.raises(ScheduleError, match=message):
        build(GPipe(), placement, microbatches)


def test_what_is_no_plan() -> None:
    with pytest.raises(ScheduleError, match="1 programs for 2 ranks"):
        Plan((0, 1), 1, (Actions.of([]),), chain(2))
    with pytest.raises(ScheduleError, match=r"edge \(0, 5\) leaves the plan's 2 stages"):
        build(GPipe(), (0, 1), 1, edges=[(0, 5)])


def test_plans_travel() -> None:
    plan = build(OneFOneB(), range(3), 4)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and hash(again) == hash(plan) and again.digest == plan.digest
    assert plan.stages_of(1) == (1,)


def test_out_of_order_weight_gradients_show() -> None:
    plan = Plan.parse("rank 0: 0F0 0F1 0I1 0I0 0W0 0W1")
    assert plan.in_order
    assert not Plan.parse("rank 0: 0F0 0F1 0B1 0B0").in_order
    assert Plan.parse("rank 0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1").in_order


class DepthFirst:
    """A user's class: two methods, no base."""

    def placement(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def orders(self, problem: Problem) -> list[list[Action]]:
        return [
            [Action(stage, op, m) for m in range(problem.microbatches) for op in (F, B)]
            for stage in range(problem.num_stages)
        ]


def test_a_class_of_the_users_own() -> None:
    plan = build(DepthFirst(), range(3), 4)
    assert completes(plan) and plan.peak_live == (1, 1, 1)
    assert text_of(DepthFirst()) is None


@dataclass
class Answers:
    answer: Any

    def placement(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def orders(self, problem: Problem) -> Any:
        return self.answer


GOOD = [Action(0, F, 0), Action(0, B, 0)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "Answers.orders returned no sequence of sequences of Action: None"),
        ([1, 2], "Answers.orders returned no sequence of sequences"),
        ([GOOD], "Answers.orders returned 1 orders for 2 ranks"),
        ([GOOD, ["1F0"]], "Answers, rank 1: #0 is '1F0', not an Action"),
        ([GOOD, [(1, F, 0)]], r"rank 1: #0 is \(1, 'F', 0\), not an Action"),
        ([GOOD, [Action(1, "G", 0)]], "rank 1: #0 1G0: unknown op 'G'"),
        ([GOOD, [Action(1, F, -1)]], "-1 is no index"),
        ([GOOD, [Action("1", F, 0)]], "'1' is no index"),  # type: ignore[arg-type]
        ([GOOD, [Action(1, F, 2**40)]], "is no index"),
        ([GOOD, GOOD], "rank 1, #0 0F0: stage 0 lives on rank 0"),
        ([GOOD, [Action(2, F, 0)]], "rank 1, #0 2F0: the plan has 2 stages"),
        ([GOOD, [Action(1, F, 1)]], "rank 1, #0 1F1: the plan has 1 microbatches"),
        ([GOOD, [Action(1, F, 0, 1)]], "a computation has no peer"),
        ([GOOD, []], "rank 1 never does 1F0"),
        ([GOOD, [Action(1, F, 0)]], "rank 1, #0 1F0: nothing takes its saved activation"),
    ],
)
def test_what_a_class_gets_wrong(answer: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(Answers(answer), (0, 1), 1)


def test_names_and_texts() -> None:
    assert names() == (*SCHEDULES, "csv")
    for text in (*SCHEDULES, "interleaved(3)", "looped_bfs(1)"):
        assert text_of(get(text)) == text
    assert text_of(get("interleaved(2)")) == "interleaved" and get("interleaved(2)") == Interleaved()
    assert get("1f1b") == OneFOneB() and get("gpipe()") == GPipe()


def test_csv_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a,1(2).csv"
    path.write_text("0F0,0B0\n")
    schedule = get(f"csv({path})")
    assert schedule == CSVFile(str(path)) and text_of(schedule) == f"csv({path})"


@pytest.mark.parametrize(
    ("text", "message", "span"),
    [
        (
            "1f1",
            r"unknown schedule '1f1' \(did you mean 1f1b\?\); the schedules are gpipe, 1f1b, .*, csv",
            (0, 3),
        ),
        ("GPipe", r"did you mean gpipe\?", (0, 5)),
        ("xyz(3)", "unknown schedule 'xyz'; the schedules", (0, 3)),
        ("gpipe(2)", "too many positional arguments", (6, 7)),
        ("gpipe(two)", "'two' is no number", (6, 9)),
        ("csv", "missing a required argument: 'path'", (0, 3)),
        ("csv(none.csv)", "cannot read none.csv", (4, 12)),
        ("interleaved(0)", r"interleaved\(0\): a rank has 1, 2, ... stages", (12, 13)),
        ("gpipe(", "names no schedule", (0, 6)),
        ("", "names no schedule", (0, 0)),
    ],
)
def test_what_is_no_name(text: str, message: str, span: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        get(text)
    assert caught.value.span == span


@dataclass(frozen=True)
class Deep(GPipe):
    depth: int = 2
    width: int = 3


def test_names_of_other_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        [
            EntryPoint("deep", f"{__name__}:Deep", registry.GROUP),
            EntryPoint("broken", "no_such_module:Thing", registry.GROUP),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))
    assert names() == (*SCHEDULES, "csv", "broken", "deep")
    for text, schedule in (("deep", Deep()), ("deep(4)", Deep(4)), ("deep(2,5)", Deep(2, 5))):
        assert get(text) == schedule and text_of(schedule) == text
    with pytest.raises(ScheduleError, match="schedule 'broken' of no_such_module:Thing cannot be loaded"):
        get("broken")


def test_longest_paths() -> None:
    sources, targets = np.array([0, 0, 1, 2, 3]), np.array([1, 2, 3, 3, 4])
    paths = longest_paths(np.array([1, 5, 2, 1, 1]), sources, targets)
    assert paths.starts.tolist() == [0, 1, 1, 6, 7] and paths.done.all()
    ring = longest_paths(np.ones(4, np.int64), np.array([0, 1, 2, 2]), np.array([1, 2, 1, 3]))
    assert ring.done.tolist() == [True, False, False, False]


def test_import_stays_light() -> None:
    code = "import sys, json, schedules; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"torch", "pipe", "partitioners"} & set(json.loads(out.stdout))


def test_a_plan_of_many_actions() -> None:
    """32,768 compute actions in some 20 ms: nothing here may turn quadratic or loop over actions."""
    plan = build(OneFOneB(), range(64), 256)
    assert plan.peak_live == tuple(64 - rank for rank in range(64))
