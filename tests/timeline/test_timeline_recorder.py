"""Is what the engine records of a step what the plan says, and does it reach the log directory?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import MLP, adamw, build, pipelined, plain
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from workers import Workers

import schedules
from pipe import OptionError
from pipe.timeline import events
from pipe.timeline.logdir import read
from pipe.timeline.summary import summarize
from schedules import COMPUTE


def train(options: str, steps: int = 3, **settings: Any) -> None:
    with build(options, optimizer=adamw, **settings) as pipeline:
        for step in range(steps):
            pipeline.step(*MLP.data(17, step))


def scalars(directory: Path) -> dict[str, list[int]]:
    """The steps of each curve, as TensorBoard has them."""
    return {tag: [step for step, _ in curve] for tag, curve in curves_of(directory).items()}


def curves_of(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("schedule", [name for name in schedules.names() if name != "csv"])
def test_every_action_is_a_bar(schedule: str, tmp_path: Path) -> None:
    train(f"ranks=2 chunks=4 schedule={schedule} tensorboard={tmp_path}")
    (run,) = read(tmp_path).values()
    assert list(run.steps) == [0, 1, 2]
    trace = run.trace(1)
    planned = Counter((a.op, a.stage, a.microbatch) for order in trace.plan.orders for a in order)
    found = Counter(
        (str(kind), int(stage), int(microbatch))
        for member in trace.members
        for kind, stage, microbatch in zip(member.kind, member.stage, member.microbatch, strict=True)
        if kind in COMPUTE
    )
    assert found == planned
    for member, peak in zip(trace.members, trace.plan.peak_live, strict=True):
        assert member.live.max() == peak
        inner = member.kind != "g"
        assert (member.start[inner][1:] >= member.end[inner][:-1] - 0.2).all(), "bars of a thread overlap"
    sent = sum(len(member.sends.left) for member in trace.members)
    assert sent == sum(a.op in ("SEND_F", "SEND_B") for p in trace.plan.programs for a in p)


def test_replicas_and_collectives(tmp_path: Path) -> None:
    train(f"ranks=2 dp=2 chunks=4 zero=3 schedule=looped_bfs(2) amp=bf16 clip=1 tensorboard={tmp_path}")
    trace = read(tmp_path)["."].trace(2)
    assert [(member.rank, member.replica) for member in trace.members] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for member in trace.members:
        assert {"c", "F", "B", "u", "g", "o"} <= set(member.kind.tolist())
    assert trace.header.replicas == 2 and "grad_norm" in trace.header.scalars


def test_only_each_so_many_steps_are_traced_and_all_have_scalars(tmp_path: Path) -> None:
    train(f"ranks=2 chunks=4 tensorboard={tmp_path} trace_every=3", steps=7)
    (run,) = read(tmp_path).values()
    assert list(run.steps) == [0, 3, 6]
    curves = scalars(tmp_path)
    assert curves["pipeline/loss"] == curves["pipeline/lr"] == list(range(7))
    assert curves["pipeline/samples_per_second"] == list(range(7))
    assert curves["pipeline/bubble"] == curves["pipeline/step_seconds"] == [0, 3, 6]


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    found = pipelined(MLP, f"ranks=3 chunks=5 tensorboard={tmp_path}")
    expected = plain(MLP, 5)
    assert all(torch.equal(found.state[name], value) for name, value in expected.state.items())


def test_a_summary_writer_of_the_users_own(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("mine", 1.0, 0)
        train("ranks=2 chunks=4 trace_every=2", tensorboard=writer)
        writer.add_scalar("mine", 2.0, 1)
    (run,) = read(tmp_path).values()
    assert list(run.steps) == [0, 2] and scalars(tmp_path)["mine"] == [0, 1]


def full(*arguments: object, **keywords: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("wait", [False, True])
def test_a_disk_that_fails_costs_the_trace_and_not_the_training(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="no more traces are written: OSError.*No space left") as caught:
        with build(f"ranks=2 chunks=4 tensorboard={tmp_path}") as pipeline:
            pipeline.step(*MLP.data(17, 0))
            monkeypatch.setattr(events.Writer, "write", full)
            pipeline.step(*MLP.data(17, 1))
            if wait:
                deadline = time.monotonic() + 30
                while not of_traces(caught):  # without a call that it could be told to
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            pipeline.step(*MLP.data(17, 2))
    assert len(of_traces(caught)) == 1
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pipe-timeline")]


def of_traces(caught: pytest.WarningsRecorder) -> list[str]:
    return [str(one.message) for one in caught if "trace" in str(one.message)]


def test_a_directory_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file"
    with pytest.warns(UserWarning, match=f"nothing is traced, tensorboard={target} fails: ") as caught:
        train(f"ranks=2 chunks=4 tensorboard={target}")
    assert len(of_traces(caught)) == 1


def test_a_directory_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no more traces are written: .*deleted") as caught:
        with build(f"ranks=2 chunks=4 tensorboard={tmp_path / 'run'}") as pipeline:
            pipeline.step(*MLP.data(17, 0))
            shutil.rmtree(tmp_path / "run")
            pipeline.step(*MLP.data(17, 1))
    assert len(of_traces(caught)) == 1


def test_a_summary_writer_that_is_closed_first(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        pipeline = build("ranks=2 chunks=4 trace_every=2", tensorboard=writer)
        for step in range(6):
            pipeline.step(*MLP.data(17, step))
    pipeline.close()
    (run,) = read(tmp_path).values()
    assert list(run.steps) == [0, 2, 4] and scalars(tmp_path)["pipeline/loss"] == list(range(6))


def test_scalars_are_those_of_their_step(tmp_path: Path) -> None:
    """A learning rate in a tensor, or the loss that `step` returned, may change in place afterwards."""
    with build(f"ranks=2 chunks=4 tensorboard={tmp_path} trace_every=9") as pipeline:
        losses = []
        for step in range(4):
            loss = pipeline.step(*MLP.data(17, step))
            losses.append(float(loss))
            loss.zero_()
    assert [value for _, value in curves_of(tmp_path)["pipeline/loss"]] == pytest.approx(losses)


@pytest.mark.parametrize("end", ["", "raise SystemExit", "del pipeline"])
def test_a_pipeline_that_nobody_closes_writes_all(end: str, tmp_path: Path) -> None:
    code = f"""
