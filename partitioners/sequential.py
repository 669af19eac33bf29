"""How is an nn.Sequential taken apart? Into stages that keep its modules and their unsplit names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

from partitioners.balance import check_counts
from partitioners.device_map import DeviceMap
from partitioners.errors import PartitionError

# What acts when the whole Sequential is called, saved or loaded. The engine calls layers: it would never act.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def split(model: nn.Sequential, device_map: DeviceMap, rank: int | None = None) -> dict[int, nn.Sequential]:
    """This rank's stages, or all of them: stage index -> a Sequential of the model's own modules.

    Children keep the names they have in `model`, so stage 1 of `0:0-5,1:5-10` still has its `7.weight`.
    """
    check_model(model)
    device_map.validate(len(model))
    return {
        stage: _slice(model, layers)
        for stage, (owner, layers) in enumerate(zip(device_map.placement, device_map.stages, strict=True))
        if rank is None or rank == owner
    }


def check_model(model: nn.Module, num_stages: int = 1) -> None:
    """Refuses a model that isn't the plain sum of its layers, or has fewer of them than stages."""
    kind = type(model).__name__
    if not isinstance(model, nn.Sequential):
        raise PartitionError(f"only an nn.Sequential can be split, and the model is a {kind}")
    if type(model).forward is not nn.Sequential.forward or "forward" in vars(model):
        raise PartitionError(f"{kind} has a forward of its own, which its layers alone wouldn't run")
    own = _own_state(model)
    if own:
        raise PartitionError(f"the model itself holds {own}, which no stage would own: move it into a layer")
    if not len(model):
        raise PartitionError("the model has no layers")
    for layer, (name, module) in enumerate(model._modules.items()):
        if module is None:
            raise PartitionError(f"layer {layer} (named {name}) is None")
    check_counts(len(model), num_stages)


def layer_sizes(model: nn.Sequential) -> list[int]:
    """How many numbers each layer's parameters hold; a shared parameter counts once, at its first layer."""
    sizes = [0] * len(model)
    for layers in _layers_by_parameter(model).values():
        (first, _, parameter), *_ = layers
        sizes[first] += parameter.numel()
    return sizes


def shared_parameters(model: nn.Sequential) -> dict[str, tuple[int, ...]]:
    """Parameters that several layers use: the name in the first layer -> the layers, in order."""
    return {
        uses[0][1]: tuple(layer for layer, _, _ in uses)
        for uses in _layers_by_parameter(model).values()
        if len(uses) > 1
    }


def shared_across_ranks(model: nn.Sequential, device_map: DeviceMap) -> set[str]:
    """The frozen parameters that layers of different ranks share, by their names in the first one.

    Raises:
        PartitionError: a trainable one, of which each rank would train its own copy.
    """
    owners = {
        layer: rank
        for rank, layers in zip(device_map.placement, device_map.stages, strict=True)
        for layer in layers
    }
    shared = set()
    for uses in _layers_by_parameter(model).values():
        (first, name, parameter), *others = uses
        for layer, _, _ in others:
            if owners[layer] == owners[first]:
                continue
            shared.add(name)
            if parameter.requires_grad:
                raise PartitionError(
                    f"layers {first} and {layer} share {name}, which is trainable, but are on ranks "
                    f"{owners[first]} and {owners[layer]}: put them on one rank, or freeze it"
                )
    return shared


def _slice(model: nn.Sequential, layers: range) -> nn.Sequential:
    # Not named_children(), which leaves out the second of two equal modules.
    children = list(model._modules.items())[layers.start : layers.stop]
    # A None among them was refused by check_model.
    stage = nn.Sequential(OrderedDict((name, module) for name, module in children if module is not None))
    # Not train(), which would reach into the layers: a frozen BatchNorm in eval mode stays there.
    stage.training = model.training
    return stage


def _own_state(model: nn.Module) -> str | None:
    for what, tensors in (("parameter", model._parameters), ("buffer", model._buffers)):
        for name, tensor in tensors.items():
            if tensor is not None:
                return f"the {what} {name}"
    return next((f"hooks ({name})" for name in _HOOKS if getattr(model, name, None)), None)


def _layers_by_parameter(model: nn.Sequential) -> dict[int, list[tuple[int, str, nn.Parameter]]]:
    """id of a parameter -> its (layer, unsplit name, parameter), one per layer that uses it, in order."""
    found: dict[int, list[tuple[int, str, nn.Parameter]]] = {}
    for layer, name, parameter in _parameters(model):
        uses = found.setdefault(id(parameter), [])
        if not uses or uses[-1][0] != layer:
            uses.append((layer, name, parameter))
    return found


def _parameters(model: nn.Sequential) -> Iterator[tuple[int, str, nn.Parameter]]:
    for layer, (child, module) in enumerate(model._modules.items()):
        if module is not None:
            for name, parameter in module.named_parameters():
                yield layer, f"{child}.{name}", parameter
