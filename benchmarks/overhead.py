"""How many microseconds does an action cost, beyond the arithmetic it does?

    python benchmarks/overhead.py [--repetitions 5] [--steps 100] [--json FILE]

The work is 8 x (Linear(64, 64), ReLU), cut in the middle, on 32 microbatches of 2 rows, with SGD:
so little arithmetic that the machinery shows. It's timed

- in one process: the engine running both ranks, and a plain loop over the same microbatches
  through the same two stages, cut from the graph at the boundary as a pipeline does. They take
  turns step by step. What the engine takes longer is its own: order, mailboxes, hooks, seeds.
- on two gloo ranks over loopback: the engine, and torch.distributed.pipelining's Schedule1F1B.
  They take turns too, in fresh processes each, as often as --repetitions says.

A step is zero_grad, forward and backward of every microbatch, and the optimizer's step, timed
from its end to the next one's on rank 0. An action is a forward or a backward of one microbatch
on one stage; sends and receives aren't counted, their time is. us/action is the step's time
over the actions of the process: 128 in one process, 64 on each of two ranks. The engine's step
also gives the mean loss to every rank and compares calls between ranks; torch's does neither.

Every side starts from the same weights, and the losses after the last step must agree.
One thread a process. Alone on two cores it takes about two minutes; the machine drifts, so only
figures of one run compare, and p10 says more than the median where others use the cores.
"""

import argparse
import functools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 16
WIDTH = 64
MICROBATCHES = 32
ROWS = 2  # a microbatch
RANKS = 2
OPTIONS = f"chunks={MICROBATCHES} device_map=0:0-8,1:8-16 schedule=1f1b"
ACTIONS = 2 * MICROBATCHES  # on each rank: a forward and a backward of each microbatch

Step = Callable[[], Tensor | None]  # one optimizer step -> the mean loss, where it is known
Result = dict[str, Any]


def main() -> None:
    args = parse_arguments()
    if args.side:
        Path(args.out).write_text(json.dumps(SIDES[args.side](args.warmup, args.steps)))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    runs: dict[str, list[Result]] = {side: [] for side in SIDES}
    for repetition in range(args.repetitions):
        for side in SIDES:
            print(f"repetition {repetition + 1} of {args.repetitions}: {side}", file=sys.stderr)
            runs[side].append(launch(side, args))
    report = summarize(runs)
    check_losses(runs)
    print(table(report))
    if args.json:
        Path(args.json).write_text(json.dumps({"report": report, "runs": runs}, indent=1) + "\n")


# The work.


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS // 2):
        linear = nn.Linear(WIDTH, WIDTH)
        # He's initialization: under torch's default the signal dies out within eight layers,
        # and equal losses would say nothing.
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
    return inputs, inputs.flip(1)


loss = nn.functional.mse_loss
sgd = functools.partial(torch.optim.SGD, lr=1e-2)


# The sides.


def in_process(warmup: int, steps: int) -> Result:
    """The engine and the plain loop, in turns, in this process."""
    from pipe import Pipeline

    with Pipeline(model(), OPTIONS, loss=loss, optimizer=sgd) as pipeline:
        inputs, targets = data()
        return time_steps(
            {"engine": lambda: pipeline.step(inputs, targets), "plain": plain_loop()}, warmup, steps
        )


