"""What does a step cost at each ZeRO stage, beside torch's own ways to shard?

    python benchmarks/zero.py [--rounds 40] [--reduce-every 4] [--no-memory] [--json FILE]

The work is a GPT of a few million parameters in fp32 with AdamW, on one pipeline rank and two replicas,
which are two gloo processes on loopback with one thread each. A step is 4 microbatches a replica, and the
same for all sides; gradients are reduced in buckets of 4 MB, so that there are several:

- the engine at zero=0, 1, 2 and 3; at 2 and 3 also with reduce_every=4, which reduces once a step and
  keeps whole gradients for it,
- torch's DistributedDataParallel, which reduces with the last microbatch (no_sync before it), with AdamW
  and with a ZeroRedundancyOptimizer around AdamW,
- torch's FSDP2, fully_shard of each layer: reducing with each microbatch, and with the last only
  (set_requires_gradient_sync).

All sides live in the same two processes and take turns step by step, each round in another order, so
that what else runs on the machine hits all alike. A step is timed on rank 0, between two barriers; beside
its time stands how long the process and its threads were busy, which other programs disturb less. Ratios
are medians over the rounds, of the two steps in the same round. Sides start from the same weights, and
their losses must agree after the last step.

The engine's step also compares calls between ranks and gives the mean loss to every rank; torch's sides
do neither. Sent is what the engine hands to collectives, counted by it, on one replica and in one step;
the theory is elements x element size x (dp - 1) / dp, times 2 for zero=0 and 1, times 1 + reductions for
zero=2, reductions + unshards for zero=3. Memory is the peak of the resident set after two steps, without
what the process had before it built the model, in fresh processes for each side.

Alone on two cores it takes about two minutes; only figures of one run compare.
"""

import argparse
import functools
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from overhead import environment, free_port, wait
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))

BLOCKS = 4
DIM = 256
HEADS = 4
LENGTH = 32
MICROBATCHES = 4
ROWS = 2  # a microbatch
REPLICAS = 2
WARMUP = 5

Step = Callable[[], Tensor]  # one optimizer step -> the mean loss, of this replica or of all
AdamW = functools.partial[torch.optim.AdamW]
Result = dict[str, Any]


class Side(NamedTuple):
    """What takes turns: a step, and how to ask what it sent (bytes by kind), where that is known."""

    step: Step
    sent: Callable[[], dict[str, int]] = dict


