"""What does a timeline look like as a picture?"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from schedules.drawing import boxes
from schedules.ops import OPS, B, F, I, W
from schedules.timeline import Timeline

_COLORS = {F: "#4c78a8", B: "#54a24b", I: "#72b7b2", W: "#eeca3b"}
_PAIR = "#b279a2"
_LANE, _MARGIN, _TOP = 24, 64, 24  # pixels
_WIDTH = 1600  # of the time axis
_LETTER = 6.5  # pixels: a box shows its text where it fits


def svg(timeline: Timeline) -> str:
    """One lane a rank, time to the right; a box tells action, start and end when pointed at."""
    height = _TOP + _LANE * timeline.plan.ranks + _TOP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_MARGIN + _WIDTH + 8}" height="{height}" '
            'font-family="monospace" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            *_legend(timeline),
            *(line for rank in range(timeline.plan.ranks) for line in _lane(timeline, rank)),
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
    for place, (color, text) in enumerate(entries):
        x = _MARGIN + 150 * place
        yield f'<rect x="{x}" y="6" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{x + 14}" y="15">{text}</text>'


def _lane(timeline: Timeline, rank: int) -> Iterator[str]:
    y, scale = _TOP + _LANE * rank, _WIDTH / (timeline.makespan or 1.0)
    yield f'<text x="4" y="{y + 15}">rank {rank}</text>'
    yield f'<rect x="{_MARGIN}" y="{y}" width="{_WIDTH}" height="{_LANE - 4}" fill="#eeeeee"/>'
    for box in boxes(timeline, rank):
        start, end = float(timeline.starts[box.number]), float(timeline.ends[box.number])
        x, width = _MARGIN + start * scale, (end - start) * scale
        color = _PAIR if "&" in box.text else _COLORS.get(box.op, "#9d9d9d")
        text = escape(box.text)
        yield (
            f'<g><title>{text}: {start:g} to {end:g}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
            f'height="{_LANE - 4}" fill="{color}" stroke="white" stroke-width="0.5"/>'
            + (f'<text x="{x + 2:.2f}" y="{y + 14}">{text}</text>' if len(text) * _LETTER < width else "")
            + "</g>"
        )