def plain_loop() -> Step:
    """What a pipeline's autograd work is, written out: two stages with a cut between them."""
    layers = model()
    first, last = layers[: LAYERS // 2], layers[LAYERS // 2 :]
    optimizer = sgd(layers.parameters())
    inputs, targets = data()
    microbatches = list(
        zip(inputs.tensor_split(MICROBATCHES), targets.tensor_split(MICROBATCHES), strict=True)
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, target in microbatches:
            sent = first(x)
            received = sent.detach().requires_grad_()
            part = loss(last(received), target) * (1 / MICROBATCHES)
            torch.autograd.backward(part)
            torch.autograd.backward(sent, received.grad)
            total += part.detach()
        optimizer.step()
        return total

    return step


def engine_gloo(warmup: int, steps: int) -> Result:
    from pipe import Pipeline

    with Pipeline(model(), OPTIONS, loss=loss, optimizer=sgd) as pipeline:
        inputs, targets = data()
        return time_steps({"engine": lambda: pipeline.step(inputs, targets)}, warmup, steps)


def torch_gloo(warmup: int, steps: int) -> Result:
    from torch import distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    half = LAYERS // RANKS
    layers = model()[rank * half : (rank + 1) * half]
    stage = PipelineStage(layers, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss)
    optimizer = sgd(layers.parameters())
    inputs, targets = data()

    def first() -> None:
        optimizer.zero_grad()
        schedule.step(inputs, return_outputs=False)
        optimizer.step()

    def last() -> Tensor:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach()

    result = time_steps({"torch": last if rank else first}, warmup, steps)
    dist.destroy_process_group()
    return result


SIDES: dict[str, Callable[[int, int], Result]] = {
    "in-process": in_process,
    "engine-gloo": engine_gloo,
    "torch-gloo": torch_gloo,
}


def time_steps(turns: dict[str, Step], warmup: int, steps: int) -> Result:
    """Runs the steps in turns; microseconds of each, and the last losses where they are known."""
    took: dict[str, list[float]] = {name: [] for name in turns}
    last: dict[str, Tensor | None] = {}
    end = time.perf_counter()
    for _ in range(warmup + steps):
        for name, step in turns.items():
            last[name] = step()
            begin, end = end, time.perf_counter()
            took[name].append((end - begin) * 1e6)
    return {
        "us": {name: [round(us, 1) for us in all_us[warmup:]] for name, all_us in took.items()},
        "loss": {name: value.item() for name, value in last.items() if value is not None},
    }


# Starting the processes.


def launch(side: str, args: argparse.Namespace) -> Result:
    """One side's ranks in fresh processes -> rank 0's times, and the loss of whoever knows it."""
    ranks = RANKS if side.endswith("gloo") else 1
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        port = free_port()
        settings = [f"--side={side}", f"--steps={args.steps}", f"--warmup={args.warmup}"]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *settings, f"--out={out}"],
                env=os.environ | environment(rank, ranks, port),
            )
            for rank, out in enumerate(outs)
        ]
        wait(processes, side, args.timeout)
        results: list[Result] = [json.loads(out.read_text()) for out in outs]
    known = functools.reduce(lambda a, b: a | b, (result["loss"] for result in results))
    return {"us": results[0]["us"], "loss": known}


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """One thread each, and for several ranks what torchrun would set, with loopback only."""
    if ranks == 1:
        return {"OMP_NUM_THREADS": "1"}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def wait(processes: list[subprocess.Popen[bytes]], side: str, timeout: float) -> None:
    """Until all end well; the first that fails, or the timeout, ends all of them."""
    deadline = time.monotonic() + timeout
    codes: list[int | None] = [None]
    try:
        while None in codes and not any(codes):
            if time.monotonic() > deadline:
                raise SystemExit(f"{side}: not done after {timeout:.0f} s (--timeout)")
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
        if any(codes):
            time.sleep(5)  # for the other ranks to say what they know
            raise SystemExit(f"{side}: the ranks ended with {[p.poll() for p in processes]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


# The report.


def summarize(runs: dict[str, list[Result]]) -> Result:
    rows = {
        "plain loop, 1 process": row(runs["in-process"], "plain", RANKS * ACTIONS),
        "engine, 1 process": row(runs["in-process"], "engine", RANKS * ACTIONS),
        "engine, 2 gloo ranks": row(runs["engine-gloo"], "engine", ACTIONS),
        "torch 1F1B, 2 gloo ranks": row(runs["torch-gloo"], "torch", ACTIONS),
    }
    plain, engine, ours, theirs = rows.values()
    # Neighbours in time: where the machine drifts, these are worth more than the ratio of all.
    pairs = [
        (row([a], "engine", ACTIONS), row([b], "torch", ACTIONS))
        for a, b in zip(runs["engine-gloo"], runs["torch-gloo"], strict=True)
    ]
    own = {key: engine[key] - plain[key] for key in ("us_per_action_median", "us_per_action_p10")}
    return {
        "rows": rows,
        "engine_only": own,
        "ratio_median": ours["step_us_median"] / theirs["step_us_median"],
        "ratio_p10": ours["step_us_p10"] / theirs["step_us_p10"],
        "ratios_median": [a["step_us_median"] / b["step_us_median"] for a, b in pairs],
        "ratios_p10": [a["step_us_p10"] / b["step_us_p10"] for a, b in pairs],
    }


def row(results: list[Result], name: str, actions: int) -> dict[str, float]:
    """Over the steps of all repetitions."""
    all_us = sorted(us for result in results for us in result["us"][name])
    median, p10 = statistics.median(all_us), all_us[len(all_us) // 10]
    return {
        "step_us_median": median,
        "step_us_p10": p10,
        "us_per_action_median": median / actions,
        "us_per_action_p10": p10 / actions,
    }


def table(report: Result) -> str:
    lines = [
        f"{'':26}{'step, ms':>18}{'us/action':>18}",
        f"{'':26}{'median':>9}{'p10':>9}{'median':>9}{'p10':>9}",
    ]
    for name, r in report["rows"].items():
        lines.append(
            f"{name:26}{r['step_us_median'] / 1e3:9.2f}{r['step_us_p10'] / 1e3:9.2f}"
            f"{r['us_per_action_median']:9.1f}{r['us_per_action_p10']:9.1f}"
        )
    own = report["engine_only"]
    lines.append(
        f"{'engine only, 1 process':44}{own['us_per_action_median']:9.1f}{own['us_per_action_p10']:9.1f}"
    )
    lines.append("")
    for key in ("median", "p10"):
        each = " ".join(f"{ratio:.2f}" for ratio in report[f"ratios_{key}"])
        lines.append(
            f"engine / torch on gloo, by {key:6} {report[f'ratio_{key}']:5.2f}  (repetitions: {each})"
        )
    return "\n".join(lines)


def check_losses(runs: dict[str, list[Result]]) -> None:
    """Same weights, data and steps: a side whose loss differs did other work."""
    losses = [
        (f"{side} {name}", value)
        for side, results in runs.items()
        for result in results
        for name, value in result["loss"].items()
    ]
    (_, expected), *others = losses
    for name, value in others:
        if not abs(value - expected) <= 1e-4 * abs(expected):
            raise SystemExit(f"{name} ended at loss {value}, {losses[0][0]} at {expected}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--repetitions", type=int, default=5, help="turns of each side (default: %(default)s)")
    add("--steps", type=int, default=200, help="timed steps a turn (default: %(default)s)")
    add("--warmup", type=int, default=20, help="untimed steps before (default: %(default)s)")
    add("--timeout", type=float, default=120, help="seconds for a turn (default: %(default)s)")
    add("--json", metavar="FILE", help="write the report and every step's time")
    add("--side", choices=SIDES, help=argparse.SUPPRESS)  # in a process that this script started
    add("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
