"""Do replicas of any size train as one, and is a parameter left alone that no replica has used?"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from covering import Row, cases, covering
from reference import MLP, Recipe, Trained, adamw, build, mlp, plain, vectors
from replication import CHUNKS, Job, assert_near, assert_within, share, train
from torch import Tensor, nn
from workers import Workers

from pipe import Pipeline

ZEROS = [0, 1, 2, 3]


# ------------------------------------------------------------------------- uneven replicas


def uneven(options: str, sizes: Sequence[int], steps: int = 3) -> Trained:
    """Replica r works on `sizes[r]` rows of each batch."""
    with build(options, mlp(), optimizer=adamw, clip=0.1) as pipeline:
        losses = []
        for step in range(steps):
            start = sum(sizes[: pipeline.replica])
            rows = slice(start, start + sizes[pipeline.replica or 0])
            inputs, targets = vectors(sum(sizes), step)
            losses.append(pipeline.step(inputs[rows], targets[rows]))
        return Trained(pipeline.state_dict(full=True), losses)


def uneven_all(cases: list[tuple[str, Sequence[int]]]) -> list[Trained]:
    return [uneven(*case) for case in cases]


SCHEDULES = ["1f1b", "zb_h1"]
SHARDINGS = [*(f"zero={zero}" for zero in ZEROS), "zero=2 reduce_every=3", "zero=3 reduce_every=2 offload"]


@pytest.mark.parametrize(("ranks", "sizes"), [(2, (5, 2)), (2, (2, 5)), (2, (1, 9)), (1, (5, 2, 6))], ids=str)
def test_replicas_of_other_sizes(workers: Workers, ranks: int, sizes: Sequence[int]) -> None:
    """All run as many microbatches as the smallest has samples, whatever `chunks` says."""
    jobs = [
        (f"ranks={ranks} dp={len(sizes)} chunks=4 schedule={schedule} {sharding}", sizes)
        for schedule, sharding in zip(SCHEDULES * 3, SHARDINGS, strict=True)
    ]
    expected = plain(MLP, 1, rows=sum(sizes), steps=3, clip=0.1)
    first, *others = workers.run(uneven_all, ranks * len(sizes), jobs)
    for other in others:
        assert [each.losses for each in other] == [each.losses for each in first]
    for found in first:
        assert_near(found, expected, 1e-5)


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_fewer_samples_than_microbatches(sharding: str, dp: int) -> None:
    """Of 5 samples, two replicas have 3 and 2, and three have 2, 2 and 1."""
    for rows in (dp, 5):
        found = train(Job(MLP, f"ranks=2 dp={dp} chunks=4 {sharding}", {"rows": rows, "clip": 0.1}))
        assert_near(found, plain(MLP, 1, rows=rows, clip=0.1), 1e-5)


EMPTY = "replica 1 has no samples, and every replica needs one at least; they have [1, 0]"


def without_samples(zero: int) -> tuple[list[str], Trained]:
    """Three calls in which replica 1 has nothing, and what is trained around them."""
    said, losses = [], []
    with build(f"ranks=2 dp=2 chunks=4 zero={zero}", mlp(), optimizer=adamw) as pipeline:
        for step in range(2):
            losses.append(pipeline.step(*share(pipeline, vectors(17, step))))
            inputs, targets = share(pipeline, vectors(1, 0))
            for call in (
                functools.partial(pipeline.step, inputs, targets),
                functools.partial(pipeline.step, inputs, targets, update=False),
                functools.partial(pipeline.evaluate, inputs, targets),
                functools.partial(pipeline.predict, inputs),
            ):
                try:
                    call()
                    said.append("no error")
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")
        return said, Trained(pipeline.state_dict(full=True), losses)


def without_samples_all() -> list[tuple[list[str], Trained]]:
    return [without_samples(zero) for zero in ZEROS]


def check_without_samples(said: list[str], found: Trained) -> None:
    assert len(set(said)) == 1 and len(said) == 8
    assert said[0] == f"ValueError: {EMPTY}"


@pytest.mark.parametrize("zero", ZEROS)
def test_a_replica_without_samples(zero: int) -> None:
    said, found = without_samples(zero)
    check_without_samples(said, found)
    assert_near(found, plain(MLP, 1, steps=2), 1e-5)


def test_a_replica_without_samples_between_processes(workers: Workers) -> None:
    """All ranks of all replicas say the same, and go on."""
    for zero, (first, *others) in enumerate(zip(*workers.run(without_samples_all, 4), strict=True)):
        check_without_samples(*first)
        assert all(said == first[0] for said, _ in others)
        assert_near(first[1], without_samples(zero)[1], 0)


# ------------------------------------------------- one global batch, however it is worked on


def curve(options: str, rows: int = 24, steps: int = 8) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of training that nothing is clipped in."""
    losses, norms = [], []
    with build(options, mlp(), optimizer=adamw, clip=1e6) as pipeline:
        for step in range(steps):
            losses.append(float(pipeline.step(*share(pipeline, vectors(rows, step)))))
            norms.append(float(pipeline.metrics["grad_norm"]))
    return losses, norms


