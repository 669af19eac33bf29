"""Do masters and state live where `offload=` says, and is that all that it changes?"""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import cases
from reference import (
    CONV_BATCHNORM,
    MLP,
    TRANSFORMER,
    OptimizerFactory,
    Recipe,
    Trained,
    adamw,
    assert_same,
    build,
    momentum,
    pipelined,
    vectors,
)
from torch import Tensor, nn
from workers import Workers

from pipe import PeerError, Pipeline, PipelineError, offload
from pipe.offload import Disk


def adagrad(named: Any) -> torch.optim.Optimizer:
    """Has its state before the first step."""
    return torch.optim.Adagrad(named, lr=1e-2)


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(named, lr=1e-2)


NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
PLACES = {"cpu": "offload", "disk": "offload=disk:{}"}
FACTORS: dict[str, list[Any]] = {
    "place": list(PLACES),
    "zero": [1, 2, 3],
    "amp": ["off", "bf16", "fp16"],
    "dp": [1, 2, 3],
    "optimizer": [adamw, momentum, adagrad, adafactor],
    "recipe": [MLP, CONV_BATCHNORM, TRANSFORMER],
    "buckets": ["", "bucket_mb=0.0015"],
    "clip": [None, 0.1],
}


# --------------------------------------------------------------------------- no difference


@pytest.mark.parametrize(tuple(FACTORS), cases(FACTORS))
def test_the_numbers_are_the_same_without(
    tmp_path: Path,
    place: str,
    zero: int,
    amp: str,
    dp: int,
    optimizer: OptimizerFactory,
    recipe: Recipe,
    buckets: str,
    clip: float | None,
) -> None:
    options = f"ranks=2 dp={dp} chunks=2 zero={zero} amp={amp} {buckets}"
    where = PLACES[place].format(tmp_path)
    found = pipelined(recipe, f"{options} {where}", rows=13, steps=3, optimizer=optimizer, clip=clip)
    assert_same(found, pipelined(recipe, options, rows=13, steps=3, optimizer=optimizer, clip=clip))
    assert not list(tmp_path.iterdir())


def train_all(folder: str) -> list[Trained]:
    """Under two settings, each without offload, and with both kinds of it."""
    return [
        pipelined(MLP, f"ranks=2 dp=2 chunks=2 {options} {place.format(folder)}", rows=7, steps=3)
        for options in ("zero=1 amp=bf16", "zero=3")
        for place in ("", *PLACES.values())
    ]


