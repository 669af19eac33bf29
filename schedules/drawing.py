"""What does a plan, or a timeline, look like as a grid of time?"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from schedules.action import Action
from schedules.costs import Costs
from schedules.ops import COMPUTE, OPS, B, F, I, W
from schedules.plan import Plan
from schedules.simulator import simulate
from schedules.timeline import Timeline

_RULER = 5
_COLORS = {F: "44;97", B: "42;30", I: "46;30", W: "43;30"}  # ANSI: blue, green, cyan, yellow


class Box(NamedTuple):
    """One action, or overlapped pair, of a timeline."""

    number: int
    op: str
    text: str


class Span(NamedTuple):
    """A box and its times."""

    op: str
    text: str
    start: float
    end: float


def draw(plan: Plan, *, color: bool | None = None) -> str:
    """One row a rank, one column a unit of time: the orders at default costs, transfers taking no time.

        F forward, B-- backward (2 columns); number = microbatch; . bubble
          time  0        5
        rank 0  F0 F1 .  .  B0--- B1---
        rank 1  .  F0 B0--- F1 B1--- .

    A rank's second stage carries one prime (F0'), its third two, ...; an overlapped pair is one box (F3&B1').
    In colour where stdout is a terminal (and NO_COLOR is not set), unless `color` says.
    """
    return draw_timeline(simulate(plan), color=color)


def draw_timeline(timeline: Timeline, *, color: bool | None = None) -> str:
    """The same at any costs: a column is as long as the shortest action, and others are rounded to it."""
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ if color is None else color
    plan, unit = timeline.plan, _unit(timeline)
    starts, ends = (
        np.floor(times / unit + 0.5).astype(int).tolist() for times in (timeline.starts, timeline.ends)
    )
    columns = int(np.floor(timeline.makespan / unit + 0.5))
    margin, width = len(f"rank {plan.ranks - 1}"), _width(timeline)
    ruler = "".join(f"{time * unit:g}".ljust(width * _RULER) for time in range(0, columns, _RULER))
    lines = [_legend(timeline, unit), f"{'time':>{margin}}  {ruler.rstrip()}"]
    for rank in range(plan.ranks):
        row, at = [], 0
        for box in boxes(timeline, rank):
            row.append(".".ljust(width) * (starts[box.number] - at))
            at = ends[box.number]
            row.append(_block(box, at - starts[box.number], width, color))
        row.append(".".ljust(width) * (columns - at))
        lines.append(f"{f'rank {rank}':<{margin}}  {''.join(row).rstrip()}")
    return "\n".join(lines)


def boxes(timeline: Timeline, rank: int) -> Iterator[Box]:
    """A rank's actions and pairs, in turn: an op, and a short text, as F0' or F3&B1'."""
    plan, low = timeline.plan, int(timeline.offsets[rank])
    stages, firsts = plan.stages_of(rank), set(plan.pairs[rank])
    program = list(plan.programs[rank])
    texts = [_text(action, stages) for action in program]
    for position, action in enumerate(program):
        if position in firsts:
            yield Box(low + position, action.op, f"{texts[position]}&{texts[position + 1]}")
        elif position - 1 not in firsts:
            yield Box(low + position, action.op, texts[position])


def stream(timeline: Timeline, rank: int) -> Iterator[Span]:
    """A rank's collectives, in turn."""
    collectives, stages = timeline.collectives, timeline.plan.stages_of(rank)
    for row in np.flatnonzero(collectives.ranks == rank).tolist():
        action = collectives.actions[row]
        times = float(collectives.starts[row]), float(collectives.ends[row])
        yield Span(action.op, _text(action, stages), *times)


def _text(action: Action, stages: tuple[int, ...]) -> str:
    return f"{action.op}{action.microbatch}" + "'" * stages.index(action.stage)


def _block(box: Box, columns: int, width: int, color: bool) -> str:
    """The box's columns, of which the last ends in a space."""
    if not columns:
        return ""
    characters = columns * width - 1
    text = box.text[:characters].ljust(characters, "-" if columns > 1 else " ")
    return f"\x1b[{_COLORS.get(box.op, '7')}m{text}\x1b[0m " if color else f"{text} "


def _unit(timeline: Timeline) -> float:
    """The shortest action's time, unless the longest would then fill the screen."""
    durations = timeline.ends - timeline.starts
    longest = float(durations.max())
    return max(float(durations[durations > 0].min(initial=longest)), longest / 50) or 1.0


def _width(timeline: Timeline) -> int:
    plan = timeline.plan
    primes = max(len(plan.stages_of(rank)) for rank in range(plan.ranks)) - 1
    return 2 + len(str(plan.microbatches - 1)) + primes


def _legend(timeline: Timeline, unit: float) -> str:
    plan, by_default = timeline.plan, timeline.costs == Costs()
    codes = {int(code) for order in plan.programs for code in np.unique(order.ops)}
    parts = [
        f"{op}-- {OPS[op].meaning} ({OPS[op].cost} columns)"
        if OPS[op].cost > 1 and by_default
        else f"{op} {OPS[op].meaning}"
        for op in COMPUTE
        if OPS[op].code in codes
    ]
    if any(plan.pairs):
        parts.append("F&B an overlapped pair")
    stages = "; ' = the rank's next stage" if plan.num_stages > plan.ranks else ""
    scale = "" if unit == 1 else f"; a column = {unit:g}"
    return f"{', '.join(parts)}; number = microbatch{stages}; . bubble{scale}"
