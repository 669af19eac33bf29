"""What does it cost to trace a step, in its time?

    python benchmarks/tracing.py [--rounds 40] [--json FILE]

The work is the GPT of benchmarks/zero.py, on 8 microbatches of 2 x 32 tokens, cut over two pipeline
ranks, which are two gloo processes on loopback with one thread each, or share one process. Each time
three pipelines of the same weights take turns of ten steps, each round in another order:

- off: without a recorder,
- every step is traced, gathered to rank 0, and written to a directory (which goes afterwards),
- every tenth is (trace_every=10), and scalars are written for the others.

A turn is timed between barriers, and as a whole: rank 0 writes a step while it computes the next one, so
that steps timed one by one, in turn with those of other sides, would lay that to the others. The ratios are
those of the same round; CPU is that of all ranks. The losses after the last step must be equal.

Alone on two cores it takes about six minutes; only figures of one run compare.
"""

import argparse
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import environment, free_port, wait
from torch import Tensor
from zero import LENGTH, MICROBATCHES, REPLICAS, ROWS, data, loss, model, orders

RANKS = 2
CHUNKS = REPLICAS * MICROBATCHES  # the batch is that of both replicas of benchmarks/zero.py
EVERY = 10
TURN = EVERY  # steps, so that one of them is traced with trace_every=10
SIDES = {
    "off": "",
    "every step": "tensorboard={}",
    f"every {EVERY}th": f"tensorboard={{}} trace_every={EVERY}",
}

Result = dict[str, Any]


def main() -> None:
    args = parse_arguments()
    if args.out:
        Path(args.out).write_text(json.dumps(measure(args)))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    results = {
        name: launch(processes, args) for name, processes in {"2 gloo ranks": 2, "1 process": 1}.items()
    }
    for result in results.values():
        check_losses(result)
    print(table(results))
    print(f"load after: {os.getloadavg()[0]:.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


# The measuring, on each rank.


def measure(args: argparse.Namespace) -> Result:
    """Milliseconds of a step of each side, by round; their CPU time on this rank; the last losses."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    barrier: Callable[[], Any] = dist.barrier if dist.is_initialized() else lambda: None
    steps = {
        name: engine(options.format(Path(args.folder, name.replace(" ", "-"))))
        for name, options in SIDES.items()
    }
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    busy: dict[str, list[float]] = {name: [] for name in SIDES}
    losses: dict[str, float] = {}
    for order in itertools.islice(orders(list(SIDES)), 1 + args.rounds):
        for name in order:
            barrier()
            begin, begin_busy = time.perf_counter(), time.process_time()
            for _ in range(TURN):
                mean = steps[name]()
            barrier()
            times[name].append((time.perf_counter() - begin) * 1e3 / TURN)
            busy[name].append((time.process_time() - begin_busy) * 1e3 / TURN)
            losses[name] = mean.item()
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        "ms": {name: each[1:] for name, each in times.items()},  # the first round warms up
        "cpu_ms": {name: each[1:] for name, each in busy.items()},
        "loss": losses,
    }


def engine(options: str) -> Callable[[], Tensor]:
    from pipe import Pipeline

    pipeline = Pipeline(
        model(),
        f"ranks={RANKS} chunks={CHUNKS} {options}",
        loss=loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )
    inputs, targets = (torch.cat(parts) for parts in zip(*map(data, range(REPLICAS)), strict=True))
    return lambda: pipeline.step(inputs, targets)


# The report.


def launch(processes: int, args: argparse.Namespace) -> Result:
    """All sides in so many fresh processes -> rank 0's times, and the CPU time of all ranks."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{rank}.json") for rank in range(processes)]
        settings = [f"--rounds={args.rounds}", f"--folder={folder}"]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, *settings, f"--out={out}"],
                env=os.environ | environment(rank, processes, port),
            )
            for rank, out in enumerate(outs)
        ]
        wait(started, f"{processes} processes", args.timeout)
        results: list[Result] = [json.loads(out.read_text()) for out in outs]
    busy = {
        name: [sum(ranks) for ranks in zip(*(result["cpu_ms"][name] for result in results), strict=True)]
        for name in SIDES
    }
    return {**results[0], "cpu_ms": busy}


def ratio(result: Result, name: str, key: str) -> list[float]:
    """Quartiles of a side's time over that of "off" in the same round."""
    return statistics.quantiles(
        [ours / off for ours, off in zip(result[key][name], result[key]["off"], strict=True)], n=4
    )


def table(results: dict[str, Result]) -> str:
    parameters = sum(p.numel() for p in model().parameters())
    lines = [
        f"{parameters / 1e6:.2f} M parameters, {RANKS} ranks, "
        f"{CHUNKS} microbatches of {ROWS} x {LENGTH} tokens",
        "",
        f"{'':14}{'traced':12}{'step, ms':>16}{'CPU, ms':>9}{'time, ratio to off':>26}{'CPU':>8}",
        f"{'':14}{'':12}{'median':>8}{'p10':>8}{'median':>9}{'median  (quartiles)':>26}{'median':>8}",
    ]
    for where, result in results.items():
        for name, ms in result["ms"].items():
            line = (
                f"{where:14}{name:12}{statistics.median(ms):8.1f}{sorted(ms)[len(ms) // 10]:8.1f}"
                f"{statistics.median(result['cpu_ms'][name]):9.1f}"
            )
            if name != "off":
                low, middle, high = ratio(result, name, "ms")
                cpu = ratio(result, name, "cpu_ms")[1]
                line += f"{middle:8.3f}  ({low:.3f} - {high:.3f}){cpu:8.3f}"
            lines.append(line)
    return "\n".join(lines)


def check_losses(result: Result) -> None:
    """Same weights, data and steps, and tracing changes nothing."""
    if len(set(result["loss"].values())) > 1:
        raise SystemExit(f"the losses differ: {result['loss']}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    turns = f"timed turns of {TURN} steps of each side (default: %(default)s)"
    add("--rounds", type=int, default=40, help=turns)
    add("--timeout", type=float, default=1200, help="seconds for a run (default: %(default)s)")
    add("--json", metavar="FILE", help="write every turn's times")
    add("--folder", help=argparse.SUPPRESS)  # in a process that this script started
    add("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
