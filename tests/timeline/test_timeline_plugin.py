"""Do the routes of TensorBoard's tab answer what the page asks, through TensorBoard's own app?"""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic
from tensorboard import default, program
from tensorboard.backend import application
from werkzeug.test import Client, TestResponse

from pipe.timeline.blobs import member_data, pack, to_blobs, unpack
from pipe.timeline.events import Writer
from pipe.timeline.plugin import KEPT, Loader
from pipe.timeline.summary import summarize, summary_data
from pipe.timeline.trace import Trace
from schedules import Costs

BASE = "/data/plugin/pipeline"


def client_of(logdir: Path, *flags: str) -> Client:
    """TensorBoard's app, with its own plugins and ours."""
    ours = [] if any(plugin is Loader for plugin in default.get_dynamic_plugins()) else [Loader()]
    tensorboard = program.TensorBoard(plugins=[*default.get_plugins(), *ours])
    once = ("--load_fast", "false", "--reload_interval", "0", "--reload_task", "blocking")
    tensorboard.configure(argv=["tensorboard", "--logdir", str(logdir), *once, *flags])
    provider, multiplexer = tensorboard._make_data_provider()
    app = application.TensorBoardWSGIApp(
        tensorboard.flags,
        tensorboard.plugin_loaders,
        provider,
        tensorboard.assets_zip_provider,
        multiplexer,
    )
    return Client(app)


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def traces(logdir: Path) -> list[Trace]:
    synthetic.write_run(logdir / "other", synthetic.plan_of("zb_v", 2, 4), steps=1)
    plan = synthetic.plan_of("interleaved", 2, 4)
    return synthetic.write_run(
        logdir / "deep" / "run", plan, Costs(latency=0.1), steps=3, every=5, replicas=2
    )


@pytest.fixture(scope="module")
def client(logdir: Path, traces: list[Trace]) -> Client:
    return client_of(logdir)


def answer(client: Client, route: str, status: int = 200) -> Any:
    response = client.get(f"{BASE}{route}")
    assert response.status_code == status, response.get_data(as_text=True)
    assert response.content_type.startswith("application/json")
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    return json.loads(response.get_data())


def test_the_tab(client: Client) -> None:
    listing = client.get("/data/plugins_listing").json
    assert listing is not None
    tab = listing["pipeline"]
    assert tab["enabled"] and tab["tab_name"] == "Pipeline"
    assert tab["loading_mechanism"] == {"type": "IFRAME", "module_path": "/data/plugin/pipeline/index.js"}
    page = client.get(f"{BASE}/index.js")
    assert page.status_code == 200 and page.content_type.startswith("text/javascript")
    assert "render" in page.get_data(as_text=True)


def test_static_files_all_have_a_route(client: Client) -> None:
    from pipe.timeline import plugin

    for file in plugin._STATIC.rglob("*"):
        if file.is_file():
            route = f"{BASE}/{file.relative_to(plugin._STATIC).as_posix()}"
            assert client.get(route).get_data() == file.read_bytes()


