"""What is one thing that a rank does, and how are millions of them kept?"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from schedules.dependencies import chain_peer, chain_peers
from schedules.errors import ScheduleError
from schedules.ops import NAMES, OPS

_TEXT = re.compile(r"([0-9]+)([A-Za-z_]+)([0-9]+)(?:([<>])([0-9]+))?")
_LARGEST = int(np.iinfo(np.int32).max)
_WINDOW = 1 << 16


class Action(NamedTuple):
    """`stage` does `op` of `microbatch`. A receive's stage is the receiving one.

    `peer` is a communication's other stage where that is not the neighbour in the chain.
    """

    stage: int
    op: str
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.op}{self.microbatch}"
        if self.peer is None or _is_chain(self):
            return text
        return f"{text}{'>' if self.op in OPS and OPS[self.op].sends else '<'}{self.peer}"

    @staticmethod
    def parse(text: str) -> Action:
        """Reads `2F0`, `2SEND_F0`, `0SEND_F0>3` or `3RECV_F0<0`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action: one is <stage><op><microbatch>, as 2F0 or 0SEND_F0>3",
                span=(0, len(text)),
            )
        stage, op, microbatch, arrow, peer = match.groups()
        if op not in OPS:
            raise ScheduleError(f"{text!r}: {unknown_op(op)}", span=match.span(2))
        if arrow is not None and (OPS[op].carries is None or (arrow == ">") != OPS[op].sends):
            raise ScheduleError(
                f"{text!r}: only a SEND goes to a stage (>3) and only a RECV comes from one (<0)",
                span=(match.start(4), len(text)),
            )
        numbers = (int(stage), int(microbatch), int(peer or 0))
        if max(numbers) > _LARGEST:
            raise ScheduleError(f"{text!r}: a number over {_LARGEST}", span=(0, len(text)))
        action = Action(numbers[0], op, numbers[1], None if peer is None else numbers[2])
        return action._replace(peer=None) if _is_chain(action) else action


class Actions(Sequence[Action]):
    """A sequence of actions in four read-only columns (13 bytes each); items are made when asked for.

    `ops` holds the codes of `OPS` (uint8), `stages` and `microbatches` int32, `peers` int32 with -1 for none.
    A peer that is the neighbour in the chain is kept as none, so that equal programs have equal columns.
    """

    __slots__ = ("microbatches", "ops", "peers", "stages")

    ops: npt.NDArray[np.uint8]
    stages: npt.NDArray[np.int32]
    microbatches: npt.NDArray[np.int32]
    peers: npt.NDArray[np.int32]

    def __init__(
        self,
        ops: npt.ArrayLike,
        stages: npt.ArrayLike,
        microbatches: npt.ArrayLike,
        peers: npt.ArrayLike = -1,
    ) -> None:
        self.ops = _column(np.asarray(ops, np.uint8))
        shape = self.ops.shape
        self.stages = _column(np.broadcast_to(np.asarray(stages, np.int32), shape))
        self.microbatches = _column(np.broadcast_to(np.asarray(microbatches, np.int32), shape))
        self.peers = _column(np.broadcast_to(np.asarray(peers, np.int32), shape))

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Actions:
        """The columns of any actions; what is none is a `ScheduleError` with its position."""
        if isinstance(actions, Actions):
            return actions
        items = list(actions)
        for position, item in enumerate(items):
            _check(item, position)
        if not items:
            return cls([], [], [])
        stages, names, microbatches, others = zip(*items, strict=True)
        ops = np.fromiter((OPS[name].code for name in names), np.uint8, len(items))
        stage_column = np.array(stages, np.int32)
        peers = np.fromiter((-1 if peer is None else peer for peer in others), np.int32, len(items))
        peers[peers == chain_peers(ops, stage_column)] = -1
        return cls(ops, stage_column, microbatches, peers)

    @classmethod
    def run(cls, stage: int, op: str, start: int, stop: int) -> Actions:
        """One op of one stage for the microbatches start, ..., stop - 1."""
        microbatches = np.arange(start, max(start, stop), dtype=np.int32)
        return cls(np.full(len(microbatches), OPS[op].code, np.uint8), stage, microbatches)

    @classmethod
    def join(cls, parts: Iterable[Actions]) -> Actions:
        """One after the other."""
        columns = [part._columns() for part in parts]
        return (
            cls(*(np.concatenate(column) for column in zip(*columns, strict=True))) if columns else cls.of(())
        )

    @classmethod
    def weave(cls, *parts: Actions) -> Actions:
        """One of each in turn; the parts are equally long."""
        columns = zip(*(part._columns() for part in parts), strict=True)
        return cls(*(np.stack(column, axis=1).ravel() for column in columns))

    def where(self, keep: npt.NDArray[np.bool_]) -> Actions:
        """The actions at which `keep` is true."""
        return Actions(*(column[keep] for column in self._columns()))

    def __len__(self) -> int:
        return len(self.ops)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Actions: ...
    def __getitem__(self, index: int | slice) -> Action | Actions:
        if isinstance(index, slice):
            return Actions(*(column[index] for column in self._columns()))
        return _view(*(column[index].item() for column in self._columns()))

    def __iter__(self) -> Iterator[Action]:
        for start in range(0, len(self), _WINDOW):  # by the window: Python's numbers are large
            window = (column[start : start + _WINDOW].tolist() for column in self._columns())
            yield from map(_view, *window)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Actions):
            return NotImplemented
        pairs = zip(self._columns(), other._columns(), strict=True)
        return all(bool(np.array_equal(mine, others)) for mine, others in pairs)

    def __hash__(self) -> int:
        return hash(tuple(column.tobytes() for column in self._columns()))

    def __str__(self) -> str:
        return " ".join(map(str, self))

    def __repr__(self) -> str:
        shown = str(self[:8]) + (" ..." if len(self) > 8 else "")
        return f"<{len(self)} actions: {shown}>"

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.ops, self.stages, self.microbatches, self.peers


def unknown_op(op: object) -> str:
    """What an error says about an op that the table does not have."""
    near = difflib.get_close_matches(str(op).upper(), OPS, n=1)
    return f"unknown op {op!r}{f' (did you mean {near[0]}?)' if near else ''}; the ops are {', '.join(OPS)}"


def without_peer(op: str) -> str:
    """What an error calls an op that is no transfer."""
    return "a collective" if OPS[op].collective else "a computation"


def _column(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view: npt.NDArray[Any] = array.view()
    view.flags.writeable = False
    return view


def _view(code: int, stage: int, microbatch: int, peer: int) -> Action:
    return Action(stage, NAMES[code], microbatch, None if peer < 0 else peer)


def _is_chain(action: Action) -> bool:
    spec = OPS.get(action.op)
    if spec is None or spec.carries is None:
        return False
    return action.peer == chain_peer(action.op, action.stage)


def _check(item: object, position: int) -> None:
    if not isinstance(item, Action):
        raise ScheduleError(f"#{position} is {item!r}, not an Action", position=position)
    if item.op not in OPS:
        raise ScheduleError(f"#{position} {item}: {unknown_op(item.op)}", position=position, action=item)
    if item.peer is not None and OPS[item.op].carries is None:
        raise ScheduleError(
            f"#{position} {item}: {without_peer(item.op)} has no peer", position=position, action=item
        )
    for number in (item.stage, item.microbatch, 0 if item.peer is None else item.peer):
        if not isinstance(number, int | np.integer) or not 0 <= number <= _LARGEST:
            raise ScheduleError(
                f"#{position} {item}: {number!r} is no index (0, 1, 2, ...)", position=position, action=item
            )
