"""Runs programs: one loop over a rank's actions, in which the ranks of one process take turns."""

from collections.abc import Sequence

from pipe.boundary import Parcel
from pipe.call import Call
from pipe.errors import PipelineError, with_note
from pipe.program import NOTHING, Kind, Step
from pipe.stage import Keep
from pipe.tracks import Track
from pipe.transport import Key, Transport
from schedules import Action, F


class Run:
    """One rank's way through its program in one call. It owns the rank's mailbox."""

    def __init__(
        self, rank: int, program: Sequence[Step], call: Call, *, name: str = "", member: int | None = None
    ) -> None:
        self.rank = rank
        self.member = rank if member is None else member
        self.name = name or f"rank {rank}"
        self.program = program
        self.call = call
        self.position = 0
        self.mailbox: dict[Key, Parcel] = {}
        self.track: Track | None = None  # where times are told, in a step that is traced
        self.live = 0  # microbatches whose forward has run on a stage and whose backward hasn't
        self.peak_live = 0

    def stands_at(self) -> str:
        if self.position >= len(self.program):
            return f"{self.name} is through its program"
        action, stage = self.program[self.position].action, self.program[self.position].stage
        layers = stage.layer_range
        return (
            f"{self.name}, stage {stage.index} (layers {layers.start} to {layers.stop - 1}), "
            f"action {action} (position {self.position}), microbatch {action.microbatch}"
        )


def execute(runs: Sequence[Run], transport: Transport) -> None:
    """Runs every rank of this process, of every replica, to the end of its program.

    A rank goes on until an action would wait; then the next rank has its turn, in a fixed order. A
    transport between processes waits itself, and there is one rank.

    Raises:
        PipelineError: an action without its inputs, a deadlock, or something left over at the end.
    """
    transport.begin(
        (step.lane, step.gives, run.call.keys[step.microbatch])
        for run in runs
        for step in run.program
        if step.kind == Kind.RECEIVE
    )
    waiting = list(runs)
    while waiting:
        moved = False
        for run in waiting:
            start, position, program, mailbox = run.position, run.position, run.program, run.mailbox
            call, track = run.call, run.track
            try:
                while position < len(program):
                    kind, _, stage, microbatch, takes, gives, lane, keep, split, own, is_ready, begin = (
                        program[position]
                    )
                    if track is not None:
                        track.begins[position] = track.stamp()
                    if is_ready is not None:
                        if not is_ready():
                            break
                        if track is not None:
                            track.arrivals[position] = track.stamp()
                    if kind == Kind.FORWARD:
                        parcel = _take(mailbox, takes)
                        if track is not None:
                            track.readies[position] = track.stamp()
                        if not call.trains or not call.weights[microbatch]:
                            keep = Keep.NOTHING
                        if own is not None:
                            parcel = own(parcel)
                        output = stage.forward(microbatch, parcel, call, keep, split=split)
                        if output is not None:
                            mailbox[gives] = output
                        if call.trains:
                            run.live += 1
                            run.peak_live = max(run.peak_live, run.live)
                    elif kind == Kind.BACKWARD or kind == Kind.BACKWARD_INPUT:
                        given = None if takes is NOTHING else _take(mailbox, takes)
                        if track is not None:
                            track.readies[position] = track.stamp()
                        if kind == Kind.BACKWARD:
                            gradients = stage.backward(microbatch, given, call)
                            run.live -= 1
                        else:
                            gradients = stage.backward_input(microbatch, given, call)
                        if gives is not NOTHING:
                            mailbox[gives] = gradients
                    elif kind == Kind.BACKWARD_WEIGHT:
                        stage.backward_weight(microbatch)
                        run.live -= 1
                    elif kind == Kind.SEND:
                        if not transport.send(lane, takes, _look(mailbox, takes), call.keys[microbatch]):
                            break
                        del mailbox[takes]
                    elif kind == Kind.COLLECTIVE:
                        assert begin is not None
                        begin()
                    else:
                        received = transport.receive(lane, gives, call.keys[microbatch])
                        if received is None:
                            break
                        mailbox[gives] = received
                    if track is not None:
                        track.end(position, run.live)
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
        raise PipelineError(f"left over at the end of the call on {run.name}: {next(iter(run.mailbox))}")
    for stage in {step.stage.index: step.stage for step in run.program}.values():
        for saved, undone in ((stage.saved, "its backward"), (stage.deferred, "its weight gradient")):
            if saved:
                forward = Action(stage.index, F, next(iter(saved)))
                raise PipelineError(
                    f"left over at the end of the call on {run.name}: {forward} without {undone}"
                )
