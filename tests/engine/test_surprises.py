"""What did users' modules do that the engine had not thought of? Each test is such a story."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from reference import (
    Batch,
    Recipe,
    accumulate,
    assert_equal,
    assert_same,
    build,
    cut,
    generator,
    mlp,
    momentum,
    plain,
    token_loss,
    tokens,
    vectors,
)
from reference import pipelined as trained
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from workers import Workers

from pipe import DisagreementError, PipelineError

WIDTH = 17
TWO_STAGES = "chunks=4 device_map=0:0-2,1:2-4"


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def pipelined(recipe: Recipe, options: str, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a stage without a layer to split says so
        return trained(recipe, options, **settings)


# ------------------------------------------------------- a split backward, and odd uses of layers


class Scaled(nn.Module):
    """Calls a Linear with a weight that is computed, and not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Any:
        weight = self.linear.weight * self.scale
        return functional_call(self.linear, {"weight": weight, "bias": self.linear.bias}, (x,))


class Standardized(nn.Conv1d):
    """Weight standardization, as many vision models have it: the convolution is not of the weight."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = super()._conv_forward(input, weight - weight.mean(), bias)
        return found


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = Standardized(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.convolution(x.unsqueeze(1)).squeeze(1)
        return found


class Bounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.tanh(), self.bias)


class Turned(nn.Module):
    """Hands a Linear three dimensions that aren't contiguous: other kernels, and other last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.stack([x, x.cos(), x.sin()], 1).transpose(0, 1)
        assert not turned.is_contiguous()
        found: Tensor = self.linear(turned).tanh().mean(0)
        return found


class Unbatched(nn.Module):
    """One image at a time, without a batch around it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.convolution(row[None])[0] for row in x])


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = vmap(self.linear)(x)
        return found


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return found


def decaying() -> nn.Module:
    """Its hook works on `.grad` as autograd leaves it: the sum over the microbatches so far."""

    def decay(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.9)

    layer = nn.Linear(WIDTH, WIDTH)
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(decay)  # type: ignore[no-untyped-call]
    return layer


ODD: dict[str, Callable[[], nn.Module]] = {
    "functional_call": Scaled,
    "a convolution of its own": Convolved,
    "a subclass of Linear": lambda: Bounded(WIDTH, WIDTH),
    "post-accumulate hook": decaying,
    "three dimensions, transposed": Turned,
    "convolution without a batch": Unbatched,
    "vmap": Mapped,
}


def around(layer: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.Tanh(), nn.Linear(WIDTH, 5))


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("kind", ODD)
def test_a_split_backward_of_odd_layers_is_plain_training(kind: str, mode: str) -> None:
    recipe = Recipe(kind, functools.partial(around, ODD[kind]), vectors)
    # Few rows each, by which kernels tell three dimensions from two.
    found = pipelined(recipe, f"{TWO_STAGES} schedule=zb_h1 checkpoint={mode}", rows=9)
    assert_same(found, plain(recipe, 4, rows=9))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_scripted_layer_trains(schedule: str) -> None:
    """To rounding: TorchScript compiles anew after it has seen a few calls, and the kernels are others.

    A scripted module has other containers than a module, which the engine looked into at construction.
    """
    recipe = Recipe("scripted", functools.partial(around, scripted), vectors)
    found = pipelined(recipe, f"{TWO_STAGES} schedule={schedule}", optimizer=momentum)
    assert_same(found, plain(recipe, 4, optimizer=momentum), bitwise=False)


class Force(nn.Module):
    """An energy's gradient by its input, as in models of molecules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.second(self.first(x).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


FORCE = Recipe("force", functools.partial(around, Force), vectors)


def test_a_gradient_taken_inside_of_a_forward_needs_a_whole_backward() -> None:
    """It was silently wrong under schedules with I and W: the inner backward left the weights' part out."""
    assert_same(pipelined(FORCE, f"{TWO_STAGES} schedule=1f1b"), plain(FORCE, 4))
    with build(f"{TWO_STAGES} schedule=zb_h1", FORCE.model()) as pipeline:
        with pytest.raises(
            PipelineError, match=r"Linear is differentiated inside of a forward.*without I and W"
        ):
            pipeline.step(*vectors(8, 0))


