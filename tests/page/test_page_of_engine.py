"""Runs of the engine between processes, from its recorder to the page: bars, numbers, steps, comparison."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import Tab, actions, tensorboard
from reference import MLP, adamw, build
from workers import Workers

from pipe.timeline.logdir import read
from pipe.timeline.summary import summarize
from pipe.timeline.trace import Trace

pytestmark = pytest.mark.timeout(180)

Runs = dict[str, list[Trace]]


def record(options: str, steps: int) -> None:
    with build(options, optimizer=adamw) as pipeline:
        for step in range(steps):
            pipeline.step(*MLP.data(16, step))


@pytest.fixture(scope="module")
def logdir(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logdir = tmp_path_factory.mktemp("engine") / "runs"
    workers.run(record, 4, f"ranks=2 dp=2 chunks=4 tensorboard={logdir}/replicas", 2)
    workers.run(record, 2, f"ranks=2 chunks=4 tensorboard={logdir}/two", 5)
    workers.run(record, 4, f"ranks=4 chunks=8 schedule=interleaved(2) tensorboard={logdir}/four", 3)
    return logdir


@pytest.fixture(scope="module")
def runs(logdir: Path) -> Runs:
    return {name: [run.trace(step) for step in run.steps] for name, run in read(logdir).items()}


@pytest.fixture(scope="module")
def opened(logdir: Path, context: Any) -> Iterator[Tab]:
    page = context.new_page()
    with tensorboard(logdir) as address:
        yield Tab(page, address)
    page.close()


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    with opened.watched():
        yield opened


def test_the_tab_appears(tab: Tab, runs: Runs) -> None:
    tab.page.goto(tab.address)
    tab.page.get_by_role("tab", name="Pipeline").click()
    tab.wait("four@2")
    assert tab["bars.total"] == actions(runs["four"][2]) == 2 * 8 * 8
    assert tab["rows"] == 4


@pytest.mark.parametrize("run", ["two", "four"])
def test_pointing_at_a_bar_shows_its_numbers(tab: Tab, runs: Runs, run: str) -> None:
    trace = runs[run][1]
    predicted = summarize(trace).predicted
    assert predicted is not None
    tab.open(f"run={run}&step=1", f"{run}@1", alone=True)
    assert tab["bars.total"] == tab["bars.drawn"] == actions(trace)
    assert tab["bars.events"] == sum(len(member.kind) for member in trace.members)
    for number, member in enumerate(trace.members):
        event = int(np.where(member.is_compute, member.end - member.start, 0).argmax())  # the longest
        tab.point(number, event)
        hover = tab["hover"]
        assert (hover["rank"], hover["stage"]) == (member.rank, member.stage[event])
        assert hover["microbatch"] == member.microbatch[event]
        assert hover["start"] == pytest.approx(member.start[event])
        assert hover["end"] == pytest.approx(member.end[event])
        order = int(member.is_compute[:event].sum())
        guess = predicted.ends[number][order] - predicted.starts[number][order]
        assert hover["predicted"]["duration"] == pytest.approx(guess, abs=0.11)
        assert told(member.start[event]) in tab.frame.locator(".tooltip").inner_text()


def told(us: float) -> str:
    return f"{us:.1f} µs" if us < 1e3 else f"{us / 1e3:.4f} ms"


def test_steps_are_chosen_with_the_slider(tab: Tab, runs: Runs) -> None:
    tab.open("run=two&step=0", "two@0", alone=True)
    for step in (3, 1):
        tab.frame.locator("#slider").fill(str(step))
        tab.wait(f"two@{step}")
        assert tab["whole"] == pytest.approx(runs["two"][step].header.duration)


def test_the_runs_are_compared(tab: Tab, runs: Runs) -> None:
    tab.open("run=two&step=4", "two@4", alone=True)
    tab.frame.select_option("#compare-run", "four")
    tab.until("it.compare && it.compare.run === 'four'")
    tab.frame.select_option("#compare-step", "2")
    tab.until("it.compare && it.compare.step === 2")
    assert tab["compare.bars"] == actions(runs["four"][2])
    assert tab["rows"] == 2 + 4
    both = (runs["two"][4], runs["four"][2])
    assert tab["whole"] == pytest.approx(max(trace.header.duration for trace in both))


def test_summary_names_the_slowest_stage(tab: Tab, runs: Runs) -> None:
    summary = summarize(runs["four"][1])
    tab.open("run=four&step=1", "four@1", alone=True)
    text = tab.frame.locator(".summary").inner_text()
    assert f"{summary.bubble * 100:.1f} %" in text
    assert summary.slowest is not None
    assert tab.frame.locator("tr.slowest").get_attribute("data-stage") == str(summary.slowest.stage)


@pytest.mark.parametrize("width", [1000, 1400, 1800])
def test_nothing_of_the_summary_is_cut_off(tab: Tab, width: int) -> None:
    tab.open("run=replicas&step=1", "replicas@1", alone=True)
    size = tab.page.viewport_size
    tab.page.set_viewport_size({"width": width, "height": 860})
    try:
        assert tab.frame.locator(".causes thead th").count() >= 7  # most causes, and so a wide table
        assert (
            tab.frame.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('aside'))") == 0
        )
    finally:
        tab.page.set_viewport_size(size)
