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
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WIDTH, BATCH, LAYERS = 6, 8, 8
# Every staged failure happens on rank 2 of 4, in its first layer.
FAULTY_RANK, FAULTY_LAYER, FAULTY_MICROBATCH = 2, 4, 1

torch.set_num_threads(1)


def folder() -> Path:
    return Path(os.environ["PIPE_TEST_JOB"])


def model(seed: int = 0, layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def batch(step: int, samples: int = BATCH) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(samples, WIDTH, generator=random), torch.randn(samples, WIDTH, generator=random)


adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def pipeline(
    options: str = "chunks=4 ranks=4", of: nn.Sequential | None = None, **keywords: Any
) -> Pipeline:
    settings = {"loss": nn.functional.mse_loss, "optimizer": adamw} | keywords
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
        return {"type": kinds[0], "kinds": kinds, "text": text, "seconds": time.monotonic() - start}
    return None


# ------------------------------------------------------------------------ plain training


def train(options: str = "chunks=4 ranks=4", count: int = 3, late: int | None = None, late_by: float = 0.0) -> Any:
    """Trains; rank `late` starts later than the others."""
    if RANK == late:
        time.sleep(late_by)
    with pipeline(options) as trained:
        losses = steps(trained, count)
        return {"losses": losses, "loss": float(trained.evaluate(*batch(0))), "parameters": parameters(trained)}


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
    if RANK == FAULTY_RANK:
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
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "warning":
        warnings.simplefilter("error")
        warnings.warn("boom: a warning", UserWarning, stacklevel=1)
    if how == "memory":
        raise MemoryError("boom: out of memory")
    if how == "sleep":
        time.sleep(20)
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
        value = _CountBackward.apply(self, value)
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
    """Fails at its `n`th call, on this rank only."""

    def __init__(self, n: int, how: str, rank: int) -> None:
        self.left, self.how, self.rank = n, how, rank

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0 and self.rank == RANK:
            boom(self.how)


def fault(place: str, how: str = "error", options: str = "chunks=4 ranks=4", guarded: bool = True) -> None:
    """Trains, and fails in some place of rank 2, or of rank 3 for a place that only the last stage has."""
    global FAULTY_RANK
    of, keywords = model(), {}
    if place in ("forward", "backward"):
        of[FAULTY_LAYER].append(Faulty(place, how))
    if place in ("forward_hook", "forward_pre_hook"):
        hook = Countdown(6, how, FAULTY_RANK)
        if place == "forward_hook":
            of[FAULTY_LAYER].register_forward_hook(lambda *_: hook())
        else:
            of[FAULTY_LAYER].register_forward_pre_hook(lambda *_: hook())
    if place == "backward_hook":
        hook = Countdown(6, how, FAULTY_RANK)
        of[FAULTY_LAYER].register_full_backward_hook(lambda *_: hook())
    if place == "parameter_hook":
        hook = Countdown(6, how, FAULTY_RANK)
        of[FAULTY_LAYER][0].weight.register_hook(lambda _: hook())
    if place in ("loss", "weight", "split"):
        FAULTY_RANK = 3
        count = Countdown({"loss": 6, "weight": 2, "split": 3}[place], how, FAULTY_RANK)

        def failing_loss(output: Tensor, target: Tensor) -> Tensor:
            count()
            return nn.functional.mse_loss(output, target)

        def failing_weight(target: Tensor) -> int:
            count()
            return len(target)

        def failing_split(whole: Tensor, microbatches: int) -> Any:
            count()
            return whole.tensor_split(microbatches)

        keywords[place] = {"loss": failing_loss, "weight": failing_weight, "split": failing_split}[place]
    if place == "optimizer":

        def failing_factory(named: Any) -> torch.optim.Optimizer:
            if RANK == FAULTY_RANK:
                boom(how)
            return adamw(named)

        keywords["optimizer"] = failing_factory
    if place == "optimizer_step":

        class Failing(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                if RANK == FAULTY_RANK:
                    boom(how)
                return super().step(closure)

        keywords["optimizer"] = functools.partial(Failing, lr=0.1)
    if place == "model" and RANK == FAULTY_RANK:  # before there is a pipeline
        boom(how)
    trained = pipeline(options, of, **keywords)
    with trained if guarded else contextlib.nullcontext():
        for step in range(3):
            if place == "between" and step == 1 and RANK == FAULTY_RANK:
                boom(how)
            trained.step(*batch(step))
        if place == "evaluate":
            trained.evaluate(*batch(0))
