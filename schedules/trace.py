"""What does a timeline look like in a trace viewer?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from schedules.drawing import boxes, stream
from schedules.timeline import Timeline


def chrome_trace(timeline: Timeline) -> str:
    """The JSON that Perfetto and chrome://tracing open: a track a rank, and its live activations.

    A rank's collectives, if it has any, have a track of their own below.

    A unit of time becomes a microsecond, the viewers' own.
    """
    events = [event for rank in range(timeline.plan.ranks) for event in _events(timeline, rank)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    track = {"pid": 0, "tid": rank}
    yield from _head(track, f"rank {rank}", 2 * rank)
    program, low = timeline.plan.programs[rank], int(timeline.offsets[rank])
    for box in boxes(timeline, rank):
        action = program[box.number - low]
        start, end = float(timeline.starts[box.number]), float(timeline.ends[box.number])
        yield {
            **track,
            "ph": "X",
            "name": box.text,
            "cat": box.op,
            "ts": start,
            "dur": end - start,
            "args": {"stage": action.stage, "microbatch": action.microbatch},
        }
    yield from _stream(timeline, rank)
    held = timeline.held(rank)
    for time, live in zip(held.times.tolist(), held.live.tolist(), strict=True):
        yield {
            "pid": 0,
            "ph": "C",
            "name": f"live activations, rank {rank}",
            "ts": time,
            "args": {"live": live},
        }


def _stream(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    track = {"pid": 0, "tid": timeline.plan.ranks + rank}
    spans = list(stream(timeline, rank))
    if spans:
        yield from _head(track, f"rank {rank}, collectives", 2 * rank + 1)
    for span in spans:
        yield {
            **track,
            "ph": "X",
            "name": span.text,
            "cat": span.op,
            "ts": span.start,
            "dur": span.end - span.start,
        }


def _head(track: dict[str, int], name: str, place: int) -> Iterator[dict[str, Any]]:
    yield {**track, "ph": "M", "name": "thread_name", "args": {"name": name}}
    yield {**track, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": place}}