def complex_vectors(rows: int, step: int) -> Batch:
    source = generator(step)
    both = [torch.randn(rows, WIDTH, dtype=torch.cfloat, generator=source) for _ in range(2)]
    return both[0], both[1]


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


def complex_model(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = (nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(2))
    return nn.Sequential(first, *between, last)


COMPLEX = Recipe("complex", complex_model, complex_vectors, distance)


def test_complex_weights_are_conjugated_as_autograd_does() -> None:
    found = pipelined(COMPLEX, "chunks=4 device_map=0:0-1,1:1-2 schedule=zb_h1", optimizer=momentum)
    assert_same(found, plain(COMPLEX, 4, optimizer=momentum))


def test_a_forward_patched_after_construction_is_called_and_stays() -> None:
    """Profilers and adapters put their own forward on a layer; it was thrown out by the first split step."""
    model, expected = mlp(), mlp()
    calls = []

    def patch(layer: nn.Module) -> None:
        forward = layer.forward

        def watched(x: Tensor) -> Any:
            calls.append(len(x))
            return 2 * forward(x)

        layer.forward = watched

    with build("ranks=2 chunks=4 schedule=zb_h1", model) as pipeline:
        patch(model[0])
        pipeline.step(*vectors(8, 0), update=False)
        assert calls == [2] * 4 and model[0].forward.__name__ == "watched"
    patch(expected[0])
    accumulate(expected, functional.cross_entropy, cut(vectors(8, 0), 4))
    assert_gradients(model, expected)


def assert_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (name, mine), plains in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None and plains.grad is not None, name
        assert_equal(mine.grad, plains.grad, name)


class Words(nn.Module):
    """Embeds with sparse gradients, and decodes with the same weight, whose gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=True)
        self.decoder = nn.Linear(WIDTH, 11, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Any:
        return self.decoder(self.embedding(text).tanh())


def words() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Words(), nn.Tanh(), nn.Linear(11, 11))


def test_a_sparse_embedding_tied_with_a_linear() -> None:
    """Its gradients are of two kinds, which can be added up in one order only."""
    recipe = Recipe("words", words, tokens, token_loss)
    found = pipelined(recipe, "chunks=4 device_map=0:0-2,1:2-3 schedule=zb_h1", optimizer=momentum)
    assert_same(found, plain(recipe, 4, optimizer=momentum))


# ---------------------------------------------------------------------------- what crosses


@dataclass
class Hidden:
    """Looks like a pytree, and is none."""

    states: Tensor
    factor: int


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "wrap", [lambda x: Hidden(x, 3), lambda x: (x, Hidden(x, 3))], ids=["alone", "inside"]
)
def test_a_dataclass_is_refused_by_name(schedule: str, wrap: Callable[[Tensor], Any]) -> None:
    """It crossed as a plain value: everything ran, and the first stage never learnt anything."""

    def unwrap(value: Any) -> Tensor:
        hidden = value if isinstance(value, Hidden) else value[1]
        return hidden.states * hidden.factor

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(wrap), Apply(unwrap), nn.Linear(WIDTH, 5))
    with build(f"{TWO_STAGES} schedule={schedule}", model) as pipeline:
        with pytest.raises(TypeError, match=r"a Hidden with tensors in it can't cross.*register_dataclass"):
            pipeline.step(*vectors(8, 0))


class Workspace(nn.Module):
    """Returns a buffer that it writes to again in the next microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.room = torch.zeros(2, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.room.copy_(x.detach())
        return x, self.room


def product(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] * pair[1]


def with_workspace() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Workspace(), Apply(product), nn.Linear(WIDTH, 5))


WRITTEN = "output was written to before it had left: .* must return a copy"


def said_in_step(options: str) -> str:
    with build(options, with_workspace()) as pipeline:
        with pytest.raises(PipelineError) as caught:
            pipeline.step(*vectors(16, 0))
        return str(caught.value)


def test_a_workspace_that_is_written_again_between_processes(workers: Workers) -> None:
    """gloo sends when the receiver is ready, and would have sent the next microbatch's numbers."""
    for said in workers.run(said_in_step, 2, "chunks=8 schedule=gpipe device_map=0:0-2,1:2-4"):
        assert "written to before it had left" in said


def test_a_workspace_that_is_written_again_before_the_same_ranks_next_stage() -> None:
    said = said_in_step("chunks=8 schedule=gpipe device_map=0:0-2,0:2-4")
    assert "written to before it had left" in said


def test_a_workspace_that_is_written_again_before_a_prediction_is_read() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Workspace(), Apply(lambda pair: pair[1]))
    with build("chunks=8 device_map=0:0-1,1:1-3", model) as pipeline:
        with pytest.raises(PipelineError, match=WRITTEN):
            pipeline.predict(vectors(16, 0)[0])


