"""Does training in several processes give what one process gives, however they are started?"""

from typing import Any

import pytest
from scripts import processes


def in_process(program: str, **arguments: Any) -> Any:
    outcome = processes.fork(program, ranks=0, **arguments)
    assert outcome.values[0] is not None, outcome
    return outcome.values[0]


@pytest.fixture(scope="module")
def alone() -> Any:
    """Four ranks in one process."""
    return in_process("train")


def check_same(outcome: processes.Outcome, alone: Any) -> None:
    assert outcome.left == [] and outcome.code == 0, outcome
    for value in outcome.values:
        assert value is not None, outcome
        assert value["losses"] == alone["losses"] and value["loss"] == alone["loss"], outcome
    assert outcome.values[0]["parameters"] == alone["parameters"], outcome


# -------------------------------------------------------------------------------- starting


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_torchrun_trains_as_one_process_does(ranks: int, alone: Any) -> None:
    check_same(processes.torchrun("train", ranks=ranks, options=f"chunks=4 ranks={ranks}"), alone)


def test_torchrun_with_one_process_is_the_in_process_run(alone: Any) -> None:
    check_same(processes.torchrun("train", ranks=1), alone)


def test_launch_trains_as_one_process_does_and_returns_results_by_rank(alone: Any) -> None:
    outcome = processes.launch("train", ranks=2, options="chunks=4 ranks=2")
    check_same(outcome, alone)
    assert '"parameters": "' + alone["parameters"] in outcome.said.splitlines()[-1]


@pytest.mark.full
def test_plain_processes_with_variables_train_as_one_process_does(alone: Any) -> None:
    check_same(processes.spawn("train"), alone)


def test_a_late_rank_is_waited_for(alone: Any) -> None:
    check_same(processes.fork("train", late=2, late_by=3.0), alone)


def test_the_scripts_own_process_group_is_used_and_left_alone() -> None:
    assert processes.fork("own_group").values == [4.0] * 4


# ---------------------------------------------------------------------------------- launch

_NOTEBOOK = """
import os, torch, pipe
{before}
def fn(word, number):
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pipe.Pipeline(layers, "chunks=2 ranks=2") as pipeline:
        rows = pipeline.predict(torch.ones(2, 2))
    return [int(os.environ["RANK"]), word * number, len(rows)]
try:
    print(pipe.launch(fn, {ranks}, "ab", 2))
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
# What a machine with a GPU has after a backward; on CPUs autograd has no threads of its own.
_AUTOGRAD_THREAD = """
import ctypes, threading
ready = threading.Event()
def named():
    ctypes.CDLL(None).prctl(15, b"pt_autograd_0", 0, 0, 0)
    ready.set()
    threading.Event().wait()
threading.Thread(target=named, daemon=True).start()
ready.wait()
"""


def notebook(before: str = "", ranks: int = 2) -> processes.Outcome:
    """Code that comes from nowhere a spawned process could import it from."""
    code = _NOTEBOOK.format(before=before, ranks=ranks)
    return processes.script([processes.PYTHON, "-"], stdin=code)


def test_launch_in_a_notebook_forks() -> None:
    outcome = notebook("torch.ones(2, requires_grad=True).sum().backward()")
    assert "[[0, 'abab', 2], [1, 'abab', 2]]" in outcome.said, outcome
    assert outcome.left == []


def test_launch_in_a_notebook_refuses_where_autograd_runs() -> None:
    outcome = notebook(_AUTOGRAD_THREAD)
    assert "PipelineError: autograd's threads are up" in outcome.said, outcome


@pytest.mark.parametrize("ranks", [0, -1])
def test_launch_needs_a_rank(ranks: int) -> None:
    from pipe import launch

    with pytest.raises(ValueError, match=f"ranks={ranks}"):
        launch(print, ranks)


# ---------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize("names", [["pp", "tp"], pytest.param(["tp", "pp"], marks=pytest.mark.full)])
def test_two_pipelines_along_a_mesh_train_apart(names: list[str]) -> None:
    """A mesh of 2 x 2: each coordinate of the other dimension has a pipeline of its own, and its own data."""
    outcome = processes.fork("on_mesh", names=names, sizes=[2, 2])
    expected = [in_process("alone", start=start) for start in (0, 100)]
    assert expected[0]["parameters"] != expected[1]["parameters"]
    for value in outcome.values:
        assert value is not None, outcome
        assert value["losses"] == expected[value["number"]]["losses"]
        if value["rank"] == 0:
            assert value["parameters"] == expected[value["number"]]["parameters"]
    assert sorted((value["number"], value["rank"]) for value in outcome.values) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_meshes_that_can_not_be_used() -> None:
    outcome = processes.fork("mesh_errors", cases=[["a", "tp"]])
    for errors in outcome.values:
        assert errors is not None, outcome
        assert "ValueError" in errors[0]["kinds"], errors
        assert "a dimension named 'pp'; it has ['a', 'tp']" in errors[0]["text"], errors


# ------------------------------------------------------------------------ several, and their end


@pytest.fixture(scope="module")
def several() -> list[Any]:
    """Four processes with two pipelines one after the other, two side by side, and a closed one."""
    outcome = processes.fork("several")
    assert all(value is not None for value in outcome.values), outcome
    return outcome.values


@pytest.mark.parametrize("how", ["after", "beside"])
def test_two_pipelines_of_the_same_ranks(how: str, several: list[Any]) -> None:
    assert several[0][how] == in_process("several")[how]


def test_a_closed_pipeline_says_so(several: list[Any]) -> None:
    for value in (*several, in_process("several")):
        for error in value["closed"][:3]:
            assert error["type"] == "PipelineError" and "closed" in error["text"], error


@pytest.mark.parametrize(
    "program", ["forget_close", pytest.param("forget_everything", marks=pytest.mark.full)]
)
def test_a_script_that_forgets_to_close_ends_quietly(program: str) -> None:
    outcome = processes.fork(program)
    assert outcome.left == []
    assert [(rank.code, rank.err) for rank in outcome.ranks] == [(0, "")] * 4, outcome


@pytest.mark.full
def test_forgetting_to_close_under_torchrun() -> None:
    outcome = processes.torchrun("forget_everything")
    assert outcome.code == 0 and outcome.left == [], outcome
    assert all(rank.err == "" for rank in outcome.ranks), outcome
