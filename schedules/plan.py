"""What is a plan: all ranks' programs, where the stages live and which edges join them?"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schedules.action import Action, Actions
from schedules.dependencies import Edge, Edges, chain
from schedules.errors import ScheduleError
from schedules.ops import (
    ACTIVATION,
    COLLECTIVES,
    COMMUNICATION,
    COMPUTE,
    OPS,
    REDUCE_GRAD,
    RESHARD,
    SAVED,
    UNSHARD,
    Op,
)
from schedules.pairs import Pairs, moved, text_of_cells, whole_pairs
from schedules.schedule import check_microbatches, check_placement, stages_by_rank
from schedules.table import Table, csv_cells, line_cells, read


@dataclass(frozen=True)
class Plan:
    """What every rank does in one step, a value: `schedules.verify` says whether it works.

    `placement[s]` is the rank of stage s, `programs[r]` what rank r does. As text, one line a rank:

        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1

    `pairs[r]` holds the position in `programs[r]` of each overlapped pair's first action, `(0F7;1B3)` as
    text: a forward and the B or I right behind it, which hardware may run at once. The engine runs them in
    turn. What is no such pair is dropped when a plan is made: a program may be changed without its pairs.
    """

    placement: tuple[int, ...]
    microbatches: int
    programs: tuple[Actions, ...]
    edges: tuple[Edge, ...]
    pairs: Pairs = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", check_placement(self.placement))
        check_microbatches(self.microbatches)
        object.__setattr__(self, "programs", _columns(self.programs))
        object.__setattr__(self, "edges", Edges.of(self.edges))
        if len(self.programs) != self.ranks:
            raise ScheduleError(
                f"{len(self.programs)} programs for {self.ranks} ranks: the placement needs one a rank"
            )
        for edge in self.edges:
            if edge[1] >= self.num_stages:
                raise ScheduleError(f"edge {edge} leaves the plan's {self.num_stages} stages")
        object.__setattr__(self, "pairs", whole_pairs(self.pairs, self.programs))

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 + max(self.placement)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return self._stages[rank]

    @cached_property
    def orders(self) -> tuple[Actions, ...]:
        """The programs without transfers and collectives."""
        return tuple(program.where(IS_COMPUTE[program.ops]) for program in self.programs)

    @cached_property
    def compute_only(self) -> Plan:
        """The plan of the orders: what is lowered, simulated and drawn."""
        return self._only(IS_COMPUTE)

    @cached_property
    def without_transfers(self) -> Plan:
        """The plan of computations and collectives."""
        return self._only(~_IS_TRANSFER) if self.has_collectives else self.compute_only

    @cached_property
    def without_collectives(self) -> Plan:
        """The plan of computations and transfers."""
        return self._only(~IS_COLLECTIVE) if self.has_collectives else self

    @cached_property
    def is_lowered(self) -> bool:
        """Whether there is any SEND or RECV. (Where one rank has all stages there is none to be put in.)"""
        return any(_IS_TRANSFER[program.ops].any() for program in self.programs)

    @cached_property
    def has_collectives(self) -> bool:
        """Whether there is any UNSHARD, RESHARD or REDUCE_GRAD: see `schedules.add_collectives`."""
        return any(IS_COLLECTIVE[program.ops].any() for program in self.programs)

    @cached_property
    def unshards(self) -> tuple[int, ...]:
        """Per stage, how often its weights are gathered."""
        return self._counts(UNSHARD)

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Per stage, how often its weight gradients are reduced."""
        return self._counts(REDUCE_GRAD)

    @cached_property
    def peak_unsharded(self) -> tuple[int, ...]:
        """Per rank, the most stages unsharded at once; 0 where none is ever sharded."""
        return tuple(
            int(GATHERS[program.ops].cumsum(dtype=np.int64).max(initial=0)) for program in self.programs
        )

    @cached_property
    def forward_only(self) -> bool:
        """Whether no rank does any backward: a plan for evaluation."""
        return not any(_IS_BACKWARD[program.ops].any() for program in self.programs)

    @cached_property
    def in_order(self) -> bool:
        """Whether every stage adds its weight gradients up (B or W) in microbatch order."""
        return all(map(_adds_in_order, self.programs))

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the most activations saved at once: live from an F to its B, or its W where it is split.

        Received inputs that no F has used yet are not among them.
        """
        if self.forward_only:
            return (0,) * self.ranks
        return tuple(
            int(LIVES[program.ops].cumsum(dtype=np.int64).max(initial=0)) for program in self.programs
        )

    @cached_property
    def bubble(self) -> float:
        """The share of ranks x makespan in which ranks wait, at default costs and with instant transfers."""
        from schedules.simulator import simulate

        return simulate(self).rate

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all of it, in hex: the same on every machine, and different for any other plan."""
        # Plans without collectives have the digests that they had before there were any.
        collectives = self.has_collectives
        names = {op: spec.code for op, spec in OPS.items() if collectives or not spec.collective}
        lengths = [len(program) for program in self.programs]
        head: tuple[object, ...] = (self.placement, self.microbatches, tuple(self.edges), names, lengths)
        if any(self.pairs):
            head = (*head, self.pairs)
        digest = hashlib.sha256(repr(head).encode())
        for program in self.programs:
            for column in (program.ops, program.stages, program.microbatches, program.peers):
                little = column.astype(column.dtype.newbyteorder("<"), copy=False)
                digest.update(np.ascontiguousarray(little).data)
        return digest.hexdigest()

    def draw(self, *, color: bool | None = None) -> str:
        """The plan as a grid of time, one row a rank, at default costs: see `schedules.drawing`."""
        from schedules.drawing import draw

        return draw(self, color=color)

    def __str__(self) -> str:
        rows = enumerate(map(text_of_cells, self.programs, self.pairs))
        return "\n".join(f"rank {rank}: {' '.join(cells)}" for rank, cells in rows)

    def to_csv(self) -> str:
        """One row a rank, one cell an action or pair: what torch.distributed.pipelining reads and writes."""
        rows = (text_of_cells(*row, "OVERLAP_F_B") for row in zip(self.programs, self.pairs, strict=True))
        return "".join(",".join(row) + "\n" for row in rows)

    @classmethod
    def parse(cls, text: str, edges: Iterable[Edge] | None = None) -> Plan:
        """Reads what `str(plan)` wrote; the rest as in `from_csv`."""
        return cls._of(read(line_cells(text)), edges)

    @classmethod
    def from_csv(cls, source: str | os.PathLike[str], edges: Iterable[Edge] | None = None) -> Plan:
        """Reads a CSV text (a str) or file (a Path). Empty cells are bubbles, and ignored.

        A stage lives where its compute actions stand; `edges` are the chain and whatever other peers occur.
        A collective without a microbatch, as torch writes it, gets that of its stage's next computation if it
        is an UNSHARD, else of its last. The plan is as the file has it: not lowered, if it has no transfers,
        and not verified.
        """
        text = source if isinstance(source, str) else Path(source).read_text(encoding="utf-8-sig")
        return cls._of(read(csv_cells(text)), edges)

    @classmethod
    def _of(cls, table: Table, edges: Iterable[Edge] | None) -> Plan:
        found = edges_of(table.programs, len(table.placement)) if edges is None else Edges.of(edges)
        return cls(table.placement, table.microbatches, table.programs, found, table.pairs)

    def _only(self, kept_ops: npt.NDArray[np.bool_]) -> Plan:
        """The plan of some ops, told by code."""
        kept = [kept_ops[program.ops] for program in self.programs]
        if all(map(np.all, kept)):
            return self
        programs = tuple(program.where(keep) for program, keep in zip(self.programs, kept, strict=True))
        return dataclasses.replace(self, programs=programs, pairs=moved(self.pairs, kept))

    def _counts(self, op: Op) -> tuple[int, ...]:
        code = OPS[op].code
        stages = np.concatenate([program.stages[program.ops == code] for program in self.programs])
        return tuple(np.bincount(stages, minlength=self.num_stages)[: self.num_stages].tolist())

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        return stages_by_rank(self.placement)


