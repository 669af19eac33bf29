"""What ranks are made to do in the tests: each public function is a program, run by every rank alike."""

import contextlib
import functools
import hashlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipe import Pipeline

RANK = int(os.environ.get("RANK", "0"))
WIDTH, BATCH, LAYERS = 6, 8, 8
# Staged failures happen on rank 2 of 4, in its first layer, in the second step.
FAULTY_RANK, FAULTY_LAYER, FAULTY_MICROBATCH = 2, 4, 1
# What only the last stage has fails on its rank.
# Of a silent rank, in seconds.
SLEEP = 7.0
LAST, ON_LAST = 3, ("loss", "weight", "split")

torch.set_num_threads(1)


def folder() -> Path:
    return Path(os.environ["PIPE_TEST_JOB"])


def model(seed: int = 0, layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def layer(of: nn.Sequential, index: int) -> nn.Sequential:
    found = of[index]
    assert isinstance(found, nn.Sequential)
    return found


def batch(step: int, samples: int = BATCH) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(samples, WIDTH, generator=random), torch.randn(samples, WIDTH, generator=random)


adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def pipeline(options: str = "chunks=4 ranks=4", of: nn.Sequential | None = None, **keywords: Any) -> Pipeline:
    settings: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": adamw} | keywords
    return Pipeline(model() if of is None else of, options, **settings)


def digest(state: dict[str, Tensor]) -> str:
    """Equal for bitwise equal parameters."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].numpy().tobytes())
    return found.hexdigest()


def parameters(trained: Pipeline) -> str | None:
    """The digest of the whole model's parameters, on rank 0."""
    state = trained.state_dict(full=True)
    return digest(state) if state else None


def steps(trained: Pipeline, count: int, start: int = 0) -> list[float]:
    return [float(trained.step(*batch(step))) for step in range(start, start + count)]


def caught(what: Callable[[], object]) -> dict[str, Any] | None:
    """The error that something ends with, in words, and how long that took; None if it goes well."""
    start = time.monotonic()
    try:
        what()
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        end = time.monotonic()
        return {"type": kinds[0], "kinds": kinds, "text": text, "seconds": end - start, "at": end}
    return None


# ------------------------------------------------------------------------ plain training


def train(
    options: str = "chunks=4 ranks=4", count: int = 3, late: int | None = None, late_by: float = 0.0
) -> Any:
    """Trains; rank `late` starts later than the others."""
    if RANK == late:
        time.sleep(late_by)
    with pipeline(options) as trained:
        losses = steps(trained, count)
        return {
            "losses": losses,
            "loss": float(trained.evaluate(*batch(0))),
            "parameters": parameters(trained),
        }


def one_pipeline(count: int) -> str | None:
    with pipeline() as trained:
        steps(trained, count)
        return parameters(trained)


def forget_close(options: str = "chunks=4 ranks=4") -> None:
    steps(pipeline(options), 2)


def forget_everything(options: str = "chunks=4 ranks=4") -> None:
    """The pipeline lives until the interpreter is gone."""
    global kept
    kept = pipeline(options)
    steps(kept, 2)


kept: Pipeline | None = None


def train_on(options: str = "chunks=4 ranks=4") -> None:
    """Trains until somebody stops it."""
    with pipeline(options) as trained:
        for step in range(10**9):
            trained.step(*batch(step))
            if step == 2:
                (folder() / f"{RANK}.ready").touch()


# --------------------------------------------------------------------- staged failures


def boom(how: str) -> None:
    """Fails, and notes down when."""
    (folder() / "raised").write_text(str(time.monotonic()))
    if how == "error":
        raise RuntimeError("boom: that went wrong")
    if how == "key":
        raise KeyError(("boom", 7))
    if how == "bare":
        raise _Strange(7, reason="boom")
    if how == "interrupt":
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)
    if how == "exit":
        sys.exit(3)
    if how == "exit_ok":
        sys.exit(0)
    if how == "vanish":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "warning":
        warnings.simplefilter("error")
        warnings.warn("boom: a warning", UserWarning, stacklevel=1)
    if how == "memory":
        raise MemoryError("boom: out of memory")
    if how == "sleep":
        time.sleep(SLEEP)
        return
    raise AssertionError(how)


