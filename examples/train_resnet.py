r"""Does a ResNet with batch norm converge in fp16? Real images, two ranks, two replicas, a table.

    python examples/train_resnet.py                 # all four in this process
    torchrun --standalone --nproc-per-node 4 examples/train_resnet.py
    python examples/train_resnet.py --pipeline "ranks=3 dp=1 chunks=4 schedule=zb_h1" --precision fp32 bf16

The images are scikit-learn's handwritten digits (8 x 8 pixels, 1437 to train on and 360 to test with),
which come with it: nothing is downloaded. The same network is trained from the same weights on the
same batches in several precisions:

    fp32        as it is
    bf16        naive mixed precision: all parameters are cast, batch norm's too, with fp32 master weights
    fp16        the same in fp16, with a dynamic loss scale
    fp16-bn32   fp16, but keep_batchnorm_fp32 (Apex O2)

Each replica has batch norm statistics of its own, of the microbatches that it has seen, and is tested
with them on its share of the test images. What is printed besides: the mean training loss of the last
epoch, how many steps the loss scaler skipped, and its last scale.

fp16 convolutions are slow on a CPU, so the network is small: about two minutes on two cores.
"""

import argparse
import functools
import math
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm  # type: ignore[import-untyped]

from pipe import Pipeline

PRECISIONS = {
    "fp32": "amp=off",
    "bf16": "amp=bf16",
    "fp16": "amp=fp16",
    "fp16-bn32": "amp=fp16 keep_batchnorm_fp32",
}
TEST_SHARE = 0.2  # of the images


# The model: an nn.Sequential of residual blocks, so that the pipeline can cut it between any two.


class Residual(nn.Module):
    """Two convolutions beside a shortcut, (batch, inputs, h, w) -> (batch, outputs, h/stride, w/stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride), nn.ReLU(), *convolution(outputs, outputs, 3)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return (
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


def resnet(width: int) -> nn.Sequential:
    """Images (batch, 1, 8, 8) -> logits (batch, 10), in eight layers."""
    return nn.Sequential(
        nn.Sequential(*convolution(1, width, 3), nn.ReLU()),
        Residual(width, width),
        Residual(width, width),
        Residual(width, 2 * width, stride=2),
        Residual(2 * width, 2 * width),
        Residual(2 * width, 4 * width, stride=2),
        Residual(4 * width, 4 * width),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)),
    )


def loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy in nats; the accuracy goes to `pipeline.metrics`, averaged as the loss is."""
    accuracy = (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy}


# The images.


def digits(seed: int, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 8, 8), of zero mean and unit variance, with labels: to train on, and to test with."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
    except ImportError as error:
        raise SystemExit(
            f"this example takes its images from scikit-learn ({error}):\n"
            "    pip install scikit-learn        or, in this repository: pip install -e '.[examples]'"
        ) from None
    found = load_digits()
    images, labels = found.images[:limit], found.target[:limit]
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=TEST_SHARE, random_state=seed, stratify=labels
    )
    mean, deviation = x_train.mean(), x_train.std()

    def dataset(x: object, y: object) -> TensorDataset:
        pixels = (torch.as_tensor(x) - mean) / deviation
        return TensorDataset(pixels.float().unsqueeze(1), torch.as_tensor(y).long())

    return dataset(x_train, y_train), dataset(x_test, y_test)


# The training.


class Row(NamedTuple):
    """Of the table: one precision."""

    precision: str
    accuracy: float  # on the test images
    loss: float  # mean over the last epoch
    skipped: int
    scale: float | None  # of the loss, at the end
    seconds: float


