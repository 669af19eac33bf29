"""Traces each k-th step of a pipeline, and writes it and the scalars of all steps to TensorBoard."""

import contextlib
import dataclasses
import functools
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
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
# What is written is at most so much older than what is known, and so many steps wait in memory for it.
_SECONDS, _STEPS = 1.0, 64


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
        self._background = Background("pipe-timeline", _SECONDS, _STEPS, _give_up)
        self._writer: Writer | None = None
        if not parts.rank and not parts.place.replica:
            try:
                # What an earlier run has left in the directory is no part of this one.
                self._writer = Writer(target, first_step=0)
            except Exception as error:  # a disk that fails costs the trace, not the training
                warnings.warn(f"nothing is traced, tensorboard={target} fails: {_told(error)}", stacklevel=3)

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
        writes = self._writer is not None and not self._background.has_failed
        scalars = self._scalars(loss, metrics, prepared.samples) if writes else {}
        if not self._runs:
            if writes:
                self._put(functools.partial(_write_scalars, self._step, time.time(), scalars, _now(scalars)))
            return
        records, self._runs = [self._record(run) for run in self._runs], ()
        gathered = self._transport.gather([records])
        self._traced += 1
        if self._traced % _STEPS_BETWEEN == 0:
            self._offsets.measure(self._transport, self._members)
        if gathered is not None and writes:
            everyone = sorted((r for part in gathered for r in part), key=lambda record: record.member)
            header = self._header(self._step, prepared, _numbers(scalars))
            self._put(functools.partial(_write_trace, header, everyone, list(self._offsets.ahead)))

    def _put(self, write: Callable[[Writer], None]) -> None:
        assert self._writer is not None
        self._background.put(functools.partial(write, self._writer))

    def close(self) -> None:
        self._background.close()
        if self._writer is not None:
            with contextlib.suppress(OSError):  # of what a full disk refused, which is told
                self._writer.close()
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
        return {name: _kept(value) for name, value in scalars.items()}


def _give_up(error: Exception) -> None:
    warnings.warn(f"no more traces are written: {_told(error)}", stacklevel=2)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _write_trace(header: Header, records: Sequence[Record], ahead: Sequence[int], writer: Writer) -> None:
    zero = min(record.begin - ahead[record.member] for record in records)
    members = tuple(record.told(zero, ahead[record.member]) for record in records)
    duration = max(member.finish for member in members)
    wall_time = header.wall_time - duration / 1e6
    header = dataclasses.replace(header, duration=duration, wall_time=wall_time)
    writer.write(Trace(header, members), _tagged(header.scalars))


def _write_scalars(
    step: int, wall_time: float, scalars: Mapping[str, Any], done: Sequence[torch.cuda.Event], writer: Writer
) -> None:
    for event in done:
        event.synchronize()
    writer.write_scalars(step, _tagged(_numbers(scalars)), wall_time)


def _now(scalars: Mapping[str, Any]) -> list[torch.cuda.Event]:
    """When what devices are to compute so far is done: the thread that reads it uses another stream."""
    devices = {value.device for value in scalars.values() if isinstance(value, Tensor)}
    events = []
    for device in devices:
        events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        events[-1].record(torch.cuda.current_stream(device))
    return events


def _kept(value: Any) -> Any:
    """As it is now, without waiting for a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().clone()
    return float(value)


def _numbers(scalars: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in scalars.items()}


def _tagged(scalars: Mapping[str, float]) -> dict[str, float]:
    return {f"{SCALARS}{name}": value for name, value in scalars.items()}


def _last(track: Track) -> Any:
    return next((stamp for stamp in reversed(track.ends) if stamp is not None), track.base)