def conjugates_activation() -> nn.Sequential:
    return complex_model(Apply(torch.conj), Apply(torch.tanh))


def conjugates_gradient() -> nn.Sequential:
    return complex_model(nn.Identity(), Apply(torch.conj))


@pytest.mark.parametrize("model", [conjugates_activation, conjugates_gradient])
def test_conjugates_cross_a_wire(workers: Workers, model: Callable[[], nn.Sequential]) -> None:
    """A conjugate is a flag on a tensor, which gloo left behind: the numbers came unconjugated."""
    recipe = Recipe(model.__name__, model, complex_vectors, distance)
    expected = train_complex(recipe)
    assert_same(expected, plain(recipe, 4, optimizer=momentum))
    assert_same(workers.run(train_complex, 2, recipe)[0], expected)


def train_complex(recipe: Recipe) -> Any:
    return pipelined(recipe, TWO_STAGES, optimizer=momentum)


DTYPES = [torch.int16, torch.float8_e4m3fn, torch.bool]


def predict_all() -> list[tuple[str, Tensor]]:
    found = []
    for dtype in DTYPES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(functools.partial(torch.Tensor.to, dtype=dtype)))
        with build("chunks=4 ranks=2", model) as pipeline:
            rows = pipeline.predict(10 * vectors(9, 0)[0], to="all")
            found.append((str(rows.dtype), rows.float()))
    return found


def test_predictions_of_types_that_gloo_does_not_know(workers: Workers) -> None:
    expected = predict_all()
    assert [dtype for dtype, _ in expected] == [str(dtype) for dtype in DTYPES]
    for found in workers.run(predict_all, 2):
        for (dtype, rows), (_, mine) in zip(expected, found, strict=True):
            assert rows.count_nonzero()
            assert_equal(mine, rows, dtype)


# --------------------------------------------------------------------- activation checkpointing


class MovingAverage(nn.Module):
    """Reads a buffer that it has just written."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Tensor
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x * self.average.clone()


def normed() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("layer", [MovingAverage, normed])
def test_a_recomputation_finds_the_buffers_of_its_forward(
    layer: Callable[[], nn.Module], schedule: str
) -> None:
    """They moved twice a microbatch, and the second forward was another function than the first."""
    recipe = Recipe(layer.__name__, functools.partial(around, layer), vectors)
    found = pipelined(recipe, f"{TWO_STAGES} checkpoint=always schedule={schedule}")
    assert_same(found, plain(recipe, 4))


class LayerDrop(nn.Module):
    """Leaves its weights out, and with them the output's need for a gradient, as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) if x.sum() > 0 else x


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1)], ids=["then dropped", "dropped first"])
def test_a_need_for_gradients_that_depends_on_data(signs: tuple[int, int]) -> None:
    """Without a graph nobody sees it before the backward; gradients were lost, or never asked for."""
    inputs = torch.cat([sign * torch.ones(1, WIDTH) for sign in signs])
    targets = torch.tensor([1, 2])
    model = nn.Sequential(*list(around(LayerDrop))[1:])
    expected = copy.deepcopy(model)
    with build("chunks=2 device_map=0:0-1,1:1-3", model) as pipeline:
        pipeline.step(inputs, targets, update=False)
    accumulate(expected, functional.cross_entropy, cut((inputs, targets), 2))
    assert_gradients(model, expected)
    with build("chunks=2 device_map=0:0-1,1:1-3 checkpoint=always", model) as pipeline:
        with pytest.raises(
            PipelineError, match=r"outputs of stage 0 want a gradient in microbatch 1, .* on data"
        ):
            pipeline.step(inputs, targets)


# ------------------------------------------------------------------------ what stands around


