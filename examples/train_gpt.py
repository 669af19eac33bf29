r"""How do you train a byte-level GPT on real text with a pipeline of two ranks?

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py                    # the same ranks, all in this process
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py \
        --pipeline "chunks=8 device_map=0:0-2,1:2-5,2:5-8,3:8-10"
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py \
        --pipeline "chunks=5 ranks=2 dp=2 amp=bf16 zero=1"    # two replicas, each takes half of a batch

The text is the source of Python's standard library, or the files given with --text. Every
rank runs this same script: it reads the same text, draws the same batches, of which it gives the
pipeline its replica's share, and makes the same calls, in the same order.
"""

import argparse
import functools
import math
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm  # type: ignore[import-untyped]

import schedules
from pipe import Pipeline

VOCABULARY = 256  # bytes
BLOCKS = 8  # with the embedding and the head: 10 layers
TEXT_BYTES = 4 << 20  # enough of the standard library
SKIPPED = {  # tests, tables and what isn't the standard library's own code
    *("__pycache__", "dist-packages", "ensurepip", "encodings", "idlelib", "lib2to3"),
    *("pydoc_data", "site-packages", "test", "tests", "turtledemo"),
}
VALIDATION_WINDOWS = 200
PROMPT = b"    def "
TEMPERATURE = 0.8


# The model: an nn.Sequential, so that the pipeline can cut it between any two layers.


class Embedding(nn.Module):
    """Bytes (batch, length) -> vectors (batch, length, dim)."""

    def __init__(self, dim: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Parameter(torch.empty(seq_len, dim))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.byte(inputs) + self.position[: inputs.size(1)])
        return x


class Attention(nn.Module):
    """Causal self-attention, (batch, length, dim) -> (batch, length, dim)."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        out: Tensor = self.out(x.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One pre-norm transformer block, (batch, length, dim) -> (batch, length, dim)."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(dim), Attention(dim, heads, dropout), nn.Dropout(dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        x = x + self.mlp(x)
        return x


def gpt(dim: int, heads: int, seq_len: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        Embedding(dim, seq_len, dropout),
        *(Block(dim, heads, dropout) for _ in range(BLOCKS)),
        nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)),
    )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# The text.


def stdlib_files() -> list[Path]:
    """Python's own .py files, about TEXT_BYTES of them, in the same order on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if SKIPPED.isdisjoint(f.relative_to(root).parts)]
    # By a hash of the name: neighbours in a folder are alike, and we take only the first few.
    files.sort(key=lambda f: (zlib.crc32(f.relative_to(root).as_posix().encode()), f))
    total, chosen = 0, []
    for file in files:
        if total < TEXT_BYTES:
            chosen.append(file)
            total += file.stat().st_size
    if not chosen:
        raise FileNotFoundError(f"no .py files under {root}: give some text with --text FILE...")
    return chosen


