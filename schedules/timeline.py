"""When did each action run, and what did ranks do, wait for and hold meanwhile?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedules.action import Actions
from schedules.clock import inputs
from schedules.costs import Costs, spread
from schedules.dependencies import Ints
from schedules.errors import Standing
from schedules.index import Index
from schedules.ops import DEFERRED, GRADIENT, OPS
from schedules.plan import LIVES, Plan

Floats = npt.NDArray[np.float64]


class Bubble(NamedTuple):
    """Per rank, the time in which it computes nothing, by cause; in the unit of the costs.

    |  warm-up  |F0|F1|  gradient  |B0|..|  activation  |..| communication |B1|  drain  |
    0                          first to last action                              makespan

    Of the time before its first action, what it waits for its weights alone is communication; after the last
    one, what its own collectives still take.
    """

    warm_up: Floats
    """Before its first action."""
    drain: Floats
    """After its last one, until the last rank is done."""
    activation: Floats
    """Until an activation that it needs next is made, elsewhere."""
    gradient: Floats
    """Until a gradient that it needs next is made, elsewhere."""
    communication: Floats
    """From when what it needs next is made until it arrives, and its stage's weights are there; in its own
    SENDs and RECVs that block; and until its last collective is done."""

    @property
    def total(self) -> Floats:
        return np.asarray(np.sum(self, axis=0))


class Held(NamedTuple):
    """What a rank holds from `times[i]` on, until `times[i + 1]`: `live[i]` activations, `size[i]` bytes."""

    times: Floats
    live: Ints
    size: Floats


class Collectives(NamedTuple):
    """The UNSHARDs and REDUCE_GRADs of a timeline, rank after rank: columns, one row a collective."""

    actions: Actions
    ranks: Ints
    starts: Floats
    ends: Floats
    first_waits: Floats
    """Per rank, how long its first computation waited for its stage's weights alone; empty if no rank did."""


_NONE = np.empty(0)
NO_COLLECTIVES = Collectives(Actions([], [], []), _NONE.astype(np.int64), _NONE, _NONE, _NONE)