@functools.cache
def plain_curve(rows: int = 24, steps: int = 8) -> tuple[list[float], list[float]]:
    model = mlp()
    updates, losses, norms = adamw(list(model.named_parameters())), [], []
    for step in range(steps):
        updates.zero_grad()
        inputs, targets = vectors(rows, step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e6).item())
        updates.step()
    return losses, norms


@pytest.mark.parametrize(
    ("chunks", "dp", "sharding", "ranks"),
    cases({"chunks": [1, 2, 3, 8], "dp": [1, 2, 3, 5], "sharding": SHARDINGS, "ranks": [1, 3]}),
)
def test_norm_and_loss_do_not_change(chunks: int, dp: int, sharding: str, ranks: int) -> None:
    losses, norms = curve(f"chunks={chunks} dp={dp} ranks={ranks} {sharding}")
    expected_losses, expected_norms = plain_curve()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)


# ----------------------------------------------------------------- frozen, unused, or both


def frozen(*layers: int, shared: tuple[int, int] | None = None) -> nn.Sequential:
    model = mlp()
    if shared:
        model[shared[1]].weight = model[shared[0]].weight
    for layer in layers:
        model[layer].weight.requires_grad_(False)
        if shared is None:
            model[layer].bias.requires_grad_(False)
    return model


# Under ranks=3 each stage has three layers, and so at least one that is linear.
FIRST_STAGE = Recipe("first stage frozen", functools.partial(frozen, 0, 2), vectors)
MIDDLE_STAGE = Recipe("middle stage frozen", functools.partial(frozen, 4), vectors)
LAST_STAGE = Recipe("last stage frozen", functools.partial(frozen, 6, 8), vectors)
TIED_STAGES = Recipe("a tied weight is frozen", functools.partial(frozen, 2, shared=(2, 6)), vectors)
FROZEN = [FIRST_STAGE, MIDDLE_STAGE, LAST_STAGE, TIED_STAGES]
MAP = "device_map=0:0-3,1:3-6,2:6-9"


@pytest.mark.parametrize(
    ("recipe", "sharding", "dp", "schedule"),
    cases({"recipe": FROZEN, "sharding": SHARDINGS, "dp": [1, 2], "schedule": ["1f1b", "zb_h1"]}),
)
def test_a_stage_without_trainable_parameters(recipe: Recipe, sharding: str, dp: int, schedule: str) -> None:
    found = train(Job(recipe, f"{MAP} dp={dp} chunks={CHUNKS} schedule={schedule} {sharding}", {"clip": 0.1}))
    assert_near(found, plain(recipe, 1, clip=0.1), 1e-5)
    start = recipe.model()
    for name, parameter in start.named_parameters(remove_duplicate=False):
        assert torch.equal(found.state[name], parameter) == (not parameter.requires_grad), name


def train_frozen(zero: int, layers: Sequence[int]) -> tuple[Trained, Tensor]:
    """Of two ranks one has nothing to train."""
    model = frozen(*layers)
    with build(f"device_map=0:0-3,1:3-9 dp=2 chunks=4 zero={zero}", model, clip=0.1) as pipeline:
        losses = [pipeline.step(*share(pipeline, vectors(17, step))) for step in range(3)]
        return Trained(pipeline.state_dict(full=True), losses), pipeline.metrics["grad_norm"]


def train_frozen_all(jobs: list[tuple[int, Sequence[int]]]) -> list[tuple[Trained, Tensor]]:
    return [train_frozen(*job) for job in jobs]


def test_stages_without_trainable_parameters_between_processes(workers: Workers) -> None:
    """They have no gradient to reduce, no shard to step and nothing to add to the norm, and nobody waits."""
    jobs = [(zero, layers) for zero in ZEROS for layers in ((0, 2), (4, 6, 8))]
    for job, found in zip(jobs, zip(*workers.run(train_frozen_all, 4, jobs), strict=True), strict=True):
        expected, expected_norm = train_frozen(*job)
        assert_near(found[0][0], expected, 0)
        assert expected_norm > 0 and all(torch.equal(norm, expected_norm) for _, norm in found)


