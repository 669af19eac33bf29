"""Do traces get into a log directory whole, and out of it again? What if the disk fails?"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic
from torch.utils.tensorboard import SummaryWriter

from pipe.timeline import events
from pipe.timeline.blobs import to_blobs
from pipe.timeline.events import Writer
from pipe.timeline.logdir import read
from pipe.timeline.trace import Trace, TraceError


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic.trace(synthetic.plan_of("1f1b", 2, 4), step=7)


@pytest.fixture(params=["directory", "SummaryWriter"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Writer]:
    if request.param == "directory":
        made = Writer(tmp_path / "deep" / "run")
        yield made
        made.close()
        return
    with SummaryWriter(tmp_path / "deep" / "run") as theirs:
        yield Writer(theirs)


def test_what_is_written_is_there_at_once(writer: Writer, trace: Trace, tmp_path: Path) -> None:
    writer.write(trace, {"loss": 0.5})
    writer.write_scalars(8, {"loss": 0.25})
    run = read(tmp_path)["deep/run"]
    assert run.steps == (7,)
    assert to_blobs(run.trace(7)) == to_blobs(trace) and run.header(7) == trace.header
    assert run.scalars["bubble"].keys() == run.scalars["step_seconds"].keys() == {7}
    assert read(tmp_path / "deep" / "run").keys() == {"."}
    with pytest.raises(KeyError):
        run.trace(8)


def test_tensorboard_reads_it(writer: Writer, trace: Trace, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer.write(trace, {"loss": 0.5})
    events = EventAccumulator(str(tmp_path / "deep" / "run"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("loss")] == [(7, 0.5)]
    (stored,) = events.Tensors("pipeline")
    assert list(stored.tensor_proto.string_val) == to_blobs(trace)
    assert stored.wall_time == trace.header.wall_time


def test_a_users_writer_stays_open(trace: Trace, tmp_path: Path) -> None:
    with SummaryWriter(tmp_path) as theirs:
        writer = Writer(theirs)
        writer.write(trace)
        writer.close()
        theirs.add_scalar("later", 1.0)
    with pytest.raises(TypeError, match=r"to a torch\.utils\.tensorboard\.SummaryWriter, not to 3"):
        Writer(3)  # type: ignore[arg-type]


def test_a_users_writer_that_is_closed_first(tmp_path: Path) -> None:
    plan = synthetic.plan_of("1f1b", 2, 2)
    with SummaryWriter(tmp_path) as theirs:
        writer = Writer(theirs)
        writer.write(synthetic.trace(plan, step=0))
    for step in (1, 2):
        writer.write(synthetic.trace(plan, step=step))
    writer.close()
    assert read(tmp_path)["."].steps == (0, 1, 2)


def test_a_file_that_somebody_deletes(trace: Trace, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run")
    writer.write(trace)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="deleted"):
        writer.write(trace)
    writer.close()


def test_a_session_that_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed from a checkpoint of step 2, training writes steps 2 and 3 again; what was behind is void."""
    plan = synthetic.plan_of("1f1b", 2, 2)
    monkeypatch.setattr(events._EventFile, "_numbers", itertools.count(9))  # "9" sorts behind "10"
    first, second = Writer(tmp_path, first_step=0), None
    for step in range(5):
        first.write(synthetic.trace(plan, step=step, options="first"))
    first.close()
    second = Writer(tmp_path, first_step=2)
    for step in (2, 3):
        second.write(synthetic.trace(plan, step=step, options="second"))
    second.close()
    run = read(tmp_path)["."]
    assert run.steps == (0, 1, 2, 3) and run.scalars["bubble"].keys() == {0, 1, 2, 3}
    assert [run.header(step).options for step in run.steps] == ["first", "first", "second", "second"]


def test_several_runs_and_other_files(tmp_path: Path) -> None:
    for name in ("b", "a/1", "a/2"):
        synthetic.write_run(tmp_path / name, steps=2)
    with SummaryWriter(tmp_path / "untraced") as theirs:
        theirs.add_scalar("loss", 1.0)
    (tmp_path / "notes.txt").write_text("not an event file")
    assert list(read(tmp_path)) == ["a/1", "a/2", "b"]
    assert read(tmp_path / "untraced") == {}
    with pytest.raises(OSError, match=r"no such directory: .*nowhere"):
        read(tmp_path / "nowhere")


def test_a_file_that_breaks_off(tmp_path: Path) -> None:
    """A writer is at its last record just now, or was killed there, or a disk lost what is in the middle."""
    synthetic.write_run(tmp_path, steps=4)
    (path,) = tmp_path.glob("*tfevents*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert read(tmp_path)["."].steps == (0, 1, 2)
    place = read(tmp_path)["."].places[2]
    path.write_bytes(whole[: place.offset - 12] + b"x" * 40 + whole[place.offset + 28 :])
    run = read(tmp_path)["."]
    assert run.steps == (0, 1)
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="has changed"):
        run.trace(1)


def test_300_steps_are_read_fast(tmp_path: Path) -> None:
    synthetic.write_run(tmp_path, synthetic.plan_of("1f1b", 4, 12), steps=300)
    start = time.process_time()
    run = read(tmp_path)["."]
    assert len(run.steps) == 300 and run.trace(299).header.step == 299
    assert time.process_time() - start < 2


# A limit on the size of files stands for a full disk: a write beyond it is an OSError.
FULL_DISK = """
import resource, signal, sys
sys.path[:0] = {path!r}
import synthetic
from pipe.timeline.events import Writer
{setup}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
trace = synthetic.trace(synthetic.plan_of("1f1b", 2, 4))
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
for step in range(50):
    try:
        writer.write(trace.replace(step=step))
    except OSError as error:
        print("step", step, type(error).__name__, error)
        break
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
{behind}
"""


def run_python(setup: str, behind: str) -> subprocess.CompletedProcess[str]:
    code = FULL_DISK.format(path=[str(Path(__file__).parent), "."], setup=setup, behind=behind)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_full_disk_is_the_callers_error(tmp_path: Path) -> None:
    """And nothing else is printed. With room again, the file goes on as if nothing had been."""
    behind = "writer.write(trace.replace(step=100)); writer.close()"
    done = run_python(f"writer = Writer({str(tmp_path)!r})", behind)
    assert done.returncode == 0 and done.stderr == ""
    assert "File too large" in done.stdout
    failed = int(done.stdout.split()[1])
    assert 0 < failed < 50
    assert read(tmp_path)["."].steps == (*range(failed + 1), 100)


def test_a_full_disk_of_a_users_writer(tmp_path: Path) -> None:
    """Its thread finds out; the call that waits for it raises."""
    setup = (
        "from torch.utils.tensorboard import SummaryWriter\n"
        f"writer = Writer(SummaryWriter({str(tmp_path)!r}))"
    )
    done = run_python(setup, "import os; os._exit(0)")
    assert "File too large" in done.stdout, done.stderr
    assert 0 < int(done.stdout.split()[1]) < 50


def test_a_thread_that_fails_later(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a write that the user's own scalar caused is raised by our next one, not lost."""
    theirs = SummaryWriter(tmp_path)
    writer = Writer(theirs)
    writer.write(trace)

    def fail(data: bytes) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # it also prints its error
    file_writer: Any = theirs.file_writer
    records = file_writer.event_writer._async_writer._writer
    monkeypatch.setattr(records, "write", fail)
    theirs.add_scalar("loss", 1.0)
    for _ in range(2):
        with pytest.raises(OSError, match="disk on fire"):
            writer.write(trace)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Writer(tmp_path / "file" / "run")
