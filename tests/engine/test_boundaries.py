"""Does every kind of value cross from stage to stage, between processes too, as if it had not?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from reference import (
    INPLACE_FIRST,
    MLP,
    Batch,
    Recipe,
    Trained,
    accumulate,
    assert_equal,
    assert_same,
    build,
    mlp,
    momentum,
    pipelined,
    plain,
    vectors,
)
from torch import Tensor, nn
from torch.nn import functional
from workers import Workers

import partitioners
from pipe import Pipeline


class Apply(nn.Module):
    """A layer made of a function."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, value: Any) -> Any:
        return self.fn(value)


class Ahead(nn.Module):
    """Applies a Linear to one item of a container and leaves the rest."""

    def __init__(self, key: Any = 0) -> None:
        super().__init__()
        self.key = key
        self.linear = nn.Linear(17, 17)

    def forward(self, value: Any) -> Any:
        items = dict(value) if isinstance(value, dict) else list(value)
        items[self.key] = self.linear(items[self.key])
        return items if isinstance(value, dict) else tuple(items)


# Every model has six layers, the first and the last of them Linear, and is cut before layers 2 and 4 (three
# ranks) or before layer 3 (two ranks): what the middle makes crosses.


def model(*middle: nn.Module, head: nn.Module | None = None) -> nn.Sequential:
    """Seeded, so that a factory makes the same model each time: layers are reset in order."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(17, 17), *middle, nn.Linear(17, 5) if head is None else head)
    assert len(layers) == 6
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return layers


def tuples() -> nn.Sequential:
    return model(
        Apply(lambda x: (x, x.sin(), x[:, :3])),
        Ahead(1),
        Ahead(0),
        Apply(lambda v: v[0] * v[1] + v[2].mean()),
    )


def dicts() -> nn.Sequential:
    return model(
        Apply(lambda x: {"h": x.relu(), "skip": x}),
        Ahead("h"),
        Ahead("skip"),
        Apply(lambda v: v["h"] + v["skip"]),
    )


def nested() -> nn.Sequential:
    return model(
        Apply(lambda x: {"a": [x, (x.tanh(), None)], "b": Pair(x.exp(), [])}),
        Apply(lambda v: {**v, "b": Pair(v["b"].left * 0.5, v["b"].right)}),
        nn.Identity(),
        Apply(lambda v: v["a"][0] + v["a"][1][0] + v["b"].left),
    )


class Pair(NamedTuple):
    left: Any
    right: Any


def precision(*dtypes: torch.dtype) -> nn.Sequential:
    """The values travel in each dtype, with gradients, and are summed up."""
    return model(
        Apply(lambda x: tuple(x.to(dtype) for dtype in dtypes)),
        nn.Identity(),
        Apply(lambda v: tuple(x * 0.5 for x in v)),
        Apply(lambda v: sum(x.float() for x in v)),
    )


def half() -> nn.Sequential:
    return precision(torch.float16, torch.bfloat16)


def double() -> nn.Sequential:
    return precision(torch.float64)


def odd_dtypes() -> nn.Sequential:
    """Integers, truth values, complex numbers and bytes."""
    return model(
        Apply(
            lambda x: (
                x,
                x > 0,
                (x * 10).long(),
                x.to(torch.uint8),
                torch.view_as_complex(x[:, :2].contiguous()),
            )
        ),
        Ahead(0),
        nn.Identity(),
        Apply(lambda v: v[0] * v[1] + v[2].float() * 0.01 + v[3].float() * 0.01 + v[4].abs()[:, None]),
    )


def scalars_and_empties() -> nn.Sequential:
    """A tensor of no dimension, one of no elements, with and without gradients."""
    return model(
        Apply(lambda x: (x, x.mean(), x[:, :0], torch.zeros(0, 3), torch.tensor(2.0))),
        Ahead(0),
        nn.Identity(),
        Apply(lambda v: v[0] * v[1] * v[4] + v[2].sum() + v[3].sum()),
    )


def plain_values() -> nn.Sequential:
    """Python's own values, which differ from microbatch to microbatch, travel with each."""
    return model(
        Apply(lambda x: {"x": x, "scale": x[0, 0].item(), "name": "row" * len(x), "pair": (1, None)}),
        Ahead("x"),
        Apply(lambda v: {**v, "scale": v["scale"] * 2}),
        Apply(lambda v: v["x"] * v["scale"] + len(v["name"]) + v["pair"][0]),
    )


