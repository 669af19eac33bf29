"""Which orders near a given one are better?"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from schedules.instance import Instance, Outcome

_HISTORY = 10
"""A move is made if what it leads to is as good as where the search stood so many moves ago."""
_ANYWHERE = 0.25
"""The share of moves with any action, on the critical path or not."""
_MORE = 0.3
"""The share of moves that come with another one."""
_TRIES = 10
"""So many are looked at for one that fits in memory."""


def improve(
    instance: Instance, orders: Sequence[Sequence[int]], iterations: int, random: Random, enough: float
) -> tuple[list[list[int]], int]:
    """The best of so many orders, each a move away from one before, and how many there were.

    A move takes an action, as a rule one that sets the objective (on the critical path), and puts it some
    places earlier or later on its rank; the k-th F stays that of microbatch k wherever it stands. It is made
    if the outcome is no worse than at present, or some moves ago (late acceptance: Burke and Bykov, 2017).
    The search stops at a value that is good enough.
    """
    here = _Place.of(instance, [list(order) for order in orders])
    assert here is not None
    best, tried = here, 0
    history = [here.value] * _HISTORY
    while tried < iterations and best.value > enough:
        found = _neighbour(instance, here, random)
        slot = tried % _HISTORY
        tried += 1
        if found is not None and found.value <= max(here.value, history[slot]):
            here = found
            if here.value < best.value:
                best = here
        history[slot] = here.value
    return best.orders, tried


class _Place(NamedTuple):
    """Where the search stands."""

    orders: list[list[int]]
    value: float
    critical: list[tuple[int, int]]

    @classmethod
    def of(cls, instance: Instance, orders: list[list[int]]) -> _Place | None:
        nodes = [instance.nodes(order) for order in orders]
        outcome = instance.run(nodes)
        if outcome is None:
            return None
        return cls(orders, outcome.value, _critical(instance, nodes, outcome))


def _critical(instance: Instance, nodes: Sequence[Sequence[int]], outcome: Outcome) -> list[tuple[int, int]]:
    """(rank, place) of the actions that set the objective, last to first."""
    m, starts, ends = instance.microbatches, outcome.starts, outcome.ends
    taken = [last - first for first, last in zip(outcome.firsts, outcome.lasts, strict=True)]
    longest = taken if instance.objective == "span" else outcome.lasts
    rank = max(range(instance.ranks), key=longest.__getitem__)
    place = len(nodes[rank]) - 1
    where: list[dict[int, int]] = [{} for _ in nodes]
    path = []
    while True:
        path.append((rank, place))
        node = nodes[rank][place]
        if place and ends[nodes[rank][place - 1]] >= starts[node]:
            place -= 1
            continue
        code = node // m
        source = instance.source[code]
        if source < 0:
            return path
        node += (source - code) * m
        rank = instance.placement[source // 3]
        where[rank] = where[rank] or {other: at for at, other in enumerate(nodes[rank])}
        place = where[rank][node]


def _neighbour(instance: Instance, here: _Place, random: Random) -> _Place | None:
    """The first of a few that keep to memory; None where none does, or where ranks then wait in a ring."""
    for _ in range(_TRIES):
        orders = list(here.orders)
        moved = {_move(here, orders, random)}
        while random.random() < _MORE:
            moved.add(_move(here, orders, random))
        if all(instance.fits(orders[rank]) for rank in moved):
            return _Place.of(instance, orders)
    return None


def _move(here: _Place, orders: list[list[int]], random: Random) -> int:
    """Puts one action elsewhere on its rank, which is answered."""
    if random.random() < _ANYWHERE:
        rank = _below(len(orders), random)
        place = _below(len(orders[rank]), random)
    else:
        rank, place = here.critical[_below(len(here.critical), random)]
    distance = 1
    while random.random() < 0.5:
        distance *= 2
    step = 1 if random.random() < 0.5 else -1
    order = list(orders[rank])
    code = order.pop(place)
    to = min(max(place + step * distance, 0), len(order))
    while 0 < to < len(order) and order[to - (step < 0)] == code:
        to += step  # beside its like it is the same order, so on to where it makes a difference
    order.insert(to, code)
    orders[rank] = order
    return rank


def _below(number: int, random: Random) -> int:
    return int(random.random() * number)