class Branch(nn.Module):
    """A linear layer, and another one that is there for inputs that begin above 0 (`Switch`)."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(17, 17)
        self.sometimes = nn.Linear(17, 17)

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return x + self.sometimes(x) if self.wanted else x

    wanted = False


class Switch(nn.Module):
    """Looks at the data, and switches the branches of its stage."""

    def __init__(self, *branches: Branch) -> None:
        super().__init__()
        self.branches = [[branch] for branch in branches]  # not its children

    def forward(self, x: Tensor) -> Tensor:
        for (branch,) in self.branches:
            branch.wanted = bool(x[0, 0] > 0)
        return x


def branching() -> nn.Sequential:
    torch.manual_seed(0)
    branch = Branch()
    return nn.Sequential(nn.Identity(), Switch(branch), branch, nn.ReLU(), nn.Linear(17, 5))


# Which of 8 samples use it. Each is a microbatch of its own; of two replicas, the first has samples 0 to 3.
USES = {
    "never": (),
    "in one microbatch": (2,),
    "on replica 1": (4, 5, 6, 7),
    "in one microbatch of replica 1": (7,),
    "in the first of each": (0, 4),
    "always": tuple(range(8)),
}


def marked(step: int, uses: Sequence[int]) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(8, step)
    inputs[:, 0] = -1.0
    inputs[list(uses), 0] = 1.0
    return inputs, targets


def decaying(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01, weight_decay=0.5)


def use(options: str, uses: Sequence[Sequence[int]]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The parameters after steps that use the branch so, and how many updates each has had."""
    with build(f"device_map=0:0-3,1:3-5 {options}", branching(), optimizer=decaying) as pipeline:
        for step, samples in enumerate(uses):
            pipeline.step(*share(pipeline, marked(step, samples)))
        return pipeline.state_dict(full=True), counts_of(pipeline)


def counts_of(pipeline: Pipeline) -> dict[str, float]:
    optimizer = pipeline.optimizer
    assert optimizer is not None
    found: dict[str, set[float]] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            found.setdefault(name, set()).add(float(state["step"]) if "step" in state else 0.0)
    assert all(len(counts) == 1 for counts in found.values()), found
    return {name: counts.pop() for name, counts in found.items()}


def use_plainly(uses: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Sample by sample; `zero_grad` leaves None for what goes unused."""
    model = branching()
    optimizer = decaying(list(model.named_parameters()))
    for step, samples in enumerate(uses):
        optimizer.zero_grad()
        inputs, targets = marked(step, samples)
        for row in range(8):
            (nn.functional.cross_entropy(model(inputs[row : row + 1]), targets[row : row + 1]) / 8).backward()
        optimizer.step()
    return model.state_dict()


def expected_counts(uses: Sequence[Sequence[int]]) -> dict[str, float]:
    names = [name for name, _ in branching().named_parameters()]
    times = sum(bool(samples) for samples in uses)
    return {name: float(times if "sometimes" in name else len(uses)) for name in names}


SEQUENCES: dict[str, list[Sequence[int]]] = {
    **{name: [samples, samples] for name, samples in USES.items()},
    "never, then on replica 1": [(), USES["on replica 1"]],
    "always, then never": [USES["always"], ()],
    "on replica 1, never, on replica 0": [USES["on replica 1"], (), (0, 1, 2, 3)],
}
AMPS = {"": 1e-5, "amp=bf16": 2e-2}


@pytest.mark.parametrize(
    ("which", "sharding", "dp", "amp", "schedule"),
    cases(
        {
            "which": list(SEQUENCES),
            "sharding": SHARDINGS,
            "dp": [1, 2],
            "amp": list(AMPS),
            "schedule": SCHEDULES,
        }
    ),
)
def test_a_parameter_that_goes_unused(which: str, sharding: str, dp: int, amp: str, schedule: str) -> None:
    """In a microbatch it adds nothing; in a whole step it is left alone: AdamW must not decay it."""
    uses = SEQUENCES[which]
    options = f"dp={dp} chunks={8 // dp} {amp} schedule={schedule} {sharding}"
    state, counts = use(options, uses)
    check_use(state, counts, uses, AMPS[amp])


def check_use(
    state: dict[str, Tensor], counts: dict[str, float], uses: Sequence[Sequence[int]], off_by: float
) -> None:
    assert counts == {name: count for name, count in expected_counts(uses).items() if name in counts}
    start = branching().state_dict()
    for name, value in use_plainly(uses).items():
        assert_within(state[name], value, off_by, name)
        if "sometimes" in name and not any(uses):
            assert torch.equal(state[name], start[name]), name


def use_all(jobs: list[Row]) -> list[Any]:
    return [use(f"dp=2 chunks=4 {job['amp']} zero={job['zero']}", SEQUENCES[job["which"]]) for job in jobs]


def test_unused_parameters_between_processes(workers: Workers) -> None:
    jobs = covering({"which": list(SEQUENCES), "zero": ZEROS, "amp": list(AMPS)})
    for job, found in zip(jobs, zip(*workers.run(use_all, 4, jobs), strict=True), strict=True):
        uses = SEQUENCES[job["which"]]
        for _, counts in found:
            assert counts == {name: n for name, n in expected_counts(uses).items() if name in counts}, job
        check_use(*found[0], uses, AMPS[job["amp"]])
        assert_near(Trained(found[0][0], []), Trained(use_all([job])[0][0], []), 0)
