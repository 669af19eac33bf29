"""How do collectives run beside a rank's computation?"""

from __future__ import annotations

import numpy as np

from schedules.clock import Graph
from schedules.costs import Costs
from schedules.dependencies import Ints
from schedules.graph import Times
from schedules.index import Columns, Index
from schedules.ops import OPS, REDUCE_GRAD, UNSHARD
from schedules.plan import IS_COMPUTE

TIMED = (UNSHARD, REDUCE_GRAD)
"""Those that communicate. A RESHARD takes no time: it gives memory back."""


def with_collectives(index: Index, graph: Graph, costs: Costs) -> Graph:
    """The graph with a node behind all others for what each collective takes on its rank's own stream.

    program     0UNSHARD0 --> 1UNSHARD0 --> 0F0 --> 1F0        Where it stands in the program, a collective
                    |             |          ^       ^         takes no time: there it is only started.
    stream       run 0 ------> run 1 --------|-------'         Runs are one after the other, and a stage's
                    '------------------------'                 next computation waits for its UNSHARD's.

    What starts a REDUCE_GRAD is the end of the computation before it: a SEND between them may block its rank,
    but the gradient is there.
    """
    columns = Columns.of(index.plan)
    numbers = np.flatnonzero(np.isin(columns.ops, [OPS[op].code for op in TIMED]))
    runs = len(graph.durations) + np.arange(len(numbers))
    in_turn = np.diff(columns.ranks[numbers]) == 0
    gathers, first_uses = _first_uses(index, columns, numbers)
    starters = _starters(index, columns, numbers)
    sources = [graph.sources, starters, runs[:-1][in_turn], runs[gathers]]
    targets = [graph.targets, runs, runs[1:][in_turn], first_uses]
    lags = graph.lags
    if lags is not None:
        lags = np.concatenate([lags, np.zeros(sum(map(len, sources[1:])))])
    durations = np.concatenate([graph.durations, _durations(index, columns, numbers, costs)])
    return Graph(durations, np.concatenate(sources), np.concatenate(targets), lags, numbers)


def first_waits(index: Index, graph: Graph, starts: Times) -> Times:
    """Per rank, how long its first computation waits for the stage's weights when all else is there."""
    computes = np.flatnonzero(IS_COMPUTE[Columns.of(index.plan).ops])
    _, places = np.unique(index.ranks_of(computes), return_index=True)
    firsts = computes[places]
    lags = np.zeros(len(graph.sources)) if graph.lags is None else graph.lags
    others = np.isin(graph.targets, firsts) & (graph.sources < graph.first_run)
    ready = np.zeros(len(starts))
    ended = starts[graph.sources[others]] + graph.durations[graph.sources[others]] + lags[others]
    np.maximum.at(ready, graph.targets[others], ended)
    waits: Times = starts[firsts] - ready[firsts]
    return waits


def _starters(index: Index, columns: Columns, numbers: Ints) -> Ints:
    """By collective, the action whose end starts it."""
    computes = np.flatnonzero(IS_COMPUTE[columns.ops])
    before = computes[np.searchsorted(computes, numbers) - 1]
    before = before - np.isin(before, index.second_of_pair)
    return np.where(columns.ops[numbers] == OPS[REDUCE_GRAD].code, before, numbers)


def _first_uses(index: Index, columns: Columns, numbers: Ints) -> tuple[Ints, Ints]:
    """Which of the collectives are UNSHARDs, and for each the stage's next computation."""
    gathers = np.flatnonzero(columns.ops[numbers] == OPS[UNSHARD].code)
    computes = np.flatnonzero(IS_COMPUTE[columns.ops])
    span = len(columns.ops)  # a stage's numbers in one block each, so that one search serves them all
    keys = columns.stages.astype(np.int64) * span + np.arange(span)
    by_key = computes[np.argsort(keys[computes])]
    found = np.searchsorted(keys[by_key], keys[numbers[gathers]])
    first_uses = by_key[np.minimum(found, len(by_key) - 1)]
    used = columns.stages[first_uses] == columns.stages[numbers[gathers]]  # or resharded without any use
    used &= first_uses > numbers[gathers]
    gathers, first_uses = gathers[used], first_uses[used]
    return gathers, first_uses - np.isin(first_uses, index.second_of_pair)


def _durations(index: Index, columns: Columns, numbers: Ints, costs: Costs) -> Times:
    durations = np.zeros(len(numbers))
    for op in TIMED:
        rows = np.flatnonzero(columns.ops[numbers] == OPS[op].code)
        table = costs.times(op, index.plan.num_stages, index.plan.microbatches)
        durations[rows] = table[columns.stages[numbers[rows]], columns.microbatches[numbers[rows]]]
    return durations
