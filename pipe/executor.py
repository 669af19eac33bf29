"""Runs programs: one loop over a rank's actions, in which the ranks of one process take turns."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import schedules
from pipe.boundary import Parcel
from pipe.call import Call
from pipe.errors import PipelineError, with_note
from pipe.stage import Keep, Stage
from pipe.transport import BATCH, Key, Lane, Transport
from schedules import ACTIVATION, GRADIENT, OPS, Action, B, F, Plan

_FORWARD, _BACKWARD, _SEND, _RECEIVE = range(4)
_NOTHING = Key("nothing", -1, -1, -1)
_NOWHERE = Lane(-1, -1, "nothing")


class Step(NamedTuple):
    """An action with everything looked up that does not change from call to call."""

    kind: int
    action: Action
    stage: Stage
    microbatch: int
    takes: Key  # what it finds in the mailbox
    gives: Key  # what it puts there
    lane: Lane
    keep: Keep
    own: Callable[[Parcel], Parcel] | None  # makes a forward's input the stage's own


class Run:
    """One rank's way through its program in one call. It owns the rank's mailbox."""

    def __init__(self, rank: int, program: Sequence[Step]) -> None:
        self.rank = rank
        self.program = program
        self.position = 0
        self.mailbox: dict[Key, Parcel] = {}
        self.live = 0  # microbatches whose forward has run on a stage and whose backward hasn't
        self.peak_live = 0

    def stands_at(self) -> str:
        if self.position >= len(self.program):
            return f"rank {self.rank} is through its program"
        action, stage = self.program[self.position].action, self.program[self.position].stage
        layers = stage.layer_range
        return (
            f"rank {self.rank}, stage {stage.index} (layers {layers.start}-{layers.stop}), "
            f"action {action} (position {self.position}), microbatch {action.microbatch}"
        )


def compile_program(plan: Plan, rank: int, stages: Mapping[int, Stage], checkpoint: str) -> list[Step]:
    """A rank's program with its stages, messages and channels looked up.

    Raises:
        PipelineError: an action that the engine can't run.
    """
    actions = list(plan.programs[rank])
    return [_compile(plan, rank, stages, actions, position, checkpoint) for position in range(len(actions))]


def _compile(
    plan: Plan,
    rank: int,
    stages: Mapping[int, Stage],
    actions: Sequence[Action],
    position: int,
    checkpoint: str,
) -> Step:
    action = actions[position]
    index, op, microbatch, peer = action
    stage = stages.get(index)
    if stage is None:
        raise PipelineError(f"rank {rank} can't run {action}: it doesn't own stage {index}")
    carried = OPS[op].carries
    if carried is not None:
        sender, receiver = schedules.route(op, index, peer)
        key = Key(carried, sender, receiver, microbatch)
        lane = Lane(plan.placement[sender], plan.placement[receiver], carried)
        kind, takes, gives = (_SEND, key, _NOTHING) if OPS[op].sends else (_RECEIVE, _NOTHING, key)
        return Step(kind, action, stage, microbatch, takes, gives, lane, Keep.NOTHING, None)
    before, behind = _neighbour(ACTIVATION, F, index, plan), _neighbour(GRADIENT, B, index, plan)
    if op == F:
        takes = Key(ACTIVATION, BATCH if before is None else before, index, microbatch)
        gives = _NOTHING if behind is None else Key(ACTIVATION, index, behind, microbatch)
        own = stage.admit if before is None else Parcel.delivered if plan.placement[before] == rank else None
        keep = _keep(actions, position, checkpoint)
        return Step(_FORWARD, action, stage, microbatch, takes, gives, _NOWHERE, keep, own)
    if op == B:
        takes = _NOTHING if behind is None else Key(GRADIENT, behind, index, microbatch)
        gives = _NOTHING if before is None else Key(GRADIENT, index, before, microbatch)
        return Step(_BACKWARD, action, stage, microbatch, takes, gives, _NOWHERE, Keep.NOTHING, None)
    raise PipelineError(f"the engine can't run {action}: it has no split backward yet")


def _neighbour(value: str, op: str, stage: int, plan: Plan) -> int | None:
    """The stage that a stage takes a value from; None at the ends of the chain."""
    sources = [need.source for need in schedules.needs(op, stage, plan.edges) if need.value == value]
    if len(sources) > 1:
        raise PipelineError(
            f"stage {stage} takes {value}s of stages {sources}, but an nn.Sequential is a chain"
        )
    return sources[0] if sources else None


def _keep(actions: Sequence[Action], position: int, checkpoint: str) -> Keep:
    """What the forward at a position must keep, by the activation checkpointing that was asked for."""
    if checkpoint == "never":
        return Keep.GRAPH
    if checkpoint == "except_last":
        forward = actions[position]
        following = next((a for a in islice(actions, position + 1, None) if a.op in (F, B)), None)
        if following is not None and following[:3] == (forward.stage, B, forward.microbatch):
            return Keep.GRAPH
    return Keep.INPUT


def execute(runs: Sequence[Run], transport: Transport, call: Call) -> None:
    """Runs every rank of this process to the end of its program.

    A rank goes on until an action would wait; then the next rank has its turn, in a fixed order. A
    transport between processes waits itself, and there is one rank.

    Raises:
        PipelineError: an action without its inputs, a deadlock, or something left over at the end.
    """
    transport.begin(
        (step.lane, step.gives, call.keys[step.microbatch])
        for run in runs
        for step in run.program
        if step.kind == _RECEIVE
    )
    waiting = list(runs)
    while waiting:
        moved = False
        for run in waiting:
            start, position, program, mailbox = run.position, run.position, run.program, run.mailbox
            try:
                while position < len(program):
                    kind, _, stage, microbatch, takes, gives, lane, keep, own = program[position]
                    if kind == _FORWARD:
                        parcel = _take(mailbox, takes)
                        if not call.trains or not call.weights[microbatch]:
                            keep = Keep.NOTHING
                        output = stage.forward(microbatch, parcel if own is None else own(parcel), call, keep)
                        if output is not None:
                            mailbox[gives] = output
                        if call.trains:
                            run.live += 1
                            run.peak_live = max(run.peak_live, run.live)
                    elif kind == _BACKWARD:
                        given = None if takes is _NOTHING else _take(mailbox, takes)
                        gradients = stage.backward(microbatch, given, call)
                        run.live -= 1
                        if gives is not _NOTHING:
                            mailbox[gives] = gradients
                    elif kind == _SEND:
                        if not transport.send(lane, takes, _look(mailbox, takes), call.keys[microbatch]):
                            break
                        del mailbox[takes]
                    else:
                        received = transport.receive(lane, gives, call.keys[microbatch])
                        if received is None:
                            break
                        mailbox[gives] = received
                    position += 1
            except BaseException as error:
                run.position = position
                with_note(error, f"in {run.stands_at()}")
                raise
            run.position = position
            moved = moved or position > start
        waiting = [run for run in waiting if run.position < len(run.program)]
        if waiting and not moved:
            raise PipelineError("deadlock: " + "; ".join(f"{run.stands_at()} waits" for run in waiting))
    for run in runs:
        _check_clean(run)
    transport.finish()


def _take(mailbox: dict[Key, Parcel], key: Key) -> Parcel:
    parcel = mailbox.pop(key, None)
    if parcel is None:
        raise PipelineError(f"{key} isn't there: it was not made, not received, or used before")
    if parcel.works:
        parcel.wait()
    return parcel


def _look(mailbox: dict[Key, Parcel], key: Key) -> Parcel:
    parcel = mailbox.get(key)
    if parcel is None:
        raise PipelineError(f"{key} isn't there: it was not made, or was sent before")
    return parcel


def _check_clean(run: Run) -> None:
    if run.mailbox:
        raise PipelineError(f"left over at the end of the call on rank {run.rank}: {next(iter(run.mailbox))}")
    for stage in {step.stage.index: step.stage for step in run.program}.values():
        if stage.saved:
            forward = Action(stage.index, F, next(iter(stage.saved)))
            raise PipelineError(
                f"left over at the end of the call on rank {run.rank}: {forward} without its backward"
            )
