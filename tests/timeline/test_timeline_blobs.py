"""Do traces survive being stored, and do broken ones say what is wrong?"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import synthetic

from pipe.timeline.blobs import VERSION, from_blobs, pack, to_blobs, unpack
from pipe.timeline.costs import predict
from pipe.timeline.trace import Trace, TraceError
from schedules import Costs

Data = dict[str, Any]


@pytest.fixture(scope="module")
def trace() -> Trace:
    plan = synthetic.plan_of("interleaved", 2, 4)
    return synthetic.trace(plan, Costs(latency=0.1), replicas=2, memory=True)


def test_round_trip(trace: Trace) -> None:
    """Of all there can be in a header; times keep a tenth of a microsecond, and blobs say it in those."""
    full = trace.replace(
        predicted=predict(trace),
        layer_sizes=tuple(map(float, range(12))),
        options="amp=bf16 \u2603",
        wall_time=1.5,
    )
    blobs = to_blobs(full)
    again = from_blobs(blobs)
    assert len(blobs) == 5 and to_blobs(again) == blobs
    assert again.header == full.header
    for mine, other in zip(again.members, full.members, strict=True):
        for field in dataclasses.fields(mine):
            if field.name == "sends":
                continue
            a, b = getattr(mine, field.name), getattr(other, field.name)
            same = np.allclose(a, b, atol=0.051) if field.name in ("start", "end") else np.array_equal(a, b)
            assert same, field.name
        assert mine.sends.source.tolist() == other.sends.source.tolist()
    assert again.header.predicted is not None and full.header.predicted is not None
    assert again.header.predicted.starts[3] == pytest.approx(full.header.predicted.starts[3], abs=0.051)
    assert again.plan == full.plan


def test_the_format_is_the_agreed_one(trace: Trace) -> None:
    header, member, *_ = (json.loads(gzip.decompress(blob)) for blob in to_blobs(trace))
    assert header["version"] == VERSION == 1 and "layer_sizes" not in header
    assert list(header) == [
        "version", "step", "wall_time", "options", "schedule", "ranks", "replicas", "microbatches",
        "placement", "layers", "layer_names", "plan", "duration", "clock", "scalars", "predicted",
    ]  # fmt: skip
    assert list(member) == [
        "member", "rank", "replica", "host", "device", "begin", "finish", "kind", "stage", "microbatch",
        "peer", "value", "start", "end", "live", "memory", "sends",
    ]  # fmt: skip
    assert member["kind"].startswith("cF") and member["kind"].endswith("o")
    assert set(member["sends"]) == {"microbatch", "source", "destination", "value", "left"}


def test_no_memory_and_no_numbers(trace: Trace) -> None:
    """JSON has neither NaN nor infinity, and a loss may be either."""
    member = dataclasses.replace(trace.members[0], memory=None)
    header = dataclasses.replace(trace.header, scalars={"loss": math.nan, "scale": math.inf, "lr": 0.1})
    again = from_blobs(to_blobs(Trace(header, (member, *trace.members[1:]))))
    assert again.members[0].memory is None
    assert math.isnan(again.header.scalars["loss"]) and math.isnan(again.header.scalars["scale"])
    assert again.header.scalars["lr"] == 0.1


def test_unknown_fields_are_ignored(trace: Trace) -> None:
    blobs = changed(trace, 0, lambda data: data.update(color="red"))
    assert from_blobs(changed_blobs(blobs, 1, lambda data: data.update(mood=[1]))).header == trace.header


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, lambda d: d.update(version=2), r"newer pipe-engine: its format is version 2, and this one reads"),
        (0, lambda d: d.pop("plan"), "the header lacks 'plan'"),
        (0, lambda d: d.update(step="x"), "'step' of the header is 'x', not a number"),
        (0, lambda d: d.update(clock=[1]), r"'clock' of the header is \[1\], not an object"),
        (0, lambda d: d.update(layers=[1, 2]), "the header is broken"),
        (0, lambda d: d.update(placement=[0, 2]), r"places stages on ranks \(0, 2\), but says 2 ranks"),
        (0, lambda d: d.update(layers=[[0, 3]]), "layers of 1 stages, and 4 stages"),
        (0, lambda d: d.update(layer_names=["a"]), r"stages of layers \(\(0, 3\), .* and 1 layers"),
        (0, lambda d: d.update(layer_sizes=[1]), "1 sizes of 12 layers"),
        (0, lambda d: d.update(replicas=3), "4 members, but its header says 2 ranks x 3 replicas: 6"),
        (2, lambda d: d.pop("kind"), "member 1 lacks 'kind'"),
        (2, lambda d: d.update(kind="?" + d["kind"][1:]), "'kind' of the member 1 has '?'"),
        (2, lambda d: d["stage"].pop(), "'stage' of the member 1 has"),
        (2, lambda d: d.update(value="a"), "'value' of the member 1 has 1 letters, not"),
        (2, lambda d: d["start"].__setitem__(1, 1e9), "events that end before they start"),
        (2, lambda d: d["start"].__setitem__(1, "soon"), "the member 1 is broken"),
        (2, lambda d: d.update(rank=1), "member 1 says that it is member 1, rank 1 of replica 1"),
        (2, lambda d: d["stage"].__setitem__(1, 4), "member 1 computes stages that the 4 of the header lack"),
        (2, lambda d: d["sends"].update(left=[]), "'left' of the 'sends' of the member 1 has 0 values"),
    ],
)
def test_broken_data(trace: Trace, number: int, change: Callable[[Data], Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        from_blobs(changed(trace, number, change))


def test_broken_blobs(trace: Trace) -> None:
    blobs = to_blobs(trace)
    for wrong, message in (
        ([], "the trace is empty"),
        ([b"", *blobs[1:]], "the header cannot be read: .*0 bytes"),
        ([b"not gzip", *blobs[1:]], "the header cannot be read: Not a gzipped file"),
        ([blobs[0][:-20], *blobs[1:]], "the header cannot be read"),
        ([gzip.compress(b"{"), *blobs[1:]], "the header cannot be read: Expecting property name"),
        ([gzip.compress(b"[]"), *blobs[1:]], "the header is no JSON object, but a list"),
        ([*blobs[:-1], blobs[-1][:50]], "the member 3 cannot be read"),
        (blobs[:-1], "3 members, but its header says 2 ranks x 2 replicas: 4"),
    ):
        with pytest.raises(TraceError, match=message):
            from_blobs(wrong)


def changed(trace: Trace, number: int, change: Callable[[Data], Any]) -> list[bytes]:
    return changed_blobs(to_blobs(trace), number, change)


def changed_blobs(blobs: list[bytes], number: int, change: Callable[[Data], Any]) -> list[bytes]:
    data = unpack(blobs[number], "blob")
    change(data)
    return [*blobs[:number], pack(data), *blobs[number + 1 :]]