def edges_of(programs: Iterable[Actions], num_stages: int) -> Edges:
    """The edges that programs imply: the chain, then whatever other peers occur, ascending.

    A peer that cannot be one makes no edge: `verify` then refuses the action, and says where it stands.
    """
    others: set[Edge] = set()
    for program in programs:
        named = program.where(program.peers >= 0)
        at_source = _AT_SOURCE[named.ops]
        sources = np.where(at_source, named.stages, named.peers)
        destinations = np.where(at_source, named.peers, named.stages)
        pairs = np.unique(np.stack((sources, destinations), axis=1), axis=0)
        others.update((s, d) for s, d in pairs.tolist() if s < d < num_stages)
    edges = chain(num_stages)
    return Edges.of((*edges, *sorted(others - set(edges)))) if others else edges


def _columns(programs: Sequence[Sequence[Action]]) -> tuple[Actions, ...]:
    columns = []
    for rank, program in enumerate(programs):
        try:
            columns.append(Actions.of(program))
        except ScheduleError as error:
            raise ScheduleError(
                f"rank {rank}: {error}", rank=rank, position=error.position, action=error.action
            ) from None
    return tuple(columns)


def _adds_in_order(program: Actions) -> bool:
    adds = program.where(LIVES[program.ops] < 0)
    by_stage = np.argsort(adds.stages, kind="stable")
    stages, microbatches = adds.stages[by_stage], adds.microbatches[by_stage]
    return not bool(((np.diff(microbatches) < 0) & (np.diff(stages) == 0)).any())


def _by_code(values: dict[str, int]) -> npt.NDArray[np.int8]:
    column = np.zeros(256, np.int8)
    for op, value in values.items():
        column[OPS[op].code] = value
    return column


# Facts of the table of ops by code, so that a column of ops becomes a column of facts.
IS_COMPUTE = _by_code(dict.fromkeys(COMPUTE, 1)) > 0
IS_SEND = _by_code({op: OPS[op].sends for op in COMMUNICATION}) > 0
_IS_TRANSFER = _by_code(dict.fromkeys(COMMUNICATION, 1)) > 0
IS_COLLECTIVE = _by_code(dict.fromkeys(COLLECTIVES, 1)) > 0
GATHERS = _by_code({UNSHARD: 1, RESHARD: -1})  # +1 where a stage's weights are gathered, -1 where they go
_IS_BACKWARD = _by_code({op: spec.backward for op, spec in OPS.items()}) > 0
LIVES = _by_code(
    {op: (SAVED in OPS[op].makes) - (OPS[op].frees == SAVED) for op in COMPUTE}
)  # +1 where an activation is saved, -1 where it dies
_AT_SOURCE = (
    _by_code({op: (spec.carries == ACTIVATION) == spec.sends for op, spec in OPS.items() if spec.carries}) > 0
)
