"""Runs small jobs in a thread, many at a time."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A job's run is put off for so many `seconds`, in which others join it.

    A short job that runs amid a training step finds its code and data in no cache: it costs several times
    what it does next to others of its kind. Jobs run in the order of `put`. After one has failed no other
    runs. What nobody flushes runs before the interpreter ends; while it ends, jobs run at once. A forked
    child has no such thread: what it puts is dropped.

    Args:
        seconds: a job has begun by then, if those before it are done.
        most: so many may wait; half of them begin at once, and the `put` of one more waits for all.
        failed: called with the error of a job, in the thread that ran it: who has no next call would never
            hear of it.
    """

    def __init__(self, name: str, seconds: float, most: int, failed: Callable[[Exception], object]) -> None:
        self._seconds, self._most, self._failed = seconds, most, failed
        # The interpreter ends no pool's thread before its work is done.
        self._pool = ThreadPoolExecutor(1, name)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._due = threading.Event()
        self._waiting: list[Callable[[], object]] = []
        self._batches: list[Future[None]] = []
        self.has_failed = False

    def put(self, job: Callable[[], object]) -> None:
        if self._is_forked:
            return
        while self._batches and self._batches[0].done():
            self._batches.pop(0).result()
        if len(self._waiting) >= self._most:
            self.flush()
        with self._lock:
            self._waiting.append(job)
            waiting = len(self._waiting)
            if waiting == 1:
                self._due.clear()
        if waiting == 1:
            try:
                self._batches.append(self._pool.submit(self._run))
            except RuntimeError:  # the interpreter ends, and starts no more threads
                self._due.set()
                self._run()
        if waiting >= self._most // 2:
            self._due.set()

    def flush(self) -> None:
        """Until all jobs have run."""
        if self._is_forked:
            return
        self._due.set()
        while self._batches:
            self._batches.pop(0).result()

    def close(self) -> None:
        """Runs what still waits."""
        self.flush()
        if not self._is_forked:
            self._pool.shutdown()

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _run(self) -> None:
        self._due.wait(self._seconds)
        with self._running:
            with self._lock:
                jobs, self._waiting = self._waiting, []
            try:
                for job in jobs:
                    if self.has_failed:
                        return
                    job()
            except Exception as error:
                self.has_failed = True
                self._failed(error)
