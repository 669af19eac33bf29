"""Where does the time go in which a member doesn't compute?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipe.timeline.trace import Ints, Member, Trace, ticks
from pipe.timeline.transfers import Receives, receives

CAUSES = {
    "warm_up": "before the first computation",
    "drain": "after the last one, until the schedule's end",
    "activation": "until an activation was made, on another rank",
    "gradient": "until a gradient was made, on another rank",
    "communication": "until what was made arrived; SENDs that block; UNSHARDs; reductions by themselves",
    "optimizer": "after the schedule's end",
    "overhead": "agreements, and where no event is: the engine's own time",
}
"""The causes of idle time, and what each means."""

_WARM_UP, _DRAIN, _ACTIVATION, _GRADIENT, _COMMUNICATION, _OPTIMIZER, _OVERHEAD = range(len(CAUSES))
_BUSY = len(CAUSES)
_FIRST_WAIT = _BUSY + 1  # then a label a stage: activations of stage 0, 1, ..., gradients of stage 0, 1, ...
_VALUES = "ag"
# Later kinds lie on top of earlier ones; before the first computation, what keeps its input is warm-up.
_PAINTED = {"g": _COMMUNICATION, "c": _OVERHEAD, "u": _COMMUNICATION, "s": _COMMUNICATION}
_BEFORE, _BETWEEN, _BEHIND = "cu", "gcus", "gus"


class Idle(NamedTuple):
    """Times in ticks (whole numbers, see `TICKS`), so that sums are exact.

    |c| warm-up |F0|F1| gradient of 1 | comm. |B0|  |B1|    drain    | optimizer |
    0 begin                                       overhead          end       duration

    The schedule begins when the first member's agreement is over, and ends with the last computation or
    reduction of any: that is what the simulator simulates, and calls the makespan. What a member does after
    its own last computation is drain until then, whatever it is called: an optimizer step that begins with
    waiting for the others' gradients (a norm over all of them, say) is still the pipeline's fault.
    """

    begin: int
    end: int
    duration: int
    busy: Ints
    """By member."""
    causes: Ints
    """[member, cause], in the order of `CAUSES`: a row sums to the duration less `busy`."""
    waits: Ints
    """[member, value, stage]: the causes activation (0) and gradient (1), by the stage waited for; the last
    stage stands for those that the trace doesn't tell."""


def idle(trace: Trace) -> Idle:
    """The whole step of every member, each tick with one cause, or busy."""
    begin, end = schedule_of(trace)
    computed = max((_computing(member, end)[1] for member in trace.members), default=end)
    duration = max([int(ticks(trace.header.duration)), end, *map(_last, trace.members)])
    sources = trace.header.num_stages + 1
    labels = _FIRST_WAIT + len(_VALUES) * sources
    rows = []
    for member, received in zip(trace.members, receives(trace), strict=True):
        canvas = _Canvas(_times(member, received, (computed, end, duration)))
        _paint(canvas, member, received, (computed, end), sources)
        rows.append(canvas.totals(labels))
    table = np.array(rows, np.int64).reshape(-1, labels)
    waits = table[:, _FIRST_WAIT:].reshape(-1, len(_VALUES), sources)
    causes = table[:, : len(CAUSES)]
    causes[:, [_ACTIVATION, _GRADIENT]] = waits.sum(axis=2)
    return Idle(begin, end, duration, table[:, _BUSY], causes, waits)


def schedule_of(trace: Trace) -> tuple[int, int]:
    """In ticks: when the first member's agreement is over; when the last computation or reduction is."""
    ends = [ticks(member.end[member.is_compute | (member.kind == "g")]) for member in trace.members]
    end = int(np.concatenate(ends).max(initial=0))
    return min((_agreed(member, end) for member in trace.members), default=0), end


def busy_of(member: Member) -> int:
    """In ticks: how long it computes, where nothing is wanted of `idle` but that."""
    starts, ends = (np.maximum(ticks(times[member.is_compute]), 0) for times in (member.start, member.end))
    by_start = np.argsort(starts, kind="stable")
    starts, ends = starts[by_start], ends[by_start]
    covered = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1]  # no time counts twice
    return int(np.maximum(ends - np.maximum(starts, covered), 0).sum())


