"""How a batch becomes microbatches, and how much each of them weighs."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipe.boundary import Pytree

Split: TypeAlias = Callable[[Any, int], Sequence[Any]]
Weight: TypeAlias = Callable[[Any], Any]


@dataclass
class Cut:
    """What a process has of a batch, in microbatches, and the numbers of samples where they were counted."""

    inputs: Sequence[Pytree] | None = None
    targets: Sequence[Pytree] | None = None
    input_samples: int | None = None
    target_samples: int | None = None


def cut(
    inputs: Pytree,
    targets: Pytree,
    pairs: Sequence[Any] | None,
    *,
    chunks: int,
    split_by: Split | None,
    replicas: int = 1,
) -> list[Cut]:
    """A call's arguments in microbatches: as many as `chunks`, or as there are samples if those are fewer.

    Args:
        inputs, targets: the batch; None where the caller had none to give.
        pairs: instead of both, `(input, target)` pairs that are microbatches already.
        split_by: the user's way to cut, `(batch, microbatches) -> sequence`.
        replicas: how many share what they are given. The rows of a batch are dealt out first, then cut; what
            is cut already is dealt out in contiguous runs.

    Returns:
        What each replica gets.

    Raises:
        ValueError: a batch that can't be cut.
    """
    if pairs is not None:
        if inputs is not None or targets is not None:
            raise ValueError("give inputs and targets, or microbatches=, not both")
        if not isinstance(pairs, Iterable):
            raise TypeError(f"microbatches= takes (input, target) pairs, not {pairs!r}")
        listed = list(pairs)
        if not listed:
            raise ValueError("microbatches= is empty")
        if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in listed):
            raise TypeError("microbatches= takes (input, target) pairs")
        return _dealt([x for x, _ in listed], [y for _, y in listed], replicas)
    if split_by is not None:
        return _dealt(
            None if inputs is None else list(split_by(inputs, chunks * replicas)),
            None if targets is None else list(split_by(targets, chunks * replicas)),
            replicas,
        )
    if replicas == 1:
        return [_cut_rows(inputs, targets, chunks)]
    pairs_of_shares = zip(shares(inputs, replicas), shares(targets, replicas), strict=True)
    return [_cut_rows(x, y, chunks) for x, y in pairs_of_shares]


def _cut_rows(inputs: Pytree, targets: Pytree, chunks: int) -> Cut:
    (input_rows, input_samples), (target_rows, target_samples) = _rows(inputs, chunks), _rows(targets, chunks)
    return Cut(input_rows, target_rows, input_samples, target_samples)


def _dealt(inputs: Sequence[Any] | None, targets: Sequence[Any] | None, replicas: int) -> list[Cut]:
    """Microbatches in contiguous runs, one a replica."""
    for listed in (inputs, targets):
        if listed is not None and len(listed) % replicas:
            raise ValueError(
                f"{len(listed)} microbatches for {replicas} replicas: all run the same number, so it must be "
                f"a multiple of {replicas}"
            )

    def run(listed: Sequence[Any] | None, replica: int) -> Sequence[Any] | None:
        size = 0 if listed is None else len(listed) // replicas
        return None if listed is None else listed[replica * size : (replica + 1) * size]

    return [Cut(run(inputs, replica), run(targets, replica)) for replica in range(replicas)]


def _rows(batch: Pytree, chunks: int) -> tuple[Sequence[Pytree] | None, int | None]:
    """A batch in microbatches, and its number of samples."""
    if batch is None:
        return None, None
    count = _length(batch)
    return (split(batch, min(chunks, count)) if count else []), count


def samples(batch: Pytree) -> int:
    """The number of samples: the length along dim 0 that all tensors of the batch share.

    Tensors of no dimension have no length and are shared by all microbatches, as leaves that are no tensors
    are.

    Raises:
        ValueError: no tensor has a dimension, two tensors have different lengths, or there are no samples.
    """
    length = _length(batch)
    if not length:
        raise ValueError("the batch has no samples")
    return length


def _length(batch: Pytree) -> int:
    lengths = [leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not lengths:
        raise ValueError(
            "the batch has no tensor to cut along dim 0; pass microbatches=, or split= to Pipeline"
        )
    if min(lengths) != max(lengths):
        raise ValueError(
            f"the tensors of the batch have different lengths along dim 0: {sorted(set(lengths))}"
        )
    return lengths[0]


def split(batch: Pytree, microbatches: int) -> Sequence[Pytree]:
    """Cuts every tensor along dim 0 into views whose sizes differ by at most one, the larger ones first.

    Raises:
        ValueError: as `samples`; or fewer samples than microbatches.
    """
    count = samples(batch)
    if count < microbatches:
        raise ValueError(f"{count} samples cannot fill {microbatches} microbatches")
    return _parts(batch, microbatches)


def shares(batch: Pytree, replicas: int) -> Sequence[Pytree]:
    """As `split`, for the replicas of one process: some of which may get nothing."""
    if batch is None:
        return [None] * replicas
    _length(batch)
    return _parts(batch, replicas)


def _parts(batch: Pytree, microbatches: int) -> Sequence[Pytree]:
    if isinstance(batch, Tensor):
        return batch.tensor_split(microbatches)
    leaves, spec = pytree.tree_flatten(batch)
    columns = [
        leaf.tensor_split(microbatches) if isinstance(leaf, Tensor) and leaf.dim() else (leaf,) * microbatches
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]


def join(rows: Sequence[Pytree]) -> Pytree:
    """The inverse of `split` for outputs: tensors are concatenated along dim 0, equal plain leaves kept.

    Raises:
        ValueError: the outputs of the microbatches differ in structure, or in a plain leaf.
    """
    if isinstance(rows[0], Tensor) and rows[0].dim():
        return torch.cat(list(rows))
    flat = [pytree.tree_flatten(row) for row in rows]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise ValueError("the microbatches' outputs differ in structure and can't be joined into rows")
    return pytree.tree_unflatten(
        [_join(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)], spec
    )


def _join(column: Sequence[Any]) -> Any:
    if isinstance(column[0], Tensor):
        return torch.cat(list(column)) if column[0].dim() else torch.stack(list(column))
    if any(leaf != column[0] for leaf in column):
        raise ValueError(
            f"the microbatches' outputs have different values, {list(column)}: they can't be joined"
        )
    return column[0]


def fingerprint(microbatches: Sequence[Pytree] | None) -> int | None:
    """A number that tells batches apart: of some of the numbers of the first and the last microbatch.

    None where there is nothing to look at without waiting for a device.
    """
    if not microbatches:
        return None
    leaves = [leaf for part in (microbatches[0], microbatches[-1]) for leaf in pytree.tree_leaves(part)]
    found = None
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.dim() and leaf.numel():
            row = leaf.detach()[0].reshape(-1)[:16].resolve_conj().contiguous()
            found = zlib.crc32(row.view(torch.uint8).numpy().tobytes(), found or 0)
    return found


def weigh(targets: Sequence[Pytree], weight: Weight | None) -> list[float]:
    """Each microbatch's weight in the mean: `weight(target)`, or else its number of samples.

    Raises:
        ValueError: a weight that is negative or no finite number.
    """
    weights = []
    for target in targets:
        value = samples(target) if weight is None else weight(target)
        try:
            weights.append(float(value))
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"weight= must return one number for a microbatch's target, not {value!r}"
            ) from None
    for index, value in enumerate(weights):
        if not 0 <= value < float("inf"):
            raise ValueError(f"weight= gave {value} for microbatch {index}; a weight is a finite number >= 0")
    return weights