def test_a_step_inside_of_inference_mode_is_an_error() -> None:
    """It returned a loss, and trained nothing."""
    with build("ranks=3 chunks=4") as pipeline:
        batch = vectors(9, 0)
        with torch.inference_mode(), pytest.raises(PipelineError, match="inference_mode"):
            pipeline.step(*batch)
        pipeline.step(*batch)


def test_a_step_inside_of_no_grad_trains() -> None:
    with build("ranks=3 chunks=4") as one, build("ranks=3 chunks=4") as other:
        with torch.no_grad():
            losses = [one.step(*vectors(9, step)) for step in range(2)]
            assert not torch.is_grad_enabled()
        assert losses == [other.step(*vectors(9, step)) for step in range(2)]


def test_a_failed_evaluation_keeps_what_was_accumulated() -> None:
    """A validation set with a bad batch threw away the gradients of the training step around it."""
    model, expected = mlp(), mlp()
    with build("ranks=3 chunks=4", model) as pipeline:
        pipeline.step(*vectors(8, 0), update=False)
        for call in (pipeline.predict, pipeline.evaluate):
            with pytest.raises(RuntimeError):
                call(torch.zeros(8, WIDTH + 1), *([vectors(8, 0)[1]] if call == pipeline.evaluate else []))
        pipeline.step(*vectors(8, 1), update=False)
    for step in range(2):
        accumulate(expected, functional.cross_entropy, cut(vectors(8, step), 4))
    assert_gradients(model, expected)


class Adapted(nn.Module):
    """An adapter that `train` folds into the weight for evaluation, and takes out again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.down.data @ self.up.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight if self.merged else self.weight + self.down @ self.up)


@pytest.mark.parametrize("training", [(True, True), (True, False), (False, True)])
def test_a_module_of_its_own_train_is_restored_through_it(training: tuple[bool, bool]) -> None:
    """Setting the flag alone left the adapter merged: it got no gradient ever after."""
    torch.manual_seed(0)
    adapters = Adapted(), Adapted()
    model = nn.Sequential(adapters[0], nn.Dropout(0.1), adapters[1], nn.Linear(WIDTH, 5))
    for adapter, mode in zip(adapters, training, strict=True):
        adapter.train(mode)
    weights = [adapter.weight.detach().clone() for adapter in adapters]
    modes = [module.training for module in model.modules()]
    with build(TWO_STAGES, model) as pipeline:
        pipeline.evaluate(*vectors(8, 0))
        assert [module.training for module in model.modules()] == modes
        assert [adapter.merged for adapter in adapters] == [not mode for mode in training]
        for adapter, weight in zip(adapters, weights, strict=True):
            torch.testing.assert_close(adapter.weight.detach(), weight)
        pipeline.step(*vectors(8, 0))
        assert [adapter.down.grad is not None for adapter in adapters] == list(training)


def test_a_thawed_parameter_is_cleared_and_clipped() -> None:
    """The engine knew those that trained at first: a thawed one's gradient grew from step to step."""

    def frozen() -> nn.Sequential:
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model

    def thaw(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [("0.weight", model[0].weight)], "lr": 0.1})

    model, expected = frozen(), frozen()
    updates = momentum([(name, p) for name, p in expected.named_parameters() if p.requires_grad])
    thaw(expected, updates)
    with build("ranks=3 chunks=4 clip=0.01", model) as pipeline:
        assert pipeline.optimizer is not None
        thaw(model, pipeline.optimizer)
        for step in range(3):
            pipeline.step(*vectors(9, step))
            updates.zero_grad()
            accumulate(expected, functional.cross_entropy, cut(vectors(9, step), 4))
            norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
            updates.step()
            assert_equal(pipeline.metrics["grad_norm"], norm, "the norm")
            assert_gradients(model, expected)
    for (name, value), plains in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_equal(value.detach(), plains.detach(), name)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 1e5), (torch.bfloat16, 1001)], ids=str)
