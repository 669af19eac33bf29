"""What do orders have to respect, and how long does a step take in them? (As `simulate`, but quickly.)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from schedules.action import Actions
from schedules.costs import Costs, spread
from schedules.dependencies import chain, edge_of
from schedules.errors import ScheduleError
from schedules.ops import ACTIVATION, GRADIENT, OPS, F, I, W
from schedules.schedule import Problem

Objective = Literal["makespan", "span"]
Orders = Sequence[Sequence[int]]
"""Per rank, a code an action: that of its kind (stage and op). The k-th of a kind is microbatch k's."""

KINDS = (F, I, W)
"""A code is `3 * stage + KINDS.index(op)`; a node, that is one action, `code * microbatches + microbatch`."""


class Outcome(NamedTuple):
    """When nodes start and end, the first start and last end of each rank, and the objective's value."""

    starts: list[float]
    ends: list[float]
    firsts: list[float]
    lasts: list[float]
    value: float


class Instance:
    """One problem of finding orders, in plain lists, for thousands of looks at it.

    Stages are a chain, backwards are split, and every kind of action goes through the microbatches in turn.

        code 0 (0F)  -> code 3 (1F)  -> code 6 (2F)        a microbatch's way over stages 0, 1, 2
                                            v              (and to the W, codes 2, 5, 8, of each stage)
        code 1 (0I)  <- code 4 (1I)  <- code 7 (2I)
    """

    def __init__(self, problem: Problem, objective: Objective, memory: float) -> None:
        costs = problem.costs if isinstance(problem.costs, Costs) else Costs()
        stages, m = problem.num_stages, problem.microbatches
        self.problem, self.objective, self.costs = problem, objective, costs
        self.microbatches, self.ranks, self.stages = m, problem.ranks, stages
        self.placement = problem.placement
        self.stages_of = [problem.stages_of(rank) for rank in range(problem.ranks)]
        self.memory = memory * (1 + 1e-9)  # for sums that round
        times = np.stack([costs.times(op, stages, m) for op in KINDS], axis=1)
        self.durations: list[float] = times.ravel().tolist()
        self._ways()
        self._sizes()

    def _ways(self) -> None:
        """Of each code: whose value it waits for, and what its own value's way to a taker costs."""
        codes, edges = range(3 * self.stages), chain(self.stages)
        wires, latencies = self.costs.wires(edges).tolist(), self.costs.latencies(edges).tolist()
        self.has_wires = any(wires)
        self.source = [-1] * len(codes)
        self.taker = [-1] * len(codes)
        self.wire, self.latency, self.channel = [0.0] * len(codes), [0.0] * len(codes), [-1] * len(codes)
        channels: dict[tuple[int, int, int], int] = {}
        for edge, row in edges.rows.items():
            for kind, value in ((0, ACTIVATION), (1, GRADIENT)):
                sending, receiving = edge if value == ACTIVATION else edge[::-1]
                assert edge_of(value, sending, receiving) == edge
                here, there = 3 * sending + kind, 3 * receiving + kind
                self.source[there], self.taker[here] = here, there
                ends = self.placement[sending], self.placement[receiving]
                if ends[0] != ends[1]:
                    self.channel[here] = channels.setdefault((*ends, kind), len(channels))
                    self.wire[here], self.latency[here] = wires[row], latencies[row]
        last = 3 * (self.stages - 1)
        self.source[last + 1], self.taker[last] = last, last + 1  # the turn, on one rank
        self.num_channels = len(channels)

    def _sizes(self) -> None:
        """By node, by how much an action makes its rank's memory grow, or shrink."""
        shape = (self.stages, self.microbatches)
        size = spread("activation_bytes", self.costs.activation_bytes, *shape)
        early = spread("released_at_input", self.costs.released_at_input, *shape)
        # In the very floats of `Timeline.held`, so that what fits here fits there.
        grows = np.stack((size, -early * size, (early - 1) * size), axis=1)
        self.grows: list[float] = grows.ravel().tolist()
        for rank, own in enumerate(self.stages_of):
            least = math.fsum(max(self.grows[3 * s * self.microbatches :][: self.microbatches]) for s in own)
            if least > self.memory:
                raise ScheduleError(
                    f"memory {self.memory:g} cannot hold a microbatch on rank {rank}, which takes {least:g}",
                    rank=rank,
                )

    def nodes(self, order: Sequence[int]) -> list[int]:
        """An order's actions by number."""
        m = self.microbatches
        following = [code * m for code in range(3 * self.stages)]
        nodes = []
        for code in order:
            nodes.append(following[code])
            following[code] += 1
        return nodes

    def fits(self, order: Sequence[int]) -> bool:
        """Whether no I stands before its F, no W before its I, and memory holds all that is live."""
        m, grows, memory = self.microbatches, self.grows, self.memory
        done = [0] * (3 * self.stages)
        live = 0.0
        for code in order:
            count = done[code]
            if code % 3 and done[code - 1] <= count:
                return False
            done[code] = count + 1
            live += grows[code * m + count]
            if live > memory:
                return False
        return True

    def peak(self, orders: Orders) -> float:
        """The most that a rank holds."""
        return max(
            float(np.cumsum([self.grows[node] for node in self.nodes(order)]).max(initial=0))
            for order in orders
        )

    def run(self, nodes: Sequence[Sequence[int]]) -> Outcome | None:
        """What the actions (by number) take; None where ranks wait for each other.

        Ranks go as far as they can in turn: who waits is woken by what it waits for.
        """
        m, durations = self.microbatches, self.durations
        source, taker, channel = self.source, self.taker, self.channel
        wire, latency, busy = self.wire, self.latency, [0.0] * self.num_channels
        count = len(durations)
        starts, ends = [-1.0] * count, [0.0] * count
        arrival = [-1.0] * count  # by the taking node
        at, clock = [0] * self.ranks, [0.0] * self.ranks
        waiting: dict[int, int] = {}
        ready = list(range(self.ranks))
        while ready:
            rank = ready.pop()
            now, order, place = clock[rank], nodes[rank], at[rank]
            for node in order[place:] if place else order:
                code = node // m
                if source[code] >= 0:
                    comes = arrival[node]
                    if comes < 0:
                        waiting[node] = rank
                        break
                    if comes > now:
                        now = comes
                starts[node] = now
                now += durations[node]
                ends[node] = now
                place += 1
                after = taker[code]
                if after >= 0:
                    target = node + (after - code) * m
                    line = channel[code]
                    if line < 0:
                        arrival[target] = now
                    elif self.has_wires:
                        busy[line] = max(now, busy[line]) + wire[code]
                        arrival[target] = busy[line] + latency[code]
                    else:
                        arrival[target] = now + latency[code]
                    if target in waiting:
                        ready.append(waiting.pop(target))
            at[rank], clock[rank] = place, now
        if any(place < len(order) for place, order in zip(at, nodes, strict=True)):
            return None
        firsts = [starts[order[0]] for order in nodes]
        if self.objective == "span":
            value = max(last - first for first, last in zip(firsts, clock, strict=True))
        else:
            value = max(clock)
        return Outcome(starts, ends, firsts, clock, value)

    def actions(self, orders: Orders) -> tuple[Actions, ...]:
        """The orders as a plan has them."""
        ops = np.array([OPS[op].code for op in KINDS], np.uint8)
        found = []
        for order in orders:
            nodes = np.array(self.nodes(order), np.int64)
            codes, microbatches = nodes // self.microbatches, nodes % self.microbatches
            found.append(Actions(ops[codes % 3], codes // 3, microbatches))
        return tuple(found)

    def coded(self, orders: Sequence[Actions]) -> list[list[int]]:
        """Orders of a plan; B, where there are any, as I and W."""
        letter = {OPS[op].code: place for place, op in enumerate(KINDS)}
        coded = []
        for order in orders:
            codes: list[int] = []
            for op, stage in zip(order.ops.tolist(), order.stages.tolist(), strict=True):
                if op in letter:
                    codes.append(3 * stage + letter[op])
                else:
                    codes += (3 * stage + 1, 3 * stage + 2)
            coded.append(codes)
        return coded
