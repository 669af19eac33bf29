"""Traces, and runs of them, made of what the simulator says: no engine, no clock."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipe.timeline.events import Writer
from pipe.timeline.trace import Clock, Header, Member, Sends, Trace
from schedules import (
    ACTIVATION,
    COMPUTE,
    GRADIENT,
    OPS,
    Action,
    Costs,
    Edges,
    Plan,
    Timeline,
    build,
    get,
    needs,
)
from schedules import simulate as simulate_plan
from schedules.plan import LIVES

_LETTERS = {ACTIVATION: "a", GRADIENT: "g"}
_LAYERS = 3  # a stage
_FIRST_SECOND = 1_790_000_000.0


def plan_of(name: str, ranks: int, microbatches: int) -> Plan:
    """A named schedule's plan, with its communication."""
    schedule = get(name)
    return build(schedule, schedule.placement(ranks), microbatches)


def trace(plan: Plan, costs: Costs | None = None, step: int = 0, **changes: Any) -> Trace:
    """The trace of a step that ran just as the simulator says: `of_timeline`."""
    return of_timeline(simulate_plan(plan, costs), step, **changes)


def of_timeline(
    timeline: Timeline,
    step: int = 0,
    *,
    scale: float = 1000.0,
    agreement: float = 200.0,
    optimizer: float = 1500.0,
    replicas: int = 1,
    memory: bool = False,
    **changes: Any,
) -> Trace:
    """A unit of the timeline's time takes `scale` us. Before it is the agreement, behind it the optimizer.

    Each replica does the same. `memory`: whether bytes are known. Others: fields of the header. Stages have
    three layers each, if none are given.
    """
    plan = timeline.plan
    end = agreement + timeline.makespan * scale
    members, made = [], _made(timeline)
    for rank in range(plan.ranks):
        lane = _Lane(timeline, rank, made, scale, agreement)
        lane.add("c", 0.0, agreement)
        lane.compute()
        lane.add("o", max(lane.done, lane.reduce()), round(end + optimizer, 1))
        members += [lane.member(replica, replicas, memory) for replica in range(replicas)]
    header = Header(
        step=step,
        wall_time=_FIRST_SECOND + step,
        options=f"chunks={plan.microbatches}",
        schedule="synthetic",
        ranks=plan.ranks,
        replicas=replicas,
        microbatches=plan.microbatches,
        placement=plan.placement,
        layers=tuple((_LAYERS * stage, _LAYERS * (stage + 1)) for stage in range(plan.num_stages)),
        layer_names=tuple(f"{layer} Linear" for layer in range(_LAYERS * plan.num_stages)),
        plan=(timeline.simulated or plan).to_csv(),
        duration=round(end + optimizer, 1),
        clock=Clock("cpu", (0.0,) * len(members)),
        scalars={"loss": 4.0 / (step + 1), "lr": 3e-4, "grad_norm": 1.5},
    )
    return Trace(dataclasses.replace(header, **changes), tuple(members))


def write_run(
    logdir: str | os.PathLike[str],
    plan: Plan | None = None,
    costs: Costs | None = None,
    *,
    steps: int = 5,
    every: int = 1,
    noise: float = 0.03,
    **changes: Any,
) -> list[Trace]:
    """Writes a run's traced steps 0, every, ..., and its scalars, and returns their traces.

    Each action takes up to `noise` more or less than the costs say, in each step anew.
    """
    plan = plan_of("1f1b", 2, 4) if plan is None else plan
    costs = Costs() if costs is None else costs
    random, written = np.random.default_rng(0), []
    writer = Writer(Path(logdir))
    for step in range(0, steps * every, every):
        one = trace(plan, _noisy(costs, plan, random, noise), step, **changes)
        writer.write(one, {"loss": one.header.scalars["loss"], "lr": one.header.scalars["lr"]})
        written.append(one)
    writer.close()
    return written


def _noisy(costs: Costs, plan: Plan, random: np.random.Generator, noise: float) -> Costs:
    shape = (plan.num_stages, plan.microbatches)
    ops: dict[str, Any] = {
        op: costs.times(op, *shape) * random.uniform(1 - noise, 1 + noise, shape) for op in COMPUTE
    }
    return Costs(**ops, latency=_latencies(plan, costs), unshard=costs.unshard, reduce_grad=costs.reduce_grad)


def _latencies(plan: Plan, costs: Costs) -> dict[tuple[int, int], float]:
    """By edge."""
    edges = Edges.of(plan.edges)
    return dict(zip(edges, costs.latencies(edges).tolist(), strict=True))


def shifted(member: Member, by: float) -> Member:
    """The same, so many microseconds later on the clock."""
    return dataclasses.replace(
        member,
        begin=member.begin + by,
        finish=member.finish + by,
        start=member.start + by,
        end=member.end + by,
        sends=dataclasses.replace(member.sends, left=member.sends.left + by),
    )


