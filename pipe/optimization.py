"""From gradients to an update: accumulation over calls, the global norm, the user's optimizer."""

import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipe.agreement import digest
from pipe.errors import PipelineError
from pipe.transport import Transport

Named: TypeAlias = list[tuple[str, nn.Parameter]]
OptimizerFactory: TypeAlias = Callable[[Any], torch.optim.Optimizer]


def build_optimizer(
    factory: OptimizerFactory, named: Named, owned: Collection[str]
) -> tuple[torch.optim.Optimizer, tuple[str, ...]]:
    """Calls the user's factory with all parameters, and takes those of other ranks out of what it returns.

    The factory sees the whole model on every rank, so that its groups come out alike everywhere; what this
    rank doesn't own is a stand-in of the right shape and no memory.

    Returns:
        The optimizer of this rank's parameters, and its groups in words, to be compared between ranks.

    Raises:
        PipelineError: the factory returned no optimizer, or one over other parameters.
    """
    offered = [(name, p if name in owned else _stand_in(p)) for name, p in named]
    optimizer = factory(offered)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PipelineError(
            f"optimizer= must return a torch.optim.Optimizer, and returned {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PipelineError("LBFGS evaluates the loss again in its step (a closure), which a pipeline can't")
    names = {id(p): name for name, p in offered}
    words = tuple(
        word for index, group in enumerate(optimizer.param_groups) for word in _words(index, group, names)
    )
    for group in optimizer.param_groups:
        kept = [names[id(p)] in owned for p in group["params"]]
        for p, keep in zip(group["params"], kept, strict=True):
            if not keep:
                optimizer.state.pop(p, None)
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [item for item, keep in zip(group[key], kept, strict=True) if keep]
    return optimizer, words


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(one.expand(parameter.shape))


def _words(index: int, group: dict[str, Any], names: dict[int, str]) -> Iterator[str]:
    strangers = [p for p in group["params"] if id(p) not in names]
    if strangers:
        raise PipelineError(
            f"optimizer= returned an optimizer over {len(strangers)} tensors that it was not given; "
            "it must use the (name, parameter) pairs it is called with"
        )
    for key, value in group.items():
        if key == "params":
            yield f"group {index} over {len(value)} parameters ({digest([names[id(p)] for p in value])})"
        elif key != "param_names":
            # A function's address is another one in every process.
            yield f"{key}={re.sub(' at 0x[0-9a-f]+', '', repr(value))} in group {index}"


class Updates:
    """Owns what lies between backward and the next forward: accumulated gradients, clipping, the
    optimizer's step.

    Args:
        named: all parameters of the unsplit model, in its order; frozen ones too, that may thaw.
        owners: the rank of each.
        local: the ranks that live in this process.
    """

    def __init__(
        self,
        named: Named,
        owners: Sequence[int],
        local: Sequence[int],
        *,
        optimizer: torch.optim.Optimizer | None,
        clip: float | None,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self._clip = clip
        self._device = device
        ranks = range(1 + max(owners, default=0)) if len(local) == 1 else local
        self._by_rank = {
            rank: [i for i, owner in enumerate(owners) if owner == rank] for rank in (*ranks, *local)
        }
        self._mine = {rank: [named[i][1] for i in self._by_rank[rank]] for rank in local}
        self._norm_dtype = _widest(p.dtype for _, p in named)
        self._stale = True  # what is in `.grad` belongs to an update that was made
        self._reference = 0.0
        self._weights: list[float] = []

    def begin(self, weight: float) -> float:
        """Before a call of some total weight; returns W, which its gradients are to be divided by."""
        if self._stale:
            self._clear()
        if not self._reference:
            self._reference = weight
        return self._reference or 1.0

    def accumulated(self, weight: float) -> None:
        """After a call: its gradients are in `.grad`."""
        if weight:
            self._weights.append(weight)

    def discard(self) -> None:
        """Forgets a call that failed, and all that was accumulated before it."""
        self._stale = True

    def update(self, transport: Transport) -> dict[str, Tensor]:
        """One optimizer step over all that was accumulated; returns what there is to report."""
        assert self.optimizer is not None
        self._stale = True
        if not self._weights:
            warnings.warn("every microbatch had weight 0: nothing was updated", stacklevel=3)
            return {}
        report = {}
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        if len(self._weights) > 1 and gradients:
            torch._foreach_mul_(gradients, self._reference / sum(self._weights))
        if self._clip is not None:
            report["grad_norm"] = norm = self._global_norm(transport)
            torch.nn.utils.clip_grads_with_norm_(self._parameters(), self._clip, norm)
        self.optimizer.step()
        # Weights cast inside one long autocast region would go stale.
        torch.clear_autocast_cache()
        return report

    def _global_norm(self, transport: Transport) -> Tensor:
        """The norm over all ranks: a norm of norms in the unsplit order, as clip_grad_norm_ takes it."""
        mine = [_norms(parameters, self._device) for parameters in self._mine.values()]
        sizes = [len(indices) for indices in self._by_rank.values()]
        norms = torch.empty(sum(sizes), dtype=torch.float64, device=self._device)
        for indices, part in zip(
            self._by_rank.values(), transport.all_gather_tensors(mine, sizes), strict=True
        ):
            norms[indices] = part
        total: Tensor = torch.linalg.vector_norm(norms[norms != _NO_GRADIENT].to(self._norm_dtype), 2.0)
        return total

    def _parameters(self) -> list[nn.Parameter]:
        return [p for parameters in self._mine.values() for p in parameters]

    def _clear(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None
        self._stale, self._reference, self._weights = False, 0.0, []


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


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes, torch.float32)
