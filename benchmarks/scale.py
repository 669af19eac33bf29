"""How long does it take to plan a large pipeline, beside torch.distributed.pipelining?

    python benchmarks/scale.py [--torch-limit 120] [--largest 1024,4096] [--json FILE]

Three tables, of one run:

- build and verify of 1F1B and interleaved(2) at growing sizes: microseconds an action (communication
  counted) stay about level, or the planner isn't linear.
- the same interleaved schedule by torch.distributed.pipelining: its constructor, which makes the orders of
  all ranks, validates and lowers them, as ours does; beside ours the time and the ratio. Its lowering is
  quadratic in the microbatches, so its sizes end where one takes longer than --torch-limit seconds.
  Neither side needs processes: torch gets a stand-in for its stages.
- 1F1B at --largest ranks, microbatches (8.4 million computations): build, verify, simulate, what its
  bubble is made of, and the peak memory of a process that does only that.

Alone on two cores it takes about three minutes, most of them torch's. Figures of different runs
compare only roughly; ratios within one do.
"""

import argparse
import functools
import gc
import json
import logging
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import schedules
from schedules import Plan, Schedule

SIZES = [(8, 64), (16, 128), (32, 256), (64, 512), (64, 1024)]
Row = dict[str, Any]


def main() -> None:
    args = parse_arguments()
    print(f"Python {platform.python_version()}, {platform.machine()}\n")
    results = {
        "growth": growth(),
        "torch": beside_torch(args.torch_limit),
        "largest": [apart(largest, *args.largest)],
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch-limit", type=float, default=120, metavar="S", help="stop torch after a size so long"
    )
    parser.add_argument(
        "--largest", type=sizes, default=(1024, 4096), metavar="P,M", help="ranks, microbatches"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures, too")
    return parser.parse_args()


def sizes(text: str) -> tuple[int, int]:
    ranks, microbatches = map(int, text.split(","))
    return ranks, microbatches


def growth() -> list[Row]:
    rows = []
    for name in ("1f1b", "interleaved"):
        for ranks, microbatches in SIZES:
            rows.append(ours(schedules.get(name), ranks, microbatches) | {"schedule": name})
            show(
                rows[-1],
                "schedule",
                "ranks",
                "microbatches",
                "actions",
                "build_s",
                "verify_s",
                "us_per_action",
            )
    return rows


def ours(schedule: Schedule, ranks: int, microbatches: int) -> Row:
    """`build` verifies as it ends; the verification is timed once more, alone."""
    plan, build_s = best(functools.partial(of_ours, schedule, ranks, microbatches))
    _, verify_s = best(functools.partial(schedules.verify, plan))
    actions = sum(map(len, plan.programs))
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "actions": actions,
        "build_s": build_s,
        "verify_s": verify_s,
        "us_per_action": 1e6 * build_s / actions,
    }


def of_ours(schedule: Schedule, ranks: int, microbatches: int) -> Plan:
    return schedules.build(schedule, schedule.placement(ranks), microbatches)


def best(call: Callable[[], Any], repetitions: int = 3) -> tuple[Any, float]:
    """What it returns, and the shortest of its times."""
    times = []
    for _ in range(repetitions):
        gc.collect()
        start = time.perf_counter()
        answer = call()
        times.append(time.perf_counter() - start)
    return answer, min(times)


def beside_torch(limit: float) -> list[Row]:
    print()
    of_torch(2, 2)  # imports torch
    rows = []
    for ranks, microbatches in SIZES:
        plan, ours_s = best(functools.partial(of_ours, schedules.Interleaved(2), ranks, microbatches))
        theirs, torch_s = best(functools.partial(of_torch, ranks, microbatches), repetitions=1)
        check_same(plan, theirs)
        rows.append(
            {
                "ranks": ranks,
                "microbatches": microbatches,
                "ours_s": ours_s,
                "torch_s": torch_s,
                "ratio": torch_s / ours_s,
            }
        )
        show(rows[-1], "ranks", "microbatches", "ours_s", "torch_s", "ratio")
        if torch_s > limit:
            print(f"torch's next size is left out: it took longer than {limit:g} s")
            break
    return rows


def of_torch(ranks: int, microbatches: int) -> Any:
    """torch's interleaved schedule of rank 0, which holds the orders of all."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    logging.disable(logging.WARNING)
    stages: Any = [
        SimpleNamespace(
            num_stages=2 * ranks,
            group_size=ranks,
            group_rank=0,
            stage_index=index,
            is_first=index == 0,
            is_last=False,
            submod=None,
        )
        for index in (0, ranks)
    ]
    return ScheduleInterleaved1F1B(stages, microbatches, loss_fn=lambda *_: None)


def check_same(plan: Plan, theirs: Any) -> None:
    """Both sides made the same orders, or their times say nothing."""
    for rank, order in enumerate(plan.orders):
        assert [str(action) for action in order] == [
            str(a) for a in theirs.pipeline_order[rank] if a is not None
        ]


def largest(ranks: int, microbatches: int) -> Row:
    schedule, clock = schedules.OneFOneB(), time.perf_counter
    start = clock()
    plan = schedules.build(schedule, schedule.placement(ranks), microbatches)
    built = clock()
    schedules.verify(plan)
    verified = clock()
    timeline = schedules.simulate(plan)
    simulated = clock()
    assert timeline.makespan == 3 * (microbatches + ranks - 1)
    assert timeline.bubble.total.sum() == ranks * timeline.makespan - timeline.busy.sum()
    scale = 1e6 if sys.platform == "darwin" else 1e3  # ru_maxrss: bytes there, KiB here
    row = {
        "ranks": ranks,
        "microbatches": microbatches,
        "computations": len(timeline.starts),
        "actions": sum(map(len, plan.programs)),
        "build_s": built - start,
        "verify_s": verified - built,
        "simulate_s": simulated - verified,
        "bubble_s": clock() - simulated,
        "total_s": clock() - start,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale,
    }
    print()
    show(row, *row)
    return row


def apart(call: Callable[..., Row], *arguments: int) -> Row:
    """In a fresh process, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, arguments)


def show(row: Row, *keys: str) -> None:
    cells = (f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in keys)
    print("  ".join(f"{key} {cell}" for key, cell in zip(keys, cells, strict=True)), flush=True)


if __name__ == "__main__":
    main()
