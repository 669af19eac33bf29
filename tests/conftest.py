"""What all tests share: one thread each, GPU tests that skip without one, and a pool of worker processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it; worker processes inherit it

import pytest
import torch
from workers import Workers

torch.set_num_threads(1)
# A shell starts background jobs with Ctrl-C ignored, which the processes of tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests of the engine use the plans and mutations that the tests of schedules are made of.
sys.path.append(str(Path(__file__).parent / "schedules"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four processes for tests that need real ranks: `workers.run(fn, ranks, *args)`."""
    pool = Workers(4)
    yield pool
    pool.kill()
