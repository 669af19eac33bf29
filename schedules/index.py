"""Where does each action of a plan stand?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schedules.action import Action, without_peer
from schedules.dependencies import Edges, Ints, Need, chain_peers, edge_of, needs, route_of
from schedules.errors import ScheduleError
from schedules.ops import ACTIVATION, COLLECTIVES, MAKERS, OPS, TRANSFERS, F
from schedules.plan import IS_COMPUTE, Plan


class Demand(NamedTuple):
    """What one op of one stage needs: `takers[m]` is the number of its action of microbatch m, or -1."""

    need: Need
    stage: int
    takers: Ints


@dataclass(frozen=True)
class Index:
    """A plan's actions, numbered through: rank 0's from 0, then rank 1's, ...

                  offsets[1]
        rank 0  0 1 2 | rank 1  3 4 5 6 |          where[F][stage, microbatch]        == number, or -1
                0F0 ...         1F0 ...            where[SEND_F][edge, microbatch]    == number, or -1

    So `where[F][2] < where[B][2]` compares positions for all microbatches at once, on one rank. A stage may
    have several collectives of one microbatch, so `where` has no table of these.
    """

    plan: Plan
    edges: Edges
    offsets: Ints
    where: dict[str, Ints]
    counts: dict[str, int]
    """How many actions of each op there are."""

    @classmethod
    def of(cls, plan: Plan) -> Index:
        """Refuses an action of another rank's stage, of no such microbatch or edge, and one done twice."""
        offsets = np.cumsum([0, *(len(program) for program in plan.programs)], dtype=np.int64)
        index = cls(plan, Edges.of(plan.edges), offsets, {}, {})
        columns = Columns.of(plan)
        for op, spec in OPS.items():
            numbers = np.flatnonzero(columns.ops == spec.code)
            index.counts[op] = numbers.size
            if spec.collective:
                _check_collectives(index, columns, numbers, op)
                continue
            rows = _stage_rows if spec.is_compute else _edge_rows
            num_rows = plan.num_stages if spec.is_compute else len(plan.edges)
            index.where[op] = _scattered(index, columns, numbers, rows, num_rows)
        return index

    @cached_property
    def second_of_pair(self) -> Ints:
        """The numbers of the pairs' second actions."""
        firsts = [np.array(pairs, np.int64) for pairs in self.plan.pairs]
        lows = self.offsets[:-1].tolist()
        return np.concatenate([low + 1 + places for low, places in zip(lows, firsts, strict=True)])

    def computes(self) -> npt.NDArray[np.bool_]:
        """By number: whether it is a computation."""
        return np.concatenate([IS_COMPUTE[program.ops] for program in self.plan.programs])

    @property
    def training(self) -> bool:
        return not self.plan.forward_only

    def has(self, op: str) -> bool:
        """Whether the plan has any such action. (An op that it lacks has a table without memory.)"""
        return self.counts[op] > 0

    @property
    def has_collectives(self) -> bool:
        return any(map(self.has, COLLECTIVES))

    def rank_of(self, number: int) -> int:
        return int(np.searchsorted(self.offsets, number, side="right")) - 1

    def ranks_of(self, numbers: Ints) -> Ints:
        ranks: Ints = np.searchsorted(self.offsets, numbers, side="right") - 1
        return ranks

    def locate(self, number: int) -> tuple[int, int, Action]:
        """The (rank, position, action) of a number."""
        rank = self.rank_of(number)
        position = int(number) - int(self.offsets[rank])
        return rank, position, self.plan.programs[rank][position]

    def error(self, number: int, reason: str) -> ScheduleError:
        """An error that names rank, position and action."""
        rank, position, action = self.locate(number)
        return ScheduleError(
            f"rank {rank}, #{position} {action}: {reason}", rank=rank, position=position, action=action
        )

    def makers(self, value: str) -> Ints:
        """[stage, microbatch]: the compute action that makes a value. Of two, the later."""
        tables = [self.where[op] for op in MAKERS[value] if self.has(op)]
        if not tables:
            return self.where[MAKERS[value][0]]
        latest: Ints = tables[0] if len(tables) == 1 else np.maximum.reduce(tables)
        return latest

    def arrivals(self, value: str, sending: int, receiving: int) -> Ints:
        """[microbatch]: the receive that brings a value to a stage."""
        row = self.edges.rows[edge_of(value, sending, receiving)]
        receives: Ints = self.where[TRANSFERS[value][1]][row]
        return receives

    def is_local(self, stage: int, other: int) -> bool:
        """Whether two stages are on one rank: then there is no transfer."""
        return self.plan.placement[stage] == self.plan.placement[other]

    def remote_edges(self) -> Ints:
        """The rows of the edges that join two ranks."""
        placement = self.plan.placement
        rows = [row for row, (s, d) in enumerate(self.edges) if placement[s] != placement[d]]
        return np.array(rows, np.int64)

    def demands(self) -> Iterator[Demand]:
        """All that the plan's actions need, by op and stage."""
        for op, spec in OPS.items():
            if spec.collective or not self.has(op):
                continue
            for row, takers in enumerate(self.where[op]):
                stage = (
                    row if spec.carries is None else route_of(spec.carries, self.edges[row])[not spec.sends]
                )
                for need in needs(op, stage, self.edges):
                    yield Demand(need, stage, takers)


