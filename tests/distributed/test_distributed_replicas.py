"""What if replicas differ, or one of them fails? Which data are whose, and on which mesh?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import MLP, Trained, adamw, build, mlp, vectors
from replication import Job, assert_near, share, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from workers import Workers

from pipe import DisagreementError

ZEROS = [0, 1, 2, 3]
OPTIONS = "ranks=2 dp=2 chunks=4"


def member() -> tuple[int, int]:
    """This process's rank and replica under OPTIONS: as in a mesh ("pp", "dp")."""
    return divmod(torch.distributed.get_rank(), 2)


def said(call: Callable[[], object]) -> str:
    """The error of a call in words, with what was noted beside it."""
    try:
        call()
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "no error"


# ------------------------------------------------------------------------ failures of a replica


class Fails(nn.Module):
    """Raises in the forward or the backward of one rank of one replica, in the second step."""

    def __init__(self, where: str, victim: tuple[int, int]) -> None:
        super().__init__()
        self.where, self.armed = where, member() == victim
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.armed and self.calls > 4 and self.where == "forward":
            raise ArithmeticError("told to")
        if self.armed and self.calls > 4 and x.requires_grad:
            x.register_hook(self._raise)
        return x

    def _raise(self, gradient: Tensor) -> Tensor:
        raise ArithmeticError("told to")


def failing(where: str, victim: tuple[int, int]) -> nn.Sequential:
    layers = list(mlp())
    for index in (3, 7):
        layers.insert(index, Fails(where, victim))
    return nn.Sequential(*layers)


def fail(where: str, victim: tuple[int, int], zero: int) -> tuple[str, str]:
    with build(
        f"device_map=0:0-4,1:4-11 dp=2 chunks=4 zero={zero}", failing(where, victim), optimizer=adamw
    ) as pipeline:
        pipeline.step(*share(pipeline, vectors(17, 0)))
        found = said(lambda: pipeline.step(*share(pipeline, vectors(17, 1))))
        return found, said(lambda: pipeline.step(*share(pipeline, vectors(17, 2))))


def fail_all(cases: list[tuple[str, tuple[int, int], int]]) -> list[tuple[str, str]]:
    return [fail(*case) for case in cases]


FAILURES = [
    ("forward", (0, 1), 0),
    ("backward", (1, 1), 1),
    ("forward", (1, 0), 2),
    ("backward", (0, 1), 3),
]


def test_a_failure_in_one_replica_ends_all(workers: Workers) -> None:
    """Within seconds, each rank of each replica names the rank and the replica that failed."""
    by_member = workers.run(fail_all, 4, FAILURES, timeout=60)
    for index, (where, (rank, replica), _) in enumerate(FAILURES):
        for number, found in enumerate(by_member):
            error, again = found[index]
            assert f"rank {rank} of replica {replica}, stage {rank}" in error, error
            assert "ArithmeticError: told to" in error, error
            assert (f"action {rank}F" if where == "forward" else f"action {rank}B") in error, error
            assert error.startswith("ArithmeticError" if number == 2 * rank + replica else "PeerError"), error
            assert again.startswith("PipelineError: this pipeline is closed since a call failed"), again


class Unwilling(Exception):
    """What an optimizer or a weight may raise."""


