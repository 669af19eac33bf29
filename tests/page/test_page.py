"""The page in a real TensorBoard and a real Chromium: states and values, not pixels."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import ALONE, PATIENCE, Tab, actions, tensorboard
from timeline import synthetic
from timeline.synthetic import plan_of, write_run

from pipe.timeline.events import Writer
from pipe.timeline.summary import summarize
from pipe.timeline.trace import Trace
from schedules import Costs

pytestmark = pytest.mark.timeout(180)

PREFIX = "/behind/a/proxy"
FRAME = 150.0
"""Milliseconds: three times what a frame may take, as tests run on busy machines."""
Runs = dict[str, list[Trace]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """Two small runs and a large one. The second stage of `virtual` is slow."""
    logdir = tmp_path_factory.mktemp("page") / "runs"
    costs = Costs(latency=0.05)
    slow = Costs(F=[1, 2, 1, 1, 1, 1, 1, 1], latency=0.05)
    return logdir, {
        "wide": write_run(logdir / "wide", plan_of("1f1b", 16, 256), costs, steps=1),
        "plain": write_run(logdir / "plain", plan_of("1f1b", 2, 6), costs, steps=5, schedule="1f1b"),
        "virtual": write_run(
            logdir / "virtual", plan_of("interleaved(2)", 4, 8), slow, steps=3, every=10, memory=True
        ),
    }


@pytest.fixture(scope="module")
def opened(runs: tuple[Path, Runs], context: Any) -> Iterator[Tab]:
    with tensorboard(runs[0], "--path_prefix", PREFIX, "--load_fast", "false") as address:
        assert PREFIX in address
        yield Tab(context.pages[0], address)


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    with opened.watched():
        yield opened


@pytest.fixture
def plain(runs: tuple[Path, Runs]) -> list[Trace]:
    return runs[1]["plain"]


@pytest.fixture
def virtual(runs: tuple[Path, Runs]) -> list[Trace]:
    return runs[1]["virtual"]


def test_tab_appears_and_shows_the_last_step_of_the_latest_run(tab: Tab, virtual: list[Trace]) -> None:
    tab.page.goto(tab.address)
    tab.page.get_by_role("tab", name="Pipeline").click()
    tab.wait("virtual@20")
    assert tab["bars.total"] == actions(virtual[2])


def test_bars_are_the_actions_of_the_plan(tab: Tab, plain: list[Trace], virtual: list[Trace]) -> None:
    tab.open("run=plain&step=2", "plain@2", alone=True)
    assert tab["bars.total"] == tab["bars.drawn"] == actions(plain[2]) == 24
    assert tab["rows"] == 2
    tab.frame.select_option("#run", "virtual")
    tab.wait("virtual@0")  # the nearest that it has
    assert tab["bars.total"] == tab["bars.drawn"] == actions(virtual[0]) == 128
    assert tab["bars.events"] == sum(len(member.kind) for member in virtual[0].members)


def test_pointing_at_a_bar_shows_its_numbers(tab: Tab, virtual: list[Trace]) -> None:
    trace, number = virtual[1], 1
    member = trace.members[number]
    event = next(at for at, kind in enumerate(member.kind) if kind == "B" and member.stage[at] == 5)
    predicted = summarize(trace).predicted
    assert predicted is not None
    order = int(member.is_compute[:event].sum())
    tab.open("run=virtual&step=10", "virtual@10")
    tab.point(number, event)
    hover, start, end = tab["hover"], member.start[event], member.end[event]
    assert (hover["rank"], hover["stage"], hover["microbatch"]) == (1, 5, member.microbatch[event])
    assert (hover["start"], hover["end"]) == (pytest.approx(start), pytest.approx(end))
    assert hover["duration"] == pytest.approx(end - start)
    guess = predicted.ends[number][order] - predicted.starts[number][order]
    assert hover["predicted"]["start"] == pytest.approx(predicted.starts[number][order], abs=0.06)
    assert hover["predicted"]["duration"] == pytest.approx(guess, abs=0.11)
    assert hover["predicted"]["delta"] == pytest.approx(end - start - guess, abs=0.11)
    box = tab.frame.locator(".tooltip").inner_text()
    for text in (
        f"{start / 1e3:.4f} ms",
        f"{end / 1e3:.4f} ms",
        f"microbatch {hover['microbatch']}",
        "stage 5",
    ):
        assert text in box


def test_arrows_join_a_send_and_its_receive(tab: Tab, virtual: list[Trace]) -> None:
    member = virtual[0].members[1]
    event = next(at for at, kind in enumerate(member.kind) if kind == "F" and member.stage[at] == 1)
    tab.open("run=virtual&step=0", "virtual@0", alone=True)
    tab.point(1, event)
    into, out = sorted(tab["hover.flows"], key=lambda flow: not flow["into"])
    assert [into["from"]["rank"], into["to"]["rank"], into["value"]] == [0, 1, "a"]
    assert [out["from"]["rank"], out["to"]["rank"], out["value"]] == [1, 2, "a"]
    fed = virtual[0].members[0]
    assert fed.kind[into["from"]["event"]] == "F" and fed.stage[into["from"]["event"]] == 0
    assert into["from"]["time"] == pytest.approx(fed.end[into["from"]["event"]])
    assert into["from"]["time"] < into["to"]["time"] <= member.start[event] + 0.01
    # The wait before it has the same arrow.
    wait = next(at for at, kind in enumerate(member.kind) if kind == "r" and member.stage[at] == 1)
    tab.point(1, wait)
    assert tab["hover.flows"] == [into]


def test_zoom_pan_and_fit(tab: Tab) -> None:
    tab.open("run=plain&step=0", "plain@0", alone=True)
    whole, total = tab["whole"], tab["bars.total"]
    assert tab["range"] == [0, whole]
    tab.page.mouse.move(*tab.place(0, 8))
    tab.page.mouse.wheel(0, -600)
    tab.until(f"it.range[1] - it.range[0] < {whole / 2}")
    tab.key("w", "w", "w")
    low, high = tab["range"]
    assert 0 < low < high < whole
    assert tab["bars.drawn"] < total
    tab.key("d")
    tab.until(f"it.range[0] > {low}")
    assert tab["range"][1] - tab["range"][0] == pytest.approx(high - low)
    tab.key("a", "s")
    tab.until(f"it.range[1] - it.range[0] > {(high - low) * 1.2}")
    before = tab["range"]
    x, y = tab.place(0, 8)
    tab.page.keyboard.down("Shift")
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 60, y, steps=3)
    tab.page.mouse.up()
    tab.page.keyboard.up("Shift")
    tab.until(f"it.range[0] < {before[0]}")
    assert tab["selection"] is None
    tab.key("f")
    tab.until(f"it.range[1] === {whole} && it.range[0] === 0")
    assert tab["bars.drawn"] == total


def test_selected_range_is_added_up(tab: Tab, plain: list[Trace]) -> None:
    tab.open("run=plain&step=0", "plain@0", alone=True)
    trace = plain[0]
    x, y = tab.place(0, 3)
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 250, y, steps=4)
    tab.page.mouse.up()
    tab.until("it.selection")
    selection = tab["selection"]
    low, high = selection["range"]
    assert 0 < low < high < tab["whole"]
    time = {
        kind: sum(
            max(0.0, min(end, high) - max(start, low))
            for member in trace.members
            for start, end, one in zip(member.start, member.end, member.kind, strict=True)
            if one == kind
        )
        for kind in "FBr"
    }
    assert selection["time"]["F"] == pytest.approx(time["F"])
    assert selection["time"]["B"] == pytest.approx(time["B"])
    assert selection["idle"] == pytest.approx(2 * (high - low) - time["F"] - time["B"])
    assert tab.frame.locator(".selection").is_visible()
    tab.key("z")
    tab.until(f"Math.abs(it.range[0] - {low}) < 1e-6")
    tab.key("Escape")
    tab.until("!it.selection")
    assert tab.frame.locator(".selection").is_hidden()


def test_going_through_steps(tab: Tab, plain: list[Trace]) -> None:
    tab.open("run=plain&step=0", "plain@0", alone=True)
    assert tab.frame.locator("#previous").is_disabled()
    tab.frame.click("#next")
    tab.wait("plain@1")
    tab.key("ArrowRight")
    tab.wait("plain@2")
    tab.frame.locator("#slider").fill("4")
    tab.wait("plain@4")
    tab.key("ArrowLeft")
    tab.wait("plain@3")
    tab.frame.click("#slowest")
    slowest = max(plain, key=lambda trace: trace.header.duration)
    tab.wait(f"plain@{slowest.header.step}")
    assert tab["whole"] == pytest.approx(slowest.header.duration)
    tab.frame.locator("#slider").fill("2")
    tab.wait("plain@2")
    tab.frame.click("#play")
    tab.wait("plain@4")
    tab.until("!it.state.playing")  # it stops at the end


def test_runs_and_steps_are_compared_on_one_axis(tab: Tab, plain: list[Trace], virtual: list[Trace]) -> None:
    tab.open("run=plain&step=1", "plain@1", alone=True)
    tab.frame.select_option("#compare-run", "virtual")
    tab.until("it.compare && it.compare.run === 'virtual'")
    tab.frame.select_option("#compare-step", "20")
    tab.until("it.compare && it.compare.step === 20")
    assert tab["compare.bars"] == actions(virtual[2])
    assert tab["rows"] == 2 + 4
    assert tab["whole"] == pytest.approx(max(plain[1].header.duration, virtual[2].header.duration))
    event = int(virtual[2].members[2].is_compute.argmax())
    tab.point(2, event, which=1)
    assert (tab["hover.run"], tab["hover.step"]) == ("virtual", 20)
    # A step pinned below stays there while others pass above.
    tab.key("c")
    tab.until("it.compare.run === 'plain' && it.compare.step === 1")
    tab.key("ArrowRight")
    tab.wait("plain@2")
    assert tab["compare.step"] == 1
    tab.frame.select_option("#compare-run", "")
    tab.until("!it.compare")


def test_measured_over_predicted(tab: Tab, plain: list[Trace]) -> None:
    tab.open("run=plain&step=1", "plain@1", alone=True)
    events = tab["bars.events"]
    tab.frame.check("#predicted")
    tab.until("it.predicted")
    assert tab["bars.events"] == events + actions(plain[1])
    event = int(plain[1].members[0].is_compute.argmax())
    tab.point(0, event, predicted=True)
    assert tab["hover.predicted.start"] >= 0
    tab.key("p")
    tab.until("!it.predicted")


def test_summary_is_the_servers(tab: Tab, virtual: list[Trace]) -> None:
    summary = summarize(virtual[0])
    tab.open("run=virtual&step=0", "virtual@0", alone=True)
    text = tab.frame.locator(".summary").inner_text()
    assert f"{summary.bubble * 100:.1f} %" in text
    for sentence in summary.advice:
        assert sentence in text
    assert summary.slowest is not None and summary.slowest.stage == 1
    assert tab.frame.locator("tr.slowest").get_attribute("data-stage") == "1"
    idle = tab.frame.locator(".causes tbody tr td.all").all_inner_texts()
    assert idle == [f"{member.idle / summary.duration * 100:.1f}" for member in summary.members]


def test_dark_mode_follows_tensorboard(tab: Tab) -> None:
    tab.open("run=plain&step=1", "plain@1")
    assert tab["dark"] is False
    light = tab.frame.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.page.get_by_label("Menu for changing light or dark theme").click()
    tab.page.get_by_role("menuitem", name="Dark").click()
    tab.until("it.dark === true")
    assert tab.frame.evaluate("getComputedStyle(document.body).backgroundColor") != light
    tab.page.get_by_label("Menu for changing light or dark theme").click()
    tab.page.get_by_role("menuitem", name="Light").click()
    tab.until("it.dark === false")


def test_links_lead_to_what_was_seen(tab: Tab) -> None:
    tab.open("run=virtual&step=20&range=5000-12000.5&compare=plain&with=3&predicted=1", "virtual@20")
    tab.until("it.compare && it.range[0] === 5000")
    assert tab["range"] == [5000, 12000.5]
    assert (tab["compare.run"], tab["compare.step"], tab["predicted"]) == ("plain", 3, True)
    tab.key("ArrowLeft")
    tab.wait("virtual@10")
    tab.page.wait_for_function("location.hash.includes('p.pipeline.step=10')")
    link = tab.page.url
    assert link.startswith(tab.address) and "p.pipeline.range=5000.0-12000.5" in link
    tab.page.goto("about:blank")
    tab.page.goto(link)
    tab.wait("virtual@10")
    tab.until("it.compare && it.range[0] === 5000")


def test_export(tab: Tab, plain: list[Trace]) -> None:
    tab.open("run=plain&step=1", "plain@1", alone=True)
    content = {}
    for form in ("chrome", "csv", "svg"):
        with tab.page.expect_download() as download:
            tab.frame.click(f"#export-{form}")
        content[form] = Path(download.value.path()).read_text()
        assert re.search(r"plain.*1\.(json|csv|svg)$", download.value.suggested_filename)
    assert len(json.loads(content["chrome"])["traceEvents"]) >= actions(plain[1])
    assert len(list(csv.reader(io.StringIO(content["csv"])))) > actions(plain[1])
    assert content["svg"].lstrip().startswith("<")


def test_a_step_that_cannot_be_read_says_why(tab: Tab) -> None:
    tab.open("run=plain&step=1", "plain@1", alone=True)
    tab.frame.evaluate("window.pipeline.state.runs.plain[2].step = 77")  # as if it had been dropped meanwhile
    tab.key("ArrowRight")
    tab.frame.wait_for_selector("body[data-state='broken']")
    assert "Step 77 of plain cannot be read" in tab.frame.locator(".notice").inner_text()
    assert "has no trace of step 77" in tab.frame.locator(".notice").inner_text()
    assert [text for text in tab.complaints if "404" not in text] == []
    tab.complaints.clear()
    tab.key("ArrowLeft")
    tab.wait("plain@1")


def test_help_lists_the_keys(tab: Tab) -> None:
    tab.open("run=plain&step=1", "plain@1", alone=True)
    tab.key("?")
    assert tab.frame.locator("dialog").is_visible()
    assert "zoom in and out" in tab.frame.locator("dialog").inner_text()
    tab.page.keyboard.press("Escape")
    tab.frame.locator("dialog").wait_for(state="hidden")


def test_sixteen_ranks_are_drawn_quickly(tab: Tab, capsys: pytest.CaptureFixture[str]) -> None:
    tab.open("run=wide&step=0", "wide@0", alone=True)
    assert tab["bars.total"] == tab["bars.drawn"] == 2 * 16 * 256
    took = tab.frame.evaluate("Array.from({length: 20}, () => window.pipeline.measure())")
    with capsys.disabled():
        print(f"\na frame of {tab['bars.events']} events: {statistics.median(took):.0f} ms (median of 20)")
    assert statistics.median(took) < FRAME


def test_without_runs_it_says_how_to_make_one(context: Any, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with tensorboard(tmp_path / "none", "--load_fast", "false", "--reload_interval", "1") as address:
        page = context.new_page()
        page.goto(f"{address}{ALONE}")
        page.wait_for_selector("body[data-state='empty']")
        assert "tensorboard=runs" in page.locator(".notice").inner_text()
        write_run(tmp_path / "none" / "first", steps=2)
        deadline = time.monotonic() + PATIENCE
        while page.locator("body[data-ready='first@1']").count() == 0:
            assert time.monotonic() < deadline
            page.wait_for_timeout(500)
            if page.locator(".notice button").is_visible():
                page.locator(".notice button").click()
        page.close()


def test_a_page_on_the_last_step_follows_the_run(context: Any, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "logs" / "run")
    for step in range(2):
        writer.write(synthetic.trace(plan_of("1f1b", 2, 4), step=step))
    with tensorboard(tmp_path / "logs", "--load_fast", "false", "--reload_interval", "1") as address:
        tab = Tab(context.new_page(), address)
        with tab.watched():
            tab.open("run=run&step=1", "run@1")
            writer.write(synthetic.trace(plan_of("1f1b", 2, 4), step=2))
            reload_until(tab, "body[data-ready='run@2']")
            tab.frame.locator("#slider").fill("0")
            tab.wait("run@0")
            writer.write(synthetic.trace(plan_of("1f1b", 2, 4), step=3))
            reload_until(tab, "#slider[max='3']")
            assert tab["step"] == 0  # looked at on purpose
        tab.page.close()
    writer.close()


def reload_until(tab: Tab, selector: str) -> None:
    """Presses TensorBoard's "reload data" as long as its server hasn't read what was written."""
    deadline = time.monotonic() + PATIENCE
    while tab.frame.locator(selector).count() == 0:
        assert time.monotonic() < deadline
        tab.page.locator("[title^='Last Updated']").first.click()
        tab.page.wait_for_timeout(500)


def test_a_link_to_a_run_that_is_not_there_says_so(tab: Tab) -> None:
    tab.page.goto("about:blank")
    tab.page.goto(f"{tab.address}#pipeline&p.pipeline.run=nowhere&p.pipeline.step=3")
    tab.frame.wait_for_selector("body[data-state='broken']")
    notice = tab.frame.locator(".notice")
    assert "There is no run nowhere" in notice.inner_text() and "plain" in notice.inner_text()
    notice.locator("button").click()  # shows what there is
    tab.wait()


def test_keys_work_once_the_pointer_is_on_the_page(tab: Tab) -> None:
    tab.open("run=plain&step=2", "plain@2")
    tab.page.mouse.move(*tab.place(0, 0))
    tab.page.keyboard.press("p")
    tab.until("it.predicted")
    field = tab.page.evaluate_handle("document.body.appendChild(document.createElement('input'))")
    field.focus()  # as in a search field of TensorBoard
    tab.page.mouse.move(2, 2)
    tab.page.mouse.move(*tab.place(0, 0))
    tab.page.keyboard.type("p")
    assert field.input_value() == "p" and tab["predicted"]
