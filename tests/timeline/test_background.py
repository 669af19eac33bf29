"""Do jobs that are put off run in order, in time, and not after one that failed?"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from pipe.background import Background


def test_jobs_run_in_order_and_in_another_thread() -> None:
    background = Background("jobs", seconds=60, most=100)
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
    background = Background("jobs", seconds=0.05, most=100)
    for _ in range(3):  # and so does one that comes after a batch has run
        ran = threading.Event()
        background.put(ran.set)
        assert ran.wait(30)
    background.close()


def test_jobs_that_come_while_a_batch_runs_are_not_lost() -> None:
    background = Background("jobs", seconds=0, most=10)
    found: list[int] = []
    for number in range(2000):
        background.put(lambda number=number: found.append(number))
    background.close()
    assert found == list(range(2000))


def test_no_more_than_so_many_wait() -> None:
    background = Background("jobs", seconds=60, most=4)
    found: list[int] = []
    for number in range(11):
        background.put(lambda number=number: found.append(number))
        assert number + 1 - len(found) <= 4
    background.close()
    assert found == list(range(11))


@pytest.mark.parametrize("call", ["put", "flush", "close"])
def test_after_a_failure_nothing_runs_and_the_next_call_tells(call: str) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    background = Background("jobs", seconds=0.05, most=100)
    found: list[int] = []
    background.put(lambda: found.append(0))
    background.put(fail)
    background.put(lambda: found.append(1))
    if call == "put":
        time.sleep(1)
    with pytest.raises(OSError, match="No space left"):
        background.put(lambda: found.append(2)) if call == "put" else getattr(background, call)()
    if call != "close":
        background.put(lambda: found.append(3))
        background.close()
    assert found == [0]


def test_what_nobody_flushed_runs_before_the_interpreter_ends() -> None:
    code = """
from pipe.background import Background
Background("jobs", 0.2, 100).put(lambda: print("it ran", flush=True))
"""
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60) == "it ran\n"
