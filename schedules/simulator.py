"""How long does a plan take on a given machine?"""

from __future__ import annotations

from schedules.action import Actions
from schedules.clock import Graph, direct, start_times, through_channels, times
from schedules.costs import Costs
from schedules.dependencies import Edges
from schedules.graph import Times
from schedules.index import Columns, Index
from schedules.lowering import lower
from schedules.plan import Plan
from schedules.streams import first_waits, with_collectives
from schedules.timeline import NO_COLLECTIVES, Collectives, Timeline
from schedules.verifier import check_orders, verify


def simulate(
    plan: Plan, costs: Costs | None = None, *, rendezvous: bool = False, blocking: bool = False
) -> Timeline:
    """When each action of a plan starts and ends. Costs are the default ones unless given.

    A rank does its actions in turn, each as soon as its inputs are there; an overlapped pair is one action,
    from when the inputs of both are there. As a rule a value leaves as soon as it is made, and is waited for
    where it is needed: ranks themselves spend no time on transfers. With `rendezvous` a value leaves once
    both ranks stand at its SEND and RECV, and the SEND holds its rank up until it has arrived; with
    `blocking` the RECV does. Both together are the strict model that `verify` proves free of deadlock.

    Collectives run beside the computation, a rank's one after the other, as the program has them: an UNSHARD
    from when the action before it has ended, a REDUCE_GRAD from when the computation before it has. A stage's
    computation waits for its UNSHARD, and the step for all of them. Replicas are taken to be equally fast.

    Raises a `ScheduleError` for a plan that does not hold (compute-only orders will do), for costs that do
    not fit it, and for overlapped pairs that wait for each other.
    """
    costs = Costs() if costs is None else costs
    index, graph = waiting(plan, costs, rendezvous=rendezvous, blocking=blocking)
    starts = start_times(index, graph)
    ends = starts + graph.durations
    ends[index.second_of_pair] = ends[index.second_of_pair - 1]
    collectives = _collectives(index, graph, starts, ends) if graph.runs.size else NO_COLLECTIVES
    actions = slice(int(index.offsets[-1]))
    starts, ends = starts[actions], ends[actions]
    if index.plan is not plan.compute_only:
        computes = index.computes()
        starts, ends = starts[computes], ends[computes]
    return Timeline(plan.compute_only, costs, starts, ends, rendezvous, blocking, plan, collectives)


def waiting(plan: Plan, costs: Costs, *, rendezvous: bool, blocking: bool) -> tuple[Index, Graph]:
    """What waits for what: among the orders alone where channels do not matter, else among whole programs."""
    index, graph = _without_collectives(plan, costs, rendezvous=rendezvous, blocking=blocking)
    return index, with_collectives(index, graph, costs) if index.has_collectives else graph


def _collectives(index: Index, graph: Graph, starts: Times, ends: Times) -> Collectives:
    """What the graph's last nodes say."""
    columns, numbers, runs = Columns.of(index.plan), graph.runs, slice(graph.first_run, None)
    actions = Actions(columns.ops[numbers], columns.stages[numbers], columns.microbatches[numbers])
    waits = first_waits(index, graph, starts)
    return Collectives(actions, index.ranks_of(numbers), starts[runs], ends[runs], waits)


def _without_collectives(
    plan: Plan, costs: Costs, *, rendezvous: bool, blocking: bool
) -> tuple[Index, Graph]:
    """The graph of computations and transfers, in which collectives take no time."""
    edges = Edges.of(plan.edges)
    wires, latencies = costs.wires(edges), costs.latencies(edges)
    if not (rendezvous or blocking or wires.any()):
        index = Index.of(plan.without_transfers)
        check_orders(index)
        return index, direct(index, times(index, costs), latencies if latencies.any() else None)
    if not plan.is_lowered:
        plan = lower(plan)
    verify(plan)
    index = Index.of(plan)
    return index, through_channels(
        index, times(index, costs), wires, latencies, rendezvous=rendezvous, blocking=blocking
    )