def test_between_processes(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(train_all, 4, str(tmp_path))[0]
    for plain, *offloaded in (found[:3], found[3:]):
        for trained in offloaded:
            assert_same(trained, plain)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------- where things are


def mapped(folder: Path) -> int:
    """Bytes of a folder's files, named or not, that this process has in its address space."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, stop = (int(number, 16) for number in line.split()[0].split("-"))
            total += stop - start
    return total


def parameters_of(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def wide(width: int = 128) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


def batch(width: int = 128) -> tuple[Tensor, Tensor]:
    return torch.randn(4, width), torch.randint(0, width, (4,))


@NEEDS_PROC
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_masters_and_state_are_in_the_files(tmp_path: Path, amp: str, zero: int) -> None:
    """Which have no name, so nothing is left of them when the last tensor goes."""
    folder = tmp_path / "not" / "there" / "yet"
    options = f"chunks=2 amp={amp} zero={zero} offload=disk:{folder}"
    with build(options, wide(), optimizer=adamw) as pipeline:
        masters = 4 * parameters_of(wide())
        assert mapped(folder) == masters
        for _ in range(2):
            pipeline.step(*batch())
            assert mapped(folder) == 3 * masters
            assert not list(folder.iterdir())
    del pipeline
    gc.collect()
    assert mapped(folder) == 0


def test_two_pipelines_share_a_folder(tmp_path: Path) -> None:
    """Their files are their own."""
    with (
        build(f"zero=1 offload=disk:{tmp_path}", optimizer=adamw, seed=0) as one,
        build(f"zero=1 offload=disk:{tmp_path}", optimizer=adamw, seed=0) as other,
    ):
        for step in range(3):
            one.step(*vectors(8, step))
            other.step(*vectors(8, step))
            assert all(torch.equal(v, one.state_dict()[name]) for name, v in other.state_dict().items())


@NEEDS_PROC
def test_state_that_was_replaced_is_let_go(tmp_path: Path) -> None:
    """As a resume does it: the optimizer has other tensors then."""
    with build(f"chunks=2 zero=1 offload=disk:{tmp_path}", wide(), optimizer=adamw) as pipeline:
        assert pipeline.optimizer is not None
        for _ in range(4):
            pipeline.step(*batch())
            assert mapped(tmp_path) == 3 * 4 * parameters_of(wide())
            pipeline.optimizer.load_state_dict(copy.deepcopy(pipeline.optimizer.state_dict()))
            gc.collect()


@NEEDS_PROC
def test_files_go_with_a_pipeline_that_could_not_be_built(tmp_path: Path) -> None:
    def broken(named: Any) -> torch.optim.Optimizer:
        raise ArithmeticError("told to")

    with pytest.raises(ArithmeticError):
        build(f"zero=1 offload=disk:{tmp_path}", wide(), optimizer=broken)
    gc.collect()
    assert mapped(tmp_path) == 0 and not list(tmp_path.iterdir())


LAYER = 1000 * 1000 * 4  # bytes, in fp32


class Watched(Disk):
    """Notes how much of files is in memory, when there is most of it."""

    def settle_state(self, *args: Any) -> None:
        PEAKS.append(files_in_memory())
        super().settle_state(*args)


PEAKS: list[int] = []


def resident(place: str) -> tuple[int, int, int]:
    """Bytes that four large layers add to a process: of files at most, of files at rest, and others."""
    options = "chunks=1 zero=1 amp=bf16 bucket_mb=2"
    for width in (64, 1000):
        PEAKS.clear()
        before = files_in_memory(), others_in_memory()
        with (
            pytest.MonkeyPatch.context() as patch,
            build_watched(patch, f"{options} offload={place}", width) as pipeline,
        ):
            for _ in range(2):
                pipeline.step(*batch(width))
            at_rest, others = files_in_memory(), others_in_memory()
    return max(PEAKS, default=before[0]) - before[0], at_rest - before[0], others - before[1]


def build_watched(patch: pytest.MonkeyPatch, options: str, width: int) -> Pipeline:
    patch.setattr(offload, "Disk", Watched)
    return build(options, wide(width), optimizer=adamw)


def files_in_memory() -> int:
    return status("RssFile") + status("RssShmem")


def others_in_memory() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed may be the allocator's still
    return status("RssAnon")


def status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@NEEDS_PROC
def test_resident_memory_is_bounded(workers: Workers, tmp_path: Path) -> None:
    """Of a layer's master and moments at a time, however many layers there are."""
    ((peak, at_rest, others),) = workers.run(resident, 1, f"disk:{tmp_path}")
    assert 2.8 * LAYER < peak < 3.2 * LAYER
    assert at_rest < 0.1 * LAYER
    ((no_peak, _, all_others),) = workers.run(resident, 1, "cpu")
    assert no_peak < 0.1 * LAYER
    assert all_others - others == pytest.approx(4 * 3 * LAYER, rel=0.1)


# ------------------------------------------------------------------------ what goes wrong


def try_to_build(options: str) -> str:
    try:
        build(options, wide(), optimizer=adamw)
    except PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("under", [False, True], ids=["it", "a folder above"])
def test_a_file_in_the_place_of_the_folder(workers: Workers, tmp_path: Path, under: bool) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    folder = file / "below" if under else file
    options = f"ranks=2 zero=1 offload=disk:{folder}"
    for said in (try_to_build(options), *workers.run(try_to_build, 2, options)):
        assert re.match(rf"PipelineError: offload=disk:{folder} can't be written to: \w+", said), said
    assert file.read_text() == "mine"


class FullDisk:
    """Has room for so many files, then no more."""

    def __init__(self, files: int) -> None:
        self.left = files
        self._really = os.posix_fallocate

    def __call__(self, descriptor: int, start: int, size: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._really(descriptor, start, size)


@NEEDS_PROC
@pytest.mark.parametrize("files", [0, 1, 3])
def test_a_disk_that_is_full_from_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", FullDisk(files))
    with pytest.raises(PipelineError, match=r"offload=disk:.* has no room for 0\.1 MB more: No space left"):
        build(f"zero=1 bucket_mb=0.05 offload=disk:{tmp_path}", wide(), optimizer=adamw)
    gc.collect()
    assert mapped(tmp_path) == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("files", [4, 5, 8])
def test_a_disk_that_fills_in_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int
) -> None:
    """There the optimizer makes its state."""
    monkeypatch.setattr(os, "posix_fallocate", FullDisk(files))
    with build(f"zero=1 bucket_mb=0.05 offload=disk:{tmp_path}", wide(), optimizer=adamw) as pipeline:
        with pytest.raises(PipelineError, match=r"has no room for 0\.1 MB more: No space left"):
            pipeline.step(*batch())


def fill_on_rank_1(folder: str, files: int) -> str:
    """What a rank hears where rank 1's disk is full."""
    really = os.posix_fallocate
    if os.environ["RANK"] == "1":
        os.posix_fallocate = FullDisk(files)
    try:
        options = f"device_map=0:0-2,1:2-4 chunks=2 timeout=10 zero=1 bucket_mb=0.05 offload=disk:{folder}"
        pipeline = build(options, wide(), optimizer=adamw)
        for _ in range(2):
            pipeline.step(*batch())
    except PipelineError as error:
        assert isinstance(error, PeerError) == (os.environ["RANK"] != "1")
        return str(error)
    finally:
        os.posix_fallocate = really
    return "no error"


@pytest.mark.parametrize("files", [0, 3])
def test_every_rank_hears_of_a_full_disk(workers: Workers, tmp_path: Path, files: int) -> None:
    for rank, said in enumerate(workers.run(fill_on_rank_1, 2, str(tmp_path), files)):
        assert "has no room for 0.1 MB more" in said and "No space left" in said, said
        assert rank == 1 or "rank 1" in said, said
