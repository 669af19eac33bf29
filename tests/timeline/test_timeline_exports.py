"""Do exports say what the trace says, in the forms that other tools read?"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
import synthetic

from pipe.timeline.chrome import chrome_trace
from pipe.timeline.costs import predict
from pipe.timeline.picture import COLORS, svg
from pipe.timeline.table import COLUMNS, csv_table
from pipe.timeline.trace import KINDS, Trace
from schedules import Costs, add_collectives


@pytest.fixture(scope="module")
def trace() -> Trace:
    plan = synthetic.plan_of("interleaved", 2, 4)
    return synthetic.trace(plan, Costs(latency=0.1), replicas=2, memory=True)


@pytest.fixture(scope="module")
def sharded() -> Trace:
    plan = add_collectives(synthetic.plan_of("looped_bfs", 2, 4), reduce_every=1, unshard=True)
    return synthetic.trace(plan, Costs(unshard=0.5, reduce_grad=3, latency=0.1))


def events_of(trace: Trace) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(trace))["traceEvents"]
    return events


def test_chrome_has_a_process_a_member(trace: Trace) -> None:
    events = events_of(trace)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[1] == "rank 0, replica 1 (localhost, cpu)" and len(names) == 4
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(member.kind) for member in trace.members)
    first = next(e for e in slices if e["cat"] == "forward")
    assert (first["name"], first["ts"], first["dur"], first["tid"]) == ("0F0", 200.0, 1000.0, 0)
    assert {e["name"] for e in events if e["ph"] == "C"} == {"live activations", "memory"}


def test_slices_of_a_thread_never_overlap(sharded: Trace) -> None:
    """A viewer nests what overlaps: reductions run beside the rest, so they have threads of their own."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events_of(sharded):
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert {thread for _, thread in tracks} == {0, 1, 2}
    for spans in tracks.values():
        assert all(one[1] <= other[0] + 0.11 for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize("of", ["trace", "sharded"])
def test_arrows_lead_from_slice_to_slice(of: str, request: pytest.FixtureRequest) -> None:
    trace: Trace = request.getfixturevalue(of)
    events = events_of(trace)
    slices = [e for e in events if e["ph"] == "X"]

    def at(end: dict[str, Any]) -> str:
        (found,) = {
            e["name"]
            for e in slices
            if e["pid"] == end["pid"]
            and e["tid"] == end["tid"]
            and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
        }
        return str(found)

    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum((member.kind == "r").sum() for member in trace.members) > 0
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"] and start["pid"] != end["pid"]
        maker, taker = at(start), at(end)
        assert maker[1] in "FB" and ("RECV" in taker or taker[1] in "FB")
        assert maker.lstrip("0123456789")[1:] == taker.removeprefix(taker[0]).lstrip("RECVFB")


def test_csv(trace: Trace) -> None:
    predicted = predict(trace)
    rows = list(csv.DictReader(io.StringIO(csv_table(trace, predicted))))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == sum(len(member.kind) for member in trace.members)
    forward = next(row for row in rows if row["kind"] == "F" and row["member"] == "2")
    assert forward["start_us"] == f"{trace.members[2].start[trace.members[2].kind == 'F'][0]:.1f}"
    assert forward["predicted_start_us"] == f"{predicted.starts[2][0]:.1f}"
    assert forward["stage"] == "1" and forward["meaning"] == "forward" and forward["peer"] == ""
    receive = next(row for row in rows if row["kind"] == "r" and row["member"] == "2")
    assert receive["value"] == "activation" and receive["peer"] == "0" and not receive["predicted_start_us"]
    bare = next(csv.DictReader(io.StringIO(csv_table(trace))))
    assert bare["predicted_end_us"] == ""


@pytest.mark.parametrize("of", ["trace", "sharded"])
def test_svg(of: str, request: pytest.FixtureRequest) -> None:
    trace: Trace = request.getfixturevalue(of)
    picture = ElementTree.fromstring(svg(trace))
    tags = [element.tag.rpartition("}")[2] for element in picture.iter()]
    shown = sum(int((member.start < member.end).sum()) for member in trace.members)
    assert tags.count("title") == shown
    texts = [element.text or "" for element in picture.iter() if element.tag.endswith("text")]
    assert trace.name_of(trace.members[-1]) in texts and "F3'" in texts and "ms" in texts
    width = float(picture.get("width", "0"))
    bars = [
        e for group in picture.iter() if group.tag.endswith("}g") for e in group if e.tag.endswith("rect")
    ]
    assert all(0 <= float(bar.get("x", "-1")) <= width for bar in bars)


def test_every_kind_has_a_color_of_its_own() -> None:
    assert COLORS.keys() == KINDS.keys() and len({color for color, _ in COLORS.values()}) == len(KINDS)


def test_names_are_escaped(trace: Trace) -> None:
    ElementTree.fromstring(svg(trace.replace(schedule="csv(<a&b>)")))


def test_an_empty_step_has_a_picture(trace: Trace) -> None:
    none = np.zeros(0, np.int64)
    columns: dict[str, Any] = {name: none for name in ("stage", "microbatch", "peer", "live")}
    members = tuple(
        dataclasses.replace(
            member,
            **columns,
            kind=np.empty(0, "<U1"),
            value=np.empty(0, "<U1"),
            start=np.empty(0),
            end=np.empty(0),
            memory=None,
        )
        for member in trace.members
    )
    ElementTree.fromstring(svg(Trace(trace.replace(duration=0.0).header, members)))