@dataclass(frozen=True, eq=False)
class Timeline:
    """What `simulate` found. Times are in the unit of the costs, from 0 when the first rank starts.

    `starts` and `ends` are columns over the actions of `plan` (orders without communication), rank after
    rank: those of rank r are at `offsets[r]` to `offsets[r + 1]`. Both actions of a pair have the pair's.
    `simulated` is the plan as it was given, with its communication.
    """

    plan: Plan
    costs: Costs
    starts: Floats
    ends: Floats
    rendezvous: bool = False
    blocking: bool = False
    simulated: Plan | None = None
    collectives: Collectives = NO_COLLECTIVES

    @cached_property
    def offsets(self) -> Ints:
        return np.cumsum([0, *(len(program) for program in self.plan.programs)], dtype=np.int64)

    @cached_property
    def makespan(self) -> float:
        """From the first start of any rank to the last end of any."""
        return float(self._all_done.max())

    @cached_property
    def span(self) -> float:
        """The longest that one rank takes from its own first start to its own last end (the papers' cost)."""
        return float((self._all_done - self._begins).max())

    @cached_property
    def busy(self) -> Floats:
        """Per rank, the time in which it computes."""
        return self._by_rank(self._durations)

    @cached_property
    def bubble(self) -> Bubble:
        """Per rank, where the rest of the makespan goes."""
        gaps = np.zeros(len(self.starts))
        gaps[1:] = self.starts[1:] - self.ends[:-1]
        gaps[self.offsets[:-1]] = 0.0  # before a rank's first action: warm-up
        gaps[self._index.second_of_pair] = 0.0
        made, by_gradient = self._last_input()
        waiting = np.clip(made - (self.starts - gaps), 0.0, gaps)
        parts = (waiting * ~by_gradient, waiting * by_gradient, gaps - waiting)
        by_rank = [self._by_rank(part) for part in parts]
        by_rank[-1] += (self._firsts - self._begins) + (self._all_done - self._lasts)
        return Bubble(self._begins, self.makespan - self._all_done, *by_rank)

    @cached_property
    def rate(self) -> float:
        """The share of ranks x makespan in which ranks wait."""
        return 1 - float(self.busy.sum()) / (self.plan.ranks * self.makespan) if self.makespan else 0.0

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the most activations held at once (`Plan.peak_live`)."""
        return self.plan.peak_live

    @cached_property
    def peak_bytes(self) -> Floats:
        """Per rank, the most bytes of activations held at once."""
        return np.array([self.held(rank).size.max(initial=0) for rank in range(self.plan.ranks)])

    def held(self, rank: int) -> Held:
        """The rank's saved activations over time: from the start of an F to the end of its B, or W."""
        order, actions = self.plan.programs[rank], slice(*self.offsets[rank : rank + 2].tolist())
        lives = LIVES[order.ops] * (not self.plan.forward_only)
        early = self._by_action("released_at_input", order)
        freed_late = np.where(order.ops == _ENDS_SPLIT, early, 0.0)
        share = lives + freed_late - np.where(order.ops == _SPLITS, early, 0.0)
        size = (share * self._by_action("activation_bytes", order)).cumsum()
        times = np.where(lives > 0, self.starts[actions], self.ends[actions])
        return Held(times, lives.cumsum(dtype=np.int64), size)

    @cached_property
    def critical_path(self) -> tuple[Standing, ...]:
        """(rank, position in its order, action) of those that set the makespan, first to last.

        Collectives among them stand at the position of the computation that follows.
        """
        from schedules.critical import critical_path

        return critical_path(self)

    def draw(self, *, color: bool | None = None) -> str:
        """As a text grid; in colour where stdout is a terminal, unless told. See `schedules.drawing`."""
        from schedules.drawing import draw_timeline

        return draw_timeline(self, color=color)

    def svg(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture, one lane a rank."""
        from schedules.svg import svg

        Path(path).write_text(svg(self), encoding="utf-8")

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace that Perfetto and chrome://tracing open; a unit of time becomes a microsecond."""
        from schedules.trace import chrome_trace

        Path(path).write_text(chrome_trace(self), encoding="utf-8")

    def _last_input(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """By number: when the last remote input of an action, or pair, was made; whether it's a gradient."""
        made, by_gradient = np.zeros(len(self.starts)), np.zeros(len(self.starts), np.bool_)
        second = np.zeros(len(self.starts), np.bool_)
        second[self._index.second_of_pair] = True
        for one in inputs(self._index):
            takers, ends = one.takers - second[one.takers], self.ends[one.makers]
            later = ends > made[takers]
            made[takers[later]] = ends[later]
            by_gradient[takers[later]] = one.value == GRADIENT
        return made, by_gradient

    @cached_property
    def _index(self) -> Index:
        return Index.of(self.plan)

    @cached_property
    def _ranks(self) -> Ints:
        return np.repeat(np.arange(self.plan.ranks), np.diff(self.offsets))

    @cached_property
    def _durations(self) -> Floats:
        durations = self.ends - self.starts
        durations[self._index.second_of_pair] = 0.0
        return durations

    def _by_action(self, cost: str, order: Actions) -> Floats:
        """A cost that has a value a stage and microbatch, by action of an order."""
        table = spread(cost, getattr(self.costs, cost), self.plan.num_stages, self.plan.microbatches)
        return np.asarray(table[order.stages, order.microbatches])

    def _by_rank(self, values: Floats) -> Floats:
        return np.asarray(np.bincount(self._ranks, values, self.plan.ranks), np.float64)

    @property
    def _firsts(self) -> Floats:
        return self.starts[self.offsets[:-1]]

    @property
    def _lasts(self) -> Floats:
        return self.ends[self.offsets[1:] - 1]

    @property
    def _begins(self) -> Floats:
        """Per rank, when it could start but for the weights that it gathers first."""
        begins: Floats = self._firsts.copy()
        if self.collectives.first_waits.size:
            begins -= self.collectives.first_waits
        return begins

    @property
    def _all_done(self) -> Floats:
        """Per rank, when its last action has ended, and its last collective."""
        done: Floats = self._lasts.copy()
        np.maximum.at(done, self.collectives.ranks, self.collectives.ends)
        return done


_SPLITS = next(spec.code for spec in OPS.values() if DEFERRED in spec.makes)
_ENDS_SPLIT = next(spec.code for spec in OPS.values() if DEFERRED in spec.own)
