"""A real TensorBoard, and a real Chromium to look at it: what the page's tests and its screenshots share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pipe.timeline.trace import COMPUTE, Trace

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ALONE = "data/plugin_entry.html?name=pipeline"
"""The plugin's page without TensorBoard around it."""
PATIENCE = 30.0
"""Seconds for anything that is waited for: the machine may be busy."""


def missing() -> str | None:
    """Why no browser can show the page here, or None."""
    if shutil.which(CHROMIUM) is None:
        return f"{CHROMIUM} is not there: apt-get install chromium"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not there: pip install playwright (its own browsers are not needed)"
    if not entry_points(group="tensorboard_plugins", name="pipeline"):
        return "TensorBoard finds the plugin in an installed package only: pip install --editable ."
    return None


def actions(trace: Trace) -> int:
    """What a step's bars are: the plan's computations."""
    return sum(action.op in COMPUTE for program in trace.plan.programs for action in program)


@contextmanager
def tensorboard(logdir: Path, *arguments: str) -> Iterator[str]:
    """Serves a directory on a free port; yields the address, ended by a slash. Only this process is ended."""
    log = logdir.parent / f"{logdir.name}-server.log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=logdir.parent,  # Python looks there first: at nothing of ours
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = re.search(r"at (http://\S+)", log.read_text())
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"TensorBoard did not start:\n{log.read_text()}")


@contextmanager
def browser(profile: Path, size: tuple[int, int] = (1400, 860)) -> Iterator[Any]:
    """A Chromium with one page; yields Playwright's context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=CHROMIUM,
            headless=True,
            args=ARGUMENTS,
            viewport={"width": size[0], "height": size[1]},
            accept_downloads=True,
        )
        context.set_default_timeout(PATIENCE * 1000)
        try:
            yield context
        finally:
            context.close()


@dataclass
class Tab:
    """The plugin's page: in TensorBoard's tab, or alone, which loads much faster.

    What it says of itself is on `window.pipeline`: `tab["range"]`.
    """

    page: Any
    address: str
    hosts: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _heard(self, message: Any) -> None:
        # TensorBoard asks for its fonts at the wrong place where there is a --path_prefix, the browser for an
        # icon of a page alone.
        url = message.location.get("url", "")
        if message.type == "error" and "/font-roboto/" not in url and not url.endswith("/favicon.ico"):
            self.complaints.append(f"{message.text} ({url})")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """No test may leave an error on the console, or ask another host for anything."""
        self.complaints.clear()
        yield
        assert self.complaints == []
        assert self.hosts == {self.address.split("/")[2]}

    @property
    def frame(self) -> Any:
        if "plugin_entry" in self.page.url:
            return self.page.main_frame
        return self.page.wait_for_selector("iframe", state="attached").content_frame()

    def open(self, link: str = "", ready: str | None = None, *, alone: bool = False) -> None:
        """Goes to a link, as from outside: `run=...&step=...`."""
        pairs = "".join(f"&p.pipeline.{pair}" for pair in link.split("&") if pair)
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}{ALONE if alone else ''}#pipeline{pairs}")
        self.wait(ready)

    def wait(self, ready: str | None = None) -> None:
        """Until a step is shown: this one."""
        self.frame.wait_for_selector(f"body[data-ready='{ready}']" if ready else "body[data-ready]")

    def until(self, condition: str) -> None:
        """Until a condition on `it`, the page's state, holds."""
        self.frame.wait_for_function(f"() => {{ const it = window.pipeline; return {condition}; }}")

    def __getitem__(self, name: str) -> Any:
        """A value of the page's state, once its last frame is drawn."""
        self.wait()
        return self.frame.evaluate(f"window.pipeline.{name}")

    def key(self, *keys: str) -> None:
        for one in keys:
            self.frame.locator(".marks").press(one)

    def place(self, member: int, event: int, **which: Any) -> tuple[float, float]:
        """Where an event's bar is, in the outer page's coordinates."""
        at = self.frame.evaluate("([m, e, w]) => window.pipeline.place(m, e, w)", [member, event, which])
        outer = self.page.query_selector("iframe")
        box = outer.bounding_box() if outer else {"x": 0, "y": 0}
        return box["x"] + at["x"], box["y"] + at["y"]

    def point(self, member: int, event: int, **which: Any) -> None:
        """Moves the mouse to an event's bar."""
        self.page.mouse.move(*self.place(member, event, **which))
        self.until(f"it.hover && it.hover.event === {event}")
