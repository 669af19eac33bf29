"""Which order is best for these costs in this memory?"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import NamedTuple

from schedules.action import Actions
from schedules.bounds import lower_bound
from schedules.dependencies import chain
from schedules.errors import ScheduleError
from schedules.family import FAMILY
from schedules.greedy import Rule, construct, rules
from schedules.instance import Instance, Objective
from schedules.local_search import improve
from schedules.pairs import Pairs
from schedules.plan import Plan
from schedules.schedule import Problem, Schedule
from schedules.shapes import line
from schedules.simulator import simulate


@dataclass(frozen=True)
class Auto:
    """The best order found for the problem's costs, in the memory that there is: one stage a rank, or more.

        rank 0  F0 F1 .  .  .  I0 W0 I1 W1
        rank 1  .  F0 F1 .  I0 .  I1 W0 W1
        rank 2  .  .  F0 I0 F1 I1 W0 W1 .

    (With equal costs and memory enough that is ZB-H1's order: the lower bound proves it best.) First come the
    named schedules that fit, then the orders of some fifty rules of thumb, then `iterations` more: rules that
    see perturbed costs, and moves on the critical path. Never worse than the best named schedule that fits,
    and done at once where the lower bound is reached. No clock is looked at, so all ranks find the same plan.

    `memory` is what a rank can hold, in the unit of the costs' `activation_bytes`: microbatches of a stage,
    unless these say otherwise. The problem's own `memory` counts too, the lesser of both; without either
    there is no limit. `iterations`, unless given, are 5000, or fewer where there are more than 400 actions.
    `objective` is what is minimised: the makespan (first start of any rank to last end of any), or the span
    (the longest that one rank takes from its own first start to its own last end; the papers' cost).

    Every backward is split, except in a named schedule's order. With several stages a rank the rules are less
    good, and a named schedule is often what is found.
    """

    memory: float | None = None
    iterations: int | None = None
    seed: int = 0
    objective: Objective = "makespan"

    def __post_init__(self) -> None:
        if self.memory is not None and not self.memory > 0:
            raise ScheduleError(f"auto: a memory of {self.memory} holds nothing")
        if self.iterations is not None and self.iterations < 0:
            raise ScheduleError(f"auto: {self.iterations} iterations; 0 or more will do")
        if self.objective not in ("makespan", "span"):
            raise ScheduleError(f"auto: objective {self.objective!r} is neither 'makespan' nor 'span'")

    def placement(self, ranks: int) -> tuple[int, ...]:
        return line(ranks)

    def orders(self, problem: Problem) -> Sequence[Actions]:
        return self.search(problem).orders

    def pairs(self, problem: Problem) -> Pairs:
        return self.search(problem).pairs

    def search(self, problem: Problem) -> Found:
        """What is found, and how good it is. The last answers are kept.

        Raises a `ScheduleError` where memory does not hold one microbatch.
        """
        return _search(self, problem)


@dataclass(frozen=True)
class Found:
    """What a search came to. `value` and `bound` are in the costs' unit of time, `peak` in that of memory."""

    orders: tuple[Actions, ...]
    pairs: Pairs
    objective: Objective
    value: float
    bound: float
    """No order in this memory has a lower value."""
    peak: float
    """The most that a rank holds."""
    method: str
    """Where the order is from: `zb_h1`, `1f1b, split` (each B), `rule`, `perturbed rule`, `local search`."""
    tried: int
    """How many iterations there were."""

    @property
    def gap(self) -> float:
        """The share of the bound by which the value is above it: 0 where the order is proven best."""
        return self.value / self.bound - 1 if self.bound else 0.0


@lru_cache(maxsize=8)
def _search(auto: Auto, problem: Problem) -> Found:
    limits = [limit for limit in (auto.memory, problem.memory) if limit is not None]
    instance = Instance(problem, auto.objective, min(limits, default=float("inf")))
    bound = lower_bound(instance)
    known = _named(instance, bound)
    best = min(known, key=lambda found: (found.value, found.peak), default=None)
    if best is not None and best.value <= best.bound:
        return best
    search = _Search(instance, Random(auto.seed), bound)
    search.run(_iterations(auto, instance), known)
    if best is not None and best.value <= search.best.value:
        return replace(best, tried=search.tried)
    value, orders, method, _ = search.best
    peak, bound = instance.peak(orders), _least(bound, value)
    return Found(instance.actions(orders), (), auto.objective, value, bound, peak, method, search.tried)


def _iterations(auto: Auto, instance: Instance) -> int:
    return min(_MOST, _LOOKS // len(instance.durations)) if auto.iterations is None else auto.iterations


def _named(instance: Instance, bound: float) -> list[Found]:
    """The named schedules that can use the placement, and fit, each with its B and its pairs."""
    problem, objective, found = instance.problem, instance.objective, []
    for name, schedule in _schedules(problem):
        try:
            orders = tuple(map(Actions.of, schedule.orders(problem)))
        except ScheduleError:  # the placement is not for it
            continue
        pairs = schedule.pairs(problem) if hasattr(schedule, "pairs") else ()
        plan = Plan(problem.placement, problem.microbatches, orders, chain(problem.num_stages), pairs)
        timeline = simulate(plan, instance.costs)
        value, peak = float(getattr(timeline, objective)), float(timeline.peak_bytes.max())
        if peak <= instance.memory:
            found.append(Found(orders, pairs, objective, value, _least(bound, value), peak, name, 0))
    return found


def _schedules(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    rounds = problem.num_stages // problem.ranks
    for name, make in FAMILY.items():
        yield name, make(rounds) if "v" in make.__dataclass_fields__ else make()


def _least(bound: float, value: float) -> float:
    """The bound, or a value that reaches it: sums of floats differ with their order."""
    return bound if value > bound * _ROUNDING else value


class _Candidate(NamedTuple):
    value: float
    orders: list[list[int]]
    method: str
    rule: Rule | None = None


class _Search:
    """Named schedules and rules, then rounds: perturbed rules and moves from the best of them, twice of three
    times; else moves from the best of all.
    """

    def __init__(self, instance: Instance, random: Random, bound: float) -> None:
        self.instance, self.random, self.enough = instance, random, bound * _ROUNDING
        self.candidates: list[_Candidate] = []
        self.tried = 0

    @property
    def best(self) -> _Candidate:
        return self.candidates[0]

    @property
    def is_over(self) -> bool:
        return bool(self.candidates) and self.best.value <= self.enough

    def run(self, iterations: int, known: Sequence[Found]) -> None:
        for found in known:
            self.add(self.instance.coded(found.orders), f"{found.method}, split")
        for rule in rules(self.instance):
            if self.is_over:
                return
            self.add(construct(self.instance, rule), "rule", rule)
        turn = 0
        while self.tried < iterations and not self.is_over:
            left = iterations - self.tried
            start = self.best if turn % 3 == 0 else self.perturbed(min(left, _PERTURBED))
            self.improve(start, min(iterations - self.tried, _MOVES))
            turn += 1

    def add(self, orders: list[list[int]], method: str, rule: Rule | None = None) -> _Candidate:
        outcome = self.instance.run([self.instance.nodes(order) for order in orders])
        assert outcome is not None, "no ranks wait in a ring: the orders came about as time went on"
        found = _Candidate(outcome.value, orders, method, rule)
        insort(self.candidates, found, key=lambda candidate: candidate.value)
        return found

    def perturbed(self, number: int) -> _Candidate:
        """The best of so many orders of good rules to which each stage and op takes some other time."""
        rules = [candidate.rule for candidate in self.candidates if candidate.rule][:_GOOD]
        instance, m = self.instance, self.instance.microbatches
        found = []
        for _ in range(number):
            rule = rules[int(self.random.random() * len(rules))]
            size = _SIZES[int(self.random.random() * len(_SIZES))]
            factors = [1 + size * (2 * self.random.random() - 1) for _ in range(3 * instance.stages)]
            durations = [time * factors[node // m] for node, time in enumerate(instance.durations)]
            found.append(self.add(construct(instance, rule, durations), "perturbed rule", rule))
        self.tried += number
        return min(found, key=lambda candidate: candidate.value)

    def improve(self, start: _Candidate, moves: int) -> None:
        orders, tried = improve(self.instance, start.orders, moves, self.random, self.enough)
        self.tried += tried
        self.add(orders, "local search")


_ROUNDING = 1 + 1e-12
_GOOD = 20
"""So many of the best rules are perturbed."""
_SIZES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""By these shares of an action's time."""
_MOST, _LOOKS = 5000, 2_000_000
"""The default number of iterations, and that of actions in all of them."""
_PERTURBED, _MOVES = 20, 150
"""Iterations of a round."""
