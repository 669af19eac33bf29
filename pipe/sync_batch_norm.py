"""Batch norm over the replicas of a rank: what `torch.nn.SyncBatchNorm` does here.

torch's own waits for the whole world unless it was given a group, and runs on GPUs only.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipe.across import Across
from pipe.errors import PipelineError


def synchronize(module: nn.Module, across: Across) -> None:
    """Lets the SyncBatchNorm layers of a stage that have no group of their own work over its replicas."""
    for layer in module.modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.process_group is None:
            layer.forward = partial(_forward, layer, across)  # type: ignore[method-assign]


def _forward(layer: nn.SyncBatchNorm, across: Across, inputs: Tensor) -> Tensor:
    if across.size == 1 or not (layer.training or layer.running_mean is None):
        return _alone(layer, inputs)
    summed = partial(_AllReduce.apply, across)
    rows = inputs.transpose(0, 1).flatten(1).to(torch.promote_types(inputs.dtype, torch.float32))
    count = torch.full((1,), float(rows.shape[1]), dtype=rows.dtype, device=rows.device)
    first = summed(torch.cat([rows.sum(1), count]))
    total = first[-1].detach()
    mean = first[:-1] / total
    centered = rows - mean[:, None]
    variance = summed(centered.square().sum(1)) / total
    if layer.training and layer.track_running_stats:
        _track(layer, mean.detach(), variance.detach() * total / (total - 1))
    normal = centered * torch.rsqrt(variance + layer.eps)[:, None]
    if layer.affine:
        normal = normal * layer.weight[:, None] + layer.bias[:, None]
    shape = (inputs.shape[1], inputs.shape[0], *inputs.shape[2:])
    output: Tensor = normal.to(inputs.dtype).view(shape).transpose(0, 1).contiguous()
    return output


def _alone(layer: nn.SyncBatchNorm, inputs: Tensor) -> Tensor:
    uses_batch = layer.training or layer.running_mean is None
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    is_tracked = not layer.training or layer.track_running_stats
    return functional.batch_norm(
        inputs,
        layer.running_mean if is_tracked else None,
        layer.running_var if is_tracked else None,
        layer.weight,
        layer.bias,
        uses_batch,
        _momentum(layer),
        layer.eps,
    )


@torch.no_grad()
def _track(layer: nn.SyncBatchNorm, mean: Tensor, variance: Tensor) -> None:
    """The running statistics, of the unbiased variance."""
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    momentum = _momentum(layer)
    for running, now in ((layer.running_mean, mean), (layer.running_var, variance)):
        assert running is not None
        running.copy_(running * (1 - momentum) + now * momentum)


def _momentum(layer: nn.SyncBatchNorm) -> float:
    """Without one, the statistics are the mean over all batches."""
    if layer.momentum is not None:
        return float(layer.momentum)
    return 1.0 / float(layer.num_batches_tracked or 1)


class _AllReduce(torch.autograd.Function):
    """The sum over replicas, whose gradient is the sum of all replicas' gradients."""

    @staticmethod
    def forward(ctx: Any, across: Across, values: Tensor) -> Tensor:
        ctx.across = across
        return _sum(across, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, _sum(ctx.across, gradients[0])


def _sum(across: Across, values: Tensor) -> Tensor:
    flat = values.new_zeros(across.size * values.numel())
    cuts = [replica * values.numel() for replica in range(across.size + 1)]
    flat[cuts[across.index] : cuts[across.index + 1]] = values
    if not across.all_gather(flat, cuts)():
        raise PipelineError(
            "SyncBatchNorm waits inside its forward for the other replicas, which can't run meanwhile in the "
            "same process: run it under torchrun, or take BatchNorm"
        )
    return flat.view(across.size, -1).sum(0)
