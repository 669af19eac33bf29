"""Do jobs that are put off run in order, in time, and not after one that failed?"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from pipe.background import Background


def unexpected(error: Exception) -> None:
    raise error


def test_jobs_run_in_order_and_in_another_thread() -> None:
    background = Background("jobs", seconds=60, most=100, failed=unexpected)
    found: list[tuple[int, str]] = []
    for number in range(50):
        background.put(lambda number=number: found.append((number, threading.current_thread().name)))
    assert not found, "a job waits for others to join it"
    background.flush()
    assert [number for number, _ in found] == list(range(50))
    assert {name for _, name in found} == {"jobs_0"}
    background.put(lambda: found.append((50, "")))
    background.close()
    assert found[-1][0] == 50


def test_a_job_runs_without_a_flush_once_its_time_is_up() -> None:
    background = Background("jobs", seconds=0.05, most=100, failed=unexpected)
    for _ in range(3):  # and so does one that comes after a batch has run
        ran = threading.Event()
        background.put(ran.set)
        assert ran.wait(30)
    background.close()


def test_jobs_that_come_while_a_batch_runs_are_not_lost() -> None:
    background = Background("jobs", seconds=0, most=10, failed=unexpected)
    found: list[int] = []
    for number in range(2000):
        background.put(lambda number=number: found.append(number))
    background.close()
    assert found == list(range(2000))


def test_no_more_than_so_many_wait() -> None:
    background = Background("jobs", seconds=60, most=4, failed=unexpected)
    found: list[int] = []
    for number in range(11):
        background.put(lambda number=number: found.append(number))
        assert number + 1 - len(found) <= 4
    background.close()
    assert found == list(range(11))


def test_after_a_failure_nothing_runs_and_its_error_is_told_once() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    told: list[Exception] = []
    has_told = threading.Event()
    background = Background("jobs", seconds=0.05, most=100, failed=lambda e: (told.append(e), has_told.set()))
    found: list[int] = []
    background.put(lambda: found.append(0))
    background.put(fail)
    background.put(lambda: found.append(1))
    assert has_told.wait(30), "nobody needs to call for it"
    background.put(fail)
    background.flush()
    background.close()
    assert found == [0] and background.has_failed
    assert [str(error) for error in told] == ["[Errno 28] No space left on device"]


def test_an_error_of_the_telling_is_the_next_calls() -> None:
    """Where warnings are errors."""

    def fail(*_: object) -> None:
        raise UserWarning("told")

    background = Background("jobs", seconds=0.05, most=100, failed=fail)
    background.put(fail)
    with pytest.raises(UserWarning):
        background.close()
    background.close()
    assert "jobs_0" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_neither_waits_for_the_thread_nor_runs_its_jobs() -> None:
    code = """
import os, sys
from pipe.background import Background
background = Background("jobs", 60, 4, print)
background.put(lambda: print("once", flush=True))
if child := os.fork():
    background.close()
    sys.exit(os.waitpid(child, 0)[1])
for _ in range(9):
    background.put(lambda: print("twice", flush=True))
background.close()
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60) == "once\n"


@pytest.mark.parametrize(
    "code",
    [
        "Background('jobs', 0.2, 100, print).put(lambda: print('it ran', flush=True))",
        """
background = Background('jobs', 0.2, 100, print)
atexit.register(background.close)
background.put(lambda: print('it ran', flush=True))
""",
        """
background = Background('jobs', 60, 100, print)
def train():
    time.sleep(1)  # the main thread has ended by then
    background.put(lambda: print('it ran', flush=True))
threading.Thread(target=train).start()
""",
        """
background = Background('jobs', 60, 100, print)
background.put(lambda: None)
background.flush()
atexit.register(lambda: (background.put(lambda: print('it ran', flush=True)), background.close()))
""",
    ],
    ids=["nobody flushes", "closed atexit", "thread outlives main", "put atexit"],
)
def test_all_runs_before_the_interpreter_ends(code: str) -> None:
    code = f"import atexit, threading, time\nfrom pipe.background import Background\n{code}"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60) == "it ran\n"