class _Lane:
    """The events of a rank, as they come."""

    def __init__(
        self,
        timeline: Timeline,
        rank: int,
        made: dict[tuple[str, int, int], float],
        scale: float,
        shift: float,
    ) -> None:
        self.timeline, self.plan, self.rank, self.made = timeline, timeline.plan, rank, made
        self.scale, self.shift = scale, shift
        self.latencies = _latencies(self.plan, timeline.costs)
        self.rows: list[tuple[Any, ...]] = []
        self.sends: list[tuple[Any, ...]] = []
        self.done = shift
        self.live = 0

    def add(
        self,
        kind: str,
        start: float,
        end: float,
        stage: int = -1,
        microbatch: int = -1,
        peer: int = -1,
        value: str = "-",
    ) -> None:
        self.rows.append((kind, start, end, stage, microbatch, peer, value, self.live))

    def compute(self) -> None:
        low = int(self.timeline.offsets[self.rank])
        program, firsts = list(self.plan.programs[self.rank]), set(self.plan.pairs[self.rank])
        for position in range(len(program)):
            if position - 1 not in firsts:
                actions = program[position : position + 1 + (position in firsts)]
                start, end = (
                    self._time(times[low + position]) for times in (self.timeline.starts, self.timeline.ends)
                )
                self._unit(actions, start, end)

    def reduce(self) -> float:
        """Adds the reductions, and says when the last is done."""
        collectives, done = self.timeline.collectives, 0.0
        for row in np.flatnonzero(collectives.ranks == self.rank).tolist():
            action = collectives.actions[row]
            start, end = self._time(collectives.starts[row]), self._time(collectives.ends[row])
            if action.op == "REDUCE_GRAD":
                self.add("g", start, end, action.stage, action.microbatch)
                done = end
        return done

    def member(self, replica: int, replicas: int, memory: bool) -> Member:
        rows = sorted(self.rows, key=lambda row: row[1])
        kind, start, end, stage, microbatch, peer, value, live = (
            list(column) for column in zip(*rows, strict=True)
        )
        sends = self.sends or [(0, 0, 0, "-", 0.0)]
        sent = [np.array(column)[: len(self.sends)] for column in zip(*sends, strict=True)]
        return Member(
            member=self.rank * replicas + replica,
            rank=self.rank,
            replica=replica,
            host="localhost",
            device="cpu",
            begin=0.0,
            finish=max(end),
            kind=np.array(kind, "<U1"),
            stage=np.array(stage),
            microbatch=np.array(microbatch),
            peer=np.array(peer),
            value=np.array(value, "<U1"),
            start=np.array(start),
            end=np.array(end),
            live=np.array(live),
            memory=2**30 + 2**20 * np.array(live) if memory else None,
            sends=Sends(*sent),
        )

    def _unit(self, actions: list[Action], start: float, end: float) -> None:
        """An action, or both of an overlapped pair one after the other: its receives, and itself."""
        for action in actions:
            self._receive(action, start)
        if self.timeline.collectives.ranks.size and self.done < start:
            self.add("u", self.done, start, actions[0].stage, actions[0].microbatch)
        times = [float(self.timeline.costs.times(a.op, *self._shape)[a.stage, a.microbatch]) for a in actions]
        cuts = [start, *(start + (end - start) * np.cumsum(times) / (sum(times) or 1.0))]
        cuts[-1] = end
        for action, begin, stop in zip(actions, cuts[:-1], cuts[1:], strict=True):
            self.live += int(LIVES[OPS[action.op].code])
            self.add(action.op, begin, stop, action.stage, action.microbatch)
        for action in actions:
            self.sends += list(self._sent(action, end))
        self.done = end

    def _receive(self, action: Action, start: float) -> None:
        for need in needs(action.op, action.stage, self.plan.edges):
            peer = self.plan.placement[need.source]
            if need.value in _LETTERS and peer != self.rank:
                edge = (min(need.source, action.stage), max(need.source, action.stage))
                made = self.made[need.value, need.source, action.microbatch]
                arrival = min(start, max(self.done, self._time(made + self.latencies[edge])))
                letter = _LETTERS[need.value]
                self.add("r", self.done, arrival, action.stage, action.microbatch, peer, letter)
                self.done = arrival

    def _sent(self, action: Action, when: float) -> Iterator[tuple[Any, ...]]:
        """What other ranks take of it."""
        for value, letter in _LETTERS.items():
            if value in OPS[action.op].makes:
                for one, other in self.plan.edges:
                    source, to = (one, other) if value == ACTIVATION else (other, one)
                    if source == action.stage and self.plan.placement[to] != self.rank:
                        yield action.microbatch, source, to, letter, when

    @property
    def _shape(self) -> tuple[int, int]:
        return self.plan.num_stages, self.plan.microbatches

    def _time(self, time: float) -> float:
        return round(self.shift + float(time) * self.scale, 1)


def _made(timeline: Timeline) -> dict[tuple[str, int, int], float]:
    """By value, stage and microbatch, when it is made."""
    actions = (action for program in timeline.plan.programs for action in program)
    return {
        (value, action.stage, action.microbatch): end
        for action, end in zip(actions, timeline.ends.tolist(), strict=True)
        for value in _LETTERS
        if value in OPS[action.op].makes
    }
