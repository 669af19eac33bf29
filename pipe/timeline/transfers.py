"""Which SEND does each receive of a trace belong to, and when was its value made?"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np

from pipe.timeline.trace import Floats, Ints, Member, Trace

_Key = tuple[int, str, int, int, int]  # replica, value, receiving stage, microbatch, sending rank
_MAKERS = {"F": "a", "B": "g", "I": "g"}


class Receives(NamedTuple):
    """A member's receives, in turn: columns, one row a receive; a time that is not known is NaN.

        source   [== F0 ==]   s                     made: when the value was there, on the source's member
                          |   left: the SEND was posted
                        made   \\
        receiver   [.. r .......\\..]                 row `event` of the receiver's events
    """

    event: Ints
    source: Ints
    """The stage that made the value; -1 where the trace doesn't tell."""
    sender: Ints
    """That stage's member."""
    made: Floats
    left: Floats


def receives(trace: Trace) -> tuple[Receives, ...]:
    """Those of each member. Several that could be the same are matched first to first."""
    sent, made = _sent(trace), _made(trace)
    return tuple(_of_member(trace, member, sent, made) for member in trace.members)


def _of_member(
    trace: Trace,
    member: Member,
    sent: dict[_Key, deque[tuple[int, float]]],
    made: dict[tuple[int, str, int, int], float],
) -> Receives:
    events = np.flatnonzero(member.kind == "r")
    rows = []
    columns = (column[events].tolist() for column in _identity(member))
    for value, stage, microbatch, peer in zip(*columns, strict=True):
        queue = sent.get((member.replica, value, stage, microbatch, peer))
        source, left = queue.popleft() if queue else (_guess(trace, value, stage, peer), np.nan)
        when = made.get((member.replica, value, source, microbatch), np.nan)
        sender = peer * trace.header.replicas + member.replica if peer >= 0 else -1
        rows.append((source, sender, when, left))
    table = np.array(rows, np.float64).reshape(-1, 4).T
    return Receives(events, table[0].astype(np.int64), table[1].astype(np.int64), table[2], table[3])


def _identity(member: Member) -> tuple[np.typing.NDArray[np.generic], ...]:
    return member.value, member.stage, member.microbatch, member.peer


def _sent(trace: Trace) -> dict[_Key, deque[tuple[int, float]]]:
    """By what a receive knows of it: (source stage, when it left), first to last."""
    sent: dict[_Key, deque[tuple[int, float]]] = defaultdict(deque)
    for member in trace.members:
        sends = member.sends
        columns = (sends.value, sends.destination, sends.microbatch, sends.source, sends.left)
        for value, to, microbatch, source, left in zip(*(c.tolist() for c in columns), strict=True):
            sent[member.replica, value, to, microbatch, member.rank].append((source, left))
    return sent


def _made(trace: Trace) -> dict[tuple[int, str, int, int], float]:
    """By replica, value, stage and microbatch: when the value was there."""
    made = {}
    for member in trace.members:
        columns = (member.kind, member.stage, member.microbatch, member.end)
        for kind, stage, microbatch, end in zip(*(c.tolist() for c in columns), strict=True):
            if kind in _MAKERS:
                made[member.replica, _MAKERS[kind], stage, microbatch] = end
    return made


def _guess(trace: Trace, value: str, stage: int, peer: int) -> int:
    """The source where no SEND is recorded: the nearest stage on the peer's rank that can be one, or -1."""
    others = trace.stages_of(peer)
    if value == "a":
        return max((other for other in others if other < stage), default=-1)
    return min((other for other in others if other > stage), default=-1)