def _paint(canvas: _Canvas, member: Member, received: Receives, until: tuple[int, int], sources: int) -> None:
    """Lays the causes on each other: what is known best comes last."""
    computed, end = until
    starts, ends = ticks(member.start), ticks(member.end)
    first, last = _computing(member, end)
    canvas.fill(0, first, _WARM_UP)
    canvas.fill(first, last, _OVERHEAD)
    canvas.fill(last, end, _DRAIN)
    canvas.fill(end, None, _OPTIMIZER)
    for kind, label in _PAINTED.items():
        of_kind = member.kind == kind
        for phase, (low, high) in {
            _BEFORE: (0, first),
            _BETWEEN: (first, last),
            _BEHIND: (last, None),
        }.items():
            if kind in phase:
                canvas.fill_all(starts[of_kind], ends[of_kind], label, low, high)
    agrees = member.kind == "c"  # on the loss: as long as others compute, that waits for them
    canvas.fill_all(starts[agrees], ends[agrees], _OVERHEAD, computed)
    _paint_waits(canvas, member, received, (first, last), sources)
    canvas.fill_all(starts[member.is_compute], ends[member.is_compute], _BUSY)


def _paint_waits(
    canvas: _Canvas, member: Member, received: Receives, between: tuple[int, int], sources: int
) -> None:
    """Each receive's wait: until the value was made, its stage's; from then on, communication."""
    starts, ends, cuts = _waits(member, received)
    gradient = member.value[received.event] == "g"
    labels = _FIRST_WAIT + gradient * sources + received.source % sources  # -1 becomes the last
    canvas.fill_all(starts, cuts, labels, *between)
    canvas.fill_all(cuts, ends, _COMMUNICATION, *between)


def _waits(member: Member, received: Receives) -> tuple[Ints, Ints, Ints]:
    """Start and end of each receive's wait, and when its value was made meanwhile (the end, if unknown)."""
    starts, ends = ticks(member.start)[received.event], ticks(member.end)[received.event]
    made = np.where(np.isnan(received.made), member.end[received.event], received.made)
    return starts, ends, np.clip(ticks(made), starts, ends)


def _times(member: Member, received: Receives, borders: tuple[int, int, int]) -> Ints:
    """All at which a cause may change; the last border is the step's end."""
    parts = (ticks(member.start), ticks(member.end), _waits(member, received)[2], [0, *borders])
    times: Ints = np.unique(np.clip(np.concatenate(parts), 0, borders[-1]))
    return times


class _Canvas:
    """The step of one member, cut at `times`: `labels[i]` is what it does until `times[i + 1]`."""

    def __init__(self, times: Ints) -> None:
        self.times = times
        self.labels = np.full(len(times) - 1, _OVERHEAD)

    def fill(self, start: int, stop: int | None, label: int) -> None:
        low, high = np.searchsorted(self.times, [start, self.times[-1] if stop is None else stop])
        self.labels[low:high] = label

    def fill_all(
        self, starts: Ints, ends: Ints, labels: int | Ints, low: int = 0, high: int | None = None
    ) -> None:
        """Several spans, as far as they lie within `low` to `high`."""
        top = int(self.times[-1]) if high is None else high
        places = np.searchsorted(self.times, np.clip([starts, ends], low, max(low, top)))
        each = np.broadcast_to(labels, len(starts))
        for begin, end, label in zip(*places.tolist(), each.tolist(), strict=True):
            self.labels[begin:end] = label

    def totals(self, labels: int) -> Ints:
        """By label, how long."""
        return np.bincount(self.labels, np.diff(self.times), labels).astype(np.int64)


def _agreed(member: Member, end: int) -> int:
    first, _ = _computing(member, end)
    ends = ticks(member.end[member.kind == "c"])
    return int(ends[ends <= first].max(initial=min(int(ticks(member.begin)), first)))


def _computing(member: Member, end: int) -> tuple[int, int]:
    """From its first computation to its last; of a member without any, the schedule's end."""
    if not member.is_compute.any():
        return end, end
    return int(ticks(member.start[member.is_compute].min())), int(ticks(member.end[member.is_compute].max()))


def _last(member: Member) -> int:
    return int(ticks(member.end.max(initial=0.0)))