class _Strange(Exception):
    """Can't be made from its message alone, and doesn't pickle."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(number)
        self.reason = reason
        self.unpicklable = lambda: None

    def __str__(self) -> str:
        return f"{self.reason} number {self.args[0]}"


class Faulty(nn.Module):
    """Hands its input on, and fails at one microbatch of the second step, in its forward or its backward."""

    def __init__(self, place: str, how: str) -> None:
        super().__init__()
        self.place, self.how = place, how
        self.seen = {"forward": 0, "backward": 0}

    def count(self, place: str) -> None:
        self.seen[place] += 1
        if place == self.place and self.seen[place] == 4 + 1 + FAULTY_MICROBATCH:
            boom(self.how)

    def forward(self, value: Tensor) -> Tensor:
        value = _CountBackward.apply(self, value)  # type: ignore[no-untyped-call]
        self.count("forward")
        return value


class _CountBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Faulty, value: Tensor) -> Tensor:
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.layer.count("backward")
        return None, gradient


class Countdown:
    """Passes its arguments on to `then`, and fails at the `n`th call on one rank."""

    def __init__(self, n: int, how: str, rank: int, then: Callable[..., Any] = lambda *_: None) -> None:
        self.left, self.how, self.rank, self.then = n, how, rank, then

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0 and self.rank == RANK:
            boom(self.how)
        return self.then(*arguments)


class FailingStep(torch.optim.SGD):
    """An optimizer whose step fails on one rank."""

    how = "error"

    def step(self, closure: Any = None) -> Any:
        if RANK == FAULTY_RANK:
            boom(self.how)
        return super().step(closure)


def staged(place: str, how: str) -> tuple[nn.Sequential, dict[str, Any]]:
    """A model and keywords of a pipeline that will fail."""
    of = model()
    at = functools.partial(Countdown, how=how, rank=LAST if place in ON_LAST else FAULTY_RANK)
    faulty = layer(of, FAULTY_LAYER)
    if place in ("forward", "backward"):
        faulty.append(Faulty(place, how))
    if place == "forward_hook":
        faulty.register_forward_hook(at(6))
    if place == "forward_pre_hook":
        faulty.register_forward_pre_hook(at(6))
    if place == "backward_hook":
        faulty.register_full_backward_hook(at(6))
    if place == "parameter_hook":
        next(faulty.parameters()).register_hook(at(6))  # type: ignore[no-untyped-call]
    FailingStep.how = how
    keywords: dict[str, dict[str, Any]] = {
        "loss": {"loss": at(6, then=nn.functional.mse_loss)},
        "weight": {"weight": at(5, then=len)},
        "split": {"split": at(3, then=torch.tensor_split)},
        "optimizer": {"optimizer": at(1, then=adamw)},
        "optimizer_step": {"optimizer": functools.partial(FailingStep, lr=0.1)},
    }
    return of, keywords.get(place, {})


def fault(place: str, how: str = "error", options: str = "chunks=4 ranks=4", guarded: bool = True) -> None:
    """Trains, and fails in some place: on rank 2, or on the last, where the place is the last stage's."""
    of, keywords = staged(place, how)
    trained = pipeline(options, of, **keywords)
    with trained if guarded else contextlib.nullcontext():
        for step in range(3):
            if place == "between" and step == 1 and RANK == FAULTY_RANK:
                boom(how)
            trained.step(*batch(step))


def faults(places: list[str]) -> Any:
    """One failure after the other, each in a new pipeline of the same processes; at last one that works."""
    errors = [caught(functools.partial(fault, place)) for place in places]
    with pipeline() as fresh:
        return {"errors": errors, "losses": steps(fresh, 2)}


# ------------------------------------------------------------------- ranks that disagree


def _built(odd: str, **keywords: Any) -> Callable[[bool], Pipeline]:
    return lambda is_odd: pipeline(odd if is_odd else "chunks=4 ranks=4", **keywords)


