"""How the mean loss of a call gets to every rank of every replica."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    said: list[Any]


def share_loss(prepared: Prepared, parts: Parts, transport: Transport, say: object = None) -> Shared:
    """The call's mean loss and metrics over all replicas, everywhere; a collective.

    Args:
        say: what else all processes shall know of this one, where there are replicas.
    """
    info = _known(prepared, parts, transport)
    names = info.names if info else ()
    own = [
        (call.mean_of(names) if call.losses else torch.zeros(1 + len(names), dtype=torch.float64)).to(
            parts.device
        )
        for call in prepared.calls
    ]
    everyone, said = _gathered(own, say, parts, transport)
    numbers = _mean(everyone, prepared)
    dtype = info.dtype if info else torch.get_default_dtype()
    # A metric may be a count, which a half-precision loss's type could not hold.
    metrics = numbers[1:].to(torch.promote_types(dtype, torch.float32))
    return Shared(numbers[0].to(dtype), dict(zip(names, metrics, strict=True)), info, said)


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


def _gathered(
    own: Sequence[Tensor], say: object, parts: Parts, transport: Transport
) -> tuple[Sequence[Tensor], list[Any]]:
    """Each replica's numbers, as the last stages' ranks have them; and what everybody said."""
    replicas, last = parts.resolved.dp, parts.last
    if parts.rank is None:
        return own, [say]
    if replicas == 1:
        return [transport.broadcast(own[0], last)], [say]
    ends = slice(last * replicas, (last + 1) * replicas)
    if parts.device.type == "cpu":
        told = transport.all_gather([(own[0].tolist(), say)])
        return [torch.tensor(n, dtype=torch.float64) for n, _ in told[ends]], [said for _, said in told]
    # Numbers stay on the device: nobody waits for it here.
    everyone = transport.all_gather_tensors(own, [own[0].numel()] * transport.size)
    return everyone[ends], transport.all_gather([say]) if say is not None else []


def _mean(everyone: Sequence[Tensor], prepared: Prepared) -> Tensor:
    """Weighed by what the replicas weigh."""
    if len(everyone) == 1:
        return everyone[0]
    shares = [weight / (prepared.weight or 1.0) for weight in prepared.weights]
    return torch.stack([numbers * share for numbers, share in zip(everyone, shares, strict=True)]).sum(0)