from reference import MLP, build
pipeline = build("ranks=2 chunks=4 tensorboard={tmp_path}/run trace_every=4")
for step in range(6):
    pipeline.step(*MLP.data(17, step))
{end}
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    (run,) = read(tmp_path / "run").values()
    assert list(run.steps) == [0, 4] and scalars(tmp_path / "run")["pipeline/loss"] == list(range(6))


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match=r"it needs tensorboard=DIR"):
        build("ranks=2 trace_every=3")
    with pytest.raises(TypeError, match="a directory or a SummaryWriter"):
        build("ranks=2", tensorboard=7)


def test_a_step_that_fails_is_not_traced(tmp_path: Path) -> None:
    with build(f"ranks=2 chunks=4 tensorboard={tmp_path}") as pipeline:
        pipeline.step(*MLP.data(17, 0))
        with pytest.raises(RuntimeError):
            pipeline.step(torch.ones(17, 3), MLP.data(17, 1)[1])
        pipeline.step(*MLP.data(17, 2))
    (run,) = read(tmp_path).values()
    assert list(run.steps) == [0, 2]


def trace_between_processes(rows: list[str]) -> None:
    for options in rows:
        with build(options, optimizer=adamw) as pipeline:
            for step in range(3):
                x, y = MLP.data(17, step)
                parts = x.tensor_split(pipeline.dp), y.tensor_split(pipeline.dp)
                pipeline.step(*(part[pipeline.replica] for part in parts))


def test_between_processes(workers: Workers, tmp_path: Path) -> None:
    rows = [
        f"ranks=2 dp=2 chunks=4 zero=1 tensorboard={tmp_path}/zero",
        f"ranks=4 chunks=6 schedule=interleaved(2) tensorboard={tmp_path}/interleaved",
    ]
    workers.run(trace_between_processes, 4, rows)
    runs = read(tmp_path)
    assert set(runs) == {"zero", "interleaved"}
    for run in runs.values():
        assert list(run.steps) == [0, 1, 2]
        trace = run.trace(2)
        assert len(trace.members) == 4 and trace.header.clock.error == (0.0,) * 4  # one machine, one clock
        summary = summarize(trace)
        assert 0 < summary.bubble < 1
    inner = runs["interleaved"].trace(2).members[1]
    assert "r" in inner.kind and "s" in inner.kind
