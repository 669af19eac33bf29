"""How the user's optimizer is made, and what of it this process keeps."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn, optim

from pipe.agreement import digest
from pipe.buckets import Piece
from pipe.errors import PipelineError
from pipe.shards import Held

Named: TypeAlias = list[tuple[str, nn.Parameter]]
OptimizerFactory: TypeAlias = Callable[[Any], optim.Optimizer]

# These treat every element by itself, so that a shard may cut through a parameter. (Of the classes
# themselves: a subclass may do anything.)
_ELEMENTWISE: frozenset[type] = frozenset(
    {
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.Adamax,
        optim.AdamW,
        optim.ASGD,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)


class Built(NamedTuple):
    """An optimizer over all parameters, as the user's factory has made it.

    `groups` has the param group of each parameter, by name; `words` say what the groups are, to be compared
    between ranks.
    """

    optimizer: optim.Optimizer
    groups: Mapping[str, int]
    words: tuple[str, ...]


def build_optimizer(factory: OptimizerFactory, named: Named, owned: Collection[str]) -> Built:
    """Calls the user's factory with all parameters, and takes those of other ranks out of what it returns.

    The factory sees the whole model on every rank, so that its groups come out alike everywhere; what this
    rank doesn't own is a stand-in of the right shape and no memory.

    Raises:
        PipelineError: the factory returned no optimizer, or one over other parameters, or one that can't
            work here.
    """
    offered = [(name, p if name in owned else _stand_in(p)) for name, p in named]
    optimizer = factory(offered)
    if not isinstance(optimizer, optim.Optimizer):
        raise PipelineError(
            f"optimizer= must return a torch.optim.Optimizer, and returned {type(optimizer).__name__}"
        )
    if isinstance(optimizer, optim.LBFGS):
        raise PipelineError("LBFGS evaluates the loss again in its step (a closure), which a pipeline can't")
    names = {id(p): name for name, p in offered}
    words = tuple(
        word for index, group in enumerate(optimizer.param_groups) for word in _words(index, group, names)
    )
    groups = {
        names[id(p)]: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
    }
    for group in optimizer.param_groups:
        kept = [names[id(p)] in owned for p in group["params"]]
        for p, keep in zip(group["params"], kept, strict=True):
            if not keep:
                optimizer.state.pop(p, None)
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [item for item, keep in zip(group[key], kept, strict=True) if keep]
    return Built(optimizer, groups, words)


def is_elementwise(optimizer: optim.Optimizer | None) -> bool:
    """Whether an optimizer never looks beyond one element of a parameter."""
    return type(optimizer) in _ELEMENTWISE


def check_dense(optimizer: optim.Optimizer | None) -> None:
    """Raises where an optimizer can't work on gradients that were reduced."""
    if isinstance(optimizer, optim.SparseAdam):
        raise PipelineError(
            "SparseAdam takes sparse gradients only, and gradients that are reduced over replicas or added "
            "up in fp32 are dense: take AdamW, or amp=off zero=0 dp=1"
        )


def install(optimizer: optim.Optimizer, held: Sequence[Held]) -> None:
    """Puts master weights where the parameters were: in the param groups, under the same names, and in the
    state that the optimizer may have made already.
    """
    by_name: dict[str, list[tuple[nn.Parameter, Piece]]] = {}
    for one in held:
        for master, piece in zip(one.masters, one.pieces if one.masters else (), strict=True):
            by_name.setdefault(piece.slot.name, []).append((master, piece))
    known = {
        id(parameter): slot.name
        for one in held
        for slot, parameter in zip(one.bucket.slots, one.parameters, strict=True)
    }
    for group in optimizer.param_groups:
        params: list[nn.Parameter] = []
        names: list[str] = []
        for parameter in group["params"]:
            name = known[id(parameter)]
            state = optimizer.state.pop(parameter, None)
            for master, piece in by_name.get(name, ()):
                params.append(master)
                names.append(name)
                if state:
                    optimizer.state[master] = {key: _cut(value, piece) for key, value in state.items()}
        group["params"] = params
        if "param_names" in group:
            group["param_names"] = names


@contextmanager
def only(optimizer: optim.Optimizer, group: int, masters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Lets the optimizer see nothing but some parameters of one group: it steps through all it sees."""
    kept = [each["params"] for each in optimizer.param_groups]
    for index, each in enumerate(optimizer.param_groups):
        each["params"] = list(masters) if index == group else []
    try:
        yield
    finally:
        for each, params in zip(optimizer.param_groups, kept, strict=True):
            each["params"] = params


def is_observed(optimizer: optim.Optimizer) -> bool:
    """Whether somebody wants to hear of each step, of which there shall be one an update."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _cut(value: Any, piece: Piece) -> Any:
    """What a piece gets of a parameter's state."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != piece.slot.shape:
        return value.clone()
    flat = piece.slot.elements(value, value.dtype)
    start = piece.slot.start
    cut = flat[piece.start - start : piece.stop - start].to(value.device, copy=True)
    return cut.as_strided(piece.slot.shape, piece.slot.strides) if piece.is_whole else cut


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
