"""How is a trace stored? As blobs of gzipped JSON, a header and one a member."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipe.timeline.trace import (
    KINDS,
    VALUES,
    Clock,
    Header,
    Letters,
    Member,
    Prediction,
    Sends,
    Trace,
    TraceError,
)

_Read = TypeVar("_Read")

VERSION = 1
"""That of the format, in every header. Readers refuse newer ones, and ignore fields that they don't know."""
_LEVEL = 5  # of gzip: 1 is a third larger, 9 five times slower


def to_blobs(trace: Trace) -> list[bytes]:
    """`[header, member 0, member 1, ...]`."""
    return [pack(header_data(trace.header)), *(pack(member_data(member)) for member in trace.members)]


def from_blobs(blobs: Sequence[bytes]) -> Trace:
    """Reads what `to_blobs` wrote; a `TraceError` says what is broken, missing or newer."""
    if not blobs:
        raise TraceError("the trace is empty: it has no header")
    header = read_header(blobs[0])
    expected = header.ranks * header.replicas
    if len(blobs) - 1 != expected:
        raise TraceError(
            f"the trace has {len(blobs) - 1} members, but its header says {header.ranks} ranks x "
            f"{header.replicas} replicas: {expected}"
        )
    members = [read_member(blob, header, number) for number, blob in enumerate(blobs[1:])]
    return Trace(header, tuple(members))


