"""Adds the communication that a compute-only order implies, and so makes a plan of a schedule."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schedules.action import Action, Actions
from schedules.clock import default_times, direct, start_times
from schedules.costs import Costs
from schedules.dependencies import Edge, Edges, Ints, chain_peers, route_of
from schedules.errors import ScheduleError
from schedules.index import Index
from schedules.ops import ACTIVATION, OPS, TRANSFERS, F
from schedules.pairs import Pairs
from schedules.plan import Plan, edges_of
from schedules.schedule import Problem, Schedule
from schedules.verifier import check_orders, verify


def build(
    schedule: Schedule,
    placement: Sequence[int],
    microbatches: int,
    *,
    costs: Costs | Mapping[str, float] | None = None,
    memory: float | None = None,
    edges: Iterable[Edge] | None = None,
    forward_only: bool = False,
) -> Plan:
    """The verified plan of a schedule: its orders, and the communication that they imply.

    Orders that have transfers already are the programs. `edges` is the chain, and whatever other
    peers occur in the orders, unless told otherwise. `costs` and `memory` are for the schedule (`Problem`);
    the lowering looks at no clock, so that all ranks make the same plan.
    """
    problem = Problem(tuple(placement), microbatches, costs, memory)
    orders = _orders(schedule, problem)
    joined = edges_of(orders, problem.num_stages) if edges is None else Edges.of(edges)
    plan = Plan(problem.placement, problem.microbatches, orders, joined, _pairs(schedule, problem))
    if not plan.is_lowered:
        plan = lower(plan)
    verify(plan)
    return _forward_only(plan) if forward_only else plan


def forward_only(plan: Plan, microbatches: int | None = None) -> Plan:
    """The plan's F alone, in the same order, lowered again and verified: for evaluation and prediction.

    Of the first `microbatches` only, where there are to be fewer. Collectives are dropped: those of
    training would stand in the wrong places, and `schedules.add_collectives` can be asked again.
    """
    count = plan.microbatches if microbatches is None else microbatches
    if plan.forward_only and count == plan.microbatches and not plan.has_collectives:
        return plan
    if not 1 <= count <= plan.microbatches:
        raise ScheduleError(f"{count} microbatches of a plan that has {plan.microbatches}")
    orders = (order.where((order.ops == OPS[F].code) & (order.microbatches < count)) for order in plan.orders)
    forward = lower(Plan(plan.placement, count, tuple(orders), plan.edges))
    verify(forward)
    return forward


_forward_only = forward_only  # `build` has a parameter of that name


def lower(orders: Plan) -> Plan:
    """The orders (a plan without transfers) with every SEND and RECV put in, free of deadlock.

    A transfer's time is when its producer ends, if transfers take no time. Both its ends are put in at once,
    in the order of (time, producer's rank, its position): the SEND after the producer, the RECV before the
    receiver's first action that starts at that time or later.

                       time 2
        rank 0   0F0   0F1 | 0SEND_F1 0F2          The time line orders all programs alike: a transfer stands
                           |                       between what starts before its time and what starts at it
        rank 1         1F0 | 1RECV_F1 1F1          or later, on both ranks. So no ring of waiting can close.
    """
    index = Index.of(orders)
    check_orders(index)
    taken = _default_times(index)
    starts = start_times(index, direct(index, taken))
    transfers = _transfers(index, starts + taken)
    if not len(transfers.time):
        return orders
    return _merged(index, transfers, _receive_before(index, starts, transfers))


class _Transfers(NamedTuple):
    """One row a transfer, in the order in which they are put in."""

    time: Ints
    producer: Ints
    ops: Ints  # [transfer, end]: the SEND, the RECV
    stages: Ints  # [transfer, end]
    microbatch: Ints


def _default_times(index: Index) -> Ints:
    """By number; both actions of an overlapped pair take what the pair does."""
    taken, second = default_times(index), index.second_of_pair
    taken[second - 1] += taken[second]
    taken[second] = taken[second - 1]
    return taken


def _transfers(index: Index, ends: Ints) -> _Transfers:
    values = [value for value in TRANSFERS if value == ACTIVATION or index.training]
    parts = [_transfers_of(index, value, ends) for value in values]
    everything = _Transfers(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    # Numbers run through the ranks, so they order by rank, then position.
    order = np.lexsort((everything.producer, everything.time))
    return _Transfers(*(column[order] for column in everything))


def _transfers_of(index: Index, value: str, ends: Ints) -> _Transfers:
    remote = index.remote_edges()
    routes = np.array([route_of(value, index.edges[row]) for row in remote], np.int64).reshape(-1, 2)
    producer = index.makers(value)[routes[:, 0]].ravel()
    microbatches = index.plan.microbatches
    ops = np.array([OPS[op].code for op in TRANSFERS[value]], np.int64)
    return _Transfers(
        time=ends[producer],
        producer=producer,
        ops=np.broadcast_to(ops, (len(producer), 2)),
        stages=np.repeat(routes, microbatches, axis=0),
        microbatch=np.tile(np.arange(microbatches), len(remote)),
    )


def _receive_before(index: Index, starts: Ints, transfers: _Transfers) -> Ints:
    """The number of the receiver's first action that starts at a transfer's time or later."""
    span = int(starts.max()) + 1
    # Within a rank starts ascend; with the ranks laid end to end, one search serves them all.
    ranks = np.repeat(np.arange(index.plan.ranks), np.diff(index.offsets))
    receiver = np.array(index.plan.placement)[transfers.stages[:, 1]]
    return np.searchsorted(ranks * span + starts, receiver * span + transfers.time)


def _merged(index: Index, transfers: _Transfers, receive_before: Ints) -> Plan:
    """The programs. A gap is the place before an action, or after a rank's last one.

    actions of rank 0:     a     b          of rank 1:     c
    gaps                0     1     2                   3     4      gap = number + rank
    """
    plan = index.plan
    rank_of = np.array(plan.placement)[transfers.stages]
    behind = _behind(index, transfers.producer)
    gaps = np.stack((behind, receive_before), axis=1) + rank_of
    order = np.argsort(gaps.ravel(), kind="stable")
    gap, rank = gaps.ravel()[order], rank_of.ravel()[order]

    # Before the j-th transfer end stand the j ends before it, and all the actions before its gap.
    at = np.arange(len(gap)) + gap - rank
    total = int(index.offsets[-1]) + len(gap)
    is_action = np.ones(total, bool)
    is_action[at] = False

    ops = np.empty(total, np.uint8)
    stages, microbatches, peers = (np.empty(total, np.int32) for _ in range(3))
    ops[is_action] = np.concatenate([program.ops for program in plan.programs])
    stages[is_action] = np.concatenate([program.stages for program in plan.programs])
    microbatches[is_action] = np.concatenate([program.microbatches for program in plan.programs])
    peers[is_action] = -1
    ops[at] = transfers.ops.ravel()[order]
    stages[at] = transfers.stages.ravel()[order]
    microbatches[at] = np.repeat(transfers.microbatch, 2)[order]
    others = transfers.stages[:, ::-1].ravel()[order]
    peers[at] = np.where(others == chain_peers(ops[at], stages[at]), -1, others)

    lengths = np.diff(index.offsets) + np.bincount(rank, minlength=plan.ranks)
    bounds = np.cumsum([0, *lengths]).tolist()
    everything = Actions(ops, stages, microbatches, peers)
    programs = tuple(everything[low:high] for low, high in pairwise(bounds))
    seats = np.flatnonzero(is_action)  # by number, where it stands now
    pairs = tuple(
        tuple((seats[low + np.array(firsts, np.int64)] - bound).tolist())
        for low, bound, firsts in zip(index.offsets.tolist(), bounds, plan.pairs, strict=False)
    )
    return Plan(plan.placement, plan.microbatches, programs, plan.edges, pairs)


def _behind(index: Index, producers: Ints) -> Ints:
    """The number of what follows a producer; a pair stays together."""
    first = np.zeros(int(index.offsets[-1]), np.int64)
    first[index.second_of_pair - 1] = 1
    return producers + 1 + first[producers]


def _orders(schedule: Schedule, problem: Problem) -> tuple[Actions, ...]:
    """What the schedule answers, checked for its form; what it says is checked with the plan."""
    name = type(schedule).__name__
    answer: Iterable[Iterable[Action]] = schedule.orders(problem)
    try:
        orders = [list(order) if not isinstance(order, Actions) else order for order in answer]
    except TypeError as error:
        raise ScheduleError(
            f"{name}.orders returned no sequence of sequences of Action: {answer!r}"
        ) from error
    if len(orders) != problem.ranks:
        raise ScheduleError(f"{name}.orders returned {len(orders)} orders for {problem.ranks} ranks")
    checked = []
    for rank, order in enumerate(orders):
        try:
            checked.append(Actions.of(order))
        except ScheduleError as error:
            raise ScheduleError(
                f"{name}, rank {rank}: {error}", rank=rank, position=error.position, action=error.action
            ) from None
    return tuple(checked)


def _pairs(schedule: Schedule, problem: Problem) -> Pairs:
    """What the schedule answers for its overlapped pairs, if it has any."""
    pairs = getattr(schedule, "pairs", None)
    if pairs is None:
        return ()
    answer = pairs(problem)
    try:
        return tuple(tuple(operator.index(first) for first in firsts) for firsts in answer)
    except TypeError as error:
        raise ScheduleError(
            f"{type(schedule).__name__}.pairs returned no sequence of sequences of int: {answer!r}"
        ) from error