def without_gradient() -> nn.Sequential:
    """A float tensor that wants no gradient crosses beside one that does."""
    return model(
        Apply(lambda x: (x, x.detach().sign())),
        Ahead(0),
        nn.Identity(),
        Apply(lambda v: v[0] * v[1]),
    )


def unused() -> nn.Sequential:
    """An output that wants a gradient, and that no later stage makes use of."""
    return model(
        Apply(lambda x: (x, x * 2)),
        nn.Identity(),
        nn.Identity(),
        Apply(lambda v: v[0].relu()),
    )


def sometimes_unused() -> nn.Sequential:
    """Whether the second output is used is up to the data: not all microbatches have its gradient."""
    return model(
        Apply(lambda x: (x, x * 2)),
        nn.Identity(),
        nn.Identity(),
        Apply(lambda v: v[0] + v[1] if v[0][0, 0] > 0 else v[0]),
    )


def same_tensor_twice() -> nn.Sequential:
    return model(Apply(lambda x: (x, x)), Ahead(0), nn.Identity(), Apply(lambda v: v[0] * v[1]))


def frozen_first() -> nn.Sequential:
    """The first ranks have nothing to train, and no gradient goes there."""
    layers = model(nn.ReLU(), nn.Linear(17, 17), nn.ReLU(), nn.Linear(17, 17))
    layers[0].requires_grad_(False)
    return layers


def frozen_but_last() -> nn.Sequential:
    layers = model(nn.ReLU(), nn.Linear(17, 17), nn.ReLU(), nn.Linear(17, 17))
    layers[:5].requires_grad_(False)
    return layers


def frozen_last() -> nn.Sequential:
    """Gradients pass through layers that get none."""
    layers = model(nn.ReLU(), nn.Linear(17, 17), nn.ReLU(), nn.Linear(17, 17))
    layers[3:].requires_grad_(False)
    return layers


def no_parameters() -> nn.Sequential:
    """The middle rank of three has nothing to train; neither has the second of two, up to the head."""
    return model(nn.Identity(), nn.Flatten(), nn.Tanh(), nn.Identity())


def in_place() -> nn.Sequential:
    """Each stage begins by writing to what it received."""
    return model(
        nn.Linear(17, 17), Apply(lambda x: x.mul_(2.0)), Apply(lambda x: x.add_(1.0)), nn.ReLU(inplace=True)
    )


def in_place_in_a_tuple() -> nn.Sequential:
    return model(
        Apply(lambda x: (x * 2, x * 3)),
        Apply(lambda v: (v[0].mul_(2.0), v[1])),
        Apply(lambda v: (v[0], v[1].add_(1.0))),
        Apply(lambda v: v[0].add_(v[1])),
    )


def twice() -> nn.Sequential:
    """One module at two places of one rank (of the last of two, and of three)."""
    torch.manual_seed(0)
    shared = nn.Linear(17, 17)
    return nn.Sequential(nn.Linear(17, 17), nn.ReLU(), nn.ReLU(), nn.Linear(17, 17), shared, shared)


def views() -> nn.Sequential:
    """Boundaries that aren't contiguous."""
    return model(Apply(torch.t), nn.Identity(), nn.Identity(), Apply(torch.t))


def expanded() -> nn.Sequential:
    return model(
        Apply(lambda x: x[:, :1].expand(-1, 17)), nn.Identity(), nn.Identity(), Apply(lambda x: x + 1)
    )