def warmup_then_cosine(step: int, steps: int) -> float:
    """The LR's factor: up to 1 within a tenth of the steps, then a cosine down to 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def train(
    pipeline: Pipeline, dataset: TensorDataset, args: argparse.Namespace, name: str
) -> tuple[float, int]:
    """The last epoch's mean loss, and the number of skipped steps."""
    # The batches of the whole pipeline, of which this process gets its replica's share.
    shard = pipeline.shard(dataset, args.batch_size, seed=args.seed, drop_last=True)
    steps = args.epochs * len(shard)
    scheduler = LambdaLR(pipeline.optimizer, functools.partial(warmup_then_cosine, steps=steps))
    total, skipped = 0.0, 0
    every = 0.1 if sys.stderr.isatty() else 10  # seconds; a log file need not see the bar move
    with tqdm(
        total=steps, desc=f"{name:9}", unit="step", mininterval=every, disable=not pipeline.is_main
    ) as bar:
        for epoch in range(args.epochs):
            shard.set_epoch(epoch)
            total = 0.0
            for images, labels in DataLoader(dataset, batch_sampler=shard):
                total += pipeline.step(images, labels).item()
                skipped += int(pipeline.metrics.get("skipped", 0))
                scheduler.step()
                bar.update()
            bar.set_postfix(epoch=epoch + 1, loss=f"{total / len(shard):.4f}")
    return total / len(shard), skipped


def test(pipeline: Pipeline, dataset: TensorDataset) -> float:
    """The accuracy, over all replicas."""
    shard = pipeline.shard(dataset, len(dataset), shuffle=False)
    ((images, labels),) = DataLoader(dataset, batch_sampler=shard)
    pipeline.evaluate(images, labels)
    return pipeline.metrics["accuracy"].item()


def run(
    precision: str, datasets: tuple[TensorDataset, TensorDataset], args: argparse.Namespace
) -> Row | None:
    """Trains and tests; the row is for one process to print."""
    begin = time.perf_counter()
    torch.manual_seed(args.seed)  # the same weights in every precision, and on every rank
    with Pipeline(
        resnet(args.width),
        f"{args.pipeline} {PRECISIONS[precision]}",
        loss=loss,
        optimizer=functools.partial(
            torch.optim.SGD, lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
        ),
    ) as pipeline:
        mean, skipped = train(pipeline, datasets[0], args, precision)
        accuracy = test(pipeline, datasets[1])
        scale = pipeline.scaler.scale if pipeline.scaler else None
        row = Row(precision, accuracy, mean, skipped, scale, time.perf_counter() - begin)
        return row if pipeline.is_main else None


def table(rows: list[Row]) -> str:
    lines = [f"{'':10}{'test accuracy':>14}{'training loss':>15}{'skipped':>9}{'scale':>8}{'time':>9}"]
    for row in rows:
        scale = "-" if row.scale is None else f"2^{math.log2(row.scale):.0f}"
        lines.append(
            f"{row.precision:10}{row.accuracy:14.2%}{row.loss:15.4f}{row.skipped:9d}{scale:>8}"
            f"{row.seconds:7.0f} s"
        )
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    datasets = digits(args.seed, args.images)
    if len(datasets[0]) < args.batch_size:
        raise SystemExit(f"{len(datasets[0])} images to train on are no batch of {args.batch_size}")
    rows = [run(precision, datasets, args) for precision in args.precision]
    printed = [row for row in rows if row is not None]
    if printed:
        print(table(printed))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--pipeline",
        default="ranks=2 dp=2 chunks=2 device_map=uniform",
        metavar="OPTIONS",
        help="the option string, without amp (default: %(default)r); the layers are 0 (first convolution), "
        "1-6 (residual blocks), 7 (classifier)",
    )
    add(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        default=list(PRECISIONS),
        help="rows of the table (default: all)",
    )
    add("--epochs", type=positive, default=12, help="over the training images (default: %(default)s)")
    add(
        "--batch-size",
        type=positive,
        default=64,
        help="images a step, of all replicas (default: %(default)s)",
    )
    add("--width", type=positive, default=8, help="channels of the first layers (default: %(default)s)")
    add("--lr", type=float, default=0.1, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches and the test images' choice (default: 0)")
    add("--images", type=positive, help="use the first so many only (default: all 1797)")
    args = parser.parse_args()
    if "amp=" in args.pipeline:
        parser.error("the table compares precisions: pick its rows with --precision, not amp= in --pipeline")
    return args


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a positive whole number")
    return int(text)


if __name__ == "__main__":
    main()
