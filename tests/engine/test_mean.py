"""Is the mean exact: over uneven microbatches, accumulated calls, weights and masks? (Contract 11.)"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import (
    MLP,
    Batch,
    accumulate,
    adamw,
    assert_equal,
    assert_same,
    build,
    cut,
    mlp,
    momentum,
    pipelined,
    plain,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional
from workers import Workers

from pipe import Pipeline

IGNORED = -100


def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    """Copies, by unsplit name; parameters that have none are left out."""
    return {
        name: p.grad.clone()
        for stage in pipeline.stages.values()
        for name, p in stage.module.named_parameters()
        if p.grad is not None
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_equal(found[name], value, name, bitwise=False)


def masked_targets(*lengths: int, step: int = 0) -> Batch:
    """17 tokens a row, of which the first so many count."""
    inputs, _ = vectors(len(lengths), step)
    source = torch.Generator().manual_seed(step)
    targets = torch.randint(0, 5, (len(lengths), 17), generator=source)
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = IGNORED
    return inputs, targets


def tagger() -> nn.Sequential:
    """Scores of 5 classes for each of 17 places."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(17, 17),
        nn.ReLU(),
        nn.Linear(17, 17),
        nn.ReLU(),
        nn.Linear(17, 85),
        nn.Unflatten(1, (5, 17)),
    )