def pack(data: Mapping[str, Any]) -> bytes:
    """A blob of JSON data."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return gzip.compress(text.encode(), _LEVEL, mtime=0)


def unpack(blob: bytes, name: str) -> dict[str, Any]:
    """The JSON data of a blob; `name` is what errors call it."""
    try:
        data = json.loads(gzip.decompress(blob))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise TraceError(f"the {name} cannot be read: {error} ({len(blob)} bytes)") from None
    if not isinstance(data, dict):
        raise TraceError(f"the {name} is no JSON object, but a {type(data).__name__}")
    return data


def header_data(header: Header) -> dict[str, Any]:
    """As JSON data."""
    data = {
        "version": VERSION,
        "step": header.step,
        "wall_time": header.wall_time,
        "options": header.options,
        "schedule": header.schedule,
        "ranks": header.ranks,
        "replicas": header.replicas,
        "microbatches": header.microbatches,
        "placement": list(header.placement),
        "layers": [list(layers) for layers in header.layers],
        "layer_names": list(header.layer_names),
        "plan": header.plan,
        "duration": _rounded(header.duration),
        "clock": {"kind": header.clock.kind, "error": _rounded(header.clock.error)},
        # JSON knows no NaN and no infinity, which a loss may well be.
        "scalars": {name: _finite(value) for name, value in header.scalars.items()},
        "predicted": prediction_data(header.predicted),
    }
    return data | ({} if header.layer_sizes is None else {"layer_sizes": list(header.layer_sizes)})


def prediction_data(prediction: Prediction | None) -> dict[str, Any] | None:
    """As JSON data."""
    if prediction is None:
        return None
    return {
        "duration": _rounded(prediction.duration),
        "starts": [_rounded(times) for times in prediction.starts],
        "ends": [_rounded(times) for times in prediction.ends],
    }


def member_data(member: Member) -> dict[str, Any]:
    """As JSON data."""
    sends = member.sends
    return {
        "member": member.member,
        "rank": member.rank,
        "replica": member.replica,
        "host": member.host,
        "device": member.device,
        "begin": _rounded(member.begin),
        "finish": _rounded(member.finish),
        "kind": "".join(member.kind.tolist()),
        "stage": member.stage.tolist(),
        "microbatch": member.microbatch.tolist(),
        "peer": member.peer.tolist(),
        "value": "".join(member.value.tolist()),
        "start": _rounded(member.start),
        "end": _rounded(member.end),
        "live": member.live.tolist(),
        "memory": None if member.memory is None else member.memory.tolist(),
        "sends": {
            "microbatch": sends.microbatch.tolist(),
            "source": sends.source.tolist(),
            "destination": sends.destination.tolist(),
            "value": "".join(sends.value.tolist()),
            "left": _rounded(sends.left),
        },
    }


def read_header(blob: bytes) -> Header:
    """The header of its blob."""
    fields = _Fields(unpack(blob, "header"), "header")
    version = fields.number("version")
    if version > VERSION:
        raise TraceError(
            f"the trace was written by a newer pipe-engine: its format is version {version:g}, and this one "
            f"reads version {VERSION}; upgrade pipe-engine where you look at it"
        )
    return fields.guarded(_header)


def read_member(blob: bytes, header: Header, number: int) -> Member:
    """The given member of its blob."""
    fields = _Fields(unpack(blob, f"member {number}"), f"member {number}")
    member = fields.guarded(_member)
    place = member.rank * header.replicas + member.replica
    if not member.member == place == number or not 0 <= member.rank < header.ranks:
        raise TraceError(
            f"member {number} says that it is member {member.member}, rank {member.rank} of replica "
            f"{member.replica}, of {header.ranks} ranks x {header.replicas} replicas"
        )
    stages = member.stage[member.is_compute]
    if stages.size and not 0 <= stages.min() <= stages.max() < header.num_stages:
        raise TraceError(f"member {number} computes stages that the {header.num_stages} of the header lack")
    return member


class _Fields:
    """The fields of a JSON object; a wrong one is a `TraceError` that names it."""

    def __init__(self, data: dict[str, Any], name: str) -> None:
        self.data, self.name = data, name

    def guarded(self, read: Callable[[_Fields], _Read]) -> _Read:
        """What `read` makes of the fields; what it stumbles over is an error of these."""
        try:
            return read(self)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"the {self.name} is broken: {error}") from error

    def get(self, key: str) -> Any:
        if key not in self.data:
            raise TraceError(f"the {self.name} lacks {key!r}")
        return self.data[key]

    def inner(self, key: str) -> _Fields:
        value = self.get(key)
        if not isinstance(value, dict):
            raise TraceError(f"{key!r} of the {self.name} is {_short(value)}, not an object")
        return _Fields(value, f"{key!r} of the {self.name}")

    def text(self, key: str) -> str:
        return str(self.get(key))

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TraceError(f"{key!r} of the {self.name} is {_short(value)}, not a number")
        return value

    def column(self, key: str, kind: type[Any], rows: int | None = None) -> npt.NDArray[Any]:
        values = self.get(key)
        column = np.asarray(values if values else [], kind)
        if column.ndim != 1 or rows not in (None, len(column)):
            raise TraceError(f"{key!r} of the {self.name} has {column.size} values, not {rows}")
        return column

    def letters(self, key: str, known: Mapping[str, str], rows: int | None = None) -> Letters:
        text = self.text(key)
        unknown = set(text) - set(known)
        if unknown:
            raise TraceError(f"{key!r} of the {self.name} has {min(unknown)!r}; known are {''.join(known)}")
        if rows not in (None, len(text)):
            raise TraceError(f"{key!r} of the {self.name} has {len(text)} letters, not {rows}")
        return np.array(list(text), "<U1")


def _header(fields: _Fields) -> Header:
    clock = fields.inner("clock")
    sizes = fields.data.get("layer_sizes")
    header = Header(
        step=int(fields.number("step")),
        wall_time=float(fields.number("wall_time")),
        options=fields.text("options"),
        schedule=fields.text("schedule"),
        ranks=int(fields.number("ranks")),
        replicas=int(fields.number("replicas")),
        microbatches=int(fields.number("microbatches")),
        placement=tuple(map(int, fields.get("placement"))),
        layers=tuple((int(start), int(stop)) for start, stop in fields.get("layers")),
        layer_names=tuple(map(str, fields.get("layer_names"))),
        plan=fields.text("plan"),
        duration=float(fields.number("duration")),
        clock=Clock(clock.text("kind"), tuple(clock.column("error", float).tolist())),
        scalars={name: _number(value) for name, value in fields.inner("scalars").data.items()},
        predicted=None if fields.get("predicted") is None else _prediction(fields.inner("predicted")),
        layer_sizes=None if sizes is None else tuple(map(float, sizes)),
    )
    _check(header)
    return header


def _check(header: Header) -> None:
    placement = header.placement
    if not placement or set(placement) != set(range(header.ranks)):
        raise TraceError(f"the header places stages on ranks {placement}, but says {header.ranks} ranks")
    if len(header.layers) != len(placement):
        raise TraceError(f"the header has layers of {len(header.layers)} stages, and {len(placement)} stages")
    layers = len(header.layer_names)
    if header.layer_sizes is not None and len(header.layer_sizes) != layers:
        raise TraceError(f"the header has {len(header.layer_sizes)} sizes of {layers} layers")
    if any(not 0 <= start <= stop <= layers for start, stop in header.layers):
        raise TraceError(f"the header has stages of layers {header.layers}, and {layers} layers")


def _prediction(fields: _Fields) -> Prediction:
    starts, ends = (tuple(np.asarray(row, float) for row in fields.get(key)) for key in ("starts", "ends"))
    return Prediction(float(fields.number("duration")), starts, ends)


def _member(fields: _Fields) -> Member:
    kind = fields.letters("kind", KINDS)
    rows = len(kind)
    start, end = fields.column("start", float, rows), fields.column("end", float, rows)
    if not (np.isfinite(start).all() and (start <= end).all()):
        raise TraceError(f"the {fields.name} has events that end before they start")
    return Member(
        member=int(fields.number("member")),
        rank=int(fields.number("rank")),
        replica=int(fields.number("replica")),
        host=fields.text("host"),
        device=fields.text("device"),
        begin=float(fields.number("begin")),
        finish=float(fields.number("finish")),
        kind=kind,
        stage=fields.column("stage", np.int64, rows),
        microbatch=fields.column("microbatch", np.int64, rows),
        peer=fields.column("peer", np.int64, rows),
        value=fields.letters("value", VALUES, rows),
        start=start,
        end=end,
        live=fields.column("live", np.int64, rows),
        memory=None if fields.get("memory") is None else fields.column("memory", np.int64, rows),
        sends=_sends(fields.inner("sends")),
    )


def _sends(fields: _Fields) -> Sends:
    value = fields.letters("value", VALUES)
    rows = len(value)
    return Sends(
        microbatch=fields.column("microbatch", np.int64, rows),
        source=fields.column("source", np.int64, rows),
        destination=fields.column("destination", np.int64, rows),
        value=value,
        left=fields.column("left", float, rows),
    )


def _rounded(times: npt.ArrayLike) -> Any:
    # Adding 0 turns -0.0 into 0.0.
    return (np.round(np.asarray(times, np.float64), 1) + 0.0).tolist()


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
