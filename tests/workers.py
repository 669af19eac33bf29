"""Worker processes that are started once and run many jobs: importing torch costs seconds."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pipe.distributed import groups

T = TypeVar("T")

HOST = "127.0.0.1"
# After the first rank of a job has failed, the others have this long to come back too.
_GRACE_S = 15.0


class WorkerError(RuntimeError):
    """A job failed; the message holds the traceback of each rank that did."""


class _Job(NamedTuple):
    number: int
    rank: int
    ranks: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]


class _Outcome(NamedTuple):
    result: Any = None
    error: str | None = None


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class Workers:
    """A pool of processes, started at the first job."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._pool: list[_Worker] = []
        self._numbers = itertools.count()
        self._store: TCPStore | None = None

    def run(self, fn: Callable[..., T], ranks: int, *args: Any, timeout: float = 60.0) -> list[T]:
        """`fn(*args)` on each of the first `ranks` workers, in a process group of their own; results by rank.

        A function travels by its name, so it stands at the top of its module. One rank gets no process group.

        Raises:
            WorkerError: a rank raised, died or was not done in time. In the last two cases, or if some rank
                hangs, the pool is killed, and the next job has a new one.
        """
        if not self._pool:
            self._start()
        number = next(self._numbers)
        for rank, worker in enumerate(self._pool[:ranks]):
            worker.connection.send_bytes(pickle.dumps(_Job(number, rank, ranks, fn, args)))
        outcomes = self._collect(ranks, timeout)
        errors = [f"rank {rank}: {o.error}" for rank, o in sorted(outcomes.items()) if o.error is not None]
        missing = sorted(set(range(ranks)) - set(outcomes))
        if missing or any(not worker.process.is_alive() for worker in self._pool):
            self.kill()
        if missing:
            errors.append(f"ranks {missing} were not done in time, and killed")
        if errors:
            raise WorkerError("\n\n".join(errors))
        return [outcomes[rank].result for rank in range(ranks)]

    def kill(self) -> None:
        """Ends the processes of this pool, whatever they are doing."""
        pool, self._pool = self._pool, []
        for process, connection in pool:
            process.kill()
            process.join()
            connection.close()

    def _start(self) -> None:
        if self._store is None:
            self._store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._pool.append(_Worker(process, ours))

    def _collect(self, ranks: int, timeout: float) -> dict[int, _Outcome]:
        pending = {worker.connection: rank for rank, worker in enumerate(self._pool[:ranks])}
        outcomes: dict[int, _Outcome] = {}
        end = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                outcome = outcomes[pending.pop(connection)] = _receive(connection)
                if outcome.error is not None:
                    end = min(end, time.monotonic() + _GRACE_S)
        return outcomes


def _receive(connection: Connection) -> _Outcome:
    try:
        outcome: _Outcome = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return _Outcome(error="the process died")
    return outcome


def _serve(connection: Connection, port: int) -> None:
    """A worker's life: one job after the other, until the pool hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore(HOST, port, is_master=False)
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        # Pickled here: `Connection.send` would share tensors' memory, file handle by file handle.
        connection.send_bytes(pickle.dumps(_outcome(data, store)))
        gc.collect()


def _outcome(data: bytes, store: Store) -> _Outcome:
    try:
        job: _Job = pickle.loads(data)
        torch.manual_seed(0)
        _enter_world(job, store)
        return _Outcome(result=job.fn(*job.args))
    except BaseException:
        return _Outcome(error=traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _enter_world(job: _Job, store: Store) -> None:
    # A job that failed may have built a pipeline on some ranks only: every job counts from the start.
    groups._serials.clear()
    world = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.ranks}
    os.environ.update({name: str(value) for name, value in world.items()})
    if job.ranks > 1:
        own = PrefixStore(f"job/{job.number}", store)
        dist.init_process_group("gloo", store=own, rank=job.rank, world_size=job.ranks)
