"""Which traces does a log directory hold? Read without a TensorBoard server."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipe.timeline import PLUGIN, SCALARS, TAG
from pipe.timeline.blobs import from_blobs, read_header
from pipe.timeline.trace import Header, Trace, TraceError

_HEAD = struct.Struct("<QI")  # a record: its length, that number's checksum, the data, and their checksum
_CHECKSUM = 4


class _Place(NamedTuple):
    path: Path
    offset: int
    length: int


@dataclass
class Run:
    """One run: where its traced steps are, and the scalars that came with them."""

    name: str
    places: dict[int, _Place] = field(default_factory=dict)
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    """By name (`step_seconds`, `bubble`, ...) and step."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The traced steps, ascending."""
        return tuple(sorted(self.places))

    def trace(self, step: int) -> Trace:
        """A traced step. Raises a `TraceError` where it can't be read, and a KeyError where there is none."""
        with self._named(step):
            return from_blobs(self._blobs(step))

    def header(self, step: int) -> Header:
        """Its header alone."""
        with self._named(step):
            return read_header(self._blobs(step)[0])

    @contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """Errors say which step they are of."""
        try:
            yield
        except TraceError as error:
            raise TraceError(f"step {step} of run {self.name}: {error}") from None

    def _blobs(self, step: int) -> list[bytes]:
        place = self.places[step]
        with place.path.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        for value in _parsed(data, place.path, place.offset).summary.value:
            if _is_trace(value):
                return list(value.tensor.string_val)
        raise TraceError(f"{place.path} has changed: no trace at byte {place.offset}")


def read(logdir: str | os.PathLike[str]) -> dict[str, Run]:
    """The runs with traces at or below a directory, by name, as TensorBoard calls them ("." is itself).

    Only where they are is read; `Run.trace` reads one. What a writer is at just now is left out, and so is
    what lies behind a broken record. Raises an `OSError` where there is no such directory.
    """
    root = Path(logdir)
    if not root.is_dir():
        kind = "not a directory, but a file" if root.exists() else "no such directory"
        raise NotADirectoryError(f"{kind}: {root}")
    runs: dict[str, Run] = {}
    for path in _event_files(root):
        name = path.parent.relative_to(root).as_posix()
        _read_file(path, runs.setdefault(name, Run(name)))
    return {name: run for name, run in sorted(runs.items()) if run.places}


def _event_files(root: Path) -> Iterator[Path]:
    """In the order of their names, which begin with a time."""
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        yield from (Path(folder, file) for file in sorted(files) if "tfevents" in file)


def _read_file(path: Path, run: Run) -> None:
    from tensorboard.compat.proto.event_pb2 import SessionLog

    for offset, data in _records(path):
        event = _parsed(data, path, offset)
        if event.session_log.status == SessionLog.START:
            _purge(run, event.step)
        for value in event.summary.value:
            if _is_trace(value):
                run.places[event.step] = _Place(path, offset, len(data))
            elif value.tag.startswith(SCALARS):
                of_tag = run.scalars.setdefault(value.tag[len(SCALARS) :], {})
                of_tag[event.step] = value.simple_value


def _purge(run: Run, first: int) -> None:
    """A session that starts again at a step makes what an earlier one said of later steps void."""
    run.places = {step: place for step, place in run.places.items() if step < first}
    for name, values in run.scalars.items():
        run.scalars[name] = {step: value for step, value in values.items() if step < first}


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each whole record's offset and data.

    The data's own checksum is not compared: in Python that takes far longer than all the rest, and a blob's
    gzip has one.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            if masked_crc32c(head[:8]) != checksum:
                return
            offset, data = file.tell(), file.read(length)
            if len(data) < length or len(file.read(_CHECKSUM)) < _CHECKSUM:
                return
            yield offset, data


def _parsed(data: bytes, path: Path, offset: int) -> Any:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        return Event.FromString(data)
    except DecodeError as error:
        raise TraceError(f"{path} is broken at byte {offset}: {error}") from None


def _is_trace(value: Any) -> bool:
    return bool(value.tag == TAG and value.metadata.plugin_data.plugin_name == PLUGIN)