def _groups_by(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return functools.partial(torch.optim.SGD, lr=rate)


def _two_groups(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": named[:3]}, {"params": named[3:], "lr": 0.2}], lr=0.01)


def _frozen(odd: bool) -> nn.Sequential:
    of = model()
    of[3].requires_grad_(not odd)
    return of


# Each builds a pipeline, given whether this rank is the one that does it differently.
BUILDS: dict[str, Callable[[bool], Pipeline]] = {
    "chunks": _built("chunks=5 ranks=4"),
    "schedule": _built("chunks=4 ranks=4 schedule=gpipe"),
    "checkpoint": _built("chunks=4 ranks=4 checkpoint=always"),
    "timeout": _built("chunks=4 ranks=4 timeout=77"),
    "mistake": _built("chunk=4 ranks=4"),
    "map": _built("chunks=4 device_map=0:0-1,1:1-2,2:2-3,3:3-8"),
    "clip": lambda odd: pipeline(clip=1.0 if odd else None),
    "ranks=3 everywhere": lambda odd: pipeline("chunks=4 ranks=3"),
    "ranks=3": _built("chunks=4 ranks=3"),
    "depth": lambda odd: pipeline(of=model(layers=9 if odd else 8)),
    "width": lambda odd: pipeline(
        of=nn.Sequential(*list(model())[:-1], nn.Linear(WIDTH, 5 if odd else WIDTH))
    ),
    "frozen": lambda odd: pipeline(of=_frozen(odd)),
    "dtype": lambda odd: pipeline(of=model().to(torch.float64 if odd else torch.float32)),
    "not sequential": lambda odd: pipeline(of=nn.Linear(2, 2) if odd else model()),  # type: ignore[arg-type]
    "learning rate": lambda odd: pipeline(optimizer=_groups_by(0.1 if odd else 0.2)),
    "groups": lambda odd: pipeline(optimizer=_two_groups if odd else adamw),
    "no optimizer": lambda odd: pipeline(optimizer=None if odd else adamw),
    "seed": lambda odd: pipeline(seed=2 if odd else 1),
    "seed on one": lambda odd: pipeline(seed=1 if odd else None),
}


def build_apart(cases: list[tuple[str, int]]) -> Any:
    """In each case one rank builds another pipeline; afterwards all build the same one, which has to work."""
    errors = [caught(functools.partial(BUILDS[case], odd == RANK)) for case, odd in cases]
    with pipeline() as good:
        return {"errors": errors, "losses": steps(good, 2)}


def _pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(step, 2) for step in range(count)]


# Each makes a call, given whether this rank is the one that does it differently.
CALLS: dict[str, Callable[[Pipeline, bool], object]] = {
    "evaluate": lambda p, odd: p.evaluate(*batch(0)) if odd else p.step(*batch(0)),
    "predict": lambda p, odd: p.predict(batch(0)[0]) if odd else p.step(*batch(0)),
    "to": lambda p, odd: p.predict(batch(0)[0], to="last" if odd else "all"),
    "update": lambda p, odd: p.step(*batch(0), update=odd),
    "samples": lambda p, odd: p.step(*batch(0, 6 if odd else 8)),
    "few samples": lambda p, odd: p.step(*batch(0, 2 if odd else 8)),
    "no samples": lambda p, odd: p.step(*batch(0, 0 if odd else 8)),
    "targets": lambda p, odd: p.step(batch(0)[0], batch(0)[1][: 7 if odd else 8]),
    "targets everywhere": lambda p, odd: p.step(batch(0)[0], batch(0)[1][:7]),
    "microbatches": lambda p, odd: p.step(microbatches=_pairs(3 if odd else 4)),
    "microbatches on one": lambda p, odd: p.step(microbatches=_pairs(5)) if odd else p.step(*batch(0)),
    "nothing": lambda p, odd: p.step() if odd else p.step(*batch(0)),
    "both": lambda p, odd: p.step(*batch(0), microbatches=_pairs(4)) if odd else p.step(*batch(0)),
    "requires grad": lambda p, odd: p.step(batch(0)[0].requires_grad_(odd), batch(0)[1]),
    "no tensors": lambda p, odd: p.step("text", "text") if odd else p.step(*batch(0)),
}


def call_apart(cases: list[tuple[str, int]]) -> Any:
    """In each case one rank makes another call, all on one pipeline, which has to work afterwards."""
    with pipeline() as same:
        losses = steps(same, 1)
        errors = [caught(functools.partial(CALLS[case], same, odd == RANK)) for case, odd in cases]
        losses += steps(same, 2, start=1)
        return {"errors": errors, "losses": losses, "parameters": parameters(same)}


def full_state_apart() -> Any:
    """One rank asks for the full state, the others step."""
    with pipeline("chunks=4 ranks=4 timeout=4") as same:
        steps(same, 1)
        return caught(lambda: same.state_dict(full=True) if RANK == 2 else same.step(*batch(1)))


def other_shapes() -> Any:
    """The inputs are of another width than the first layer takes."""
    with pipeline() as same:
        inputs, targets = batch(0)
        error = caught(lambda: same.step(inputs[:, :5], targets))
        return {"error": error}


def leave_early(how: str, guarded: bool = True) -> Any:
    """Rank 2 makes fewer steps than the others: it closes its pipeline, ends its script, or lets it go."""
    trained = pipeline("chunks=4 ranks=4 timeout=5")
    with trained if guarded else contextlib.nullcontext():
        steps(trained, 1)
        if RANK == FAULTY_RANK:
            (folder() / "raised").write_text(str(time.monotonic()))
            if how == "return":
                return None
            if how == "close":
                trained.close()
                time.sleep(3)
                return None
        return caught(lambda: steps(trained, 2))


def one_without_pipeline() -> Any:
    """Rank 2 never builds its pipeline."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if RANK == 2:
        time.sleep(4)
        return None
    return caught(lambda: pipeline("chunks=4 ranks=4 timeout=2"))


def steps_apart() -> Any:
    """Rank 1 has made one step fewer: an evaluation comes where the others step."""
    with pipeline() as same:
        steps(same, 1)
        return caught(lambda: [same.evaluate(*batch(0)) if RANK == 1 else same.step(*batch(1))])


def silent(place: str, timeout: int = 2, rank: int = FAULTY_RANK) -> Any:
    """One rank sleeps for longer than `timeout`, in its forward, its backward or between two calls."""
    global FAULTY_RANK
    FAULTY_RANK = rank
    of = model()

    def run() -> None:
        if place in ("forward", "backward"):
            layer(of, 2 * rank).append(Faulty(place, "sleep"))
        trained = pipeline(f"chunks=4 ranks=4 timeout={timeout}", of)
        steps(trained, 1)
        if place == "between" and rank == RANK:
            boom("sleep")
        steps(trained, 2)

    return caught(run)


# -------------------------------------------------------------------- pipelines together


def one_after_the_other() -> Any:
    """Two pipelines, the second after the first was closed."""
    found = []
    for seed in range(2):
        with pipeline(of=model(seed)) as trained:
            steps(trained, 2)
            found.append(parameters(trained))
    return found


def side_by_side() -> Any:
    """Two pipelines of the same ranks, their calls in turn."""
    with pipeline(of=model(0)) as one, pipeline("chunks=3 ranks=4 schedule=gpipe", model(1)) as two:
        for step in range(2):
            one.step(*batch(step))
            two.step(*batch(step))
        return [parameters(one), parameters(two)]


def closed() -> Any:
    """Closes twice, then uses what is closed."""
    trained = pipeline()
    steps(trained, 1)
    trained.close()
    trained.close()
    calls: list[Callable[[], object]] = [
        lambda: trained.step(*batch(0)),
        lambda: trained.evaluate(*batch(0)),
        lambda: trained.predict(batch(0)[0]),
        lambda: trained.state_dict(full=True),
    ]
    return [caught(call) for call in calls]


def several() -> Any:
    return {"after": one_after_the_other(), "beside": side_by_side(), "closed": closed()}


def after_a_failure() -> Any:
    """A call fails on rank 2; what does the pipeline say then, and does a new one work here?"""
    of = model()
    layer(of, FAULTY_LAYER).append(Faulty("forward", "error"))
    trained = pipeline(of=of)
    first = caught(lambda: steps(trained, 2))
    again = caught(lambda: steps(trained, 1))
    trained.close()
    with pipeline() as fresh:
        return {"first": first, "again": again, "losses": steps(fresh, 2)}


def one_survives() -> Any:
    """Of two pipelines side by side one fails; the other goes on."""
    of = model()
    layer(of, FAULTY_LAYER).append(Faulty("forward", "error"))
    with pipeline() as good:
        bad = pipeline(of=of)
        steps(good, 1)
        error = caught(lambda: steps(bad, 2))
        return {"error": error, "losses": steps(good, 1, start=1), "parameters": parameters(good)}


# ----------------------------------------------------------------------------------- meshes


def on_mesh(names: list[str], sizes: list[int], options: str = "chunks=4 ranks=2") -> Any:
    """Trains a pipeline along `pp` of a mesh; every other coordinate has its own data."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
    other = next(name for name in names if name != "pp")
    number = mesh[other].get_local_rank()
    with pipeline(options, mesh=mesh) as trained:
        losses = steps(trained, 3, start=100 * number)
        return {"number": number, "rank": trained.rank, "losses": losses, "parameters": parameters(trained)}


def mesh_errors(cases: list[list[str]]) -> Any:
    """What comes of meshes of 2 x 2 with these dimensions."""
    from torch.distributed.device_mesh import init_device_mesh

    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(names)) for names in cases]
    return [caught(functools.partial(pipeline, "chunks=4 ranks=2", mesh=mesh)) for mesh in meshes]


def alone(start: int, options: str = "chunks=4 ranks=2") -> Any:
    """What one of the pipelines of `on_mesh` computes, in one process."""
    with pipeline(options) as trained:
        return {"losses": steps(trained, 3, start=start), "parameters": parameters(trained)}


def own_group() -> Any:
    """The script has made the process group itself, and uses it afterwards."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with pipeline() as trained:
        steps(trained, 1)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)
