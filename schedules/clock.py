"""Which graph of waiting does a plan make, and when does each action start in it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from schedules.costs import Costs, spread
from schedules.deadlock import deadlock
from schedules.dependencies import Ints, edge_of, route_of
from schedules.graph import Times, longest_paths
from schedules.index import Index
from schedules.ops import COMPUTE, OPS, TRANSFERS


class Input(NamedTuple):
    """What one stage takes along one edge from another rank: by microbatch, two actions' numbers."""

    value: str
    edge: int
    microbatches: Ints
    makers: Ints
    takers: Ints


class Graph(NamedTuple):
    """Nodes are an index's actions, by number, and what follows them. Edge i takes `lags[i]`, or 0.

    The last nodes are the runs of collectives (see `schedules.streams`): `runs` are these actions' numbers.
    """

    durations: Times
    sources: Ints
    targets: Ints
    lags: Times | None = None
    runs: Ints = np.empty(0, np.int64)

    @property
    def first_run(self) -> int:
        return len(self.durations) - len(self.runs)


def inputs(index: Index) -> Iterator[Input]:
    """All that ranks take from each other."""
    makers = {value: index.makers(value) for value in TRANSFERS}
    for (value, source), stage, takers in index.demands():
        if not index.is_local(source, stage):
            there = np.flatnonzero(takers >= 0)
            edge = index.edges.rows[edge_of(value, source, stage)]
            yield Input(value, edge, there, makers[value][source][there], takers[there])


def direct(index: Index, durations: Times, lags: Times | None = None) -> Graph:
    """Values go straight from maker to taker, and are `lags[edge]` on their way."""
    edges = _Edges()
    edges.add(*_in_turn(index))
    for one in inputs(index):
        edges.add(one.makers, one.takers, 0.0 if lags is None else float(lags[one.edge]))
    graph = edges.graph(durations)
    return _contracted(index, graph if lags is not None else graph._replace(lags=None))


def through_channels(
    index: Index, durations: Times, wires: Times, latencies: Times, *, rendezvous: bool, blocking: bool
) -> Graph:
    """Each transfer is a node of `wires[edge]`, behind the one before it on its channel.

        SEND ------> transfer 0 - - latency - - -> taker
                         |
        SEND ------> transfer 1 - - latency - - -> taker

    With `rendezvous` a transfer waits for its RECV, too, and what stands behind the SEND for the transfer;
    with `blocking` what stands behind the RECV does. With neither, it starts when its value is made.
    """
    edges, lasting, channels = _Edges(), [durations, np.zeros(1)], defaultdict(list)
    edges.add(*_in_turn(index))
    end, nodes = len(durations), len(durations) + 1  # a node behind all programs, then the transfers
    behind = np.arange(1, end + 1)
    behind[index.offsets[1:] - 1] = end
    for one in inputs(index):
        transfers, latency = nodes + np.arange(len(one.makers)), float(latencies[one.edge])
        nodes += len(transfers)
        lasting.append(np.full(len(transfers), wires[one.edge]))
        send, receive = (index.where[op][one.edge][one.microbatches] for op in TRANSFERS[one.value])
        leaves = send if rendezvous or blocking else one.makers
        edges.add(leaves, transfers)
        edges.add(transfers, one.takers, latency)
        if rendezvous:
            edges.add(receive, transfers)
            edges.add(transfers, behind[send], latency)
        if blocking:
            edges.add(transfers, behind[receive], latency)
        sending, receiving = (index.plan.placement[s] for s in route_of(one.value, index.edges[one.edge]))
        channels[sending, receiving, one.value].append((leaves, transfers))
    for parts in channels.values():
        leaves, transfers = (np.concatenate(part) for part in zip(*parts, strict=True))
        queue = transfers[np.argsort(leaves, kind="stable")]
        edges.add(queue[:-1], queue[1:])
    return _contracted(index, edges.graph(np.concatenate(lasting)))


class _Edges:
    """Edges of a graph, as they come."""

    def __init__(self) -> None:
        self.parts: list[tuple[Ints, Ints, Times]] = []

    def add(self, sources: Ints, targets: Ints, lag: float = 0.0) -> None:
        self.parts.append((sources, targets, np.full(len(sources), lag)))

    def graph(self, durations: Times) -> Graph:
        return Graph(durations, *(np.concatenate(column) for column in zip(*self.parts, strict=True)))


def start_times(index: Index, graph: Graph) -> Times:
    """By node. Raises a `ScheduleError` that draws the ring where ranks wait for each other.

    (Verified programs never do, as units either: what a pair's backward receives stands before its forward.)
    """
    starts, done = longest_paths(graph.durations, graph.sources, graph.targets, graph.lags)
    stuck = np.flatnonzero(~done[: int(index.offsets[-1])])
    if not stuck.size:
        second = index.second_of_pair
        starts[second] = starts[second - 1]
        return starts
    stuck_ranks, first = np.unique(index.ranks_of(stuck), return_index=True)
    heads = stuck[first]
    blocking = np.isin(graph.targets, heads) & ~done[graph.sources]
    waits = dict(zip(graph.targets[blocking].tolist(), graph.sources[blocking].tolist(), strict=True))
    raise deadlock(index, dict(zip(stuck_ranks.tolist(), heads.tolist(), strict=True)), waits)


def default_times(index: Index) -> Ints:
    """By number, each action's default cost."""
    return np.concatenate([_COSTS[program.ops] for program in index.plan.programs])


def times(index: Index, costs: Costs) -> Times:
    """By number, what each action takes; of a pair, the first takes it all."""
    durations = np.zeros(int(index.offsets[-1]))
    shape = (index.plan.num_stages, index.plan.microbatches)
    for op in COMPUTE:
        if index.has(op):
            there = index.where[op] >= 0
            durations[index.where[op][there]] = costs.times(op, *shape)[there]
    second = index.second_of_pair
    together = durations[second - 1] + durations[second]
    if costs.pair is not None:
        stage, microbatch = (
            np.concatenate([getattr(program, column) for program in index.plan.programs])[second - 1]
            for column in ("stages", "microbatches")
        )
        together = spread("pair", costs.pair, *shape)[stage, microbatch]
    durations[second - 1], durations[second] = together, 0.0
    return durations


def _in_turn(index: Index) -> tuple[Ints, Ints]:
    """Each action waits for the one before it in its program; a pair's second starts with the first."""
    inner = np.ones(int(index.offsets[-1]), np.bool_)
    inner[index.offsets[:-1]] = False  # a rank's first action has none before it
    inner[index.second_of_pair] = False
    targets = np.flatnonzero(inner)
    return targets - 1, targets


def _contracted(index: Index, graph: Graph) -> Graph:
    """Each pair as one node, its first action's."""
    second = index.second_of_pair
    if not second.size:
        return graph
    node = np.arange(len(graph.durations))
    node[second] = second - 1
    return graph._replace(sources=node[graph.sources], targets=node[graph.targets])


_COSTS = np.zeros(256, np.int64)
for _spec in OPS.values():
    _COSTS[_spec.code] = _spec.cost
