"""What does a trace look like in a spreadsheet?"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from pipe.timeline.trace import KINDS, VALUES, Member, Prediction, Trace

COLUMNS = (
    "member",
    "rank",
    "replica",
    "kind",
    "meaning",
    "stage",
    "microbatch",
    "peer",
    "value",
    "start_us",
    "end_us",
    "duration_us",
    "predicted_start_us",
    "predicted_end_us",
    "live",
    "memory_bytes",
)


def csv_table(trace: Trace, predicted: Prediction | None = None) -> str:
    """One row an event, member after member; what an event doesn't have is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for member in trace.members:
        writer.writerows(_rows(member, predicted))
    return text.getvalue()


def _rows(member: Member, predicted: Prediction | None) -> Iterator[tuple[Any, ...]]:
    times = iter(_predicted(member, predicted))
    for row, kind in enumerate(member.kind.tolist()):
        start, end = float(member.start[row]), float(member.end[row])
        first, last = next(times, ("", "")) if member.is_compute[row] else ("", "")
        yield (
            member.member,
            member.rank,
            member.replica,
            kind,
            KINDS[kind],
            *(_index(int(column[row])) for column in (member.stage, member.microbatch, member.peer)),
            VALUES[str(member.value[row])],
            *(f"{time:.1f}" for time in (start, end, end - start)),
            first,
            last,
            int(member.live[row]),
            "" if member.memory is None else int(member.memory[row]),
        )


def _predicted(member: Member, predicted: Prediction | None) -> Iterator[tuple[str, str]]:
    """Of each computation, in turn."""
    if predicted is not None and member.member < len(predicted.starts):
        starts, ends = predicted.starts[member.member], predicted.ends[member.member]
        yield from ((f"{start:.1f}", f"{end:.1f}") for start, end in zip(starts, ends, strict=False))


def _index(number: int) -> str:
    return "" if number < 0 else str(number)
