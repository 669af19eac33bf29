"""Which layers go where? Device maps, balance, and the split itself; torch is imported for the last only."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from partitioners.balance import params, uniform
from partitioners.device_map import DeviceMap, Range
from partitioners.errors import PartitionError

if TYPE_CHECKING:
    from partitioners.sequential import (
        check_model,
        layer_sizes,
        shared_across_ranks,
        shared_parameters,
        split,
    )

__all__ = [
    "DeviceMap",
    "PartitionError",
    "Range",
    "check_model",
    "layer_sizes",
    "params",
    "shared_across_ranks",
    "shared_parameters",
    "split",
    "uniform",
]


def __getattr__(name: str) -> Any:
    # The names that are public and not here yet are those that need torch (PEP 562).
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("partitioners.sequential"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
