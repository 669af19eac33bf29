"""What all stages of a rank share during one call of step, evaluate or predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipe.agreement import LossInfo
from pipe.boundary import Pytree, check_unwritten, pack, version_of
from pipe.errors import PipelineError
from pipe.precision import LossScaler
from pipe.randomness import Seeds


class Prediction:
    """The last stage's output of a microbatch."""

    def __init__(self, value: Pytree) -> None:
        self._value = value
        self._tensors = pack(value)[0]
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def value(self) -> Pytree:
        check_unwritten(self._tensors, self._versions)
        return self._value


@dataclass
class Call:
    """One call, as all ranks have agreed on it.

    Args:
        trains: whether the plan has backwards.
        microbatches: how many there are.
        keys: for each microbatch, a number that stands for all that shapes its boundaries; equal numbers
            mean equal shapes, on every rank.
        weights: each microbatch's weight in the mean (w_i).
        reference: the weight that gradients are divided by (W of contract 11).
        seeds: for each microbatch and layer, or None where layers draw as they please.
        targets: for each microbatch, where this process has the last stage.
        predicts: keep the last stage's outputs instead of asking for a loss.
        loss_info: what all ranks know of the loss from earlier calls, if anything.
        environment: this process's number for what else shapes its outputs (`Note.environment`).
        scaler: of the loss, if it is scaled.
    """

    trains: bool
    microbatches: int
    keys: Sequence[int]
    weights: Sequence[float]
    reference: float
    seeds: Seeds | None = None
    targets: Sequence[Pytree] | None = None
    predicts: bool = False
    loss_info: LossInfo | None = None
    environment: int = 0
    scaler: LossScaler | None = None
    predictions: dict[int, Prediction] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _factors: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def target(self, microbatch: int, device: torch.device) -> Pytree:
        """A microbatch's target: the caller's own view, moved only where it has to be."""
        assert self.targets is not None
        target = self.targets[microbatch]
        if device.type == "cpu":
            return target
        return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), target)

    def record(self, microbatch: int, loss: Tensor, metrics: Mapping[str, Any]) -> None:
        self.losses[microbatch] = loss
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                continue
            if not isinstance(value, int | float):
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                raise ValueError(f"metric {name!r} must be one number, not a {type(value).__name__}{shape}")
        if metrics:
            self.metrics[microbatch] = {
                name: value.reshape(()) if isinstance(value, Tensor) else value
                for name, value in metrics.items()
            }

    def factor(self, microbatch: int, loss: Tensor) -> Tensor:
        """w_i / W, times the loss scale: the gradient that a microbatch's backward begins with."""
        kind = (loss.dtype, loss.device)
        factors = self._factors.get(kind)
        if factors is None:
            # Divided in double precision, then rounded once, as `loss * (w / W)` does with Python's floats.
            exact = [weight / self.reference for weight in self.weights]
            factors = torch.tensor(exact, dtype=loss.dtype, device=loss.device)
            if self.scaler is not None:
                factors = factors * self.scaler.tensor(loss.device)
            self._factors[kind] = factors
        return factors[microbatch]

    def found(self) -> LossInfo | None:
        """What this call has shown of the loss, where it had any.

        Raises:
            PipelineError: metrics that differ from microbatch to microbatch.
        """
        if not self.losses:
            return None
        rows = list(self.metrics.values())
        names = list(rows[0]) if rows else []
        for index, row in self.metrics.items():
            if list(row) != names:
                raise PipelineError(f"loss returned metrics {names}, and {list(row)} in microbatch {index}")
        return LossInfo(next(iter(self.losses.values())).dtype, tuple(names))

    def mean_of(self, names: Sequence[str]) -> Tensor:
        """The mean loss, then those of the metrics, in double precision."""
        means = [self.mean({index: row[name] for index, row in self.metrics.items()}) for name in names]
        return torch.stack([self.mean(self.losses), *means])

    def mean(self, values: Mapping[int, Any]) -> Tensor:
        """The weighted mean of one number a microbatch, as a 0-d tensor, in double precision."""
        total = sum(self.weights)
        if not values or not total:
            return torch.zeros((), dtype=torch.float64)
        numbers = [torch.as_tensor(values[index]).detach().to(torch.float64) for index in sorted(values)]
        shares = [self.weights[index] / total for index in sorted(values)]
        stacked = torch.stack(numbers)
        return (stacked * torch.tensor(shares, dtype=torch.float64, device=stacked.device)).sum()
