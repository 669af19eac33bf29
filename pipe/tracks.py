"""Where the times of one rank's actions are told, in a step that is traced."""

import time
from collections.abc import Callable
from typing import Any

import torch


class Track:
    """A rank's way through its program, timed: a stamp where an action begins, when what it waits for has
    come, and where it ends.

    Stamps are nanoseconds of the monotonic clock, or CUDA events, whose times are asked for after the step.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.device = device
        self.stamp: Callable[[], Any] = time.perf_counter_ns if device.type == "cpu" else event
        self.begins: list[Any] = [None] * length
        self.arrivals: list[Any] = [None] * length  # of the stage's weights
        self.readies: list[Any] = [None] * length  # of the action's input
        self.ends: list[Any] = [None] * length
        self.lives = [0] * length
        self.memory = [0] * length
        self.marks: list[tuple[str, Any, Any]] = []  # what all ranks of a process do: kind, from, to
        self.base: Any = None  # the first stamp

    def end(self, position: int, live: int) -> None:
        self.ends[position] = self.stamp()
        self.lives[position] = live
        if self.device.type == "cuda":
            self.memory[position] = torch.cuda.memory_allocated(self.device)


def event() -> torch.cuda.Event:
    """A stamp of the device's own time, here in its stream."""
    made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    made.record()
    return made
