"""Do the commands of `python -m pipe` answer, quickly and without torch, and refuse politely?"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipe.__main__ import main
from schedules import SCHEDULES, ZBV, OneFOneB, Plan, build

DEADLOCK = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.csv"
    path.write_text(build(OneFOneB(), range(8), 64).to_csv())
    return path


@pytest.mark.parametrize(
    "command", ["draw zb_v", "simulate zb_v --latency 0.1", "compare --memory 8", "verify"]
)
def test_commands_are_quick_and_light(command: str, plan_file: Path) -> None:
    """Under a second each at p=8, m=64; the best of three, as others use this machine too."""
    arguments = [*command.split(), *([str(plan_file)] if command == "verify" else ["-p", "8", "-m", "64"])]
    code = (
        f"import sys; from pipe.__main__ import main; status = main({arguments!r});"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    took = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
        took.append(time.perf_counter() - start)
        if took[-1] < 1:
            break
    assert min(took) < 1


def test_it_is_a_module() -> None:
    run = [sys.executable, "-m", "pipe", "--help"]
    out = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    assert all(word in out for word in ("draw", "verify", "simulate", "compare", *SCHEDULES))


@pytest.mark.parametrize("command", ["draw", "verify", "simulate", "compare"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0 and "usage" in capsys.readouterr().out


def test_draw(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.svg", "a.json", "a.csv")]
    arguments = [
        "draw",
        "zb_v",
        "-p",
        "2",
        "-m",
        "4",
        "--svg",
        files[0],
        "--trace",
        files[1],
        "--csv",
        files[2],
    ]
    assert main(arguments) == 0
    plan = build(ZBV(), ZBV().placement(2), 4)
    assert capsys.readouterr().out.rstrip() == plan.draw(color=False)
    assert Path(files[0]).read_text().startswith("<svg") and json.loads(Path(files[1]).read_text())
    assert Plan.from_csv(Path(files[2])) == plan
    assert main(["draw", f"csv({files[2]})"]) == 0
    assert capsys.readouterr().out.rstrip() == plan.draw(color=False)
    assert main(["draw", "1f1b", "-p", "2", "--color", "always"]) == 0
    assert "\x1b[44;97mF0\x1b[0m" in capsys.readouterr().out


def test_verify(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    assert main(["verify", str(plan_file)]) == 0
    out = capsys.readouterr().out
    assert "holds" in out and "8 7 6 5 4 3 2 1" in out and "in microbatch order" in out


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "1f1b", "-p", "2", "-m", "2", "--latency", "1", "--critical"]) == 0
    out = capsys.readouterr().out
    assert "makespan 11, span 11" in out and "critical path: 0F0 1F0 1B0 1F1 1B1 0B1" in out
    assert [row.split()[:6] for row in out.splitlines() if row.startswith("0 ")] == [
        ["0", "6", "0", "0", "0", "3"]
    ]
    assert main(["simulate", "gpipe", "-p", "2", "--placement", "0,1,0", "--forward", "1,2,1"]) == 0


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--memory", "4"]) == 0
    rows = {row.split()[0].split("(")[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines()}
    assert rows.pop("schedule") == ["makespan", "span", "bubble", "peak", "fits"]
    assert set(rows) == set(SCHEDULES)
    assert rows["zb_h1"] == ["27", "27", "11.11%", "4", "yes"]
    assert rows["v_half"] == ["26.5", "26.5", "9.43%", "3", "yes"] and rows["zb_h2"][-2:] == ["7", "no"]
    assert rows["auto"] == ["27", "27", "11.11%", "4", "yes"]
    assert main(["compare", "-p", "2", "--forward", "1,3"]) == 0


def test_auto_takes_its_memory_costs_and_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    def last_row(arguments: str) -> list[str]:
        assert main(arguments.split()) == 0
        return capsys.readouterr().out.splitlines()[-1].split()

    assert last_row("compare --memory 3 --iterations 2000") == ["auto", "31", "31", "22.58%", "3", "yes"]
    assert last_row("compare --memory 0.5") == ["auto", "27", "27", "11.11%", "4", "no"]
    assert main(["simulate", "auto(4)", "--forward", "2", "--input", "2"]) == 0
    assert capsys.readouterr().out.startswith("found by zb_h1; lower bound 49, gap 0.00%\nmakespan 49,")
    assert main(["draw", "auto", "--placement", "0,1,1,0"]) == 0
    assert "rank 0  F0  F1  F2  F0' I0'" in capsys.readouterr().out


def test_auto_takes_seconds_at_p8_m64() -> None:
    """A search that goes on to its end, in a process of its own."""
    code = "from pipe.__main__ import main; main(['simulate', 'auto(6)', '-p', '8', '-m', '64'])"
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, check=True, capture_output=True, text=True, timeout=30).stdout
    assert out.startswith("found by ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("draw nothing", "unknown schedule 'nothing'"),
        ("draw interleaved(0)", "a rank has 1, 2, ... stages"),
        ("draw 1f1b --placement 0,2", "leaves rank 1 without a stage"),
        ("draw zb_v --placement 0,1,0,1", "0,1,1,0 would do"),
        ("draw 1f1b --svg no/such/folder.svg", "No such file"),
        ("simulate 1f1b --forward 1,2,3", "F has shape (3,)"),
        ("simulate 1f1b --bandwidth 0", "bandwidth=0"),
        ("compare --forward 1,2,3", "3 costs for 4 ranks"),
        ("verify none.csv", "cannot read none.csv"),
    ],
)
def test_wrong_input(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "error:" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: COMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("draw", "required: SCHEDULE"),
        ("draw 1f1b -p 0", "'0' is no count"),
        ("draw 1f1b -m two", "'two' is no count"),
        ("draw 1f1b --placement a,b", "'a,b' is no placement"),
        ("simulate 1f1b --weight -1", "--weight"),
        ("simulate 1f1b --weight nan", "'nan' is no number"),
        ("compare --memory much", "'much' is no number"),
        ("compare --iterations -1", "--iterations"),
        ("compare --iterations x", "'x' is no number of iterations"),
    ],
)
def test_wrong_options(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("0F0,0X0\n", ("rank 0, column 1", "unknown op 'X'")),
        ("0F0,one\n", ("rank 0, column 1", "'one' is no action")),
        ("0F0,0B0\n\n1F0\n", ("rank 1 is missing",)),
        ("0F0,0B0\n1F0,0B0\n", ("rank 1, #1 0B0", "stage 0 is on rank 0 too")),
        (DEADLOCK, ("deadlock: 2 ranks wait for each other", "rank 0 stands at #3 0SEND_F1", "'-----'")),
    ],
)
def test_bad_files(
    text: str, messages: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text(text)
    assert main(["verify", str(tmp_path / "bad.csv")]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages)