def trees(rows: int, step: int) -> Batch:
    """One tensor twice, one of no dimension, and a value that all microbatches share."""
    inputs, targets = vectors(rows, step)
    return {"x": inputs, "again": [inputs], "scale": torch.tensor(0.5), "mode": "sum"}, targets


def tree_model() -> nn.Sequential:
    layers = model(nn.ReLU(), nn.Identity(), nn.Linear(17, 17), nn.ReLU())
    gather = Apply(lambda v: (v["x"] + v["again"][0]) * v["scale"] if v["mode"] == "sum" else None)
    return nn.Sequential(nn.Sequential(gather, layers[0]), *list(layers)[1:])


CASES = [
    *(
        Recipe(factory.__name__, factory, vectors)
        for factory in (
            tuples,
            dicts,
            nested,
            half,
            double,
            odd_dtypes,
            scalars_and_empties,
            plain_values,
            without_gradient,
            unused,
            sometimes_unused,
            same_tensor_twice,
            frozen_first,
            frozen_but_last,
            frozen_last,
            no_parameters,
            in_place,
            in_place_in_a_tuple,
            twice,
            views,
            expanded,
        )
    ),
    Recipe("trees", tree_model, trees),
]
# Kernels give other bits for tensors that don't lie as they did, and so do gradients of one tensor that are
# added up in another order: those from a later stage come as one sum.
TO_ROUNDING = {"views", "expanded", "same_tensor_twice", "tuples", "half"}
MAPS = {2: "0:0-3,1:3-6", 3: "0:0-2,1:2-4,2:4-6"}
CHECKPOINTS = ["never", "always"]


def cross(recipe: Recipe, ranks: int, checkpoint: str) -> Trained:
    options = f"chunks=4 device_map={MAPS[ranks]} checkpoint={checkpoint}"
    return pipelined(recipe, options, rows=9, steps=3, optimizer=momentum)


def check(found: Trained, recipe: Recipe) -> None:
    expected = plain(recipe, 4, rows=9, steps=3, optimizer=momentum)
    assert_same(found, expected, bitwise=recipe.name not in TO_ROUNDING)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("ranks", MAPS)
@pytest.mark.parametrize("recipe", CASES, ids=str)
def test_in_one_process(recipe: Recipe, ranks: int, checkpoint: str) -> None:
    check(cross(recipe, ranks, checkpoint), recipe)


def cross_all(ranks: int, checkpoint: str) -> list[Trained]:
    return [cross(recipe, ranks, checkpoint) for recipe in CASES]


@pytest.mark.parametrize(("ranks", "checkpoint"), [(2, "never"), (2, "always"), (3, "never")])
def test_between_processes(workers: Workers, ranks: int, checkpoint: str) -> None:
    """One job for all cases: a pipeline is quickly made, a process isn't."""
    by_rank = workers.run(cross_all, ranks, ranks, checkpoint)
    for recipe, *found in zip(CASES, *by_rank, strict=True):
        check(found[0], recipe)
        for other in found[1:]:
            assert other.losses == found[0].losses, recipe


# -------------------------------------------------------------------------- shapes that change


SHAPES = [(8, 8), (3,), (8, 8), (1, 5, 2, 8), (8, 8, 8), (5, 1)]  # rows of each microbatch, step by step


def change_shapes(checkpoint: str = "never") -> tuple[list[float], dict[str, Tensor]]:
    with build(f"ranks=3 chunks=4 checkpoint={checkpoint}") as pipeline:
        losses = []
        for step, rows in enumerate(SHAPES):
            batch = microbatches_of(rows, step)
            losses.append(pipeline.step(microbatches=batch).item())
            losses.append(pipeline.evaluate(microbatches=batch).item())
        for rows_of_batch in (16, 3, 17):  # and cut by the engine in between
            losses.append(pipeline.step(*vectors(rows_of_batch, 0)).item())
        return losses, pipeline.state_dict(full=True)


