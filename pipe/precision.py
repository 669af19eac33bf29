"""Naive AMP: what computes in half precision, what doesn't, and how losses are scaled for it.

    input --cast--> half layers -- half boundaries --> half layers --cast--> fp32 output -> loss x scale
                        ^                                  ^
                 half parameters                    a layer that is kept in fp32: its input is cast up,
             (fp32 master weights: pipe/shards.py)  and its output down again

Everything that floats in a stage is cast, batch norm and its statistics too (as ColossalAI's naive AMP does);
`keep_batchnorm_fp32` makes it Apex's O2.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pipe.boundary import Pytree
from pipe.errors import PipelineError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Precision:
    """What of a model computes in half precision.

    Args:
        dtype: the half type.
        keep_batchnorm: leave batch norm's parameters and statistics in fp32; its kernels take half inputs.
        keep: leave the layers whose name in the unsplit model, or whose class's name, this expression finds.
    """

    def __init__(self, dtype: torch.dtype, *, keep_batchnorm: bool = False, keep: str | None = None) -> None:
        self.dtype = dtype
        self._keep_batchnorm = keep_batchnorm
        self._keep = None if keep is None else re.compile(keep)
        self._hooked: set[nn.Module] = set()

    def dtypes(self, model: nn.Module) -> dict[str, torch.dtype]:
        """The type that each parameter shall compute in, by its name in the unsplit model.

        Raises:
            ValueError: an expression that finds nothing, or a parameter of two layers of which one is kept.
        """
        kept = list(self._kept(model))
        if self._keep is not None and not kept:
            raise ValueError(
                f"keep_fp32={self._keep.pattern} finds no layer: no module's name or class has it in it"
            )
        spared = {id(module) for _, layer in kept for module in layer.modules()}
        if self._keep_batchnorm:
            spared |= {id(module) for module in model.modules() if isinstance(module, _BatchNorm)}
        chosen: dict[int, torch.dtype] = {}
        dtypes = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                stays = id(module) in spared or not _is_castable(parameter)
                dtype = parameter.dtype if stays else self.dtype
                if chosen.setdefault(id(parameter), dtype) != dtype:
                    raise ValueError(
                        f"{prefix}.{name} belongs to two layers, of which one is kept in fp32 and one isn't"
                    )
                dtypes[f"{prefix}.{name}" if prefix else name] = dtype
        return dtypes

    def prepare(self, module: nn.Sequential, *, is_end: bool) -> None:
        """Casts a stage's buffers, and makes layers that are kept cast what goes in and out.

        Parameters are cast by who keeps their master weights.

        Args:
            is_end: whether the module's last layer is the model's.
        """
        end = module[-1] if is_end else None
        kept = list(self._kept(module))
        spared = {id(inner) for _, layer in kept for inner in layer.modules()}
        for inner in module.modules():
            if id(inner) in spared or (self._keep_batchnorm and isinstance(inner, _BatchNorm)):
                continue
            for name, buffer in inner._buffers.items():
                if buffer is not None and _is_castable(buffer):
                    inner._buffers[name] = buffer.to(self.dtype)
        for layer in {layer for _, layer in kept} - self._hooked:
            self._hooked.add(layer)  # it may stand in another stage, too
            layer.register_forward_pre_hook(self._raise_inputs, with_kwargs=True)
            if layer is not end:  # whose output the loss gets in fp32
                layer.register_forward_hook(self._lower_output)

    def lower(self, value: Pytree) -> Pytree:
        """A pytree whose floating tensors are in half precision, integers and bools as they were."""
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, value)

    def raised(self, value: Pytree) -> Pytree:
        """A pytree whose half-precision tensors are in fp32."""
        return pytree.tree_map_only(Tensor, lambda t: t.float() if t.dtype == self.dtype else t, value)

    def _kept(self, model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules that the expression finds."""
        if self._keep is None:
            return
        for name, module in model.named_children():
            path = f"{prefix}{name}"
            if self._keep.search(path) or self._keep.search(type(module).__name__):
                yield path, module
            else:
                yield from self._kept(module, f"{path}.")

    def _raise_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.raised(args), self.raised(kwargs)

    def _lower_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda t: t.to(self.dtype) if t.dtype == torch.float32 else t, output
        )


def _is_castable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1  # eight bits are somebody's own scheme


class LossScaler:
    """What losses are multiplied by, so that fp16 gradients don't vanish; the same on all ranks.

    A dynamic scale (Micikevicius et al., arXiv 1710.03740) doubles after so many steps without an overflow
    and halves at an overflow, once `hysteresis` of them have come without a doubling in between.

    Args:
        fixed: a scale that never changes, in place of a dynamic one.
    """

    initial, floor, ceiling = 2.0**16, 1.0, 2.0**32
    window = 1000
    hysteresis = 2
    patience = 10  # overflows in a row under a fixed scale, until somebody is told

    def __init__(self, fixed: float | None = None) -> None:
        self.dynamic = fixed is None
        self.scale = self.initial if fixed is None else fixed
        self.good_steps = 0
        self.left = self.hysteresis  # overflows until the scale gives way
        self._in_a_row = 0
        self._tensors: dict[torch.device, Tensor] = {}

    @property
    def at_floor(self) -> bool:
        """Whether nothing can be given way any more: the next overflow is an error."""
        return self.dynamic and self.scale <= self.floor

    def tensor(self, device: torch.device) -> Tensor:
        """The scale, on a device."""
        found = self._tensors.get(device)
        if found is None:
            found = self._tensors[device] = torch.tensor(self.scale, device=device)
        return found

    def update(self, overflow: bool) -> None:
        """After each attempt to step."""
        if not self.dynamic:
            self.good_steps = 0 if overflow else self.good_steps + 1
            self._in_a_row = self._in_a_row + 1 if overflow else 0
            if self._in_a_row == self.patience:
                warnings.warn(
                    f"{self.patience} updates in a row were skipped: gradients overflow fp16 at "
                    f"loss_scale={self.scale:g}, which is fixed (loss_scale=dynamic gives way)",
                    stacklevel=4,
                )
            return
        if overflow:
            self.good_steps = 0
            self.left -= 1
            if self.left <= 0:
                self._set(max(self.floor, self.scale / 2))
            return
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.good_steps, self.left = 0, self.hysteresis
            self._set(min(self.ceiling, self.scale * 2))

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis": self.left}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on where another scaler stopped.

        Raises:
            PipelineError: a state that lacks something.
        """
        missing = {"scale", "good_steps", "hysteresis"} - set(state)
        if missing:
            raise PipelineError(f"the loss scaler's state lacks {sorted(missing)}")
        self.good_steps, self.left = int(state["good_steps"]), int(state["hysteresis"])
        self._set(float(state["scale"]))

    def _set(self, scale: float) -> None:
        self.scale = scale
        self._tensors.clear()