def read(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Training and validation bytes: each tenth file validates, of one file the last tenth."""
    texts = [file.read_bytes() for file in files]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts = [texts[0][:cut], texts[0][cut:]]
    every = min(10, len(texts))
    validation = b"".join(texts[every - 1 :: every])
    del texts[every - 1 :: every]
    return tensor(b"".join(texts)), tensor(validation)


def tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(0)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets, both (seq_len,), that begin at `starts`: each byte's target is the next byte."""

    def __init__(self, text: Tensor, starts: Tensor, seq_len: int) -> None:
        self.text, self.starts, self.seq_len = text, starts.tolist(), seq_len

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        taken = self.text[start : start + self.seq_len + 1].long()
        return taken[:-1], taken[1:]


def random_windows(text: Tensor, count: int, seq_len: int, seed: int) -> Windows:
    generator = torch.Generator().manual_seed(seed)
    return Windows(text, torch.randint(len(text) - seq_len, (count,), generator=generator), seq_len)


def even_windows(text: Tensor, count: int, seq_len: int) -> Windows:
    """Spread evenly over the text."""
    return Windows(text, torch.linspace(0, len(text) - seq_len - 1, count).long(), seq_len)


def batches(pipeline: Pipeline, windows: Windows, batch_size: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """This process's share of each batch: all of it, but for a process that is one replica of several."""
    shard = pipeline.shard(windows, batch_size, shuffle=False)
    return DataLoader(windows, batch_sampler=shard)


def unigram_entropy(train: Tensor, validation: Tensor) -> float:
    """Bits per validation byte for a model that knows only how often each byte is in train."""
    counts = torch.bincount(train.long(), minlength=VOCABULARY).double() + 1
    bits: Tensor = -(counts / counts.sum()).log2()[validation.long()].mean()
    return bits.item()


# The training.


def adamw(
    parameters: list[tuple[str, nn.Parameter]], lr: float, weight_decay: float = 0.1
) -> torch.optim.AdamW:
    """AdamW that decays weight matrices, but neither layer 0 (embeddings) nor norms and biases.

    The pipeline calls this with the whole model's parameters under their unsplit names.
    """
    decayed: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in parameters:
        matrix = parameter.ndim >= 2 and not name.startswith("0.")
        (decayed if matrix else others).append((name, parameter))
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)


def warmup_then_cosine(step: int, steps: int) -> float:
    """The LR's factor: up to 1 within a twentieth of the steps, then a cosine down to 0.05."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2


def train(pipeline: Pipeline, text: Tensor, args: argparse.Namespace) -> None:
    factor = functools.partial(warmup_then_cosine, steps=args.steps)
    scheduler = LambdaLR(pipeline.optimizer, factor)
    windows = random_windows(text, args.steps * args.batch_size, args.seq_len, args.seed)
    batch_tokens = args.batch_size * args.seq_len  # of all replicas
    quiet = not pipeline.is_main
    every = 1 if sys.stderr.isatty() else 10  # seconds; a log file need not see the bar move
    with tqdm(
        total=args.steps * batch_tokens, unit="tok", unit_scale=True, mininterval=every, disable=quiet
    ) as bar:
        for step, (inputs, targets) in enumerate(batches(pipeline, windows, args.batch_size)):
            mean = pipeline.step(inputs, targets)
            scheduler.step()
            bar.update(batch_tokens)  # the bar shows tokens, so its rate is tokens/s
            if step % 10 == 0:  # reading the loss waits for the device
                bits = f"{mean.item() / math.log(2):.2f} bits"
                bar.set_postfix(step=step, loss=bits, bubble=f"{pipeline.bubble:.0%}")


def evaluate(pipeline: Pipeline, text: Tensor, args: argparse.Namespace) -> float:
    """Bits per byte over windows spread evenly over the text."""
    windows = even_windows(text, VALIDATION_WINDOWS, args.seq_len)
    total, left = 0.0, VALIDATION_WINDOWS
    for inputs, targets in batches(pipeline, windows, args.batch_size):
        size = min(args.batch_size, left)  # of all replicas
        total += pipeline.evaluate(inputs, targets).item() * size
        left -= size
    return total / (VALIDATION_WINDOWS - left) / math.log(2)


def sample(pipeline: Pipeline, length: int, args: argparse.Namespace) -> str:
    """PROMPT and `length` bytes more. All ranks draw the same ones, so they stay in step."""
    generator = torch.Generator().manual_seed(args.seed)
    text = list(PROMPT)
    # Where all replicas share one process, and so one batch, each needs a row to work on.
    rows = pipeline.dp if pipeline.replica is None else 1
    for _ in range(length):
        context = text[-args.seq_len :]
        # Padded on the right, which a causal model can't see: shapes that stay the same send
        # no metadata.
        inputs = torch.zeros(rows, args.seq_len, dtype=torch.long)
        inputs[:, : len(context)] = torch.tensor(context)
        logits = pipeline.predict(inputs)[0, len(context) - 1].float().cpu()
        chances = (logits / TEMPERATURE).softmax(-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def main() -> None:
    args = parse_arguments()
    train_text, validation_text = read(args.text or stdlib_files())
    if min(len(train_text), len(validation_text)) <= args.seq_len:
        raise SystemExit(
            f"{len(train_text)} bytes to train on and {len(validation_text)} to validate on: "
            f"both must be more than --seq-len {args.seq_len}"
        )

    # Every rank may build the whole model, under the same seed: the pipeline keeps this rank's
    # stages only, and the rest is freed as nothing else holds on to it.
    torch.manual_seed(args.seed)
    with Pipeline(
        gpt(args.dim, args.heads, args.seq_len, args.dropout),
        args.pipeline,
        schedule=schedules.get(args.schedule) if args.schedule else None,
        loss=loss,
        optimizer=functools.partial(adamw, lr=args.lr),
        clip=None if "clip=" in args.pipeline else 1.0,
    ) as pipeline:
        if pipeline.is_main:
            print(f"text: {len(train_text):,} bytes to train on, {len(validation_text):,} to validate on")
        train(pipeline, train_text, args)
        reached = evaluate(pipeline, validation_text, args)
        continuation = sample(pipeline, args.sample_bytes, args)
        if pipeline.is_main:
            unigram = unigram_entropy(train_text, validation_text)
            verdict = "below" if reached < unigram else "NOT below"
            print(f"\nvalidation loss  {reached:.3f} bits per byte, {verdict} the unigram entropy")
            print(f"unigram entropy  {unigram:.3f} bits per validation byte, by train frequencies")
            print(f"\nsample at temperature {TEMPERATURE}, prompt {PROMPT.decode()!r}:")
            print(continuation)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--pipeline",
        default="chunks=5 device_map=0:0-5,1:5-10",
        metavar="OPTIONS",
        help="the option string (default: %(default)r); the layers are 0 (embedding), 1-8 (blocks), 9 (head)",
    )
    add("--schedule", metavar="NAME", help="gpipe, 1f1b, ... (default: the string's, else 1f1b)")
    add("--steps", type=positive, default=1600, help="optimizer steps (default: %(default)s)")
    add("--batch-size", type=positive, default=20, help="windows a step (default: %(default)s)")
    add("--seq-len", type=positive, default=64, help="bytes a window (default: %(default)s)")
    add("--dim", type=positive, default=64, help="width (default: %(default)s)")
    add("--heads", type=positive, default=4, help="attention heads (default: %(default)s)")
    add(
        "--dropout",
        type=float,
        default=0.0,
        help="default 0: a short run sees no byte twice, so there is nothing to overfit",
    )
    add("--lr", type=float, default=4e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches and sample (default: 0)")
    add(
        "--text",
        type=existing_file,
        nargs="+",
        metavar="FILE",
        help="train on these files (default: the standard library's .py files)",
    )
    add("--sample-bytes", type=int, default=256, help="bytes to sample (default: %(default)s)")
    args = parser.parse_args()
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} isn't a multiple of --heads {args.heads}")
    return args


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a positive whole number")
    return int(text)


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return Path(text)


if __name__ == "__main__":
    main()