def refuse(what: str, victim: tuple[int, int]) -> str:
    """One member can't build its pipeline, or can't take part in a call."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        if what == "optimizer" and member() == victim:
            raise Unwilling("not here")
        return adamw(named)

    def weight(target: Tensor) -> int:
        if what == "weight" and member() == victim:
            raise Unwilling("not here")
        return len(target)

    def run() -> None:
        with build(OPTIONS, mlp(), optimizer=optimizer, weight=weight) as pipeline:
            pipeline.step(*share(pipeline, vectors(17, 0)))

    return said(run)


def refuse_all(cases: list[tuple[str, tuple[int, int]]]) -> list[str]:
    return [refuse(*case) for case in cases]


REFUSALS = [("optimizer", (0, 1)), ("optimizer", (1, 0)), ("weight", (1, 0)), ("weight", (1, 1))]


def test_a_member_that_can_not_take_part_is_named(workers: Workers) -> None:
    by_member = workers.run(refuse_all, 4, REFUSALS)
    for index, (_, (rank, replica)) in enumerate(REFUSALS):
        for number, found in enumerate(by_member):
            if number == 2 * rank + replica:
                assert found[index].startswith("Unwilling: not here"), found[index]
            else:
                assert found[index].startswith(f"PeerError: rank {rank} of replica {replica} "), found[index]
                assert "Unwilling: not here" in found[index]


# ---------------------------------------------------------------------------- disagreements


def frozen(replica: int) -> nn.Sequential:
    model = mlp()
    model[2].weight.requires_grad_(member()[1] != replica)
    return model


def wider(replica: int) -> nn.Sequential:
    model = mlp()
    if member()[1] == replica:
        model[2], model[4] = nn.Linear(17, 19), nn.Linear(19, 17)
    return model


def differ(what: str) -> str:
    """Replica 1 means something else than replica 0."""
    odd = member()[1] == 1
    options, model, settings = OPTIONS, mlp, {}
    if what == "chunks":
        options = "ranks=2 dp=2 chunks=5" if odd else options
    elif what == "zero":
        options = f"{options} zero={2 if odd else 1}"
    elif what == "frozen":
        return said(lambda: build(options, frozen(1)))
    elif what == "wider":
        return said(lambda: build(options, wider(1)))
    elif what == "lr":
        rate = 0.1 if odd else 0.2
        settings["optimizer"] = lambda named: torch.optim.SGD(named, lr=rate)
    elif what == "seed":
        settings["seed"] = 5 + odd
    return said(lambda: build(options, model(), **settings))


DIFFERENCES = {
    "chunks": "rank 0 of replica 1: 'chunks=5",
    "zero": "rank 1 of replica 1: 'chunks=4 ranks=2 dp=2 zero=2'",
    "frozen": r"2.weight torch.float32[17, 17] frozen on rank 0 of replica 1",
    "wider": r"2.weight torch.float32[19, 17] on rank 0 of replica 1",
    "lr": "lr=0.1 in group 0 on rank 0 of replica 1",
    "seed": "'rank 0 of replica 1': 6",
}


def differ_all(whats: list[str]) -> list[str]:
    return [differ(what) for what in whats]


def test_replicas_that_are_built_differently(workers: Workers) -> None:
    for found in workers.run(differ_all, 4, list(DIFFERENCES)):
        for text, (what, names) in zip(found, DIFFERENCES.items(), strict=True):
            assert text.startswith("DisagreementError"), (what, text)
            assert names in text, (what, text)


def call_apart() -> list[str]:
    """Calls that replica 1 makes in its own way; then one that both make alike."""
    odd = member()[1] == 1
    with build(OPTIONS, model := mlp(), optimizer=adamw) as pipeline:
        inputs, targets = vectors(8, 0)
        found = [
            said(lambda: pipeline.evaluate(inputs, targets) if odd else pipeline.step(inputs, targets)),
            said(lambda: pipeline.step(inputs, targets, update=not odd)),
            said(lambda: pipeline.step(microbatches=[(inputs, targets)] * (3 if odd else 2))),
        ]
        model[2].requires_grad_(not odd)
        found.append(said(lambda: pipeline.step(inputs, targets)))
        model[2].requires_grad_(True)
        found.append(said(lambda: pipeline.step(inputs, targets)))
        return found


def test_replicas_that_are_called_differently(workers: Workers) -> None:
    for calls, update, counts, trained, fine in workers.run(call_apart, 4):
        assert calls.startswith("DisagreementError") and "rank 0 of replica 1: 'evaluate'" in calls
        assert update.startswith("DisagreementError") and "update=False" in update
        assert counts.startswith("DisagreementError") and "{0: 2, 1: 3}" in counts
        assert trained.startswith("DisagreementError") and "requires_grad" in trained
        assert fine == "no error"


# ------------------------------------------------------- what only some replicas know of a loss


def weightless(which: int) -> list[float]:
    """In the first step, and an evaluation after it, one replica's targets all are padding."""
    with build(f"{OPTIONS} timeout=20", mlp(), weight=lambda target: float((target > 0).sum())) as pipeline:
        losses = []
        for step in range(3):
            inputs, targets = vectors(16, step)
            targets = targets.clamp(min=1)
            if step == 0:
                targets[8 * which : 8 * which + 8] = 0
            batch = share(pipeline, (inputs, targets))
            losses += [float(pipeline.step(*batch)), float(pipeline.evaluate(*batch))]
        return losses


