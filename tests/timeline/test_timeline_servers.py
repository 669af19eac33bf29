"""Does the built wheel, without torch, serve every traced step on both of TensorBoard's back ends?"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import synthetic

ROOT = Path(__file__).parents[2]
STEPS = 300
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents and a torch that cannot be imported, to be put on the path."""
    folder = tmp_path_factory.mktemp("wheel")
    source, wheels, target = folder / "source", folder / "wheels", folder / "site"
    # A copy, as building leaves files behind.
    for name in ("pipe", "schedules", "partitioners"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), str(source))
    (wheel,) = wheels.glob("*.whl")
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    (target / "torch.py").write_text('raise ImportError("nothing here may import torch")\n')
    return target


def pip(*arguments: str) -> None:
    run = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    synthetic.write_run(folder / "long", synthetic.plan_of("1f1b", 2, 4), steps=STEPS, every=2)
    return folder


def environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed)}


@pytest.mark.parametrize("fast", ["true", "false"])
def test_every_step_is_listed_and_returned(fast: str, installed: Path, logdir: Path, tmp_path: Path) -> None:
    with serving(logdir, installed, tmp_path, "--load_fast", fast, "--path_prefix", "/x") as base:
        expected = list(range(0, 2 * STEPS, 2))
        steps = wait_for_steps(f"{base}/steps", STEPS)
        assert steps["runs"][0]["run"] == "long" and steps["runs"][0]["steps"] == expected
        assert None not in steps["runs"][0]["duration"] + steps["runs"][0]["bubble"]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda step: get(f"{base}/step?run=long&step={step}"), expected))
        for step, data in zip(expected, answers, strict=True):
            assert data["header"]["step"] == step and len(data["members"]) == 2
            assert data["summary"]["step"] == step and data["header"]["predicted"]
        assert b"render" in raw(f"{base}/index.js")
        with pytest.raises(urllib.error.HTTPError) as caught:
            raw(f"{base}/step?run=long&step=1")
        assert "no trace of step 1" in json.loads(caught.value.read())["error"]
        listing = get(f"{base.removesuffix('/plugin/pipeline')}/plugins_listing")
        assert listing["pipeline"]["enabled"] and listing["pipeline"]["tab_name"] == "Pipeline"


def test_the_command_needs_neither_server_nor_torch(installed: Path, logdir: Path, tmp_path: Path) -> None:
    """Where the wheel is installed, from any directory."""
    run = [sys.executable, "-m", "pipe", "timeline", str(logdir), "--svg", "step.svg"]
    done = subprocess.run(
        run,
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"step {2 * STEPS - 2}:" in done.stdout and (tmp_path / "step.svg").exists()


@contextmanager
def serving(logdir: Path, installed: Path, cwd: Path, *flags: str) -> Iterator[str]:
    """TensorBoard in a process of its own, on a port of the loopback that it finds free itself."""
    run = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1"]
    server = subprocess.Popen(
        [*run, "--port", "0", *flags],
        cwd=cwd,
        env=environment(installed),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    killer = threading.Timer(200, os.killpg, (server.pid, signal.SIGKILL))
    killer.start()
    try:
        yield f"{address(server)}data/plugin/pipeline"
    finally:
        killer.cancel()
        # It takes its data server along.
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(20)


def address(server: subprocess.Popen[str]) -> str:
    """What it prints once it serves."""
    assert server.stderr is not None
    said = ""
    for line in server.stderr:
        said += line
        found = re.search(r"http://127\.0\.0\.1:\d+/\S*", line)
        if found and "TensorBoard" in line:
            threading.Thread(target=server.stderr.read, daemon=True).start()  # so that it never blocks
            return found.group()
    raise AssertionError(f"tensorboard did not start:\n{said}")


def wait_for_steps(url: str, count: int) -> Any:
    """Data servers read in the background."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        data = get(url)
        if data["runs"] and len(data["runs"][0]["steps"]) == count:
            return data
        time.sleep(0.5)
    raise AssertionError(f"not all steps after a minute: {data}")


def get(url: str) -> Any:
    return json.loads(raw(url))


def raw(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        content: bytes = response.read()
    return content
