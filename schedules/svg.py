"""What does a timeline look like as a picture?"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from schedules.drawing import Span, boxes, stream
from schedules.ops import OPS, REDUCE_GRAD, UNSHARD, B, F, I, W
from schedules.timeline import Timeline

_COLORS = {F: "#4c78a8", B: "#54a24b", I: "#72b7b2", W: "#eeca3b"}
_PAIR = "#b279a2"
_COLLECTIVES = {UNSHARD: "#ff9da6", REDUCE_GRAD: "#e45756"}
_LANE, _STREAM, _MARGIN, _TOP = 24, 14, 64, 24  # pixels
_WIDTH = 1600  # of the time axis
_LETTER = 6.5  # pixels: a box shows its text where it fits


def svg(timeline: Timeline) -> str:
    """One lane a rank, time to the right; a box tells action, start and end when pointed at.

    Below each lane is a narrow one of the rank's collectives, if they take time.
    """
    ranks = timeline.plan.ranks
    streams = [_stream(timeline, rank) for rank in range(ranks)]
    lane = _LANE + (_STREAM if any(streams) else 0)
    tops = [_TOP + lane * rank for rank in range(ranks)]
    height = _TOP + lane * ranks + _TOP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_MARGIN + _WIDTH + 8}" height="{height}" '
            'font-family="monospace" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            *_legend(timeline),
            *(line for rank in range(ranks) for line in _lane(timeline, rank, tops[rank])),
            *(
                line
                for top, spans in zip(tops, streams, strict=True)
                for line in _below(timeline, spans, top)
            ),
            f'<text x="{_MARGIN}" y="{height - 8}">0</text>',
            f'<text x="{_MARGIN + _WIDTH}" y="{height - 8}" text-anchor="end">{timeline.makespan:g}</text>',
            "</svg>",
            "",
        ]
    )


def _legend(timeline: Timeline) -> Iterator[str]:
    entries = [(_COLORS[op], f"{op} {OPS[op].meaning}") for op in _COLORS]
    if any(timeline.plan.pairs):
        entries.append((_PAIR, "overlapped pair"))
    codes = set(timeline.collectives.actions.ops.tolist())
    entries += [(_COLLECTIVES[op], OPS[op].meaning) for op in _COLLECTIVES if OPS[op].code in codes]
    for place, (color, text) in enumerate(entries):
        x = _MARGIN + 150 * place
        yield f'<rect x="{x}" y="6" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{x + 14}" y="15">{text}</text>'


def _lane(timeline: Timeline, rank: int, y: int) -> Iterator[str]:
    yield f'<text x="4" y="{y + 15}">rank {rank}</text>'
    yield f'<rect x="{_MARGIN}" y="{y}" width="{_WIDTH}" height="{_LANE - 4}" fill="#eeeeee"/>'
    for box in boxes(timeline, rank):
        start, end = float(timeline.starts[box.number]), float(timeline.ends[box.number])
        color = _PAIR if "&" in box.text else _COLORS.get(box.op, "#9d9d9d")
        yield _box(timeline, Span(box.op, box.text, start, end), color, y, _LANE - 4)


def _below(timeline: Timeline, spans: list[Span], top: int) -> Iterator[str]:
    for span in spans:
        yield _box(timeline, span, _COLLECTIVES[span.op], top + _LANE - 2, _STREAM - 2)


def _stream(timeline: Timeline, rank: int) -> list[Span]:
    return [span for span in stream(timeline, rank) if span.end > span.start]


def _box(timeline: Timeline, span: Span, color: str, y: int, height: int) -> str:
    scale = _WIDTH / (timeline.makespan or 1.0)
    x, width = _MARGIN + span.start * scale, (span.end - span.start) * scale
    text = escape(span.text)
    shown = len(text) * _LETTER < width
    return (
        f"<g><title>{text}: {span.start:g} to {span.end:g}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{height}" fill="{color}" stroke="white" stroke-width="0.5"/>'
        + (f'<text x="{x + 2:.2f}" y="{y + height // 2 + 4}">{text}</text>' if shown else "")
        + "</g>"
    )
