"""How are programs read from text, and what does a mistake in it say?"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from schedules.action import Action, Actions
from schedules.errors import ScheduleError
from schedules.ops import COLLECTIVES, OPS, UNSHARD
from schedules.pairs import Pairs, parse_cell

_LINE = re.compile(r"rank ([0-9]+):(.*)")
_WITHOUT_NUMBER = re.compile(rf"([0-9]+)({'|'.join(COLLECTIVES)})")
_OPEN = -1
"""The microbatch of a collective whose cell names none."""


class Table(NamedTuple):
    """What the cells say: `placement` is read from where the stages' compute actions stand."""

    placement: tuple[int, ...]
    microbatches: int
    programs: tuple[Actions, ...]
    pairs: Pairs


def csv_cells(text: str) -> Iterator[list[str]]:
    """The rows of a CSV text; what a file's end has in empty lines is no row."""
    yield from csv.reader(io.StringIO(text.rstrip("\r\n")))


def line_cells(text: str) -> Iterator[list[str]]:
    """The rows of `str(plan)`."""
    for rank, line in enumerate(text.strip().splitlines()):
        match = _LINE.fullmatch(line.strip())
        if match is None or int(match[1]) != rank:
            raise ScheduleError(f"line {rank}: expected 'rank {rank}: <actions>', not {line!r}", rank=rank)
        yield match[2].split()


def read(rows: Iterable[list[str]]) -> Table:
    """One row a rank, one action or overlapped pair a cell; empty cells are bubbles."""
    read = [_program(rank, cells) for rank, cells in enumerate(rows)]
    programs = tuple(program for program, _ in read)
    if not programs:
        raise ScheduleError("a plan without ranks: it needs one row a rank")
    microbatches = 1 + max(int(program.microbatches.max()) for program in programs)
    return Table(_placement(programs), microbatches, programs, tuple(pairs for _, pairs in read))


def _program(rank: int, cells: list[str]) -> tuple[Actions, tuple[int, ...]]:
    """The actions of a row, and where its pairs begin."""
    actions: list[Action] = []
    columns: list[int] = []
    pairs = []
    for column, cell in enumerate(cells):
        text = cell.strip()
        if not text:
            continue
        try:
            parsed = _open_collective(text) or parse_cell(text)
        except ScheduleError as error:
            raise ScheduleError(
                f"rank {rank}, column {column}: {error}", rank=rank, position=column, span=error.span
            ) from None
        if len(parsed) > 1:
            pairs.append(len(actions))
        actions.extend(parsed)
        columns.extend([column] * len(parsed))
    if not actions:
        raise ScheduleError(f"rank {rank} is missing: its row is empty", rank=rank)
    if any(action.microbatch == _OPEN for action in actions):
        _close(rank, columns, actions, ahead=True)
        _close(rank, columns, actions, ahead=False)
    return Actions.of(actions), tuple(pairs)


def _open_collective(text: str) -> tuple[Action, ...]:
    """`0UNSHARD`, as torch.distributed.pipelining writes collectives: without a microbatch."""
    match = _WITHOUT_NUMBER.fullmatch(text)
    if match is None:
        return ()
    return (Action.parse(f"{text}0")._replace(microbatch=_OPEN),)


def _close(rank: int, columns: Sequence[int], actions: list[Action], *, ahead: bool) -> None:
    """Gives UNSHARDs the microbatch of their stage's next computation (ahead), or others that of its last."""
    seen: dict[int, int] = {}
    for position in reversed(range(len(actions))) if ahead else range(len(actions)):
        action = actions[position]
        if OPS[action.op].is_compute:
            seen[action.stage] = action.microbatch
        elif action.microbatch == _OPEN and (action.op == UNSHARD) == ahead:
            if action.stage not in seen:
                raise _without_computation(rank, columns[position], action)
            actions[position] = action._replace(microbatch=seen[action.stage])


def _without_computation(rank: int, column: int, action: Action) -> ScheduleError:
    text, place = f"{action.stage}{action.op}", "behind" if action.op == UNSHARD else "before"
    return ScheduleError(
        f"rank {rank}, column {column}: {text!r} takes the microbatch of a computation of stage "
        f"{action.stage} {place} it, and there is none",
        rank=rank,
        position=column,
        span=(0, len(text)),
    )


def _placement(programs: tuple[Actions, ...]) -> tuple[int, ...]:
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for position, action in enumerate(program):
            if OPS[action.op].is_compute and rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"rank {rank}, #{position} {action}: stage {action.stage} is on rank "
                    f"{rank_of[action.stage]} too, and a stage lives on one rank",
                    rank=rank,
                    position=position,
                    action=action,
                )
    num_stages = 1 + max(rank_of, default=-1)
    unused = next((stage for stage in range(num_stages) if stage not in rank_of), None)
    if unused is not None or not rank_of:
        raise ScheduleError(
            "no rank computes anything"
            if unused is None
            else f"stage {unused} is never used, though stage {num_stages - 1} is: stages are 0, 1, 2, ..."
        )
    return tuple(rank_of[stage] for stage in range(num_stages))
