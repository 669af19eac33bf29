"""A rank's program with everything looked up that does not change from call to call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import schedules
from pipe.boundary import Parcel
from pipe.errors import PipelineError
from pipe.stage import Keep, Stage
from pipe.transport import BATCH, Key, Lane
from schedules import ACTIVATION, COMPUTE, GRADIENT, OPS, Action, B, F, I, Plan, W


class Kind(IntEnum):
    """What the executor does for a step."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    SEND = 4
    RECEIVE = 5


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


def compile_program(plan: Plan, rank: int, stages: Mapping[int, Stage], checkpoint: str) -> list[Step]:
    """A rank's program as the executor runs it.

    Raises:
        PipelineError: an action that the engine can't run.
    """
    actions = list(plan.programs[rank])
    splits = {(action.stage, action.microbatch) for action in actions if action.op == I}
    return [
        _compute(plan, rank, stages[action.stage], action, keep, (action.stage, action.microbatch) in splits)
        if OPS[action.op].carries is None
        else _transfer(plan, stages[action.stage], action)
        for action, keep in zip(_checked(actions, rank, stages), _keeps(actions, checkpoint), strict=True)
    ]


def _checked(actions: Sequence[Action], rank: int, stages: Mapping[int, Stage]) -> Iterator[Action]:
    for action in actions:
        if action.stage not in stages:
            raise PipelineError(f"rank {rank} can't run {action}: it doesn't own stage {action.stage}")
        if OPS[action.op].carries is None and action.op not in _KINDS:
            raise PipelineError(f"the engine doesn't know how to run {action}")
        yield action


def _transfer(plan: Plan, stage: Stage, action: Action) -> Step:
    spec = OPS[action.op]
    assert spec.carries is not None
    sender, receiver = schedules.route(action.op, action.stage, action.peer)
    key = Key(spec.carries, sender, receiver, action.microbatch)
    lane = Lane(plan.placement[sender], plan.placement[receiver], spec.carries)
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
