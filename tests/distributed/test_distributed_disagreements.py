"""When ranks are not asked to do the same thing, do all of them raise, at once, and say how they differ?"""

from typing import Any

import pytest
from scripts import processes

# What every rank must say, for each case of `programs.BUILDS`: one rank builds another pipeline.
BUILDS = {
    "chunks": "chunks=5",
    "schedule": "schedule=gpipe",
    "checkpoint": "checkpoint=always",
    "timeout": "timeout=77",
    "mistake": "did you mean 'chunks'",
    "map": "3:3-8",
    "clip": "clip=1.0",
    "ranks=3 everywhere": "3 ranks on a world size of 4",
    "ranks=3": "3 ranks on a world size of 4",
    "depth": "nothing on rank 0, 8.0.weight",
    "width": "7.weight torch.float32[5, 6] on rank 1",
    "frozen": "different models",
    "dtype": "torch.float64[6, 6] on rank 1",
    "not sequential": "the model is a Linear",
    "learning rate": "lr=0.1 in group 0 on rank 1",
    "groups": "over 3 parameters",
    "no optimizer": "nothing on rank 1",
    "seed": "different seeds",
    "seed on one": "different seeds",
}
# The same for `programs.CALLS`, where the odd rank is 0 (the first stage's), 2 (neither's) and 3 (the last
# stage's). None: nothing is wrong, since such a rank's batch is not asked for.
CALLS: dict[str, tuple[str | None, str | None, str | None]] = {
    "evaluate": ("different calls", "different calls", "different calls"),
    "predict": ("different calls", "different calls", "different calls"),
    "to": ("different calls", "different calls", "different calls"),
    "update": ("update=False", "update=False", "update=False"),
    "samples": ("6", "6", "6"),
    "few samples": ("2", "2", "2"),
    "no samples": ("no samples", "no samples", "no samples"),
    "targets": ("7", "7", "7"),
    "targets everywhere": ("8 samples and the targets 7",) * 3,
    "microbatches": ("3", "3", "3"),
    "microbatches on one": ("5", "5", "5"),
    "nothing": (
        "needs inputs on the rank of the first stage",
        None,
        "needs targets on the rank of the last stage",
    ),
    "both": ("not both", "not both", "not both"),
    "requires grad": ("require a gradient", None, None),
    "no tensors": ("no tensor to cut", "no tensor to cut", "no tensor to cut"),
}
ODD = (0, 2, 3)


@pytest.fixture(scope="module")
def built() -> list[Any]:
    """Every case of BUILDS in the same processes, rank 1 being the odd one."""
    outcome = processes.fork("build_apart", cases=[(case, 1) for case in BUILDS])
    assert all(value is not None for value in outcome.values), outcome
    return outcome.values


@pytest.fixture(scope="module")
def called() -> list[Any]:
    """Every case of CALLS on one pipeline."""
    outcome = processes.fork("call_apart", cases=[(case, odd) for odd in ODD for case in CALLS])
    assert all(value is not None for value in outcome.values), outcome
    return outcome.values


@pytest.mark.parametrize("case", BUILDS)
def test_pipelines_that_differ(case: str, built: list[Any]) -> None:
    index = list(BUILDS).index(case)
    for value in built:
        error = value["errors"][index]
        assert error is not None and set(error["kinds"]) & {"PipelineError", "ValueError"}, error
        assert BUILDS[case] in error["text"], error
        assert error["seconds"] < 10, error


def test_the_odd_rank_is_shown_beside_the_others(built: list[Any]) -> None:
    text = built[3]["errors"][list(BUILDS).index("chunks")]["text"]
    assert "rank 0: 'chunks=4 ranks=4'" in text and "rank 1: 'chunks=5 ranks=4'" in text


def test_a_pipeline_works_after_all_those_that_could_not_be_built(built: list[Any]) -> None:
    alone = processes.fork("train", ranks=0).values[0]
    assert all(value["losses"] == alone["losses"][:2] for value in built)


@pytest.mark.parametrize(("case", "odd"), [(case, odd) for odd in ODD for case in CALLS])
def test_calls_that_differ(case: str, odd: int, called: list[Any]) -> None:
    index = ODD.index(odd) * len(CALLS) + list(CALLS).index(case)
    expected = CALLS[case][ODD.index(odd)]
    for value in called:
        error = value["errors"][index]
        if expected is None:
            assert error is None, error
            continue
        assert error is not None and set(error["kinds"]) & {"PipelineError", "ValueError"}, error
        assert expected in error["text"], error
        assert error["seconds"] < 5, error


def test_the_pipeline_goes_on_after_calls_that_were_refused(called: list[Any]) -> None:
    """Nothing of a refused call is left: the parameters are those of a run in which it never happened."""
    good = [(case, odd) for i, odd in enumerate(ODD) for case in CALLS if CALLS[case][i] is None]
    alone = processes.fork("call_apart", ranks=0, cases=good).values[0]
    assert called[0]["losses"] == alone["losses"]
    assert called[0]["parameters"] == alone["parameters"]


def test_state_is_asked_for_while_the_others_step() -> None:
    outcome = processes.fork("full_state_apart")
    for value in outcome.values:
        assert value is not None and "PipelineError" in value["kinds"], outcome
        assert "state_dict" in value["text"] and "step" in value["text"], value


def test_a_step_behind() -> None:
    """Rank 1 evaluates where the others step."""
    for value in processes.fork("steps_apart").values:
        assert value["type"] == "DisagreementError" and "rank 1: 'evaluate'" in value["text"]


def test_inputs_that_the_first_layer_can_not_take() -> None:
    """Only the first stage's rank uses its inputs, so it is the one that fails; the others hear of it."""
    for number, value in enumerate(processes.fork("other_shapes").values):
        assert value["error"]["type"] == ("PeerError" if number else "RuntimeError")
        assert "0F0" in value["error"]["text"] and "2x5" in value["error"]["text"]
