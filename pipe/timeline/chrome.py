"""What does a trace look like in a trace viewer?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipe.timeline.trace import COMPUTE, KINDS, VALUES, Member, Trace
from pipe.timeline.transfers import Receives, receives

_COMPUTATION, _COMMUNICATION, _REDUCTIONS = (
    0,
    1,
    2,
)  # threads; reductions may overlap the others, and each other
_INSIDE = 0.05  # us: an arrow is bound to the slice that is open then, so it begins a little before its end
_MAKERS = {"a": "F", "g": "BI"}
_Event = dict[str, Any]


def chrome_trace(trace: Trace) -> str:
    """The JSON that Perfetto and chrome://tracing open: a process a member, and arrows between them.

    An arrow goes from the computation that made a value to the receive that waited for it, or, if none had
    to, to the computation that took it. Live activations, and memory where it is known, are counters.
    """
    header = trace.header
    events = [event for member in trace.members for event in _of_member(trace, member)]
    events += _arrows(trace)
    other = {"step": header.step, "options": header.options, "schedule": header.schedule}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":")
    )


def label(kind: str, stage: int, microbatch: int) -> str:
    """A short name, as 2F0; what has no stage is called by what it does."""
    if stage < 0:
        return KINDS[kind]
    return f"{stage}{_NAMES.get(kind, kind)}{microbatch if microbatch >= 0 else ''}"


def _of_member(trace: Trace, member: Member) -> Iterator[_Event]:
    pid, threads = member.member, _threads(member)
    yield _named(pid, "process_name", f"{trace.name_of(member)} ({member.host}, {member.device})")
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for thread in sorted(set(threads)):
        yield _named(pid, "thread_name", _name_of(thread), tid=thread)
        yield {
            "ph": "M",
            "pid": pid,
            "tid": thread,
            "name": "thread_sort_index",
            "args": {"sort_index": thread},
        }
    columns = (member.kind, member.stage, member.microbatch, member.start, member.end, member.live)
    rows = zip(threads, *(column.tolist() for column in columns), strict=True)
    for row, (thread, kind, stage, microbatch, start, end, live) in enumerate(rows):
        yield {
            "ph": "X",
            "pid": pid,
            "tid": thread,
            "name": label(kind, stage, microbatch),
            "cat": KINDS[kind],
            "ts": start,
            "dur": round(end - start, 1),
            "args": _arguments(member, row, stage, microbatch),
        }
        if kind in COMPUTE:
            yield _counter(pid, "live activations", end, live)
            if member.memory is not None:
                yield _counter(pid, "memory", end, int(member.memory[row]))


def _arguments(member: Member, row: int, stage: int, microbatch: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {} if stage < 0 else {"stage": stage, "microbatch": microbatch}
    if member.peer[row] >= 0:
        arguments |= {"peer": int(member.peer[row]), "value": VALUES[str(member.value[row])]}
    return arguments


def _threads(member: Member) -> list[int]:
    """By event. Reductions get as many threads as overlap."""
    threads, free = [], [-np.inf]  # free[i]: when the i-th thread of reductions is
    for kind, start, end in zip(
        member.kind.tolist(), member.start.tolist(), member.end.tolist(), strict=True
    ):
        if kind != "g":
            threads.append(_COMPUTATION if kind in COMPUTE + "o" else _COMMUNICATION)
            continue
        lane = next((lane for lane, time in enumerate(free) if time <= start), len(free))
        free[lane:] = [end, *free[lane + 1 :]]
        threads.append(_REDUCTIONS + lane)
    return threads


def _name_of(thread: int) -> str:
    return ("computation", "communication")[thread] if thread < _REDUCTIONS else "reductions"


def _arrows(trace: Trace) -> Iterator[_Event]:
    rows = {
        (member.member, kind, stage, microbatch): row
        for member in trace.members
        for row, (kind, stage, microbatch) in enumerate(
            zip(member.kind.tolist(), member.stage.tolist(), member.microbatch.tolist(), strict=True)
        )
    }
    number = 0
    for member, received in zip(trace.members, receives(trace), strict=True):
        for at in range(len(received.event)):
            made, taken = _maker(trace, rows, received, member, at), _taker(rows, received, member, at)
            if made is not None and taken is not None:
                number += 1
                yield {**_flow("s", number), **made}
                yield {**_flow("f", number), "bp": "e", **taken}


def _maker(
    trace: Trace, rows: dict[tuple[int, str, int, int], int], received: Receives, member: Member, at: int
) -> _Event | None:
    """Where an arrow begins: at the end of the computation that made the value."""
    event, sender, source = received.event[at], int(received.sender[at]), int(received.source[at])
    for kind in _MAKERS.get(str(member.value[event]), ""):
        row = rows.get((sender, kind, source, int(member.microbatch[event])))
        if row is not None:
            start, end = trace.members[sender].start[row], trace.members[sender].end[row]
            return {"pid": sender, "tid": _COMPUTATION, "ts": max(float(start), float(end) - _INSIDE)}
    return None


def _taker(
    rows: dict[tuple[int, str, int, int], int], received: Receives, member: Member, at: int
) -> _Event | None:
    """Where it ends."""
    event = int(received.event[at])
    if member.end[event] - member.start[event] > 2 * _INSIDE:
        return {
            "pid": member.member,
            "tid": _COMMUNICATION,
            "ts": float(member.end[event]) - _INSIDE,
        }
    for kind in _MAKERS.get(str(member.value[event]), ""):
        row = rows.get((member.member, kind, int(member.stage[event]), int(member.microbatch[event])))
        if row is not None:
            inside = min(_INSIDE, float(member.end[row] - member.start[row]) / 2)
            return {"pid": member.member, "tid": _COMPUTATION, "ts": float(member.start[row]) + inside}
    return None


def _flow(phase: str, number: int) -> _Event:
    return {"ph": phase, "id": number, "name": "transfer", "cat": "transfer"}


def _counter(pid: int, name: str, time: float, value: int) -> _Event:
    return {"ph": "C", "pid": pid, "name": name, "ts": time, "args": {name: value}}


def _named(pid: int, what: str, name: str, tid: int | None = None) -> _Event:
    event: _Event = {"ph": "M", "pid": pid, "name": what, "args": {"name": name}}
    return event if tid is None else {**event, "tid": tid}


_NAMES: dict[str, str] = {"s": "SEND", "r": "RECV", "g": "REDUCE_GRAD", "u": "UNSHARD"}