def test_no_traces_no_tab(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write_scalars(0, {"loss": 1.0})
    writer.close()
    client = client_of(tmp_path)
    listing = client.get("/data/plugins_listing").json
    assert listing is not None and not listing["pipeline"]["enabled"]
    assert answer(client, "/steps") == {"version": 1, "runs": []}
    assert "there are: none" in answer(client, "/step?run=.&step=0", 404)["error"]


def test_steps(client: Client, traces: list[Trace]) -> None:
    deep, other = answer(client, "/steps")["runs"]
    assert (deep["run"], other["run"]) == ("deep/run", "other")
    assert deep["steps"] == [0, 5, 10] and other["steps"] == [0]
    summaries = [summarize(trace) for trace in traces]
    assert deep["duration"] == pytest.approx([summary.duration for summary in summaries], rel=1e-6)
    assert deep["bubble"] == pytest.approx([summary.bubble for summary in summaries], abs=1e-6)


def test_step(client: Client, traces: list[Trace]) -> None:
    response = client.get(f"{BASE}/step?run=deep/run&step=5", headers={"Accept-Encoding": "gzip"})
    assert response.headers["Content-Encoding"] == "gzip"
    data = json.loads(gzip.decompress(response.get_data()))
    assert data == answer(client, "/step?run=deep/run&step=5")
    trace = traces[1]
    summary = summarize(trace)
    assert data["members"] == [json.loads(json.dumps(member_data(member))) for member in trace.members]
    assert data["header"]["step"] == 5 and data["header"]["plan"] == trace.header.plan
    assert data["header"]["predicted"]["duration"] == pytest.approx(data["summary"]["predicted"], abs=0.06)
    for key, expected in summary_data(summary, trace).items():
        if isinstance(expected, float):
            assert data["summary"][key] == pytest.approx(expected, rel=1e-5), key
    assert data["summary"]["advice"] == list(summary.advice)
    counts = [sum(kind in "FBIW" for kind in member["kind"]) for member in data["members"]]
    assert list(map(len, data["header"]["predicted"]["starts"])) == counts


@pytest.mark.parametrize(("form", "content_type", "suffix"), [
    ("chrome", "application/json", "json"),
    ("csv", "text/csv; charset=utf-8", "csv"),
    ("svg", "image/svg+xml; charset=utf-8", "svg"),
])  # fmt: skip
def test_export(client: Client, traces: list[Trace], form: str, content_type: str, suffix: str) -> None:
    response = client.get(f"{BASE}/export?run=deep/run&step=10&format={form}")
    assert response.status_code == 200 and response.content_type == content_type
    name = f'attachment; filename="pipeline-deep-run-step-10.{suffix}"'
    assert response.headers["Content-Disposition"] == name
    text, events = response.get_data(as_text=True), sum(len(member.kind) for member in traces[2].members)
    if form == "chrome":
        assert sum(event["ph"] == "X" for event in json.loads(text)["traceEvents"]) == events
    elif form == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        assert len(rows) == events and all(row["predicted_end_us"] for row in rows if row["kind"] in "FB")
    else:
        assert text.startswith("<svg") and "step 10:" in text


@pytest.mark.parametrize(
    ("route", "status", "message"),
    [
        ("/step", 400, "run= is missing"),
        ("/step?run=other", 400, "step='' is no step"),
        ("/step?run=other&step=-1", 400, "step='-1' is no step"),
        ("/step?run=other&step=5", 404, "run 'other' has no trace of step 5; it has step 0"),
        (
            "/step?run=deep/run&step=1",
            404,
            "run 'deep/run' has no trace of step 1; it has 3 steps from 0 to 10",
        ),
        ("/step?run=none&step=0", 404, "no run 'none' with traces; there are: deep/run, other"),
        ("/export?run=other&step=0", 400, "format='': a step can be exported as chrome, csv, svg"),
        ("/export?run=other&step=0&format=png", 400, "format='png'"),
        ("/export?run=other&step=3&format=svg", 404, "has no trace of step 3"),
    ],
)
def test_errors_explain_themselves(client: Client, route: str, status: int, message: str) -> None:
    assert message in answer(client, route, status)["error"]


def test_broken_and_newer_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an error of its own step; the others still show."""
    writer, plan = Writer(tmp_path), synthetic.plan_of("1f1b", 2, 2)

    def write(step: int, change: Callable[[list[bytes]], list[bytes]]) -> None:
        monkeypatch.setattr("pipe.timeline.events.to_blobs", lambda trace: change(to_blobs(trace)))
        writer.write(synthetic.trace(plan, step=step))

    def newer(blobs: list[bytes]) -> list[bytes]:
        return [pack(unpack(blobs[0], "header") | {"version": 9}), *blobs[1:]]

    write(0, lambda blobs: [blobs[0], b"torn", *blobs[2:]])
    write(1, newer)
    write(2, lambda blobs: blobs[:2])
    write(3, lambda blobs: blobs)
    writer.close()
    client = client_of(tmp_path)
    assert answer(client, "/steps")["runs"][0]["steps"] == [0, 1, 2, 3]
    assert "the member 0 cannot be read" in answer(client, "/step?run=.&step=0", 422)["error"]
    assert "newer pipe-engine" in answer(client, "/step?run=.&step=1", 422)["error"]
    assert "1 members, but its header says" in answer(client, "/step?run=.&step=2", 422)["error"]
    assert "newer" in answer(client, "/export?run=.&step=1&format=svg", 422)["error"]
    assert answer(client, "/step?run=.&step=3")["header"]["step"] == 3


def test_a_plan_that_cannot_be_simulated_has_no_prediction(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(synthetic.trace(synthetic.plan_of("1f1b", 2, 2)).replace(plan="0X0\n"))
    writer.close()
    data = answer(client_of(tmp_path), "/step?run=.&step=0")
    assert data["header"]["predicted"] is None and data["summary"]["predicted"] is None


def test_steps_whose_scalars_tensorboard_dropped(tmp_path: Path) -> None:
    synthetic.write_run(tmp_path, steps=30)
    client = client_of(tmp_path, "--samples_per_plugin", "scalars=10")
    (run,) = answer(client, "/steps")["runs"]
    assert run["steps"] == list(range(30))
    assert sum(value is not None for value in run["duration"]) == 10
    assert run["duration"][-1] is not None and run["bubble"][-1] is not None


def test_the_user_says_how_many_steps_are_kept(tmp_path: Path) -> None:
    assert KEPT == 500
    synthetic.write_run(tmp_path, steps=12)
    few = answer(client_of(tmp_path, "--samples_per_plugin", "pipeline=5"), "/steps")
    assert len(few["runs"][0]["steps"]) == 5


def test_below_a_path_prefix(logdir: Path, traces: list[Trace]) -> None:
    client = client_of(logdir, "--path_prefix", "/a/b")
    response: TestResponse = client.get("/a/b/data/plugin/pipeline/steps")
    assert response.status_code == 200 and response.json is not None and len(response.json["runs"]) == 2


LIGHT = """
import sys, time
from tensorboard import default, program  # what TensorBoard has imported when it looks for plugins
from tensorboard.backend import application
default.get_static_plugins()
start = time.process_time()
import pipe.timeline.plugin
print(time.process_time() - start)
heavy = [name for name in ("torch", "numpy", "schedules", "pipe.timeline.trace") if name in sys.modules]
assert heavy in ([], ["numpy"]), heavy  # numpy is tensorboard's own
"""


def test_importing_the_plugin_is_light() -> None:
    """Under 0.3 s of CPU time; the best of three, as the machine is shared."""
    took = []
    for _ in range(3):
        run = [sys.executable, "-c", LIGHT]
        out = subprocess.run(run, check=True, capture_output=True, text=True, timeout=60).stdout
        took.append(float(out))
    assert min(took) < 0.3