def tokens_that_count(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


# ------------------------------------------------------------------------ chunks and batches


def test_gradients_do_not_depend_on_chunks() -> None:
    inputs, targets = vectors(17, 0)
    model = mlp()
    torch.autograd.backward(functional.cross_entropy(model(inputs), targets))
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for chunks in (1, 2, 3, 5, 8, 17):
        with build(f"ranks=3 chunks={chunks}") as pipeline:
            loss = pipeline.step(inputs, targets, update=False)
            assert_close(gradients(pipeline), whole)
            assert_equal(loss, functional.cross_entropy(mlp()(inputs), targets), "the loss", bitwise=False)


def test_a_batch_smaller_than_chunks_then_a_full_one() -> None:
    """The step after a short batch uses all chunks again: bit for bit what plain training does."""
    seen: list[int] = []
    model = mlp()
    model[0].register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    plainly = mlp()
    updates = momentum(list(plainly.named_parameters()))
    with build("ranks=2 chunks=8", model) as pipeline:
        for number, rows in enumerate((16, 3, 16, 1, 9)):
            updates.zero_grad()
            accumulate(plainly, functional.cross_entropy, cut(vectors(rows, number), 8))
            updates.step()
            pipeline.step(*vectors(rows, number))
        for name, value in plainly.state_dict().items():
            assert_equal(pipeline.state_dict()[name], value, name)
    assert seen == [2] * 8 + [1] * 3 + [2] * 8 + [1] + [2] + [1] * 7


def test_a_batch_smaller_than_chunks_between_processes(workers: Workers) -> None:
    for losses in workers.run(train_short_batches, 3):
        assert losses == train_short_batches()


def train_short_batches() -> list[float]:
    with build("ranks=3 chunks=8") as pipeline:
        batches = enumerate((16, 3, 16, 1, 9))
        return [pipeline.step(*vectors(rows, number)).item() for number, rows in batches]


# ------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("clip", [None, 0.1])
def test_calls_of_different_sizes_equal_one_call(clip: float | None) -> None:
    inputs, targets = vectors(20, 0)
    bounds = [(0, 3), (3, 11), (11, 12), (12, 20)]
    with build("ranks=3 chunks=4", clip=clip) as one, build("ranks=3 chunks=4", clip=clip) as many:
        one.step(inputs, targets)
        for start, stop in bounds:
            many.step(inputs[start:stop], targets[start:stop], update=stop == 20)
        assert_close(gradients(many), gradients(one))
        assert_close(many.state_dict(), one.state_dict())
        if clip is not None:
            assert_equal(many.metrics["grad_norm"], one.metrics["grad_norm"], "the norm", bitwise=False)
        # The next update begins afresh.
        one.step(*vectors(8, 1))
        many.step(*vectors(8, 1))
        assert_close(gradients(many), gradients(one))


def test_calls_of_different_weights_equal_one_call() -> None:
    lengths = [17, 1, 0, 5, 9, 0, 2, 17]
    inputs, targets = masked_targets(*lengths)

    def tag(chunks: int) -> Pipeline:
        return build(f"ranks=2 chunks={chunks}", tagger(), weight=tokens_that_count)

    model = tagger()
    whole = functional.cross_entropy(model(inputs), targets)
    torch.autograd.backward(whole)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with tag(8) as one, tag(2) as many:
        assert_equal(one.step(inputs, targets), whole.detach(), "the loss", bitwise=False)
        for start, stop in ((0, 2), (2, 4), (4, 8)):
            many.step(inputs[start:stop], targets[start:stop], update=stop == 8)
        assert_close(gradients(one), expected)
        assert_close(gradients(many), expected)


def accumulated_losses() -> list[float]:
    inputs, targets = vectors(20, 0)
    with build("ranks=3 chunks=4") as pipeline:
        losses = [
            pipeline.step(inputs[start:stop], targets[start:stop], update=stop == 20).item()
            for start, stop in ((0, 3), (3, 11), (11, 12), (12, 20))
        ]
        return [*losses, *(float(p.sum()) for p in pipeline.state_dict(full=True).values())]


def test_accumulation_between_processes(workers: Workers) -> None:
    assert workers.run(accumulated_losses, 3)[0] == accumulated_losses()


def test_step_returns_the_mean_of_its_own_call() -> None:
    inputs, targets = vectors(20, 0)
    model = mlp()
    with build("ranks=3 chunks=4") as pipeline:
        for start, stop in ((0, 3), (3, 20)):
            loss = pipeline.step(inputs[start:stop], targets[start:stop], update=False)
            plainly = functional.cross_entropy(model(inputs[start:stop]), targets[start:stop])
            assert loss.dim() == 0 and not loss.requires_grad
            assert_equal(loss, plainly.detach(), "the loss", bitwise=False)


def test_one_call_has_no_factor_more() -> None:
    """With 17 rows, of which the shares are no round numbers, a factor more would show in the bits."""
    assert_same(pipelined(MLP, "ranks=2 chunks=3"), plain(MLP, 3))


# ------------------------------------------------------------------------------ masks, weights


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_masked_microbatch_changes_nothing(place: int, checkpoint: str) -> None:
    """Its mean is 0 / 0; multiplied by a weight of 0 that would still be NaN."""
    full = [masked_targets(17, 4, step=number) for number in range(3)]
    masked = masked_targets(0, 0, step=9)
    assert functional.cross_entropy(tagger()(masked[0]), masked[1]).isnan()
    settings: dict[str, Any] = {"weight": tokens_that_count, "clip": 0.5, "optimizer": adamw}
    options = f"ranks=2 checkpoint={checkpoint}"
    with build(options, tagger(), **settings) as with_it, build(options, tagger(), **settings) as without:
        for _ in range(3):
            batch = [*full[:place], masked, *full[place:]]
            loss, expected = with_it.step(microbatches=batch), without.step(microbatches=full)
            assert_equal(loss, expected, "the loss", bitwise=False)
            assert not loss.isnan()
        for name, value in without.state_dict().items():
            assert_equal(with_it.state_dict()[name], value, name)
        assert_equal(with_it.evaluate(microbatches=batch), without.evaluate(microbatches=full), "evaluate")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_masked_call_changes_nothing_in_accumulation(place: int) -> None:
    full = [masked_targets(17, 4, step=1), masked_targets(3, 1, step=2)]
    calls = [*full[:place], masked_targets(0, 0, step=9), *full[place:]]
    with (
        build("ranks=2 chunks=2", tagger(), weight=tokens_that_count) as with_it,
        build("ranks=2 chunks=2", tagger(), weight=tokens_that_count) as without,
    ):
        for number, batch in enumerate(calls):
            with_it.step(*batch, update=number == 2)
        for number, batch in enumerate(full):
            without.step(*batch, update=number == 1)
        for name, value in without.state_dict().items():
            assert_equal(with_it.state_dict()[name], value, name)


def masked_between_processes() -> list[float]:
    batch = [
        masked_targets(0, 0),
        masked_targets(17, 4, step=1),
        masked_targets(0, 0),
        masked_targets(3, 2, step=2),
    ]
    with build("ranks=3", tagger(), weight=tokens_that_count, clip=0.5) as pipeline:
        losses = [pipeline.step(microbatches=batch).item() for _ in range(3)]
        # The same shapes with a gradient where there was none before, and the other way round.
        losses.append(pipeline.step(microbatches=batch[::-1]).item())
        losses.append(pipeline.evaluate(microbatches=batch).item())
        return [*losses, *(float(p.sum()) for p in pipeline.state_dict(full=True).values())]


def test_masks_between_processes(workers: Workers) -> None:
    assert workers.run(masked_between_processes, 3)[0] == masked_between_processes()


def test_a_call_without_weight_updates_nothing_and_warns() -> None:
    with build("ranks=2 chunks=2", tagger(), weight=tokens_that_count, optimizer=adamw) as pipeline:
        pipeline.step(*masked_targets(17, 4))
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        with pytest.warns(UserWarning, match="weight 0"):
            loss = pipeline.step(*masked_targets(0, 0, step=1))
        assert not loss.isnan()
        for name, value in before.items():
            assert_equal(pipeline.state_dict()[name], value, name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline.step(*masked_targets(17, 4))


@pytest.mark.parametrize(
    "weight", [lambda target: -1, lambda target: float("nan"), lambda target: float("inf")]
)
def test_what_is_no_weight(weight: Callable[[Tensor], float]) -> None:
    with (
        build("ranks=3 chunks=4", weight=weight) as pipeline,
        pytest.raises(ValueError, match=r"weight= gave .* microbatch 0"),
    ):
        pipeline.step(*vectors(8, 0))


def test_metrics_are_averaged_by_weight() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        right = (output.argmax(1) == target)[target != IGNORED]
        return functional.cross_entropy(output, target), {"accuracy": right.float().mean(), "answer": 42}

    inputs, targets = masked_targets(17, 1, 0, 5, 9, 0, 2, 17)
    output = tagger()(inputs)
    with build("ranks=2 chunks=4", tagger(), weight=tokens_that_count, loss=loss) as pipeline:
        for call in (pipeline.evaluate, pipeline.step):
            call(inputs, targets)
            accuracy = (output.argmax(1) == targets)[targets != IGNORED].float().mean()
            assert_equal(pipeline.metrics["accuracy"], accuracy, "the accuracy", bitwise=False)
            assert float(pipeline.metrics["answer"]) == pytest.approx(42)


# --------------------------------------------------------------------------- unused parameters


class Choice(nn.Module):
    """Uses one of two layers, by the sign of a row's first number."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.never = nn.Linear(17, 17), nn.Linear(17, 17), nn.Linear(17, 17)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = (self.positive if x[0, 0] > 0 else self.negative)(x)
        return chosen


def decaying(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_unused_parameter_is_left_alone(checkpoint: str) -> None:
    """Not even weight decay touches it; one unused in some microbatches has the others' gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 17), Choice(), nn.Linear(17, 5))
    first = Choice()
    model.insert(0, first)
    inputs, targets = vectors(8, 0)
    inputs[:, 0] = 1.0  # the first layer always goes one way
    before = {name: p.clone() for name, p in model.named_parameters()}
    with build(f"ranks=2 chunks=4 checkpoint={checkpoint}", model, optimizer=decaying) as pipeline:
        pipeline.step(inputs, targets)
        after = pipeline.state_dict()
    untouched = {name for name, value in before.items() if torch.equal(after[name], value)}
    assert untouched >= {f"{layer}.never.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    assert untouched >= {"0.negative.weight", "0.negative.bias"}
    assert not untouched & {"0.positive.weight", "1.weight", "3.weight"}


def test_a_parameter_used_before_is_left_alone_too() -> None:
    """The last update's gradient is gone, not zero: zero would let weight decay at it."""
    torch.manual_seed(0)
    with build("ranks=2 chunks=2", nn.Sequential(Choice(), nn.Linear(17, 5)), optimizer=decaying) as pipeline:
        inputs, targets = vectors(4, 0)
        inputs[:, 0] = 1.0
        pipeline.step(inputs, targets)
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        inputs[:, 0] = -1.0
        pipeline.step(inputs, targets)
        after = pipeline.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert changed == {f"{layer}.{kind}" for layer in ("0.negative", "1") for kind in ("weight", "bias")}


# ---------------------------------------------------------------------------- what doesn't fit


def test_targets_that_do_not_match_are_refused_before_anything_runs() -> None:
    model = mlp()
    forwards: list[int] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, inputs: forwards.append(1))
    inputs, targets = vectors(10, 0)
    with build("ranks=3 chunks=4", model) as pipeline:
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(ValueError, match=r"inputs have 10 samples and the targets 9\b"):
                call(inputs, targets[:9])
        assert not forwards
        pipeline.step(inputs, targets)  # and it goes on
        assert len(forwards) == 4 * len(model)


def refused() -> str:
    inputs, targets = vectors(10, 0)
    with build("ranks=2 chunks=4") as pipeline:
        try:
            pipeline.step(inputs, targets[:9])
        except ValueError as error:
            return str(error)
    return "no error"


def test_targets_that_do_not_match_are_refused_on_every_rank(workers: Workers) -> None:
    for message in workers.run(refused, 2):
        assert "10 samples" in message and "targets 9" in message


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(0, 17), torch.ones(0)), "no samples"),
        (({"a": torch.ones(4, 17), "b": torch.ones(3, 17)}, torch.ones(4)), r"different lengths.*\[3, 4\]"),
        ((torch.ones(()), torch.ones(4)), "no tensor to cut"),
        ((torch.ones(4, 17), None), "targets"),
        ((None, torch.ones(4)), "inputs"),
        ((torch.ones(4, 17, requires_grad=True), torch.ones(4)), "detach"),
    ],
)
def test_what_is_no_batch(batch: Batch, message: str) -> None:
    with build("ranks=3 chunks=4") as pipeline, pytest.raises(ValueError, match=message):
        pipeline.step(*batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"microbatches": []}, "empty"),
        ({"inputs": torch.ones(4, 17), "microbatches": [vectors(2, 0)]}, "not both"),
    ],
)
def test_what_are_no_microbatches(settings: dict[str, Any], message: str) -> None:
    with build("ranks=3 chunks=4") as pipeline, pytest.raises(ValueError, match=message):
        pipeline.step(**settings)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, target: output, "mean loss, a tensor of one number"),
        (lambda output, target: 3.0, "not float"),
        (lambda output, target: functional.cross_entropy(output, target).detach(), "detached"),
        (lambda output, target: (functional.cross_entropy(output, target), {"n": target}), "metric 'n' must"),
    ],
)
def test_what_is_no_loss(loss: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with (
        build("ranks=3 chunks=4", loss=loss) as pipeline,
        pytest.raises((ValueError, RuntimeError), match=message),
    ):
        pipeline.step(*vectors(8, 0))