def microbatches_of(rows: Sequence[int], step: int) -> list[Batch]:
    return [vectors(count, 10 * step + index) for index, count in enumerate(rows)]


def changed_plainly() -> dict[str, Tensor]:
    plainly = mlp()
    updates = momentum(list(plainly.named_parameters()))
    batches = [microbatches_of(rows, step) for step, rows in enumerate(SHAPES)]
    for rows in (16, 3, 17):
        inputs, targets = vectors(rows, 0)
        count = min(4, rows)
        batches.append(list(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)))
    for batch in batches:
        updates.zero_grad()
        accumulate(plainly, functional.cross_entropy, batch)
        updates.step()
    return plainly.state_dict()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_shapes_that_change(checkpoint: str) -> None:
    _, found = change_shapes(checkpoint)
    for name, value in changed_plainly().items():
        assert_equal(found[name], value, name)


def test_shapes_that_change_between_processes(workers: Workers) -> None:
    for checkpoint in CHECKPOINTS:
        results = workers.run(change_shapes, 3, checkpoint)
        for name, value in changed_plainly().items():
            assert_equal(results[0][1][name], value, name)
        for losses, _ in results:
            assert losses == change_shapes()[0]


def unfreeze() -> dict[str, Tensor]:
    """What wants a gradient changes from step to step, on one rank only, and so do the messages on all."""
    with build("ranks=3 chunks=4") as pipeline:
        first = pipeline.stages.get(0)
        for step in range(6):
            if first is not None:
                first.module.requires_grad_(step % 3 != 1)
            pipeline.step(*vectors(9, step))
        return pipeline.state_dict(full=True)


def test_layers_frozen_and_thawed_between_steps(workers: Workers) -> None:
    between = workers.run(unfreeze, 3)[0]
    for name, value in unfreeze().items():
        assert_equal(between[name], value, name)


# ----------------------------------------------------------------------------- the caller's batch


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_callers_batch_stays_as_it_is(ranks: int, checkpoint: str) -> None:
    """The first layer is an in-place ReLU, for which plain training would pay with its batch."""
    with build(f"ranks={ranks} chunks=4 checkpoint={checkpoint}", INPLACE_FIRST.model()) as pipeline:
        inputs, targets = vectors(9, 0)
        before = inputs.clone(), targets.clone()
        pipeline.step(inputs, targets)
        pipeline.evaluate(inputs, targets)
        pipeline.predict(inputs)
        assert torch.equal(inputs, before[0]) and torch.equal(targets, before[1])


def test_a_sender_keeps_what_it_needs(workers: Workers) -> None:
    """Tanh's backward needs its output, to which the next stage may write though plain training may not."""
    for ranks in MAPS:
        between = workers.run(write_to_outputs, ranks, MAPS_BEHIND_TANH[ranks])[0]
        for found in (write_to_outputs(MAPS_BEHIND_TANH[ranks]), between):
            assert_same(found, plain(Recipe("not in place", outputs_left_alone, vectors), 4, steps=3))


def test_a_sender_keeps_what_it_needs_from_a_stage_on_its_own_rank() -> None:
    found = write_to_outputs("0:0-2,0:2-6 schedule=gpipe")
    assert_same(found, plain(Recipe("not in place", outputs_left_alone, vectors), 4, steps=3))


def outputs_left_alone() -> nn.Sequential:
    return model(nn.Tanh(), Apply(lambda x: x * 2.0), nn.Identity(), nn.Tanh())


MAPS_BEHIND_TANH = {2: "0:0-2,1:2-6", 3: "0:0-1,1:1-2,2:2-6"}


def write_to_outputs(device_map: str) -> Trained:
    recipe = Recipe(
        "in place", lambda: model(nn.Tanh(), Apply(lambda x: x.mul_(2.0)), nn.Identity(), nn.Tanh()), vectors
    )
    return pipelined(recipe, f"chunks=4 device_map={device_map}", steps=3)


