"""Does a wrong argument get an error that says what to give instead?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import build, mlp, vectors
from torch import Tensor, nn
from torch.nn import functional

import schedules
from pipe import Pipeline, PipelineError

WRONG: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "an optimizer": (
        lambda: {"optimizer": torch.optim.SGD(mlp().parameters(), lr=0.1)},
        TypeError,
        r"is an optimizer: give what makes one, such as functools\.partial\(torch\.optim\.SGD, lr=",
    ),
    "an optimizer that calls back": (
        lambda: {"optimizer": torch.optim.LBFGS},
        PipelineError,
        "LBFGS evaluates the loss again",
    ),
    "a loss's class": (
        lambda: {"loss": nn.CrossEntropyLoss},
        TypeError,
        r"loss= is the class CrossEntropyLoss: give an instance, CrossEntropyLoss\(\)",
    ),
    "a schedule's class": (
        lambda: {"schedule": schedules.GPipe},
        TypeError,
        r"schedule= is the class GPipe: give an instance, GPipe\(\)",
    ),
    "a plan": (
        lambda: {"schedule": schedules.build(schedules.GPipe(), (0, 1), 4)},
        TypeError,
        r"schedule= is a plan: .* schedules\.CSVFile\(file\)",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_argument_of_the_wrong_kind_is_refused_with_the_right_one(what: str) -> None:
    settings, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        build("ranks=2 chunks=4", **settings())


def test_a_schedule_without_its_methods_is_told_which() -> None:
    class HalfASchedule:
        def placement(self, ranks: int) -> tuple[int, ...]:
            return tuple(range(ranks))

    with pytest.raises(TypeError, match=r"methods placement and orders; this lacks \['orders'\]"):
        build("ranks=2 chunks=4", schedule=HalfASchedule())
    with pytest.raises(TypeError, match=r"lacks \['placement', 'orders'\]"):
        build("ranks=2 chunks=4", schedule=4)


@pytest.mark.parametrize("options", [None, {"chunks": 4}, 4], ids=repr)
def test_options_are_a_string_or_options(options: Any) -> None:
    kind = type(options).__name__
    with pytest.raises(TypeError, match=f"an option string or an Options, not a {kind}$"):
        build(options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")], ids=str)
def test_a_gpu_where_there_is_none(device: Any) -> None:
    with pytest.raises(ValueError, match=r"device='cuda(:1)?', but torch finds no CUDA device here"):
        build("ranks=2 chunks=4", device=device)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (lambda target: None, TypeError, "weight= must return one number .*, not None"),
        (lambda target: target, TypeError, "weight= must return one number .*, not tensor"),
        (lambda target: -1, ValueError, r"weight= gave -1\.0 for microbatch 0; .* >= 0"),
        (lambda target: float("nan"), ValueError, "weight= gave nan for microbatch 0"),
    ],
    ids=["returns None", "returns a vector", "returns -1", "returns nan"],
)
def test_a_weight_is_a_function_that_returns_a_number(
    weight: Any, error: type[Exception], message: str
) -> None:
    with build("ranks=2 chunks=4", weight=weight) as pipeline:
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(error, match=message):
                call(*vectors(8, 0))


@pytest.mark.parametrize("name", ["loss", "optimizer", "weight", "split"])
def test_what_is_called_is_a_function(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}= takes a function, not 'mean'"):
        build("ranks=2 chunks=4", **{name: "mean"})


@pytest.mark.parametrize(
    "microbatches",
    [
        [vectors(4, 0)[0]],
        [(*vectors(4, 0), 1)],
        [{"inputs": vectors(4, 0)[0], "targets": vectors(4, 0)[1]}],
        [vectors(4, 0), None],
    ],
    ids=["inputs alone", "three of a kind", "dicts", "a missing one"],
)
def test_microbatches_are_pairs(microbatches: Any) -> None:
    """A tensor of two rows would unpack as a pair, and a dict of two entries as its keys."""
    with build("ranks=2 chunks=4") as pipeline:
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(TypeError, match=r"microbatches= takes \(input, target\) pairs"):
                call(microbatches=microbatches)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (
            lambda output, target: (mean(output, target), {}, output),
            ValueError,
            "loss must return the microbatch's mean loss, a tensor of one number, not tuple",
        ),
        (
            lambda output, target: (mean(output, target), output),
            TypeError,
            r"loss must return the mean loss, or \(mean loss, \{name: value\}\), not Tensor",
        ),
        (
            lambda output, target: (mean(output, target), {"seen": output}),
            ValueError,
            r"metric 'seen' must be one number, not a Tensor of shape \(2, 5\)",
        ),
        (
            lambda output, target: (mean(output, target), {"name": "many"}),
            ValueError,
            "metric 'name' must be one number, not a str",
        ),
    ],
    ids=["three values", "a loss and an output", "a metric of many numbers", "a metric of none"],
)
def test_what_a_loss_may_return(loss: Any, error: type[Exception], message: str) -> None:
    with build("ranks=2 chunks=4", loss=loss) as pipeline:
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(error, match=message):
                call(*vectors(8, 0))


def test_nothing_runs_in_a_closed_pipeline() -> None:
    with build("ranks=2 chunks=4") as pipeline:
        pass
    inputs, targets = vectors(8, 0)
    calls: list[Callable[[], Any]] = [
        lambda: pipeline.step(inputs, targets),
        lambda: pipeline.evaluate(inputs, targets),
        lambda: pipeline.predict(inputs),
        lambda: pipeline.state_dict(full=True),
    ]
    for call in calls:
        with pytest.raises(PipelineError, match=r"this pipeline is closed$"):
            call()


def test_a_pipeline_and_its_stages_tell_what_they_are() -> None:
    with build("chunks=4 device_map=0:0-4,1:4-9") as pipeline:
        assert isinstance(pipeline, Pipeline)
        stages = ["Stage(0, layers 0 to 3, on cpu)", "Stage(1, layers 4 to 8, on cpu)"]
        assert [repr(stage) for stage in pipeline.stages.values()] == stages
        assert repr(pipeline) == (
            f"Pipeline('chunks=4 device_map=0:0-4,1:4-9': 2 ranks, in one process; [{', '.join(stages)}])"
        )
