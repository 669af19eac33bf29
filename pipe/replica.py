"""One copy of the whole pipeline, as far as it lives in this process: stages, and who holds parameters."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

import partitioners
from partitioners import DeviceMap
from pipe.across import Across
from pipe.buckets import Entry, arrange
from pipe.errors import PipelineError
from pipe.offload import Home
from pipe.precision import Precision
from pipe.shards import Held, Holding, Sharding
from pipe.stage import Loss, Stage
from pipe.transport import Place


class Replica:
    """A model, cut into stages.

    Args:
        model: the whole model, of which the stages of this process's ranks are used.
        rank: whose stages; None for all.
        devices: of each rank.
    """

    def __init__(
        self,
        place: Place,
        model: nn.Sequential,
        device_map: DeviceMap,
        *,
        rank: int | None,
        devices: Sequence[torch.device],
        loss: Loss | None,
        precision: Precision | None,
    ) -> None:
        self.place = place
        self.holdings: dict[int, Holding] = {}
        self.stages: dict[int, Stage] = {}
        self._placement = device_map.placement
        self._first, self._last = device_map.placement[0], device_map.placement[-1]
        for index, module in partitioners.split(model, device_map, rank).items():
            device, is_last = devices[device_map.placement[index]], index == len(device_map.stages) - 1
            if precision is not None:
                precision.prepare(module, is_end=is_last)
            self.stages[index] = Stage(
                index,
                module.to(device),
                first_layer=device_map.stages[index].start,
                is_first=index == 0,
                is_last=is_last,
                device=device,
                loss=loss,
                precision=precision,
            )
        # By number in the unsplit model. What other processes' stages have isn't kept alive.
        own = {id(parameter) for stage in self.stages.values() for parameter in stage.module.parameters()}
        self.named: dict[int, tuple[str, nn.Parameter]] = {
            number: named for number, named in enumerate(model.named_parameters()) if id(named[1]) in own
        }

    def member(self, rank: int) -> int:
        return self.place.member(rank)

    def modules(self) -> Iterator[nn.Module]:
        """All modules of all stages, outer ones first."""
        for stage in self.stages.values():
            yield from stage.module.modules()

    def parameters_of(self, rank: int) -> dict[int, tuple[int, ...]]:
        """The parameters of a rank, by their number in the unsplit model, and the stages that have them."""
        stages: dict[int, list[int]] = {}
        for index, stage in self.stages.items():
            if self._placement[index] == rank:
                for parameter in stage.module.parameters():
                    stages.setdefault(id(parameter), []).append(index)
        return {
            number: tuple(stages[id(parameter)])
            for number, (_, parameter) in self.named.items()
            if id(parameter) in stages
        }

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, each once."""
        found = [
            t for stage in self.stages.values() for t in (*stage.module.parameters(), *stage.module.buffers())
        ]
        return list({id(tensor): tensor for tensor in found}.values())

    def hold(
        self,
        ranks: Iterable[int],
        *,
        groups: Mapping[str, int],
        dtypes: Mapping[str, torch.dtype],
        apart: Collection[str],
        sharding: Sharding,
        bucket_mb: float,
        whole: bool,
        across: Callable[[int], Across],
        home: Callable[[torch.device], Home],
    ) -> None:
        """Takes the parameters of its ranks into buckets.

        Args:
            groups: the optimizer's param group of each parameter that it has, by name.
            dtypes: what parameters compute in, by name; those that aren't named stay as they are.
            apart: parameters that go into no bucket. In one process several ranks have them, and ZeRO-3 would
                take them from under each other.
            whole: whether shards are made of whole parameters.
        """
        for rank in ranks:
            entries = [
                Entry(number, name, parameter, stages, groups.get(name), dtypes.get(name, parameter.dtype))
                for number, stages in self.parameters_of(rank).items()
                for name, parameter in (self.named[number],)
                if name not in apart and (parameter.is_floating_point() or parameter.is_complex())
            ]
            replicas = across(self.member(rank))
            lives = functools.cache(home)  # buckets on one device take turns in what a home has
            held = []
            for bucket in arrange(entries, shards=replicas.size, bucket_mb=bucket_mb, whole=whole):
                parameters = [self.named[slot.index][1] for slot in bucket.slots]
                held.append(Held(bucket, parameters, replicas, sharding, lives(parameters[0].device)))
            self.holdings[rank] = Holding(held, sharding)
        for name, parameter in self.named.values():
            if name in apart and name in dtypes:
                parameter.data = parameter.detach().to(dtypes[name])
        for index, stage in self.stages.items():
            stage.holding = self.holdings[self._placement[index]]

    def held(self) -> Iterator[Held]:
        for holding in self.holdings.values():
            yield from holding.held

    def follow(self, other: "Replica") -> None:
        """Trains what another replica trains, in its modes."""
        for mine, theirs in zip(self.modules(), other.modules(), strict=True):
            mine.training = theirs.training
        for number, (_, parameter) in self.named.items():
            _, leading = other.named[number]
            if parameter.requires_grad != leading.requires_grad:
                parameter.requires_grad_(leading.requires_grad)

    def check_unwritten(self) -> None:
        """Raises where parameters were written to that are only copies of what is trained."""
        for held in self.held():
            name = held.written()
            if name is not None:
                raise PipelineError(
                    f"{name} was written to since the last call, but what is trained lives elsewhere (fp32 "
                    "master weights, shards, other replicas): load weights before the pipeline is built, or "
                    "with pipeline.load_state_dict"
                )

    def check_layers(self) -> None:
        """Raises where layers have written to their own parameters in their forwards."""
        for held in self.held():
            name = held.written(in_call=True)
            if name is not None:
                raise PipelineError(
                    f"a layer writes to {name} in its forward (Embedding(max_norm=) does), which is a copy "
                    "with replicas, amp or zero=3: do it between steps, with pipeline.load_state_dict"
                )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state of the unsplit model: parameters, and the persistent buffers of its stages."""
        held = {id(parameter) for one in self.held() for parameter in one.parameters}
        names = {id(parameter): name for name, parameter in self.named.values()}
        for stage in self.stages.values():
            own = stage.module.state_dict(keep_vars=True)
            missing = [name for name in own if name not in state]
            if missing:
                raise KeyError(
                    f"the state lacks {missing[0]}, and {len(missing) - 1} more of stage {stage.index}"
                )
            for name, there in own.items():
                if id(there) not in held:
                    with torch.no_grad():
                        there.copy_(state[name])
        values = {names[id(p)]: state[name] for name, p in self._by_name() if id(p) in held}
        for one in self.held():
            one.load(values)

    def _by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from stage.module.named_parameters(remove_duplicate=False)

    def buffers(self) -> list[Tensor]:
        """Each once."""
        found = [buffer for stage in self.stages.values() for buffer in stage.module.buffers()]
        return list({id(buffer): buffer for buffer in found}.values())

    def rest(self) -> None:
        """After a call: gives back what it gathered for it."""
        for holding in self.holdings.values():
            holding.rest()
        for held in self.held():
            held.note_versions()

    def forget(self, *, for_good: bool) -> None:
        """What a call that failed has left behind.

        Args:
            for_good: whether no other call will follow.
        """
        for stage in self.stages.values():
            stage.saved.clear()
            stage.deferred.clear()
        if for_good:
            for holding in self.holdings.values():
                holding.forget()
        self.rest()
