"""What does it cost to run a backward in two parts?

    python benchmarks/split.py [--repetitions 60]

One transformer block of the example, on one thread: the time of a whole backward (B), and of its two parts,
the input gradients (I) and the weight gradients (W), in turn on the same data. And what a forward costs
whose backward will be split. The first quartile of the repetitions; figures of one run compare.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

from pipe.boundary import Parcel
from pipe.call import Call
from pipe.stage import Keep, Stage

sys.path.append(str(Path(__file__).parents[1] / "examples"))

SIZES = [(64, 4, 64, 4), (256, 8, 128, 4)]  # dim, heads, length, rows; the first is the example's


def measure(dim: int, heads: int, length: int, rows: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of each part."""
    from train_gpt import Block

    block = nn.Sequential(Block(dim, heads, 0.0))
    stage = Stage(
        1, block, first_layer=1, is_first=False, is_last=False, device=torch.device("cpu"), loss=None
    )
    call = Call(True, 1, [0], [1.0], 1.0)
    data, gradient = torch.randn(rows, length, dim), torch.randn(rows, length, dim)
    times = defaultdict(list)

    def timed(part: str, act: object, *args: object, **settings: object) -> None:
        start = time.perf_counter()
        act(*args, **settings)  # type: ignore[operator]
        times[part].append(time.perf_counter() - start)

    for _ in range(repetitions):
        for split in (False, True):
            parcel = Parcel([data.clone()], wants=(True,))
            timed("F for I, W" if split else "F", stage.forward, 0, parcel, call, Keep.GRAPH, split=split)
            if split:
                timed("I", stage.backward_input, 0, Parcel([gradient]), call)
                timed("W", stage.backward_weight, 0)
            else:
                timed("B", stage.backward, 0, Parcel([gradient]), call)
    return {part: statistics.quantiles(found)[0] * 1e3 for part, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=60, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'dim x length x rows':<20}{'F':>8}{'F split':>9}{'B':>8}{'I':>8}{'W':>8}{'(I + W) / B':>13}")
    for dim, heads, length, rows in SIZES:
        ms = measure(dim, heads, length, rows, args.repetitions)
        parts = "".join(
            f"{ms[part]:>{w}.2f}" for part, w in (("F", 8), ("F for I, W", 9), ("B", 8), ("I", 8), ("W", 8))
        )
        print(f"{f'{dim} x {length} x {rows}':<20}{parts}{(ms['I'] + ms['W']) / ms['B']:>13.3f}")


if __name__ == "__main__":
    main()
