"""Does a plan work: is all done once, in an order that its needs allow, and can no rank wait for ever?"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from schedules.deadlock import deadlock
from schedules.dependencies import Ints, route_of
from schedules.errors import ScheduleError
from schedules.graph import longest_paths
from schedules.index import Index
from schedules.ops import ACTIVATION, COMPUTE, DEFERRED, MAKERS, OPS, SAVED, TRANSFERS, F
from schedules.plan import Plan
from schedules.sharding import check_collectives


def verify(plan: Plan) -> None:
    """Raises a `ScheduleError` unless every rank, run strictly, comes to the end of its program.

    Strictly: an action needs its inputs on its rank, made or received before it in the program; SEND and RECV
    both block where they stand until the partner stands at the matching one. What passes this passes gloo and
    NCCL. A plan without any backward is a forward-only plan (`plan.forward_only`). Of its
    collectives `schedules.sharding` says what has to hold.
    """
    index = Index.of(plan)
    _check_compute(index)
    _check_transfers(index)
    _check_needs(index, lowered=True)
    _check_channels(index)
    _check_deadlock(index)
    check_collectives(index)


def check_orders(index: Index) -> None:
    """The part of the proof that orders without transfers can be given."""
    _check_compute(index)
    _check_needs(index, lowered=False)
    check_collectives(index)


def _check_compute(index: Index) -> None:
    """Each stage does each microbatch's F once and, in training, its backward once: B, or I and W."""
    lacking = index.where[F] < 0
    if lacking.any():
        stage, microbatch = _first(lacking)
        rank = index.plan.placement[stage]
        raise ScheduleError(f"rank {rank} never does {stage}F{microbatch}", rank=rank)
    if index.training:
        _check_taken_once(index, SAVED)
        _check_taken_once(index, DEFERRED)


def _check_taken_once(index: Index, value: str) -> None:
    """A value that stays on its stage is made at most once, and taken as often as made."""
    takers = [op for op in COMPUTE if value in OPS[op].own]
    made = sum((index.where[op] >= 0).astype(np.int8) for op in MAKERS[value])
    taken = sum((index.where[op] >= 0).astype(np.int8) for op in takers)
    unequal = np.asarray(made != taken)
    if not unequal.any():
        return
    cell = _first(unequal)
    here = [int(index.where[op][cell]) for op in takers if index.where[op][cell] >= 0]
    if not here:
        maker = next(op for op in MAKERS[value] if index.where[op][cell] >= 0)
        wanted = " or ".join(f"{cell[0]}{op}{cell[1]}" for op in takers)
        raise index.error(int(index.where[maker][cell]), f"nothing takes its {value}: {wanted} is missing")
    makers = " or ".join(f"{cell[0]}{op}{cell[1]}" for op in MAKERS[value])
    reason = (
        f"takes a {value} that {makers} never made" if len(here) == 1 else f"its {value} is taken already"
    )
    raise index.error(max(here), reason)


def _check_transfers(index: Index) -> None:
    """Each edge between ranks carries each microbatch once: up and, in training, down."""
    remote = index.remote_edges()
    for value, (send, receive) in TRANSFERS.items():
        wanted = value == ACTIVATION or index.training
        for op, other in ((send, receive), (receive, send)):
            table = index.where[op]
            if not wanted and index.has(op):
                raise index.error(int(table.max()), f"a forward-only plan has no {value}s")
            lacking = table[remote] < 0
            if not wanted or not lacking.any():
                continue
            row, microbatch = _first(lacking)
            row = int(remote[row])
            here, there = _ends(index, value, row, sends=OPS[op].sends)
            reason = f"rank {index.plan.placement[here]} lacks the {op} from or to stage {there}"
            partner = int(index.where[other][row, microbatch])
            if partner >= 0:
                raise index.error(partner, f"no partner: {reason}")
            raise ScheduleError(
                f"the {value} of microbatch {microbatch} never travels between stages "
                f"{index.edges[row][0]} and {index.edges[row][1]}: {reason}",
                rank=index.plan.placement[here],
            )