class Columns(NamedTuple):
    """The programs, one after the other."""

    ops: npt.NDArray[np.uint8]
    stages: npt.NDArray[np.int32]
    microbatches: npt.NDArray[np.int32]
    peers: npt.NDArray[np.int32]
    ranks: npt.NDArray[np.int32]

    @classmethod
    def of(cls, plan: Plan) -> Columns:
        programs = plan.programs
        ranks = np.repeat(np.arange(len(programs), dtype=np.int32), [len(program) for program in programs])
        return cls(
            np.concatenate([program.ops for program in programs]),
            np.concatenate([program.stages for program in programs]),
            np.concatenate([program.microbatches for program in programs]),
            np.concatenate([program.peers for program in programs]),
            ranks,
        )


_Rows = Callable[[Index, Columns, Ints], Ints]


def _scattered(index: Index, columns: Columns, numbers: Ints, rows: _Rows, num_rows: int) -> Ints:
    shape = (num_rows, index.plan.microbatches)
    if not numbers.size:
        return np.broadcast_to(np.int64(-1), shape)
    _check_home(index, columns, numbers)
    cells = rows(index, columns, numbers) * shape[1] + columns.microbatches[numbers]
    table = np.full(shape, -1, np.int64)
    flat = table.reshape(-1)
    flat[cells[::-1]] = numbers[::-1]  # backwards, so that of an action done twice the first stays
    twice = np.flatnonzero(flat[cells] != numbers)
    if twice.size:
        first = index.locate(int(flat[cells[twice[0]]]))
        raise index.error(int(numbers[twice[0]]), f"done already, at #{first[1]} of rank {first[0]}")
    return table


def _check_home(index: Index, columns: Columns, numbers: Ints) -> None:
    """Each action's stage lives on its rank, and its microbatch exists."""
    plan, stages = index.plan, columns.stages[numbers]
    _refuse(index, numbers, stages >= plan.num_stages, f"the plan has {plan.num_stages} stages")
    _refuse(
        index,
        numbers,
        columns.microbatches[numbers] >= plan.microbatches,
        f"the plan has {plan.microbatches} microbatches",
    )
    strangers = np.flatnonzero(np.array(plan.placement)[stages] != columns.ranks[numbers])
    if strangers.size:
        home = plan.placement[stages[strangers[0]]]
        raise index.error(int(numbers[strangers[0]]), f"stage {stages[strangers[0]]} lives on rank {home}")


def _check_collectives(index: Index, columns: Columns, numbers: Ints, op: str) -> None:
    if numbers.size:
        _check_home(index, columns, numbers)
        _check_no_peer(index, columns, numbers, op)


def _check_no_peer(index: Index, columns: Columns, numbers: Ints, op: str) -> None:
    _refuse(index, numbers, columns.peers[numbers] >= 0, f"{without_peer(op)} has no peer")


def _stage_rows(index: Index, columns: Columns, numbers: Ints) -> Ints:
    _check_no_peer(index, columns, numbers, F)
    return columns.stages[numbers].astype(np.int64)


def _edge_rows(index: Index, columns: Columns, numbers: Ints) -> Ints:
    """The edges that these actions, all of one op, travel on."""
    plan, ops = index.plan, columns.ops[numbers]
    stages, peers = columns.stages[numbers].astype(np.int64), columns.peers[numbers].astype(np.int64)
    peers = np.where(peers < 0, chain_peers(ops, stages), peers)
    spec = next(spec for spec in OPS.values() if spec.code == ops[0])
    at_source = (spec.carries == ACTIVATION) == spec.sends
    source, destination = (stages, peers) if at_source else (peers, stages)
    rows = _rows_by_key(index, source, destination)
    _refuse(index, numbers, rows < 0, f"no edge: the plan's edges are {_shown(index.edges)}")
    placement = np.array(plan.placement)
    local = placement[source] == placement[destination]
    _refuse(index, numbers, local, "both stages are on this rank, where nothing is sent")
    return rows


def _rows_by_key(index: Index, source: Ints, destination: Ints) -> Ints:
    """Each pair's row in the edges, -1 where there is no such edge."""
    if not index.edges:
        return np.full(len(source), -1, np.int64)
    stages = index.plan.num_stages
    exists = (source >= 0) & (source < stages) & (destination >= 0) & (destination < stages)
    keys = np.array([s * stages + d for s, d in index.edges], np.int64)
    by_key = np.argsort(keys)
    wanted = np.where(exists, source * stages + destination, -1)
    found = by_key[np.minimum(np.searchsorted(keys, wanted, sorter=by_key), len(keys) - 1)]
    return np.where(keys[found] == wanted, found, -1)


def _refuse(index: Index, numbers: Ints, bad: npt.NDArray[Any], reason: str) -> None:
    if bad.any():
        raise index.error(int(numbers[np.flatnonzero(bad)[0]]), reason)


def _shown(edges: Edges) -> str:
    text = " ".join(f"{source}-{destination}" for source, destination in edges[:12])
    return (text or "none") + (" ..." if len(edges) > 12 else "")
