"""Does a split model stay the model: its modules, its names, its modes?"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from partitioners import (
    DeviceMap,
    PartitionError,
    check_model,
    layer_sizes,
    shared_across_ranks,
    shared_parameters,
    split,
)

TEN = DeviceMap.parse("0:0-5,1:5-10")


def ten_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(10)))


def test_stages_keep_modules_and_names() -> None:
    model = ten_layers()
    stages = split(model, TEN)
    assert list(stages) == [0, 1]
    assert stages[1].get_submodule("7") is model[7]
    assert list(stages[1].state_dict()) == [
        f"{layer}.{n}" for layer in range(5, 10) for n in ("weight", "bias")
    ]
    x = torch.randn(2, 3)
    assert torch.equal(stages[1](stages[0](x)), model(x))
    assert len(model) == 10


def test_a_rank_gets_its_own_stages_only() -> None:
    device_map = DeviceMap.parse("0:0-2,1:2-5,0:5-7,1:7-10")
    stages = split(ten_layers(), device_map, 1)
    assert {stage: list(layers._modules) for stage, layers in stages.items()} == {
        1: ["2", "3", "4"],
        3: ["7", "8", "9"],
    }


def test_names_may_be_words() -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(5, 3), head=nn.Linear(3, 5)))
    stages = split(model, DeviceMap.parse("0:0-1,1:1-2"))
    assert list(stages[1].state_dict()) == ["head.weight", "head.bias"]


def test_one_module_twice_is_two_layers() -> None:
    """named_children() leaves the second one out, and the stage was a layer short."""
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    (stage,) = split(model, DeviceMap.parse("0:0-3")).values()
    assert list(stage._modules) == ["0", "1", "2"]
    assert layer_sizes(model) == [12, 0, 0]


def test_modes_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].eval()
    stage = split(model, DeviceMap.parse("0:0-2"))[0]
    assert stage.training and not model[1].training
    model.eval()
    model[0].train()
    stage = split(model, DeviceMap.parse("0:0-2"))[0]
    assert not stage.training and model[0].training


class OwnForward(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Named(nn.Sequential):
    """A subclass that only builds its layers is fine."""


def with_state(kind: str) -> nn.Sequential:
    model = ten_layers()
    if kind == "parameter":
        model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    elif kind == "buffer":
        model.register_buffer("seen", torch.zeros(1))
    elif kind == "hook":
        model.register_forward_hook(lambda *_: None)
    elif kind == "forward":
        model.forward = lambda x: x  # type: ignore[method-assign]
    elif kind == "none":
        model.register_module("3", None)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 3), "only an nn.Sequential can be split, and the model is a Linear"),
        (OwnForward(nn.ReLU()), "OwnForward has a forward of its own"),
        (with_state("forward"), "a forward of its own"),
        (with_state("parameter"), "the parameter scale"),
        (with_state("buffer"), "the buffer seen"),
        (with_state("hook"), r"hooks \(_forward_hooks\)"),
        (with_state("none"), r"layer 3 \(named 3\) is None"),
        (nn.Sequential(), "no layers"),
    ],
)
def test_refuses_what_is_more_than_its_layers(model: nn.Module, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        check_model(model)


def test_accepts_a_plain_subclass_and_refuses_too_many_stages() -> None:
    check_model(Named(nn.ReLU()))
    check_model(ten_layers(), 10)
    with pytest.raises(PartitionError, match="10 layers cannot fill 11 stages"):
        check_model(ten_layers(), 11)
    with pytest.raises(PartitionError, match="1:5-10 goes past the last layer: the model has 7 layers"):
        split(nn.Sequential(*ten_layers()[:7].children()), TEN)


def tied() -> nn.Sequential:
    model = nn.Sequential(
        nn.Embedding(5, 3), *(nn.Linear(3, 3) for _ in range(8)), nn.Linear(3, 5, bias=False)
    )
    model[9].weight = model[0].weight
    return model


def test_a_shared_parameter_counts_once() -> None:
    assert layer_sizes(tied()) == [15, *[12] * 8, 0]
    assert shared_parameters(tied()) == {"0.weight": (0, 9)}
    assert shared_parameters(ten_layers()) == {}


def test_a_trainable_parameter_on_two_ranks_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"layers 0 and 9 share 0\.weight, .* ranks 0 and 1"):
        shared_across_ranks(tied(), TEN)


def test_sharing_within_a_rank_or_of_frozen_parameters_is_fine() -> None:
    shared_across_ranks(ten_layers(), TEN)
    shared_across_ranks(tied(), DeviceMap.parse("0:0-2,1:2-8,0:8-10"))
    frozen = tied()
    frozen[0].requires_grad_(False)
    shared_across_ranks(frozen, TEN)
