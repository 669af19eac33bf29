"""A rank's program with everything looked up that does not change from call to call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import NamedTuple

import schedules
from pipe.boundary import Parcel
from pipe.errors import PipelineError
from pipe.shards import Held, Holding
from pipe.stage import Keep, Stage
from pipe.transport import BATCH, Key, Lane, Place
from schedules import (
    ACTIVATION,
    COLLECTIVES,
    COMPUTE,
    GRADIENT,
    OPS,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    Action,
    B,
    F,
    I,
    Plan,
    W,
)


class Kind(IntEnum):
    """What the executor does for a step."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    SEND = 4
    RECEIVE = 5
    COLLECTIVE = 6


_KINDS = {F: Kind.FORWARD, B: Kind.BACKWARD, I: Kind.BACKWARD_INPUT, W: Kind.BACKWARD_WEIGHT}

NOTHING = Key("nothing", -1, -1, -1)
_NOWHERE = Lane(-1, -1, "nothing")


class Step(NamedTuple):
    """An action, and what it works on."""

    kind: Kind
    action: Action
    stage: Stage
    microbatch: int
    takes: Key = NOTHING  # what it finds in the mailbox
    gives: Key = NOTHING  # what it puts there
    lane: Lane = _NOWHERE
    # Of forwards:
    keep: Keep = Keep.NOTHING
    split: bool = False
    own: Callable[[Parcel], Parcel] | None = None  # makes the input the stage's own
    # Of data parallelism:
    is_ready: Callable[[], bool] | None = None  # False: to be tried again after others moved on
    begin: Callable[[], None] | None = None  # of a collective, which goes on beside what follows


def compile_program(
    plan: Plan,
    rank: int,
    stages: Mapping[int, Stage],
    checkpoint: str,
    *,
    place: Place = Place(),  # noqa: B008 - a value
    holding: Holding | None = None,
) -> list[Step]:
    """A rank's program as the executor runs it.

    Args:
        holding: of the rank's parameters, where they are held for others.

    Raises:
        PipelineError: an action that the engine can't run.
    """
    actions = list(plan.programs[rank])
    splits = {(action.stage, action.microbatch) for action in actions if action.op == I}
    steps = [
        _compute(plan, rank, stages[action.stage], action, keep, (action.stage, action.microbatch) in splits)
        if action.op in _KINDS
        else _collective(stages[action.stage], action)
        if action.op in COLLECTIVES
        else _transfer(plan, stages[action.stage], action, place)
        for action, keep in zip(_checked(actions, rank, stages), _keeps(actions, checkpoint), strict=True)
    ]
    if holding is not None:
        _bind(steps, holding)
    return steps


def _collective(stage: Stage, action: Action) -> Step:
    return Step(Kind.COLLECTIVE, action, stage, action.microbatch, begin=_nothing)


def _bind(steps: list[Step], holding: Holding) -> None:
    """Lets collectives do what they stand for, and computation wait for them."""
    reduced = _reduced(steps, holding)
    arriving = set()
    for position, step in enumerate(steps):
        op, stage = step.action.op, step.stage.index
        if op == UNSHARD:
            arriving.add(stage)
            steps[position] = step._replace(begin=partial(holding.unshard, stage))
        elif op == RESHARD:
            steps[position] = step._replace(begin=partial(holding.reshard, stage))
        elif op == REDUCE_GRAD:
            steps[position] = step._replace(
                begin=partial(holding.reduce, reduced[position]), is_ready=holding.may_reduce
            )
        elif op in COMPUTE and stage in arriving:
            arriving.discard(stage)
            steps[position] = step._replace(is_ready=partial(holding.has_arrived, stage))


def _reduced(steps: Sequence[Step], holding: Holding) -> dict[int, list[Held]]:
    """Which buckets are reduced at each REDUCE_GRAD, by position.

    A bucket of parameters that two stages share waits for the later one's.
    """
    rounds: dict[int, list[int]] = {}
    for position, step in enumerate(steps):
        if step.action.op == REDUCE_GRAD:
            rounds.setdefault(step.stage.index, []).append(position)
    reduced: dict[int, list[Held]] = {position: [] for positions in rounds.values() for position in positions}
    for held in holding.held:
        for positions in zip(*(rounds.get(stage, ()) for stage in held.bucket.stages), strict=True):
            reduced[max(positions)].append(held)
    return reduced


def _nothing() -> None:
    """Of a collective that concerns nobody: one replica has nothing to gather, nor to reduce."""


def _checked(actions: Sequence[Action], rank: int, stages: Mapping[int, Stage]) -> Iterator[Action]:
    for action in actions:
        if action.stage not in stages:
            raise PipelineError(f"rank {rank} can't run {action}: it doesn't own stage {action.stage}")
        if OPS[action.op].carries is None and action.op not in (*_KINDS, *COLLECTIVES):
            raise PipelineError(f"the engine doesn't know how to run {action}")
        yield action


def _transfer(plan: Plan, stage: Stage, action: Action, place: Place) -> Step:
    spec = OPS[action.op]
    assert spec.carries is not None
    sender, receiver = schedules.route(action.op, action.stage, action.peer)
    key = Key(spec.carries, sender, receiver, action.microbatch)
    lane = Lane(place.member(plan.placement[sender]), place.member(plan.placement[receiver]), spec.carries)
    if spec.sends:
        return Step(Kind.SEND, action, stage, action.microbatch, takes=key, lane=lane)
    return Step(Kind.RECEIVE, action, stage, action.microbatch, gives=key, lane=lane)


def _compute(plan: Plan, rank: int, stage: Stage, action: Action, keep: Keep, split: bool) -> Step:
    index, op, microbatch, _ = action
    step = Step(_KINDS[op], action, stage, microbatch)
    before, behind = _neighbour(ACTIVATION, F, index, plan), _neighbour(GRADIENT, B, index, plan)
    if op == F:
        own = stage.admit if before is None else Parcel.delivered if plan.placement[before] == rank else None
        return step._replace(
            takes=Key(ACTIVATION, BATCH if before is None else before, index, microbatch),
            gives=NOTHING if behind is None else Key(ACTIVATION, index, behind, microbatch),
            keep=keep,
            split=split,
            own=own,
        )
    if op in (B, I):
        return step._replace(
            takes=NOTHING if behind is None else Key(GRADIENT, behind, index, microbatch),
            gives=NOTHING if before is None else Key(GRADIENT, index, before, microbatch),
        )
    return step


def _neighbour(value: str, op: str, stage: int, plan: Plan) -> int | None:
    """The stage that a stage takes a value from; None at the ends of the chain."""
    sources = [need.source for need in schedules.needs(op, stage, plan.edges) if need.value == value]
    if len(sources) > 1:
        raise PipelineError(
            f"stage {stage} takes {value}s of stages {sources}, but an nn.Sequential is a chain"
        )
    return sources[0] if sources else None


def _keeps(actions: Sequence[Action], checkpoint: str) -> Iterator[Keep]:
    """What the forward at each position must keep, by the activation checkpointing that was asked for."""
    for position, (stage, _, microbatch, _) in enumerate(actions):
        if checkpoint == "never":
            yield Keep.GRAPH
            continue
        following = next((a for a in islice(actions, position + 1, None) if a.op in COMPUTE), None)
        comes_next = following is not None and following[:3] in (
            (stage, B, microbatch),
            (stage, I, microbatch),
        )
        yield Keep.GRAPH if checkpoint == "except_last" and comes_next else Keep.INPUT
