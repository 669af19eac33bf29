"""Traces each k-th step of a pipeline, and writes it and the scalars of all steps to TensorBoard."""

import dataclasses
import functools
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipe.assembly import Parts
from pipe.background import Background
from pipe.executor import Run
from pipe.preparation import Prepared
from pipe.recording import Offsets, Record, StampClock, events_of, sends_of
from pipe.timeline import SCALARS
from pipe.timeline.events import Writer
from pipe.timeline.trace import Clock, Header, Trace
from pipe.tracks import Track
from pipe.transport import Transport
from schedules import Plan

# Traced steps between two looks at how far clocks have moved apart.
_STEPS_BETWEEN = 100
# Steps whose scalars are kept until they are written: reading one waits for the device.
_KEPT = 20
# What is written is at most so much older than what is known, and so many traces wait in memory for it.
_SECONDS, _TRACES = 1.0, 64


class NoRecorder:
    """Of a pipeline that isn't traced."""

    def begin(self, step: int, prepared: Prepared, entered: int) -> None: ...

    def mark(self, kind: str) -> None: ...

    def finish(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """All members record; member 0 writes.

    Args:
        target: a directory, or the user's SummaryWriter; None on members that don't write.
        every: each so many steps one is traced.
    """

    def __init__(self, target: Any, every: int, parts: Parts, transport: Transport) -> None:
        self._every = every
        self._parts = parts
        self._transport = transport
        self._members = parts.resolved.ranks * parts.resolved.dp
        self._offsets = Offsets()
        self._offsets.measure(transport, self._members)
        self._traced = 0
        self._step = self._entered = 0
        self._prepared: Prepared | None = None
        self._plan: Plan | None = None
        self._plan_text = ""
        self._runs: Sequence[Run] = ()
        self._pending: list[tuple[int, float, Mapping[str, Any]]] = []
        self._background = Background("pipe-timeline", _SECONDS, _TRACES)
        self._writer: Writer | None = None
        if not parts.rank and not parts.place.replica:
            self._guarded(lambda: self._open(target))

    def _open(self, target: Any) -> None:
        # What an earlier run has left in the directory is no part of this one.
        self._writer = Writer(target, first_step=0)

    # ------------------------------------------------------------------- a step

    def begin(self, step: int, prepared: Prepared, entered: int) -> None:
        """Before a step's first action; `entered`: when the call began."""
        self._step, self._prepared, self._entered = step, prepared, entered
        self._runs = prepared.runs if step % self._every == 0 else ()
        for run in self._runs:
            track = run.track = Track(len(run.program), self._parts.devices[run.member])
            track.marks.append(("c", entered, time.perf_counter_ns()))
            track.base = track.stamp()

    def mark(self, kind: str) -> None:
        """Since the last mark, or the last action, all ranks of this process have done this."""
        if kind == "g" and self._parts.resolved.dp == 1:
            return  # there is nothing to reduce
        for run in self._runs:
            track = run.track
            assert track is not None
            since = track.marks[-1][2] if len(track.marks) > 1 else _last(track)
            track.marks.append((kind, since, track.stamp()))

    def finish(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """After a step; a collective where it was traced."""
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        scalars = self._scalars(loss, metrics, prepared.samples)
        if not self._runs:
            self._note(self._step, scalars)
            return
        records, self._runs = [self._record(run) for run in self._runs], ()
        gathered = self._transport.gather([records])
        self._traced += 1
        if self._traced % _STEPS_BETWEEN == 0:
            self._offsets.measure(self._transport, self._members)
        if self._writer is not None:
            self._guarded(self._write_pending)
        if gathered is not None and self._writer is not None:
            everyone = sorted((r for part in gathered for r in part), key=lambda record: record.member)
            header = self._header(self._step, prepared, _numbers(scalars))
            write = functools.partial(_write, self._writer, header, everyone, list(self._offsets.ahead))
            self._guarded(lambda: self._background.put(write))

    def _note(self, step: int, scalars: Mapping[str, Any]) -> None:
        """The scalars of a step that isn't traced."""
        if self._writer is not None:
            self._pending.append((step, time.time(), scalars))
        if len(self._pending) >= _KEPT:
            self._guarded(self._write_pending)

    def close(self) -> None:
        if self._writer is not None:
            self._guarded(self._write_pending)
        if self._writer is not None:
            self._guarded(self._background.close)
        if self._writer is not None:
            self._guarded(self._writer.close)
        self._writer = None

    # ----------------------------------------------------------------- its parts

    def _record(self, run: Run) -> Record:
        track, parts = run.track, self._parts
        assert track is not None
        clock = StampClock(track.base)
        events = events_of(run.program, track, parts.plan.placement, clock)
        rank, replica = divmod(run.member, parts.resolved.dp)
        run.track = None
        return Record(
            member=run.member,
            rank=rank,
            replica=replica,
            host=socket.gethostname(),
            device=str(track.device),
            begin=min(event.start for event in events),
            end=max(event.end for event in events),
            events=events,
            sends=sends_of(run.program, track, clock),
        )

    def _header(self, step: int, prepared: Prepared, scalars: Mapping[str, float]) -> Header:
        """But for when the step began, and how long it took."""
        parts = self._parts
        return Header(
            step=step,
            wall_time=time.time(),
            options=parts.options.text or str(parts.options),
            schedule=parts.schedule_name,
            ranks=parts.resolved.ranks,
            replicas=parts.resolved.dp,
            microbatches=prepared.plan.microbatches,
            placement=parts.plan.placement,
            layers=tuple((layers.start, layers.stop) for layers in parts.resolved.device_map.stages),
            layer_names=tuple(name for name, _ in parts.layers),
            layer_sizes=tuple(size for _, size in parts.layers),
            plan=self._text_of(prepared.plan),
            duration=0.0,
            clock=Clock(parts.device.type, tuple(error / 1e3 for error in self._offsets.error)),
            scalars=scalars,
        )

    def _text_of(self, plan: Plan) -> str:
        """A plan in words, which is the same for most steps."""
        if self._plan is not plan:
            self._plan, self._plan_text = plan, plan.to_csv()
        return self._plan_text

    def _scalars(self, loss: Tensor, metrics: Mapping[str, Tensor], samples: int | None) -> dict[str, Any]:
        """What curves over steps are drawn of, by tag."""
        seconds = (time.perf_counter_ns() - self._entered) / 1e9
        scalars: dict[str, Any] = {"loss": loss, **metrics}
        groups = self._parts.optimizer.param_groups if self._parts.optimizer else []
        for index, group in enumerate(groups):
            scalars["lr" if len(groups) == 1 else f"lr_group_{index}"] = group["lr"]
        if samples is not None:
            scalars["samples_per_second"] = samples / seconds
        return scalars

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, []
        if pending and self._writer is not None:
            # Reading them waits for the device: not there, where traces wait behind them.
            numbers = [(step, wall_time, _numbers(scalars)) for step, wall_time, scalars in pending]
            self._background.put(functools.partial(_write_scalars, self._writer, numbers))

    def _guarded(self, write: Any) -> None:
        """A disk that fails costs the trace, not the training."""
        try:
            write()
        except Exception as error:
            self._writer = None
            self._pending.clear()
            warnings.warn(f"no more traces are written: {type(error).__name__}: {error}", stacklevel=4)


def _write(writer: Writer, header: Header, records: Sequence[Record], ahead: Sequence[int]) -> None:
    zero = min(record.begin - ahead[record.member] for record in records)
    members = tuple(record.told(zero, ahead[record.member]) for record in records)
    duration = max(member.finish for member in members)
    wall_time = header.wall_time - duration / 1e6
    header = dataclasses.replace(header, duration=duration, wall_time=wall_time)
    writer.write(Trace(header, members), _tagged(header.scalars))


def _write_scalars(writer: Writer, pending: Sequence[tuple[int, float, Mapping[str, float]]]) -> None:
    for step, wall_time, scalars in pending:
        writer.write_scalars(step, _tagged(scalars), wall_time)


def _numbers(scalars: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in scalars.items()}


def _tagged(scalars: Mapping[str, float]) -> dict[str, float]:
    return {f"{SCALARS}{name}": value for name, value in scalars.items()}


def _last(track: Track) -> Any:
    return next((stamp for stamp in reversed(track.ends) if stamp is not None), track.base)
