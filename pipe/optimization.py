"""From gradients to an update: accumulation over calls, loss scaling, clipping, the optimizer's step."""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from pipe.precision import LossScaler
from pipe.transport import Transport

# By member, a flag for each of its parameters.
Uses: TypeAlias = Mapping[int, bytes]


class Gradients(Protocol):
    """The gradients of this process's parameters, and their step, however they are held."""

    def begin(self, *, check: bool) -> None:
        """Before a call; `check`: a gradient that isn't finite is an error."""

    def finish(self) -> None:
        """After the last backward: every gradient becomes final."""

    def uses(self) -> Uses | None:
        """Which parameters have a gradient, to be told to the other replicas; None where there are none.

        A parameter that no replica has used is left alone, and only together they know.
        """

    def hear(self, said: Sequence[Uses]) -> None:
        """What all replicas have told."""

    def scale(self, factor: float) -> Tensor | None:
        """Multiplies all; returns whether any isn't finite (over 0) where that is looked for."""

    def norm(self, transport: Transport) -> Tensor:
        """The 2-norm of the unsplit model's gradient; a parameter that two stages share counts once."""

    def clip(self, limit: float, norm: Tensor) -> None:
        """Multiplies all by `limit / norm` where the norm is over the limit."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets the optimizer step, and the parameters follow."""

    def clear(self) -> None:
        """Forgets all."""


class Updates:
    """Owns what lies between backward and the next forward: accumulation, scaling, clipping, the step.

    Args:
        scaler: of fp16's losses; None where they aren't scaled.
    """

    def __init__(
        self,
        gradients: Gradients,
        *,
        optimizer: torch.optim.Optimizer | None,
        clip: float | None,
        scaler: LossScaler | None,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self._gradients = gradients
        self._clip = clip
        self._device = device
        self._stale = True  # what is there belongs to an update that was made
        self._reference = 0.0
        self._weights: list[float] = []

    def begin(self, weight: float) -> float:
        """Before a call of some total weight; returns W, which its gradients are to be divided by."""
        if self._stale:
            self._gradients.clear()
            self._stale, self._reference, self._weights = False, 0.0, []
        self._gradients.begin(check=self.scaler is not None and self.scaler.at_floor)
        if not self._reference:
            self._reference = weight
        return self._reference or 1.0

    def accumulated(self, weight: float) -> None:
        """After a call: its gradients are added up."""
        if weight:
            self._weights.append(weight)

    def say(self) -> Uses | None:
        """What other replicas have to know before an update."""
        return self._gradients.uses()

    def hear(self, said: Sequence[Uses]) -> None:
        """What all replicas said."""
        self._gradients.hear(said)

    def discard(self) -> None:
        """Forgets a call that failed, and all that was accumulated before it."""
        self._stale = True

    def update(self, transport: Transport, *, reduced: Callable[[], None] | None = None) -> dict[str, Tensor]:
        """One optimizer step over all that was accumulated; returns what there is to report.

        Args:
            reduced: called when all gradients are final.
        """
        assert self.optimizer is not None
        self._stale = True
        self._gradients.finish()
        if reduced is not None:
            reduced()
        if not self._weights:
            warnings.warn("every microbatch had weight 0: nothing was updated", stacklevel=3)
            return {}
        report = {}
        factor = self._reference / sum(self._weights) if len(self._weights) > 1 else 1.0
        found = self._gradients.scale(factor / (self.scaler.scale if self.scaler else 1.0))
        if self.scaler is not None:
            report["loss_scale"] = torch.tensor(self.scaler.scale)
            overflow = self._any(found, transport)
            self.scaler.update(overflow)
            report["skipped"] = torch.tensor(float(overflow))
            if overflow:
                return report
        if self._clip is not None:
            report["grad_norm"] = norm = self._gradients.norm(transport)
            self._gradients.clip(self._clip, norm)
        self._gradients.step(self.optimizer)
        # Weights cast inside one long autocast region would go stale.
        torch.clear_autocast_cache()
        return report

    def _any(self, found: Tensor | None, transport: Transport) -> bool:
        """Whether a gradient of any rank of any replica isn't finite."""
        mine = torch.zeros(1, dtype=torch.float64, device=self._device)
        if found is not None:
            mine += found.to(mine)
        everyone = transport.all_gather_tensors([mine], [1] * transport.size)
        return bool(torch.stack(everyone).sum() > 0)


class Whole:
    """One replica, full precision, nothing sharded: gradients are where autograd puts them.

    Args:
        parameters: of this process, by their number in the unsplit model; frozen ones too, that may thaw.
        owners: the rank of each parameter of the unsplit model.
        local: the ranks that live in this process.
        norm_dtype: what a norm over all of them is.
    """

    def __init__(
        self,
        parameters: Mapping[int, nn.Parameter],
        owners: Sequence[int],
        local: Sequence[int],
        norm_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device = device
        ranks = range(1 + max(owners, default=0)) if len(local) == 1 else local
        self._by_rank = {
            rank: [i for i, owner in enumerate(owners) if owner == rank] for rank in (*ranks, *local)
        }
        self._mine = {rank: [parameters[i] for i in self._by_rank[rank]] for rank in local}
        self._norm_dtype = norm_dtype

    def begin(self, *, check: bool) -> None:
        """Nothing to prepare."""

    def finish(self) -> None:
        """They are final as they are."""

    def uses(self) -> Uses | None:
        return None

    def hear(self, said: Sequence[Uses]) -> None:
        """There are no other replicas."""

    def scale(self, factor: float) -> Tensor | None:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        return None

    def norm(self, transport: Transport) -> Tensor:
        """A norm of norms in the unsplit order, as clip_grad_norm_ takes it."""
        mine = [_norms(parameters, self._device) for parameters in self._mine.values()]
        sizes = [len(indices) for indices in self._by_rank.values()]
        norms = torch.empty(sum(sizes), dtype=torch.float64, device=self._device)
        for indices, part in zip(
            self._by_rank.values(), transport.all_gather_tensors(mine, sizes), strict=True
        ):
            norms[indices] = part
        total: Tensor = torch.linalg.vector_norm(norms[norms != _NO_GRADIENT].to(self._norm_dtype), 2.0)
        return total

    def clip(self, limit: float, norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(self._parameters(), limit, norm)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def clear(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _parameters(self) -> list[nn.Parameter]:
        return [p for parameters in self._mine.values() for p in parameters]


_NO_GRADIENT = -1.0


def _norms(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The 2-norm of each parameter's gradient, in fp64 so that nothing is lost on the way."""
    norms = torch.full((len(parameters),), _NO_GRADIENT, dtype=torch.float64, device=device)
    there = [index for index, p in enumerate(parameters) if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return norms
    if device.type == "cuda":  # each as clip_grad_norm_ has it, so that the bits agree
        found: Sequence[Tensor] = torch._foreach_norm(gradients, 2.0)
    else:
        found = [torch.linalg.vector_norm(gradient, 2.0) for gradient in gradients]
    norms[there] = torch.stack([norm.to(device) for norm in found]).to(torch.float64)
    return norms


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The type that all of these fit into, fp32 at least."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)
