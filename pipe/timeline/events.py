"""How do traces and scalars get into a TensorBoard log directory?"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pipe.timeline import PLUGIN, SCALARS, TAG
from pipe.timeline.blobs import to_blobs
from pipe.timeline.summary import scalars_of
from pipe.timeline.trace import Trace


class SummaryWriter(Protocol):
    """What we need of torch's: its `file_writer`, which is None once it is closed."""

    file_writer: Any
    log_dir: str


class Writer:
    """Writes the traced steps of one run, each whole and at once, and scalars.

    `target` is a directory, made if need be, or the user's own `torch.utils.tensorboard.SummaryWriter`. Only
    one writer may write traces to a directory: of two, TensorBoard shows the steps of either.

    `first_step`: the step from which on this writer tells what happened. Steps from it on that an earlier
    session left in the directory are then no longer shown. (A SummaryWriter's `purge_step` does the same.)

    A failing disk is an `OSError` of the call that found out.
    """

    def __init__(
        self, target: str | os.PathLike[str] | SummaryWriter, *, first_step: int | None = None
    ) -> None:
        self._file: _EventFile | _UsersFile
        if not isinstance(target, str | os.PathLike):
            self._file = _UsersFile(target)
            return
        self._file = _EventFile(Path(target))
        if first_step is not None:
            self._file.add(_session_start(first_step))

    def write(self, trace: Trace, scalars: Mapping[str, float] | None = None) -> None:
        """A trace, what `scalars_of` says of it (under `pipeline/`), and scalars of your own, by tag."""
        derived = {f"{SCALARS}{name}": value for name, value in scalars_of(trace).items()}
        header = trace.header
        event = _event(header.step, header.wall_time, {**derived, **(scalars or {})})
        _add_blobs(event, to_blobs(trace))
        self._file.add(event)

    def write_scalars(self, step: int, scalars: Mapping[str, float], wall_time: float | None = None) -> None:
        """Scalars by tag, of a step that needn't be traced."""
        self._file.add(_event(step, time.time() if wall_time is None else wall_time, scalars))

    def close(self) -> None:
        """Closes the file; a user's SummaryWriter stays open."""
        self._file.close()


class _EventFile:
    """An event file of our own.

    tensorboard's EventFileWriter has a thread, whose OSErrors end up on stderr too, and we'd have to wait for
    it after each step anyway. A buffered file keeps what a full disk refused: if there is room later, the
    records go on where they broke off. Its RecordWriter takes 120 ns for each byte's part in a checksum, in
    Python, during which the training that it serves stands still.
    """

    _numbers = itertools.count()

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names: of two that one second has seen, too.
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers):06d}"
        self._path = directory / f"events.out.tfevents.{unique}.{PLUGIN}"
        self._stream: BinaryIO = self._path.open("ab")
        self._counts_links = self._links > 0  # some file systems don't
        self.add(_first_event())

    def add(self, event: Any) -> None:
        """In the file when this returns, so that TensorBoard shows it."""
        if self._counts_links and not self._links:
            raise FileNotFoundError(errno.ENOENT, "somebody deleted it", str(self._path))
        self._stream.write(_record(event.SerializeToString()))
        self._stream.flush()

    @property
    def _links(self) -> int:
        return os.fstat(self._stream.fileno()).st_nlink

    def close(self) -> None:
        self._stream.close()


class _UsersFile:
    """The event file of torch's SummaryWriter; once that is closed, one beside it.

    What a step tells may be written a little later: after the end of a `with SummaryWriter(...)`.
    """

    def __init__(self, writer: SummaryWriter) -> None:
        if not hasattr(writer, "file_writer"):
            raise TypeError(
                f"traces go to a directory, or to a torch.utils.tensorboard.SummaryWriter, not to {writer!r}"
            )
        self._writer = writer
        self._beside: _EventFile | None = None

    def add(self, event: Any) -> None:
        file_writer = self._writer.file_writer
        if file_writer is None:
            if self._beside is None:
                self._beside = _EventFile(Path(self._writer.log_dir))
            self._beside.add(event)
            return
        file_writer.add_event(event, event.step, event.wall_time)
        # Its thread writes the file: a flush waits for it, and raises what it stumbled over.
        file_writer.flush()

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()


def _record(data: bytes) -> bytes:
    """A TFRecord: the length of the data, the data, and a checksum of each."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    """A TFRecord's: a CRC-32C, rotated by 15 bits, plus a constant, so that it differs from a plain one."""
    from google_crc32c import value  # here, since TensorBoard's process needs none

    crc: int = value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _event(step: int, wall_time: float, scalars: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event(step=step, wall_time=wall_time)
    for tag, value in scalars.items():
        event.summary.value.add(tag=tag, simple_value=float(value))
    return event


def _add_blobs(event: Any, blobs: list[bytes]) -> None:
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_BLOB_SEQUENCE
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    value = event.summary.value.add(tag=TAG)
    value.metadata.plugin_data.plugin_name = PLUGIN
    value.metadata.data_class = DATA_CLASS_BLOB_SEQUENCE  # without it, the series is invisible
    value.tensor.dtype = DT_STRING
    value.tensor.tensor_shape.dim.add(size=len(blobs))
    value.tensor.string_val.extend(blobs)


def _first_event() -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), file_version="brain.Event:2")


def _session_start(step: int) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
