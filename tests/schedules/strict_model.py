"""What would a strict executor do with a plan? (The verifier's rules, written as plainly as can be.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from schedules import (
    COLLECTIVES,
    COMPUTE,
    OPS,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
    B,
    F,
    I,
    Plan,
    W,
)

Program = list[Action]
CARRIED = {SEND_F: "activation", RECV_F: "activation", SEND_B: "gradient", RECV_B: "gradient"}
NEIGHBOUR = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}


class Refused(Exception):
    pass


def completes(plan: Plan) -> bool:
    """Whether every rank comes to the end of its program, with everything done once and nothing left over."""
    try:
        makespan(plan)
    except Refused:
        return False
    return True


def makespan(plan: Plan) -> int:
    """When the last rank ends, at default costs; a transfer takes no time; its ends wait for each other."""
    model = _Model(plan)
    model.run()
    return max(model.clock)


class _Model:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.programs: list[Program] = [list(program) for program in plan.programs]
        self.at = [0] * plan.ranks
        self.clock = [0] * plan.ranks
        # Values present on a rank: (kind, source stage, destination stage or None, microbatch).
        self.present: list[Counter[tuple[object, ...]]] = [Counter() for _ in range(plan.ranks)]
        self.done: Counter[tuple[int, str, int]] = Counter()
        self.training = any(a.op in (B, I, W) for program in self.programs for a in program)
        everything = [action for program in self.programs for action in program]
        self.sharded = {action.stage for action in everything if action.op == UNSHARD}
        self.reducing = {action.stage for action in everything if action.op == REDUCE_GRAD}
        self.unsharded: set[int] = set()
        self.unreduced: set[int] = set()  # stages that have added to a gradient since they last reduced it

    def run(self) -> None:
        while any(self.advance(rank) for rank in range(self.plan.ranks)):
            pass
        if any(self.at[rank] < len(self.programs[rank]) for rank in range(self.plan.ranks)):
            raise Refused("stuck")
        if any(+present for present in self.present):
            raise Refused("left over")
        if self.unsharded or self.unreduced & self.reducing:
            raise Refused("left unsharded, or unreduced")
        for stage in range(self.plan.num_stages):
            for microbatch in range(self.plan.microbatches):
                counts = tuple(self.done[stage, op, microbatch] for op in (F, B, I, W))
                if counts not in ([(1, 1, 0, 0), (1, 0, 1, 1)] if self.training else [(1, 0, 0, 0)]):
                    raise Refused("undone")

    def head(self, rank: int) -> Action | None:
        at = self.at[rank]
        return self.programs[rank][at] if at < len(self.programs[rank]) else None

    def advance(self, rank: int) -> bool:
        action = self.head(rank)
        if action is None:
            return False
        if action.stage >= self.plan.num_stages or action.microbatch >= self.plan.microbatches:
            raise Refused("out of range")
        if self.plan.placement[action.stage] != rank:
            raise Refused("another rank's stage")
        if action.op in COLLECTIVES:
            return self.collective(rank, action)
        return self.compute(rank, action) if action.op in COMPUTE else self.transfer(rank, action)

    def collective(self, rank: int, action: Action) -> bool:
        holders = self.unreduced if action.op == REDUCE_GRAD else self.unsharded
        if (action.stage in holders) == (action.op == UNSHARD):
            raise Refused("nothing to reshard or reduce, or unsharded twice")
        if action.op == UNSHARD:
            holders.add(action.stage)
        else:
            holders.remove(action.stage)
        self.at[rank] += 1
        return True

    def compute(self, rank: int, action: Action) -> bool:
        stage, op, microbatch, _ = action
        if self.done[stage, op, microbatch]:
            raise Refused("twice")
        if stage in self.sharded and stage not in self.unsharded:
            raise Refused("without weights")
        if op in (B, W):
            self.unreduced.add(stage)
        before = [s for s, d in self.plan.edges if d == stage]
        behind = [d for s, d in self.plan.edges if s == stage]
        if op == F:
            self.take(rank, [("activation", s, stage, microbatch) for s in before])
            self.make(rank, [("activation", stage, d, microbatch) for d in behind])
            if self.training:
                self.make(rank, [("saved", stage, None, microbatch)])
        elif op in (B, I):
            self.take(rank, [("saved", stage, None, microbatch)])
            self.take(rank, [("gradient", d, stage, microbatch) for d in behind])
            self.make(rank, [("gradient", stage, s, microbatch) for s in before])
            if op == I:
                self.make(rank, [("deferred", stage, None, microbatch)])
        else:
            self.take(rank, [("deferred", stage, None, microbatch)])
        self.done[stage, op, microbatch] += 1
        self.at[rank] += 1
        self.clock[rank] += OPS[op].cost
        return True

    def transfer(self, rank: int, action: Action) -> bool:
        sending, receiving = self.route(action)
        edge = (sending, receiving) if CARRIED[action.op] == "activation" else (receiving, sending)
        if edge not in self.plan.edges:
            raise Refused("no edge")
        peer = self.plan.placement[receiving if OPS[action.op].sends else sending]
        if peer == rank:
            raise Refused("same rank")
        if not OPS[action.op].sends:
            return False  # the sender moves both
        value = (CARRIED[action.op], sending, receiving, action.microbatch)
        if self.present[rank][value] < 1:
            raise Refused("nothing to send")
        partner = self.head(peer)
        if partner is None or CARRIED.get(partner.op) != value[0] or OPS[partner.op].sends:
            return False
        route = self.route(partner)
        if not 0 <= route[0] < self.plan.num_stages or self.plan.placement[route[0]] != rank:
            return False  # it listens to another rank
        if (*route, partner.microbatch) != (sending, receiving, action.microbatch):
            raise Refused("another message on the channel")
        self.take(rank, [value])
        self.make(peer, [value])
        self.at[rank] += 1
        self.at[peer] += 1
        self.clock[rank] = self.clock[peer] = max(self.clock[rank], self.clock[peer])
        return True

    def route(self, action: Action) -> tuple[int, int]:
        other = action.stage + NEIGHBOUR[action.op] if action.peer is None else action.peer
        return (action.stage, other) if OPS[action.op].sends else (other, action.stage)

    def take(self, rank: int, values: Iterable[tuple[object, ...]]) -> None:
        for value in values:
            if self.present[rank][value] < 1:
                raise Refused(f"{value} is not there")
            self.present[rank][value] -= 1

    def make(self, rank: int, values: Iterable[tuple[object, ...]]) -> None:
        self.present[rank].update(values)
