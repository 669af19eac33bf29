"""Starts local ranks: torch's elastic launcher, without leaving Python."""

import os
import sys
import traceback
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipe.errors import PipelineError

T = TypeVar("T")


def launch(fn: Callable[..., T], ranks: int, *args: Any, timeout: float = 300.0) -> list[T]:
    """Runs `fn(*args)` in `ranks` processes of this machine, as torchrun would, and returns their results
    by rank.

    From a script the processes are spawned, so `fn` must be importable (a top-level function) and the
    script needs its `if __name__ == "__main__":`. In a notebook, whose functions can't be imported, they
    are forked.

    Args:
        ranks: the number of processes.
        timeout: seconds for the processes to find each other.

    Raises:
        PipelineError: in a notebook, where CUDA or autograd's threads are up already: a fork would hang.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed; it names the
        first.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least one process is needed")
    method = "fork" if _in_notebook() else "spawn"
    if method == "fork":
        _check_fork()
    config = LaunchConfig(
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_timeout=int(timeout),
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=method,
    )
    # As torchrun does: ranks that each take all cores are slower than ranks that share them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    results: dict[int, T] = elastic_launch(config, _shown)(fn, *args)
    return [results[rank] for rank in range(ranks)]


def _shown(fn: Callable[..., T], *args: Any) -> T:
    """Runs in the child, and shows what it raises: the launcher would show one child's error only."""
    try:
        return fn(*args)
    except BaseException:
        rank = os.environ["RANK"]
        for line in traceback.format_exc().splitlines():
            print(f"[rank{rank}]: {line}", file=sys.stderr)
        raise


def _in_notebook() -> bool:
    """Whether the main module is no file, so that a spawned process couldn't import it."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return file is None or not os.path.exists(file)


def _check_fork() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise PipelineError("CUDA is in use here and doesn't survive a fork: launch before touching a GPU")
    if any(name.startswith("pt_autograd") for name in _thread_names()):
        raise PipelineError(
            "autograd's threads are up here and don't survive a fork: launch before a backward"
        )


def _thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []:
        with open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return names