def _check_needs(index: Index, *, lowered: bool) -> None:
    """Each input is made, or received, before it is needed, on the same rank."""
    makers = {value: index.makers(value) for value in MAKERS}
    for (value, source), stage, takers in index.demands():
        if index.is_local(source, stage):
            suppliers = makers[value][source]
        elif lowered:
            suppliers = index.arrivals(value, source, stage)
        else:
            continue  # a transfer will bring it
        late = (takers >= 0) & ((suppliers < 0) | (suppliers > takers))
        if late.any():
            microbatch = int(np.argmax(late))
            raise index.error(
                int(takers[microbatch]), _late(index, value, source, int(suppliers[microbatch]))
            )


def _late(index: Index, value: str, source: int, supplier: int) -> str:
    missing = f"needs the {value} of stage {source}"
    if supplier < 0:
        return f"{missing}, which nothing makes or receives"
    _, position, action = index.locate(supplier)
    return f"{missing}, which only #{position} {action} brings"


def _check_channels(index: Index) -> None:
    """Per channel (a rank, another rank, a kind of value), sends and receives come in one order."""
    placement = index.plan.placement
    for value, (send, receive) in TRANSFERS.items():
        if not index.has(send):
            continue
        channels = defaultdict(list)
        for row in index.remote_edges().tolist():
            sending, receiving = route_of(value, index.edges[row])
            channels[placement[sending], placement[receiving]].append(row)
        for rows in channels.values():
            _check_channel(index, index.where[send][rows].ravel(), index.where[receive][rows].ravel())


def _check_channel(index: Index, sends: Ints, receives: Ints) -> None:
    as_sent = np.argsort(sends)
    expected = receives[as_sent]
    if (np.diff(expected) > 0).all():
        return
    posted = np.sort(receives)
    place = int(np.argmax(posted != expected))
    rank, position, action = index.locate(int(posted[place]))
    raise index.error(
        int(sends[as_sent[place]]),
        f"is number {place} on its channel, where rank {rank} first stands at #{position} {action}: "
        "a channel is first in, first out",
    )


def _check_deadlock(index: Index) -> None:
    """With each matched SEND and RECV as one node, the union of all programs has no cycle.

    rank 0   ... SEND ----> RECV ...        Transfers are all the nodes it takes: computation never waits
                   |          |             once its inputs stand before it, as they do by now, and a
    rank 1   ... RECV ----> SEND ...        channel's order is part of its two programs'.
    """
    sends, receives = _transfers(index)
    transfer_of = np.full(int(index.offsets[-1]), -1, np.int64)
    transfer_of[sends] = transfer_of[receives] = np.arange(len(sends))
    numbers = np.flatnonzero(transfer_of >= 0)
    transfers, ranks = transfer_of[numbers], index.ranks_of(numbers)
    same = ranks[1:] == ranks[:-1]
    done = longest_paths(np.zeros(len(sends), np.int64), transfers[:-1][same], transfers[1:][same]).done
    if done.all():
        return
    stuck = ~done[transfers]
    stuck_ranks, first = np.unique(ranks[stuck], return_index=True)
    heads = dict(zip(stuck_ranks.tolist(), numbers[stuck][first].tolist(), strict=True))
    both = sends + receives
    partners = {number: int(both[transfer_of[number]]) - number for number in heads.values()}
    raise deadlock(index, heads, partners)


def _transfers(index: Index) -> tuple[Ints, Ints]:
    """The numbers of all sends and of their receives."""
    remote = index.remote_edges()
    pairs = [pair for pair in TRANSFERS.values() if index.has(pair[0])]
    sends = [index.where[send][remote].ravel() for send, _ in pairs]
    receives = [index.where[receive][remote].ravel() for _, receive in pairs]
    none = np.empty(0, np.int64)
    return np.concatenate([none, *sends]), np.concatenate([none, *receives])


def _ends(index: Index, value: str, row: int, *, sends: bool) -> tuple[int, int]:
    """The stage at one end of an edge, and the stage at the other."""
    sending, receiving = route_of(value, index.edges[row])
    return (sending, receiving) if sends else (receiving, sending)


def _first(cells: np.typing.NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.unravel_index(int(np.argmax(cells)), cells.shape)
    return int(row), int(column)