@pytest.mark.parametrize("which", [0, 1])
def test_a_replica_that_has_had_no_loss_yet(workers: Workers, which: int) -> None:
    """It asked the others what a loss is like, who knew and didn't answer: gloo ended the processes."""
    expected = weightless(which)
    for found in workers.run(weightless, 4, which):
        assert found == pytest.approx(expected)


def other_modes(how: str) -> list[float]:
    """In the second step, replica 1 alone leaves dropout out, or computes in another precision."""
    odd = member()[1] == 1
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(17, 17), nn.Dropout(0.0), nn.Linear(17, 17), nn.Dropout(0.0), nn.Linear(17, 5)
    )
    with build(f"{OPTIONS} timeout=20", model) as pipeline:
        losses = []
        for step in range(3):
            for layer in (1, 3):
                model[layer].train(not (odd and how == "eval" and step == 1))
            with torch.autocast("cpu", torch.bfloat16, enabled=odd and how == "autocast" and step == 1):
                losses.append(float(pipeline.step(*share(pipeline, vectors(17, step)))))
        return losses


def other_modes_or_error(how: str) -> list[float] | str:
    try:
        return other_modes(how)
    except DisagreementError as error:
        return str(error)


@pytest.mark.parametrize("how", ["eval", "autocast"])
def test_replicas_in_other_modes(workers: Workers, how: str) -> None:
    """Refused on all or trained by all."""
    first, *others = workers.run(other_modes_or_error, 4, how)
    assert all(other == first for other in others)
    if not isinstance(first, str):
        assert len(first) == 3


# --------------------------------------------------------------------------- equal at the start


def seeded_apart(options: str) -> Trained:
    """Each replica draws its own parameters and has met other data."""
    _, replica = member()
    model = mlp()
    if replica:
        torch.manual_seed(99)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    with build(options, model, optimizer=adamw, seed=1) as pipeline:
        losses = [pipeline.step(*share(pipeline, vectors(17, step))) for step in range(3)]
        return Trained(pipeline.state_dict(full=True), losses)


def seeded_apart_all(options: list[str]) -> list[Trained]:
    return [seeded_apart(each) for each in options]


def test_all_replicas_begin_with_the_first_ones_parameters(workers: Workers) -> None:
    sharding = [*(f"zero={zero}" for zero in ZEROS), "zero=3 offload", "amp=bf16", "amp=bf16 zero=3"]
    options = [f"{OPTIONS} {each}" for each in sharding]
    for each, found in zip(options, workers.run(seeded_apart_all, 4, options)[0], strict=True):
        assert_near(found, train(Job(MLP, each, {"steps": 3})), 0)


