"""Runs small jobs in a thread, many at a time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A job's run is put off for so many `seconds`, in which others join it.

    A short job that runs amid a training step finds its code and data in no cache: it costs several times
    what it does next to others of its kind. Jobs run in the order of `put`. After one has failed no other
    runs, and the next call of any method raises its error. What nobody flushes runs before the interpreter
    ends.

    Args:
        seconds: a job has begun by then, if those before it are done.
        most: so many may wait; the `put` of one more runs them first.
    """

    def __init__(self, name: str, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        # The interpreter ends no pool's thread before its work is done.
        self._pool = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._waiting: list[Callable[[], object]] = []
        self._batches: list[Future[None]] = []
        self._has_failed = False

    def put(self, job: Callable[[], object]) -> None:
        while self._batches and self._batches[0].done():
            self._batches.pop(0).result()
        if len(self._waiting) >= self._most:
            self.flush()
        with self._lock:
            self._waiting.append(job)
            if len(self._waiting) == 1:
                self._due.clear()
                self._batches.append(self._pool.submit(self._run))

    def flush(self) -> None:
        """Until all jobs have run."""
        self._due.set()
        while self._batches:
            self._batches.pop(0).result()

    def close(self) -> None:
        """Runs what still waits."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()

    def _run(self) -> None:
        self._due.wait(self._seconds)
        with self._lock:
            jobs, self._waiting = self._waiting, []
        if self._has_failed:
            return
        try:
            for job in jobs:
                job()
        except BaseException:
            self._has_failed = True
            raise