def test_counts_survive_a_loss_of_half_precision(dtype: torch.dtype, count: float) -> None:
    """A count of tokens came back in the loss's type: 1e5 as inf, 1001 as 1000."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, float]]:
        return functional.cross_entropy(output, target).to(dtype), {"tokens": count}

    with build("ranks=3 chunks=4", loss=loss) as pipeline:
        for call in (pipeline.step, pipeline.evaluate):
            assert call(*vectors(8, 0)).dtype == dtype
            assert pipeline.metrics["tokens"].item() == count


def test_a_loss_may_have_another_precision_in_the_next_call() -> None:
    """As under autocast, which is around one step and not around the other."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - functional.one_hot(target, 5)).to(output.dtype).abs().mean()

    with build("ranks=3 chunks=4", loss=loss) as pipeline:
        assert pipeline.step(*vectors(8, 0)).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert pipeline.step(*vectors(8, 0)).dtype == torch.bfloat16


# --------------------------------------------------------------------------- between ranks


def shuffled_apart() -> list[str]:
    """Each rank has a loader of its own, over the same data; only the order may differ."""
    rank = torch.distributed.get_rank()
    inputs, targets = vectors(8, 0)
    order = torch.arange(8).roll(rank)
    said = []
    with build("ranks=2 chunks=4") as pipeline:
        for call in (pipeline.step, pipeline.evaluate):
            for batch in (
                (inputs[order], targets),
                (inputs, targets + rank),
                (inputs[order], targets[order]),
            ):
                try:
                    call(*batch)
                    said.append("no error")
                except DisagreementError as error:
                    said.append(str(error))
        # A rank needs no more than its stage does.
        pipeline.step(inputs if rank == 0 else None, targets if rank == 1 else None)
        return [*said, str(pipeline.step(inputs, targets).item())]


def test_loaders_that_shuffle_apart_are_noticed(workers: Workers) -> None:
    """Inputs of one batch were trained on the targets of another: the loss just never fell."""
    with build("ranks=2 chunks=4") as pipeline:
        pipeline.step(*vectors(8, 0))
        expected = pipeline.step(*vectors(8, 0)).item()
    for *said, loss in workers.run(shuffled_apart, 2):
        assert [words.split(":")[0] for words in said] == [
            f"the ranks were given different {what}" for what in ("inputs", "targets", "inputs") * 2
        ]
        assert all("a loader that shuffles does it alike on all ranks" in words for words in said)
        assert float(loss) == pytest.approx(expected)


def with_function(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    rank = torch.distributed.get_rank()
    functions = [lambda: None for _ in range(1 + 7 * rank)]  # no two at one address
    optimizer = momentum(named)
    optimizer.param_groups[0]["callback"] = functions[-1]
    return optimizer


def train_with_function() -> str:
    with build("ranks=2 chunks=4", optimizer=with_function) as pipeline:
        pipeline.step(*vectors(8, 0))
        assert pipeline.optimizer is not None
        return repr(pipeline.optimizer.param_groups[0]["callback"])


def test_functions_in_an_optimizers_settings_are_alike(workers: Workers) -> None:
    """Each was told apart by its address, which is another in every process."""
    one, other = workers.run(train_with_function, 2)
    assert one != other


def test_evaluation_works_inside_of_inference_mode() -> None:
    """Tensors made there have no version, which the engine looks at to see workspaces written to."""
    inputs, targets = vectors(8, 0)
    with build("ranks=2 chunks=4") as pipeline:
        expected = pipeline.evaluate(inputs, targets)
        with torch.inference_mode():
            assert torch.equal(pipeline.evaluate(inputs.clone(), targets.clone()), expected)
            assert pipeline.predict(inputs.clone()).shape == (8, 5)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_a_scripted_layer_can_be_recomputed(mode: str) -> None:
    torch.manual_seed(0)
    scripted: nn.Module = torch.jit.script(nn.Tanh())
    model = nn.Sequential(nn.Linear(17, 17), scripted, nn.Linear(17, 5))
    with build(f"ranks=2 chunks=4 checkpoint={mode}", model) as pipeline:
        assert pipeline.step(*vectors(8, 0)).isfinite()


@dataclass
class Listing:
    tensors: list[Tensor]


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Wraps(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x)


@pytest.mark.parametrize("wrap", [lambda x: Listing([x]), Slotted, lambda x: frozenset([x])])
def test_tensors_are_found_wherever_they_hide(wrap: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(17, 17), Wraps(wrap), nn.Identity())
    with (
        build("device_map=0:0-2,1:2-3 chunks=4", model) as pipeline,
        pytest.raises(TypeError, match="with tensors in it can't cross between stages"),
    ):
        pipeline.step(*vectors(8, 0))