def buffers() -> list[Tensor]:
    """Running statistics, of which replica 1 begins with others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 17), nn.BatchNorm1d(17), nn.Linear(17, 5))
    if member()[1]:
        nn.init.constant_(model[1].running_mean, 7.0)
    with build("ranks=1 dp=2 chunks=2", model) as pipeline:
        return [buffer.clone() for buffer in pipeline.stages[0].module.buffers()]


def test_all_replicas_begin_with_the_first_ones_buffers(workers: Workers) -> None:
    for found in workers.run(buffers, 2):
        assert torch.equal(found[0], torch.zeros(17))


# -------------------------------------------------------------------------------- data shards


def indices(dataset: Any, epochs: int, **settings: Any) -> list[Any]:
    """This process's batches in some epochs, and how many it says there are."""
    with build(OPTIONS) as pipeline:
        sampler = pipeline.shard(dataset, **settings)
        found = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            batches = list(sampler)
            assert len(sampler) == len(batches)
            found.append(batches)
        return found


SHARDS: list[dict[str, Any]] = [
    {"batch_size": 8},
    {"batch_size": 7},  # of odd size: replica 0 gets one more
    {"batch_size": 7, "drop_last": True},
    {"batch_size": 7, "shuffle": False},
    {"batch_size": 8, "seed": 3},
    {"batch_size": 2},
    {"batch_size": 100},  # more than there are
    {"batch_size": 29},  # a last batch of one, which two replicas can't share
]


def indices_all() -> list[Any]:
    return [indices(range(30), 3, **settings) for settings in SHARDS]


def test_shards_are_disjoint_and_make_the_whole_batch(workers: Workers) -> None:
    alone = indices_all()
    members = workers.run(indices_all, 4)
    assert members[0] == members[2] and members[1] == members[3]  # rank 0 and 1 of each replica
    for settings, whole, first, second in zip(SHARDS, alone, members[0], members[1], strict=True):
        for epochs in zip(whole, first, second, strict=True):
            for batch, mine, others in zip(*epochs, strict=True):
                assert mine + others == batch, settings
                assert not set(mine) & set(others)
                assert len(others) <= len(mine) <= len(others) + 1


@pytest.mark.parametrize("settings", SHARDS, ids=str)
def test_shards_of_one_process_are_whole_batches(settings: dict[str, Any]) -> None:
    size, shuffles = settings["batch_size"], settings.get("shuffle", True)
    least = size if settings.get("drop_last") else 2
    epochs = indices(range(30), 3, **settings)
    for batches in epochs:
        assert [len(b) for b in batches[:-1]] == [size] * (len(batches) - 1)
        seen = [index for batch in batches for index in batch]
        assert len(set(seen)) == len(seen) == 30 - (30 % size if 30 % size < least else 0)
        assert (seen == sorted(seen)) != shuffles
    assert (epochs[0] == epochs[1]) != shuffles
    assert indices(range(30), 3, **settings) == epochs


def test_the_seed_decides_the_order() -> None:
    assert indices(range(30), 1, batch_size=8, seed=0) != indices(range(30), 1, batch_size=8, seed=1)


@pytest.mark.parametrize("batch_size", [1, 0])
def test_a_batch_that_can_not_be_shared(batch_size: int) -> None:
    with build(OPTIONS) as pipeline, pytest.raises(ValueError, match=f"batch_size={batch_size} for 2"):
        pipeline.shard(range(30), batch_size)  # type: ignore[arg-type]


def load(options: str) -> Trained:
    """Two epochs over 31 samples in batches of 10: the last batch has one, and is left out."""
    dataset = TensorDataset(*vectors(31, 0))
    with build(options, optimizer=adamw) as pipeline:
        sampler = pipeline.shard(dataset, 10)
        loader = DataLoader(dataset, batch_sampler=sampler)
        assert len(loader) == 3
        losses = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            losses += [pipeline.step(inputs, targets) for inputs, targets in loader]
        return Trained(pipeline.state_dict(full=True), losses)


def test_a_loader_over_a_shard(workers: Workers) -> None:
    found = workers.run(load, 4, OPTIONS)
    assert len(found[0].losses) == 6
    assert all(other.losses == found[0].losses for other in found)
    # Kernels round by where a row lies: a share that was loaded apart lies elsewhere.
    assert_near(found[0], load(OPTIONS), 1e-6)


