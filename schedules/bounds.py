"""How short can a step not be, whatever the order?"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from schedules.costs import spread
from schedules.instance import KINDS, Instance
from schedules.ops import B

_NONE = float("-inf")


def lower_bound(instance: Instance) -> float:
    """A bound on the objective of every order that fits in memory.

    Per rank, its actions on one machine: each has a head (before which it cannot start) and a tail (what has
    to follow its end), and the bound is the best that a machine could do which may interrupt actions, and
    which always does the one with the longest tail (Jackson's rule; Carlier, 1982). Heads and tails are the
    longest paths of what any order has to respect:

        0F0 -> 1F0 -> 2F0 -.        each kind of action through the microbatches in turn, F to I to W of each,
         |      |      |   v        and where memory is short, an F after the W (or I) without which it would
        0F1 -> 1F1 -> 2F1 2I0 -> 2W0          not fit: with k microbatches of memory, F of k after W of 0.
    """
    durations = _durations(instance)
    heads, tails = _heads_and_tails(instance, durations)
    m = instance.microbatches
    best = 0.0
    for own in instance.stages_of:
        nodes = [node for stage in own for node in range(3 * stage * m, 3 * (stage + 1) * m)]
        work = math.fsum(durations[node] for node in nodes)
        best = max(best, work, _one_machine(nodes, durations, heads, tails))
    return best


def _durations(instance: Instance) -> list[float]:
    """By node, the least time: a whole backward, and an overlapped pair, may take less than their parts."""
    costs, shape = instance.costs, (instance.stages, instance.microbatches)
    forward, inputs, weight = (costs.times(op, *shape).copy() for op in KINDS)
    if costs.B is not None:
        whole = costs.times(B, *shape)
        inputs = np.minimum(inputs, whole)
        weight = np.minimum(weight, whole - inputs)
    if costs.pair is not None:
        pairs = spread("pair", costs.pair, *shape)
        for own in map(list, instance.stages_of):
            pair = pairs[own].min()  # of any forward and any backward here
            inputs[own] = np.minimum(inputs[own], pair)
            weight[own] = np.minimum(weight[own], pair - inputs[own])
            forward[own] = np.minimum(forward[own], pair - (inputs[own] + weight[own]).max())
    durations: list[float] = np.stack((forward, inputs, weight), axis=1).ravel().tolist()
    return durations


def _heads_and_tails(instance: Instance, durations: list[float]) -> tuple[list[float], list[float]]:
    """By node. A tail leads from an action's end to the objective: with `span`, less when that rank began."""
    followers: list[list[tuple[int, float]]] = [[] for _ in durations]
    before = [0] * len(durations)
    for node, after, lag in _precedences(instance):
        followers[node].append((after, lag))
        before[after] += 1
    order = [node for node, count in enumerate(before) if not count]
    heads = [0.0] * len(durations)
    for node in order:  # grows as it goes
        end = heads[node] + durations[node]
        for after, lag in followers[node]:
            heads[after] = max(heads[after], end + lag)
            before[after] -= 1
            if not before[after]:
                order.append(after)
    began = _began(instance, heads)
    tails = [0.0] * len(durations)
    for node in reversed(order):
        tails[node] = -began[instance.placement[node // (3 * instance.microbatches)]]
        for after, lag in followers[node]:
            tails[node] = max(tails[node], lag + durations[after] + tails[after])
    return heads, tails


def _began(instance: Instance, heads: list[float]) -> list[float]:
    """By rank, when its span begins, or the latest that it can; 0 for the makespan.

    A rank begins with microbatch 0 of its first stage, as soon as that comes: nothing comes before it on the
    way, unless a rank there has several stages, and may do other things first.
    """
    if instance.objective == "makespan":
        return [0.0] * instance.ranks
    m = instance.microbatches
    began = []
    for own in instance.stages_of:
        ranks_before = instance.placement[: own[0]]
        alone = len(set(ranks_before)) == len(ranks_before)
        began.append(heads[3 * own[0] * m] if alone else float("inf"))
    return began


def _precedences(instance: Instance) -> Iterator[tuple[int, int, float]]:
    """(action, later action, least time between the end of one and the start of the other), by node."""
    m = instance.microbatches
    for stage in range(instance.stages):
        first = 3 * stage * m
        for kind in range(3):
            code = 3 * stage + kind
            yield from ((node, node + 1, 0.0) for node in range(code * m, code * m + m - 1))
            if kind < 2:  # F before I, I before W
                yield from ((node, node + m, 0.0) for node in range(code * m, code * m + m))
            taker = instance.taker[code]
            if taker >= 0 and taker // 3 != stage:
                lag = 0.0 if instance.channel[code] < 0 else instance.wire[code] + instance.latency[code]
                yield from ((code * m + k, taker * m + k, lag) for k in range(m))
        yield from ((node, after, 0.0) for node, after in _memory(instance, first))


def _memory(instance: Instance, first: int) -> Iterator[tuple[int, int]]:
    """(I or W, the F for which it makes room) of the stage whose first node is `first`."""
    m, grows, memory = instance.microbatches, instance.grows, instance.memory
    for kind in (1, 2):
        gone = 0  # so many I (W) are needed before F of k
        held = 0.0  # by microbatches `gone` ... k - 1: at least, with their F (and I) done
        for k in range(m):
            size = grows[first + k]
            while held + size > memory:
                held -= _kept(grows, first, m, kind, gone)
                gone += 1
                yield first + kind * m + gone - 1, first + k
            held += _kept(grows, first, m, kind, k)


def _kept(grows: list[float], first: int, m: int, kind: int, k: int) -> float:
    """What microbatch k holds until its I, or with its I done until its W."""
    return grows[first + k] if kind == 1 else grows[first + k] + grows[first + m + k]


def _one_machine(nodes: list[int], durations: list[float], heads: list[float], tails: list[float]) -> float:
    """The best end of a rank's actions and their tails, were they interruptible."""
    coming = sorted(nodes, key=lambda node: heads[node])
    ready: list[tuple[float, int]] = []
    left = {node: durations[node] for node in nodes}
    now, best, at = 0.0, _NONE, 0
    while at < len(coming) or ready:
        if not ready:
            now = max(now, heads[coming[at]])
        while at < len(coming) and heads[coming[at]] <= now:
            heapq.heappush(ready, (-tails[coming[at]], coming[at]))
            at += 1
        tail, node = ready[0]
        until = heads[coming[at]] if at < len(coming) else float("inf")
        if now + left[node] <= until:
            now += left[node]
            best = max(best, now - tail)
            heapq.heappop(ready)
        else:
            left[node] -= until - now
            now = until
    return best