# ------------------------------------------------------------------------ sharing across ranks


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(17, 17) for _ in range(6)))
    layers[4].weight = layers[1].weight
    return layers


def test_a_parameter_on_two_ranks_is_refused() -> None:
    with pytest.raises(partitioners.PartitionError, match=r"layers 1 and 4 share 1\.weight"):
        Pipeline(tied(), "device_map=0:0-3,1:3-6", optimizer=momentum, device="cpu")


def refusal() -> str:
    try:
        Pipeline(tied(), "device_map=0:0-3,1:3-6", optimizer=momentum, device="cpu")
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_parameter_on_two_ranks_is_refused_between_processes(workers: Workers) -> None:
    for message in workers.run(refusal, 2):
        assert "layers 1 and 4 share 1.weight" in message


def test_a_parameter_of_two_layers_within_a_rank() -> None:
    recipe = Recipe("tied", lambda: tied().append(nn.Linear(17, 5)), vectors)
    found = pipelined(recipe, "chunks=4 device_map=0:0-1,1:1-7")
    assert_same(found, plain(recipe, 4))


# ---------------------------------------------------------------------------- the caller's cut


def columns(batch: Tensor, microbatches: int) -> Sequence[Tensor]:
    """Rows dealt out like cards, not in runs."""
    return [batch[index::microbatches] for index in range(microbatches)]


def deal() -> tuple[dict[str, Tensor], list[int]]:
    asked: list[int] = []

    def split(batch: Tensor, microbatches: int) -> Sequence[Tensor]:
        asked.append(microbatches)
        return columns(batch, microbatches)

    with build("ranks=2 chunks=3", split=split) as pipeline:
        pipeline.step(*vectors(10, 0))
        return pipeline.state_dict(full=True), asked


def test_split_replaces_the_cut(workers: Workers) -> None:
    plainly = mlp()
    updates = momentum(list(plainly.named_parameters()))
    inputs, targets = (columns(part, 3) for part in vectors(10, 0))
    accumulate(plainly, functional.cross_entropy, list(zip(inputs, targets, strict=True)))
    updates.step()
    for found, asked in (deal(), workers.run(deal, 2)[0]):
        assert asked == [3, 3]  # for the inputs and for the targets
        for name, value in plainly.state_dict().items():
            assert_equal(found[name], value, name)


def test_split_that_cuts_unevenly_is_refused() -> None:
    def split(batch: Tensor, microbatches: int) -> Sequence[Tensor]:
        return torch.split(batch, 3 if batch.dim() == 2 else 4)

    with (
        build("ranks=2", split=split) as pipeline,
        pytest.raises(ValueError, match="inputs make 3 microbatches and the targets 2"),
    ):
        pipeline.step(*vectors(8, 0))


# --------------------------------------------------------------- an output of a surprising shape


def surprise() -> str:
    """The rows of the second microbatch decide about the boundary's width: no input's shape says so."""
    fickle = Apply(lambda x: x[:, : 16 + int(x[0, 0] > 0)])
    padded = Apply(lambda x: functional.pad(x, (0, 17 - x.shape[1])))
    inputs, targets = vectors(4, 0)
    inputs[:2, 0], inputs[2:, 0] = 1.0, -1.0
    layers = nn.Sequential(nn.Identity(), fickle, padded, nn.Linear(17, 5))
    try:
        with build("chunks=2 device_map=0:0-2,1:2-4", layers) as pipeline:
            pipeline.step(inputs, targets)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_output_of_another_shape_is_an_error_not_a_crash(workers: Workers) -> None:
    """In one process a copy needs no description; a receiver elsewhere would die of a wrong size."""
    assert surprise() == "no error"
    sender, receiver = workers.run(surprise, 2)
    for message in (sender, receiver):
        assert "changed shape" in message and "float32[2, 17]" in message and "float32[2, 16]" in message
    assert MLP.name not in sender
