"""Runs a pipeline: the public names, resolved on first use so that importing them costs nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipe.distributed.launch import launch
    from pipe.errors import DisagreementError, PeerError, PipelineError
    from pipe.options import OptionError, Options
    from pipe.pipeline import Pipeline

__version__ = "0.1.0"

# PEP 562: the TensorBoard plugin and the planning commands import `pipe` and must not pay for torch.
_HOMES = {
    "DisagreementError": "pipe.errors",
    "OptionError": "pipe.options",
    "Options": "pipe.options",
    "PeerError": "pipe.errors",
    "Pipeline": "pipe.pipeline",
    "PipelineError": "pipe.errors",
    "launch": "pipe.distributed.launch",
}

__all__ = [
    "DisagreementError",
    "OptionError",
    "Options",
    "PeerError",
    "Pipeline",
    "PipelineError",
    "launch",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pipe' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
