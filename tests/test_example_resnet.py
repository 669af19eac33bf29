"""Does the ResNet example run in every precision, in one process as in four?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

SCRIPT = Path(__file__).parents[1] / "examples" / "train_resnet.py"
SMALL = ["--epochs", "1", "--images", "100", "--batch-size", "20", "--width", "2"]


def run(*command: str, small: bool = True, path: str = "") -> subprocess.CompletedProcess[str]:
    arguments = SMALL if small else []
    return subprocess.run(
        [*command, *arguments],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([path, str(SCRIPT.parents[1])]),
        },
        capture_output=True,
        text=True,
        timeout=100,
    )


def without_times(table: str) -> str:
    return re.sub(r" +\d+ s$", "", table, flags=re.MULTILINE)


def test_the_table_is_the_same_in_one_process_and_in_four() -> None:
    alone = run(sys.executable, str(SCRIPT))
    assert alone.returncode == 0, alone.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    four = run(*torchrun, str(SCRIPT))
    assert four.returncode == 0, four.stderr
    assert without_times(four.stdout) == without_times(alone.stdout)
    header, *rows = alone.stdout.splitlines()
    assert header.split()[:4] == ["test", "accuracy", "training", "loss"]
    assert [row.split()[0] for row in rows] == ["fp32", "bf16", "fp16", "fp16-bn32"]
    assert all(re.search(r" \d+\.\d\d% +\d+\.\d{4} ", row) for row in rows)
    assert [row.split()[4] for row in rows[:2]] == ["-", "-"]  # no loss scale
    assert all(row.split()[4].startswith("2^") for row in rows[2:])


def test_amp_in_the_option_string_would_be_every_rows() -> None:
    refused = run(sys.executable, str(SCRIPT), "--pipeline", "ranks=2 amp=fp16")
    assert refused.returncode != 0
    assert "--precision" in refused.stderr


def test_without_scikit_learn_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('No module named sklearn')\n")
    refused = run(sys.executable, str(SCRIPT), path=str(tmp_path))
    assert refused.returncode == 1
    assert "pip install scikit-learn" in refused.stderr and "Traceback" not in refused.stderr


def test_help_names_the_layers() -> None:
    shown = run(sys.executable, str(SCRIPT), "--help", small=False)
    assert shown.returncode == 0
    assert "torchrun" in shown.stdout and "keep_batchnorm_fp32" in shown.stdout
