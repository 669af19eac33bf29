"""When did each action run? Told by clocks while a step runs, and gathered to one writer afterwards."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pipe.program import Kind, Step
from pipe.timeline.trace import Member, Sends
from pipe.tracks import Track, event
from pipe.transport import Transport
from schedules import ACTIVATION, REDUCE_GRAD, UNSHARD

# Exchanges at the beginning, and before a traced step now and then: the narrowest of them counts.
_EXCHANGES_AT_FIRST, _EXCHANGES_LATER = 10, 3

_COMPUTES = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}


class Event(NamedTuple):
    """One bar of the timeline; times in nanoseconds of this process's clock."""

    start: int
    end: int
    kind: str
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    value: str = "-"
    live: int = 0
    memory: int = 0


@dataclass
class Record:
    """What one member tells of a step."""

    member: int
    rank: int
    replica: int
    host: str
    device: str
    begin: int
    end: int
    events: list[Event]
    sends: list[tuple[int, int, int, str, int]] = field(default_factory=list)

    def told(self, zero: int, offset: int) -> Member:
        """As the trace has it: in microseconds since `zero`, on a clock that is `offset` behind ours."""

        def times(values: Sequence[int]) -> Any:
            return np.round((np.array(values, np.float64) - offset - zero) / 1e3, 1)

        columns = list(zip(*self.events, strict=True)) if self.events else [()] * len(Event._fields)
        start, end, kind, stage, microbatch, peer, value, live, memory = columns
        sent = list(zip(*self.sends, strict=True)) if self.sends else [()] * 5
        sends = Sends(
            np.array(sent[0], np.int64),
            np.array(sent[1], np.int64),
            np.array(sent[2], np.int64),
            np.array(sent[3], "<U1"),
            times(sent[4]),
        )
        begin, finish = times([self.begin, self.end]).tolist()
        return Member(
            member=self.member,
            rank=self.rank,
            replica=self.replica,
            host=self.host,
            device=self.device,
            begin=begin,
            finish=finish,
            kind=np.array(kind, "<U1"),
            stage=np.array(stage, np.int64),
            microbatch=np.array(microbatch, np.int64),
            peer=np.array(peer, np.int64),
            value=np.array(value, "<U1"),
            start=times(start),
            end=times(end),
            live=np.array(live, np.int64),
            memory=np.array(memory, np.int64) if any(memory) else None,
            sends=sends,
        )


def events_of(
    program: Sequence[Step], track: Track, placement: Sequence[int], clock: "StampClock"
) -> list[Event]:
    """A track as bars, in the order of their starts."""
    found = list(_events(program, track, placement, clock))
    found += [Event(clock.ns(start), clock.ns(end), kind) for kind, start, end in track.marks]
    return sorted(found)


def _events(
    program: Sequence[Step], track: Track, placement: Sequence[int], clock: "StampClock"
) -> Iterator[Event]:
    for position, step in enumerate(program):
        stage, microbatch = step.stage.index, step.microbatch
        live, memory = track.lives[position], track.memory[position]
        # A wait ends before its action begins: then things are as the action before has left them.
        before = max(position - 1, 0)
        held = track.lives[before] if position else 0, track.memory[before]
        begin, end = clock.ns(track.begins[position]), clock.ns(track.ends[position])
        if step.kind in _COMPUTES:
            arrived = track.arrivals[position]
            if arrived is not None:
                yield Event(begin, clock.ns(arrived), "u", stage, microbatch, -1, "-", *held)
                begin = clock.ns(arrived)
            ready = track.readies[position]
            source = step.takes.source
            if ready is not None:
                if source >= 0 and placement[source] != placement[stage]:
                    ready_at = clock.ns(ready)
                    peer = placement[source]
                    yield Event(begin, ready_at, "r", stage, microbatch, peer, _letter(step), *held)
                begin = clock.ns(ready)
            yield Event(begin, end, _COMPUTES[step.kind], stage, microbatch, live=live, memory=memory)
        elif step.kind == Kind.SEND:
            peer = placement[step.takes.destination]
            yield Event(begin, end, "s", stage, microbatch, peer, _letter(step), live, memory)
        elif step.action.op in (UNSHARD, REDUCE_GRAD):
            kind = "u" if step.action.op == UNSHARD else "g"
            yield Event(begin, end, kind, stage, microbatch, live=live, memory=memory)


def sends_of(
    program: Sequence[Step], track: Track, clock: "StampClock"
) -> list[tuple[int, int, int, str, int]]:
    """Microbatch, source stage, destination stage, value and time of each SEND."""
    return [
        (
            step.microbatch,
            step.takes.source,
            step.takes.destination,
            _letter(step),
            clock.ns(track.ends[position]),
        )
        for position, step in enumerate(program)
        if step.kind == Kind.SEND
    ]


def _letter(step: Step) -> str:
    """What a step takes, as a trace has it."""
    return "a" if step.takes.value == ACTIVATION else "g"


class StampClock:
    """Turns stamps of one device into nanoseconds of this process's clock, after the step."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self._zero = 0
        if not isinstance(base, int):
            last = event()
            last.synchronize()
            self._zero = time.perf_counter_ns() - int(base.elapsed_time(last) * 1e6)

    def ns(self, stamp: Any) -> int:
        if isinstance(stamp, int):
            return stamp
        return self._zero + int(self._base.elapsed_time(stamp) * 1e6)


class Offsets:
    """How far the members' clocks are ahead of member 0's, and by how much that may be wrong.

    Nobody leaves a collective before all have entered it. So if one entered at e by its own clock, and
    another left at l by its own, then the first clock is at least e - l ahead of the other, and each exchange
    bounds it on both sides. Processes of one machine have one clock.
    """

    def __init__(self) -> None:
        self.ahead: list[int] = []
        self.error: list[int] = []

    def measure(self, transport: Transport, members: int) -> None:
        """A collective, of some exchanges."""
        if transport.size == 1:
            self.ahead, self.error = [0] * members, [0] * members
            return
        times = []
        for _ in range(_EXCHANGES_LATER if self.ahead else _EXCHANGES_AT_FIRST):
            entered = time.perf_counter_ns()
            transport.all_gather([0])
            times.append((entered, time.perf_counter_ns()))
        said = transport.all_gather([(_machine(), times)])
        home, ours = said[0]
        self.ahead, self.error = [], []
        for machine, theirs in said:
            if machine == home:
                self.ahead.append(0)
                self.error.append(0)
                continue
            pairs = list(zip(ours, theirs, strict=True))
            low = max(their_entry - our_exit for (_, our_exit), (their_entry, _) in pairs)
            high = min(their_exit - our_entry for (our_entry, _), (_, their_exit) in pairs)
            self.ahead.append((low + high) // 2)
            self.error.append(abs(high - low) // 2)


def _machine() -> str:
    """What all processes with one monotonic clock have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