def main() -> None:
    args = parse_arguments()
    if args.sides:
        result = measure(args.sides, args)
        if dist.get_rank() == 0:
            Path(args.out).write_text(json.dumps(result))
        dist.destroy_process_group()
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    sides = list(makers(args))
    result = launch(sides, args)
    check_losses(result)
    if not args.no_memory:
        for side in sides:
            print(f"memory: {side}", file=sys.stderr)
            result["peak_mb"][side] = launch([side], args)["peak_mb"][side]
    print(table(result, args))
    print(f"load after: {os.getloadavg()[0]:.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


# The work.


def model() -> nn.Sequential:
    from train_gpt import VOCABULARY, Block, Embedding

    torch.manual_seed(0)
    return nn.Sequential(
        Embedding(DIM, LENGTH, 0.0),
        *(Block(DIM, HEADS, 0.0) for _ in range(BLOCKS)),
        nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)),
    )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data(replica: int) -> tuple[Tensor, Tensor]:
    """A replica's share of the batch."""
    generator = torch.Generator().manual_seed(1 + replica)
    tokens = torch.randint(256, (MICROBATCHES * ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# The sides.


def makers(args: argparse.Namespace) -> dict[str, Callable[[], Side]]:
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=args.fused or None)
    every = f"reduce_every={args.reduce_every}"
    engines = ["zero=0", "zero=1", "zero=2", "zero=3", f"zero=2 {every}", f"zero=3 {every}"]
    return {
        **{options: functools.partial(engine, options, adamw, args.bucket_mb) for options in engines},
        "DDP": functools.partial(ddp, adamw, args.bucket_mb),
        "DDP + ZeroRedundancy": functools.partial(ddp, adamw, args.bucket_mb, zero=True),
        "FSDP2": functools.partial(fsdp2, adamw),
        "FSDP2, reduces once": functools.partial(fsdp2, adamw, once=True),
    }


def engine(options: str, adamw: AdamW, bucket_mb: float) -> Side:
    from pipe import Pipeline

    pipeline = Pipeline(
        model(),
        f"ranks=1 dp={REPLICAS} chunks={MICROBATCHES} bucket_mb={bucket_mb} {options}",
        loss=loss,
        optimizer=adamw,
    )
    inputs, targets = data(dist.get_rank())
    return Side(lambda: pipeline.step(inputs, targets), lambda: pipeline.traffic[0])


def ddp(adamw: AdamW, bucket_mb: float, *, zero: bool = False) -> Side:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    layers = DistributedDataParallel(model(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    if zero:
        optimizer = ZeroRedundancyOptimizer(
            layers.parameters(), adamw.func, parameters_as_bucket_view=True, **adamw.keywords
        )
    else:
        optimizer = adamw(layers.parameters())
    return Side(accumulating(layers, optimizer, lambda last: nullcontext() if last else layers.no_sync()))


def fsdp2(adamw: AdamW, *, once: bool = False) -> Side:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers, mesh = model(), init_device_mesh("cpu", (REPLICAS,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)

    def before(is_last: bool) -> Any:
        if once:
            layers.set_requires_gradient_sync(is_last)
        return nullcontext()

    return Side(accumulating(layers, adamw(layers.parameters()), before))


def accumulating(layers: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[bool], Any]) -> Step:
    """A step over the microbatches of this replica; `before(is_last)` each one's forward and backward."""
    inputs, targets = data(dist.get_rank())
    pairs = list(zip(inputs.tensor_split(MICROBATCHES), targets.tensor_split(MICROBATCHES), strict=True))

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, (x, target) in enumerate(pairs):
            with before(index == len(pairs) - 1):
                part = loss(layers(x), target) / len(pairs)
                part.backward()
            total += part.detach()
        optimizer.step()
        return total

    return step


# The measuring, on each rank.


def measure(names: list[str], args: argparse.Namespace) -> Result:
    """Milliseconds of each side's steps, by round; what it sent; its last loss; how much memory it took."""
    dist.init_process_group("gloo")
    found = makers(args)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # imports what it needs
    before = resident_mb()
    sides = {name: found[name]() for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    busy: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    rounds = args.rounds if len(names) > 1 else 0
    for order in itertools.islice(orders(names), WARMUP + rounds):
        for name in order:
            dist.barrier()
            begin, begin_busy = time.perf_counter(), time.process_time()
            mean = sides[name].step()
            dist.barrier()
            times[name].append((time.perf_counter() - begin) * 1e3)
            busy[name].append((time.process_time() - begin_busy) * 1e3)
            losses[name] = everywhere(mean)
    return {
        "parameters": sum(p.numel() for p in model().parameters()),
        "ms": {name: each[WARMUP:] for name, each in times.items()},
        "cpu_ms": {name: each[WARMUP:] for name, each in busy.items()},
        "sent": {name: side.sent() for name, side in sides.items()},
        "loss": losses,
        "peak_mb": {names[0]: peak_mb() - before} if len(names) == 1 else {},
    }


def orders(names: list[str]) -> Iterator[list[str]]:
    """Another order for each round, the same on all ranks."""
    shuffle = random.Random(0)
    while True:
        yield shuffle.sample(names, len(names))


def everywhere(mean: Tensor) -> float:
    """The mean over replicas."""
    total = mean.detach().clone()
    dist.all_reduce(total)
    return total.item() / REPLICAS


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# The report.


def launch(sides: list[str], args: argparse.Namespace) -> Result:
    """The sides in two fresh processes -> what rank 0 measured."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        settings = [f"--rounds={args.rounds}", f"--reduce-every={args.reduce_every}", f"--out={out}"]
        settings += [f"--bucket-mb={args.bucket_mb}", *(["--fused"] if args.fused else [])]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *settings, "--sides", *sides],
                env=os.environ | environment(rank, REPLICAS, port),
            )
            for rank in range(REPLICAS)
        ]
        wait(processes, ", ".join(sides), args.timeout)
        return json.loads(out.read_text())


def ratio(result: Result, name: str, to: str, key: str = "ms") -> list[float]:
    """Quartiles, over the rounds, of one side's time over another's in the same round."""
    found = [a / b for a, b in zip(result[key][name], result[key][to], strict=True)]
    return statistics.quantiles(found, n=4)


def table(result: Result, args: argparse.Namespace) -> str:
    unit = result["parameters"] * 4 * (REPLICAS - 1) / REPLICAS
    lines = [
        f"{result['parameters'] / 1e6:.2f} M parameters, buckets of {args.bucket_mb:g} MB, "
        f"{MICROBATCHES} microbatches of {ROWS} x {LENGTH} tokens",
        "",
        f"{'':22}{'step, ms':>16}{'CPU, ms':>9}{'ratio':>8}{'sent':>17}{'peak':>7}",
        f"{'':22}{'median':>8}{'p10':>8}{'median':>9}{'to DDP':>8}{'MB':>8}{'of theory':>9}{'MB':>7}",
    ]
    for name, ms in result["ms"].items():
        sent = sum(result["sent"][name].values())
        traffic = f"{sent / 1e6:8.1f}{sent / unit:7.2f} N" if sent else f"{'-':>8}{'-':>9}"
        peak = result["peak_mb"].get(name)
        lines.append(
            f"{name:22}{statistics.median(ms):8.1f}{sorted(ms)[len(ms) // 10]:8.1f}"
            f"{statistics.median(result['cpu_ms'][name]):9.1f}{ratio(result, name, 'DDP')[1]:8.2f}"
            f"{traffic}{'-' if peak is None else f'{peak:.0f}':>7}"
        )
    every = f"reduce_every={args.reduce_every}"
    lines += ["", f"{'in the same round':43}{'time':>6}  (quartiles)       CPU"]
    for name, to in [
        ("zero=0", "DDP"),
        ("zero=1", "DDP + ZeroRedundancy"),
        ("zero=3", "FSDP2"),
        (f"zero=3 {every}", "FSDP2, reduces once"),
        (f"zero=2 {every}", "zero=2"),
        (f"zero=3 {every}", "zero=3"),
    ]:
        low, middle, high = ratio(result, name, to)
        cpu = ratio(result, name, to, "cpu_ms")[1]
        lines.append(f"{name + ' / ' + to:43}{middle:6.2f}  ({low:.2f} - {high:.2f}){cpu:9.2f}")
    return "\n".join(lines)


def check_losses(result: Result) -> None:
    """Same weights, data and steps: a side whose loss differs did other work."""
    (first, expected), *others = result["loss"].items()
    for name, value in others:
        if not abs(value - expected) <= 1e-3 * abs(expected):
            raise SystemExit(f"{name} ended at loss {value}, {first} at {expected}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=40, help="timed steps of each side (default: %(default)s)")
    add("--reduce-every", type=int, default=4, help="to set against 1 (default: %(default)s)")
    add("--bucket-mb", type=float, default=4, help="of the engine and of DDP (default: %(default)s)")
    add("--fused", action="store_true", help="AdamW's fused kernel, for all sides")
    add("--no-memory", action="store_true", help="leave out the runs that measure memory")
    add("--timeout", type=float, default=600, help="seconds for a run (default: %(default)s)")
    add("--json", metavar="FILE", help="write the report and every step's time")
    add("--sides", nargs="+", help=argparse.SUPPRESS)  # in a process that this script started
    add("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
