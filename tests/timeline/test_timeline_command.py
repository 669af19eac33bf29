"""Does `python -m pipe timeline` say where a step's time went, without torch, and refuse politely?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic

from pipe.__main__ import main
from schedules import Costs

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from pipe.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    slow = Costs(F=(1, 1.6, 1), B=(2, 3.2, 2), latency=0.1)
    synthetic.write_run(folder / "a", synthetic.plan_of("1f1b", 3, 6), slow, steps=4, every=10)
    plan = synthetic.plan_of("interleaved", 2, 4)
    synthetic.write_run(folder / "b", plan, steps=20, replicas=2, wall_time=2e9, memory=True)
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["timeline", *arguments]) == 0
    return capsys.readouterr().out


def test_the_last_step_of_the_latest_run(logdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, str(logdir))
    assert out.startswith(
        "run b, of a, b: choose with --run\n\nstep 19: synthetic, 2 ranks, 2 replicas, 4 stages"
    )
    assert "20 traced steps (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ... 19): mean" in out
    assert "rank 1, replica 1" in out and "slowest step" in out and "The stages are balanced" in out


def test_a_step_of_a_run(logdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, str(logdir), "--run", "a", "--step", "10")
    assert "step 10: synthetic, 3 ranks, 3 stages, 6 microbatches" in out
    head, rows = out.split("times in ms")
    assert all(word in head for word in ("step time", "predicted", "ideal", "bubble", "idle", "loss"))
    assert all(word in rows for word in ("warm-up", "drain", "gradient", "communication", "optimizer"))
    assert "gradients of stage 1" in rows and "Stage 1 (rank 1) is 1." in rows
    assert "4 traced steps (0, 10, 20, 30): mean" in rows
    # The numbers of a row add up: busy and idle to the step, causes to idle.
    step = float(head.split("step time")[1].split()[0])
    cells = [float(cell) for cell in rows.split("rank 2")[1].split()[:10] if "%" not in cell]
    assert cells[0] + cells[1] == pytest.approx(step, abs=0.011)
    assert sum(cells[2:9]) == pytest.approx(cells[1], abs=0.05)


def test_one_run_by_its_own_directory(logdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, str(logdir / "a")).startswith("step 30:")


def test_files(logdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace, csv = (tmp_path / name for name in ("a.svg", "a.json", "a.csv"))
    said(capsys, str(logdir), "--svg", str(svg), "--trace", str(trace), "--csv", str(csv))
    assert svg.read_text().startswith("<svg") and json.loads(trace.read_text())["traceEvents"]
    assert csv.read_text().startswith("member,rank,replica,kind")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{}/nowhere", "no such directory: "),
        ("{}/a --step 7", "run . has no trace of step 7: it has 0, 10, 20, 30"),
        ("{} --run c", "has no run 'c' with traces: it has a, b"),
        (
            "{empty}",
            'has no traces, nor has any directory below it: a run writes them with "tensorboard=DIR"',
        ),
        ("{} --svg no/such/folder.svg", "No such file or directory"),
    ],
)
def test_wrong_input(
    arguments: str, message: str, logdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", *arguments.format(logdir, empty=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("python -m pipe timeline: error: ")


def test_a_newer_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipe.timeline.blobs.VERSION", 2)
    synthetic.write_run(tmp_path, steps=1)
    monkeypatch.undo()
    assert main(["timeline", str(tmp_path)]) == 2
    assert "newer pipe-engine: its format is version 2" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["-1", "x", "1.5"])
def test_wrong_options(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["timeline", "runs", "--step", step])
    assert (caught.value.code == 2 and "no step" in capsys.readouterr().err) or "argument" in step


def test_it_needs_no_torch(logdir: Path) -> None:
    run = [sys.executable, "-c", WITHOUT_TORCH, "timeline", str(logdir)]
    out = subprocess.run(run, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "step 19:" in out
