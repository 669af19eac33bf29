"""What does a trace look like as a picture?"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from pipe.timeline.chrome import label
from pipe.timeline.summary import scalars_of
from pipe.timeline.trace import COMPUTE, KINDS, Member, Trace

# Okabe and Ito's colours, which the colour-blind tell apart, each with the colour of the text on it.
COLORS = {
    "F": ("#0072b2", "white"),
    "B": ("#e69f00", "black"),
    "I": ("#f0e442", "black"),
    "W": ("#009e73", "white"),
    "o": ("#7f7f7f", "white"),
    "r": ("#c9c9c9", "black"),
    "s": ("#d55e00", "white"),
    "u": ("#56b4e9", "black"),
    "g": ("#cc79a7", "black"),
    "c": ("#404040", "white"),
}
_LANE, _THIN, _GAP = 24, 7, 8  # pixels: computation, communication below it, then a gap
_MARGIN, _TOP, _WIDTH = 136, 64, 1600
_LETTER = 6.6  # pixels: a bar shows its text where it fits
_ENTRY = 7 * 2 + 12  # of the legend, beside its text
_STEPS = (1, 2, 5)


def svg(trace: Trace) -> str:
    """A lane a member, time to the right; below it a thin one of communication. Bars tell what they are.

    A rank's later stages are paler, and their microbatches carry primes, as F3'.
    """
    scale = _WIDTH / (trace.header.duration or 1.0)
    height = _TOP + len(trace.members) * _pitch() + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_MARGIN + _WIDTH + 16}" height="{height}" '
            'font-family="monospace" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="8" y="18" font-size="13">{escape(_title(trace))}</text>',
            *_legend(trace),
            *_axis(trace, scale, height),
            *(line for member in trace.members for line in _lane(trace, member, scale)),
            "</svg>",
            "",
        ]
    )


def milliseconds(time: float) -> str:
    """Microseconds, as people read them."""
    return f"{time / 1e6:.3f} s" if time >= 1e7 else f"{time / 1e3:.3f} ms"


def _pitch() -> int:
    return _LANE + _THIN + _GAP


def _title(trace: Trace) -> str:
    header = trace.header
    bubble = scalars_of(trace)["bubble"]
    return (
        f"step {header.step}: {milliseconds(header.duration)}, bubble {bubble:.1%}; {header.schedule}, "
        f"{header.ranks} ranks, {header.microbatches} microbatches"
    )


def _legend(trace: Trace) -> Iterator[str]:
    kinds = {kind for member in trace.members for kind in set(member.kind.tolist())}
    x = 8.0
    for kind, (color, _) in COLORS.items():
        if kind in kinds:
            yield f'<rect x="{x:.0f}" y="30" width="11" height="11" fill="{color}"/>'
            yield f'<text x="{x + 15:.0f}" y="40">{KINDS[kind]}</text>'
            x += _ENTRY + _LETTER * len(KINDS[kind])


def _axis(trace: Trace, scale: float, height: int) -> Iterator[str]:
    step = _tick(trace.header.duration)
    for number in range(int(trace.header.duration / step) + 1):
        x = _MARGIN + number * step * scale
        yield f'<path d="M{x:.1f} {_TOP - 6}V{height - 22}" stroke="#dddddd"/>'
        yield f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{number * step / 1e3:g}</text>'
    yield f'<text x="8" y="{height - 8}">ms</text>'


def _tick(duration: float) -> float:
    """The first round number of which ten or fewer fit."""
    step = 1e-1
    while True:
        for factor in _STEPS:
            if duration <= 10 * step * factor:
                return step * factor
        step *= 10


def _lane(trace: Trace, member: Member, scale: float) -> Iterator[str]:
    y = _TOP + member.member * _pitch()
    yield f'<text x="8" y="{y + 16}">{trace.name_of(member)}</text>'
    yield f'<rect x="{_MARGIN}" y="{y}" width="{_WIDTH}" height="{_LANE}" fill="#f2f2f2"/>'
    stages = trace.stages_of(member.rank)
    columns = (member.kind, member.stage, member.microbatch, member.start, member.end)
    for kind, stage, microbatch, start, end in zip(*(c.tolist() for c in columns), strict=True):
        if start == end:
            continue
        place = stages.index(stage) if stage in stages else 0
        title = f"{label(kind, stage, microbatch)} ({KINDS[kind]}): {start:.1f} to {end:.1f} us"
        x, width = _MARGIN + start * scale, max((end - start) * scale, 0.3)
        if kind in COMPUTE or kind == "o":
            text = f"{kind}{microbatch}{chr(39) * place}" if kind in COMPUTE else ""
            yield _bar(kind, x, y, width, _LANE, title, text, 1 - 0.55 * place / max(len(stages) - 1, 1))
        else:
            yield _bar(kind, x, y + _LANE, width, _THIN, title, "", 1.0)


def _bar(
    kind: str, x: float, y: float, width: float, height: int, title: str, text: str, opacity: float
) -> str:
    color, ink = COLORS[kind]
    pale = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    shown = bool(text) and len(text) * _LETTER < width - 2
    ink = "black" if opacity < _PALE else ink
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" '
        f'fill="{color}"{pale}{_EDGE if height == _LANE else ""}/>'
        + (f'<text x="{x + 2:.2f}" y="{y + 16}" fill="{ink}">{escape(text)}</text>' if shown else "")
        + "</g>"
    )


_EDGE = ' stroke="white" stroke-width="0.4"'
_PALE = 0.7  # below this opacity, white text can't be read