# ------------------------------------------------------------------------------------- meshes

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "pp, dp": ((2, 2), ("pp", "dp")),
    "dp, pp": ((2, 2), ("dp", "pp")),
    "dp, pp, tp": ((2, 2, 1), ("dp", "pp", "tp")),
    "pp, tp, dp": ((2, 1, 2), ("pp", "tp", "dp")),
    "tp, dp, pp": ((1, 2, 2), ("tp", "dp", "pp")),
}


def on_mesh(layout: str, options: str) -> tuple[tuple[int | None, int | None, bool], Trained]:
    sizes, names = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with build(options, mlp(), optimizer=adamw, mesh=mesh) as pipeline:
        losses = [pipeline.step(*share(pipeline, vectors(17, step))) for step in range(3)]
        where = (pipeline.rank, pipeline.replica, pipeline.is_main)
        assert where[0] == mesh.get_local_rank("pp") and where[1] == mesh.get_local_rank("dp")
        return where, Trained(pipeline.state_dict(full=True), losses)


def on_meshes(layouts: list[str], options: str) -> list[Any]:
    return [on_mesh(layout, options) for layout in layouts]


@pytest.mark.parametrize("options", ["chunks=4 zero=2", "chunks=4 ranks=2 dp=2 zero=3"])
def test_a_mesh_lays_out_ranks_and_replicas(workers: Workers, options: str) -> None:
    by_member = workers.run(on_meshes, 4, list(LAYOUTS), options)
    expected = train(Job(MLP, f"{options.replace('ranks=2 dp=2', '')} ranks=2 dp=2", {"steps": 3}))
    for index, layout in enumerate(LAYOUTS):
        places = [found[index][0] for found in by_member]
        grid = [(0, 0), (0, 1), (1, 0), (1, 1)]
        if LAYOUTS[layout][1].index("dp") < LAYOUTS[layout][1].index("pp"):
            grid = [(rank, replica) for replica in (0, 1) for rank in (0, 1)]
        assert [place[:2] for place in places] == grid, layout
        assert [place[2] for place in places] == [True, False, False, False]
        assert_near(by_member[0][index][1], expected, 0)
        assert all(found[index][1].losses == by_member[0][index][1].losses for found in by_member)


def refused_meshes() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    only = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    without = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [
        said(lambda: build("chunks=4 dp=4", mesh=mesh)),
        said(lambda: build("chunks=4 ranks=4", mesh=mesh)),
        said(lambda: build("chunks=4 dp=2", mesh=only)),
        said(lambda: build("chunks=4", mesh=without)),
    ]


def test_meshes_that_contradict_the_options(workers: Workers) -> None:
    for dp, ranks, only, without in workers.run(refused_meshes, 4):
        assert dp.startswith("OptionError") and "dp is 4, but the mesh's dp dimension has 2 replicas" in dp
        assert "chunks=4 dp=4\n" in dp and "^" in dp
        assert ranks.startswith("OptionError") and "2 replicas" in ranks
        assert only.startswith("OptionError") and "1 replica" in only
        assert without.startswith("ValueError") and "'pp'" in without


SAID = {
    "ranks=2": (2, 2),
    "dp=2": (2, 2),
    "dp=4": (1, 4),
    "": (4, 1),
    "device_map=0:0-5,1:5-9": (2, 2),
}


def laid_out() -> list[tuple[int, int, int | None, int | None]]:
    found = []
    for options in SAID:
        with build(options) as pipeline:
            found.append((pipeline.ranks, pipeline.dp, pipeline.rank, pipeline.replica))
    return found


def test_the_world_fills_in_what_nothing_says(workers: Workers) -> None:
    for number, found in enumerate(workers.run(laid_out, 4)):
        assert found == [(ranks, dp, *divmod(number, dp)) for ranks, dp in SAID.values()]
