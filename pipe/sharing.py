"""How the mean loss of a call gets to every rank of every replica."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipe.agreement import LossInfo
from pipe.assembly import Parts
from pipe.errors import PipelineError
from pipe.preparation import Prepared
from pipe.transport import Transport


class Shared(NamedTuple):
    """What a call gave, as all ranks know it."""

    loss: Tensor
    metrics: dict[str, Tensor]
    info: LossInfo | None


def share_loss(prepared: Prepared, parts: Parts, transport: Transport) -> Shared:
    """The call's mean loss and metrics over all replicas, everywhere; a collective."""
    info = _known(prepared, parts, transport)
    names = info.names if info else ()
    own = [
        (call.mean_of(names) if call.losses else torch.zeros(1 + len(names), dtype=torch.float64)).to(
            parts.device
        )
        for call in prepared.calls
    ]
    numbers = _mean(own, prepared, parts, transport)
    dtype = info.dtype if info else torch.get_default_dtype()
    # A metric may be a count, which a half-precision loss's type could not hold.
    metrics = numbers[1:].to(torch.promote_types(dtype, torch.float32))
    return Shared(numbers[0].to(dtype), dict(zip(names, metrics, strict=True)), info)


def _known(prepared: Prepared, parts: Parts, transport: Transport) -> LossInfo | None:
    """What there is to share: known from earlier calls, or told now by those that have a loss."""
    found = [call.found() for call in prepared.calls]
    known = prepared.calls[0].loss_info
    if parts.rank is None or known is None:
        found = [info for part in transport.all_gather([found]) for info in part]
        known = next((info for info in found if info is not None), None)
    if any(info not in (None, known) for info in found):
        raise PipelineError(f"loss gave {found}, and {known} in earlier calls: ranks must know beforehand")
    return known


def _mean(own: Sequence[Tensor], prepared: Prepared, parts: Parts, transport: Transport) -> Tensor:
    """Each replica's numbers, weighed, as the last stages' ranks have them."""
    replicas, last = parts.resolved.dp, parts.last
    if parts.rank is None:
        everyone = list(own)
    elif replicas == 1:
        return transport.broadcast(own[0], last)
    else:
        said = transport.all_gather_tensors(own, [own[0].numel()] * transport.size)
        everyone = said[last * replicas : (last + 1) * replicas]
    if len(everyone) == 1:
        return everyone[0]
    shares = [weight / (prepared.weight or 1.0) for weight in prepared.weights]
    return torch.stack([numbers * share for numbers, share in zip(everyone, shares, strict=True)]).sum(0)
