"""From a model and its options to the parts of a pipeline, as far as they live in this process."""

import copy
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import partitioners
import schedules
from partitioners import DeviceMap
from pipe.agreement import Opening
from pipe.errors import PipelineError
from pipe.microbatch import Split, Weight
from pipe.offload import home_of
from pipe.optimization import Gradients, Updates, Whole, widest
from pipe.optimizers import (
    Built,
    Named,
    OptimizerFactory,
    build_optimizer,
    check_dense,
    install,
    is_elementwise,
)
from pipe.options import Options, Resolved, merge
from pipe.precision import DTYPES, LossScaler, Precision
from pipe.randomness import generators
from pipe.reduction import Reduced
from pipe.replica import Replica
from pipe.shards import Sharding
from pipe.stage import Loss
from pipe.sync_batch_norm import synchronize
from pipe.transport import Lane, Place, Transport
from schedules import ACTIVATION, GRADIENT, Plan, Schedule


class Arguments(NamedTuple):
    """What the user gave (`Pipeline`)."""

    model: nn.Sequential
    options: str | Options
    clip: float | None
    schedule: Schedule | str | None
    loss: Loss | None
    optimizer: OptimizerFactory | None
    weight: Weight | None
    split: Split | None
    seed: int | None
    tensorboard: Any


class Spot(NamedTuple):
    """Where this process is.

    Args:
        world: processes of the pipeline.
        member: which of them it is; None where it is all.
        replicas: what a mesh fixes of them.
        device: of its stages.
    """

    world: int
    member: int | None
    replicas: int | None
    device: torch.device


@dataclass(frozen=True)
class Parts:
    """What a pipeline is made of.

    Args:
        base: the plan of a full batch without, `plan` with what replicas do together.
        layers: of the unsplit model: name and class, and how many numbers it has as parameters.
        place: of this process; in one process, of replica 0.
        rank: of this process; None where all ranks live in it.
        local: the ranks that live in it.
        replicas: that live in it, of these ranks.
        devices: by member.
        owners: the rank of each parameter of the unsplit model; frozen ones too, that may thaw.
        norm_dtype: of the norm over all gradients.
        shared: the frozen parameters that stages of different ranks have, by name.
        synchronizes: whether a SyncBatchNorm waits for other replicas in its forward and backward.
        dtypes: what parameters compute in, by name, where it isn't their own type.
    """

    options: Options
    resolved: Resolved
    base: Plan
    plan: Plan
    layers: Sequence[tuple[str, float]]
    place: Place
    rank: int | None
    local: Sequence[int]
    replicas: list[Replica]
    devices: Sequence[torch.device]
    generators: Sequence[torch.Generator]
    owners: Sequence[int]
    norm_dtype: torch.dtype
    shared: Collection[str]
    synchronizes: bool
    dtypes: Mapping[str, torch.dtype]
    built: Built | None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.built.optimizer if self.built else None

    @property
    def schedule_name(self) -> str:
        """As the option string has it, or an object's class."""
        schedule = self.resolved.schedule
        if schedule == schedules.get(self.options.schedule):
            return self.options.schedule
        return type(schedule).__name__

    @property
    def name(self) -> str:
        """This process in words."""
        return "this process" if self.rank is None else self.place.name(self.rank)

    @property
    def device(self) -> torch.device:
        """Where this process's own numbers are."""
        return self.devices[self.place.member(self.local[0])]

    @property
    def first(self) -> int:
        """The rank of the first stage."""
        return self.plan.placement[0]

    @property
    def last(self) -> int:
        """The rank of the last stage."""
        return self.plan.placement[-1]


# --- Each process by itself ---


def assemble(given: Arguments, spot: Spot) -> tuple[Opening, Parts]:
    """The stages and the user's optimizer, and what there is to compare with other ranks."""
    _check(given)
    model, options = (
        given.model,
        merge(given.options, clip=given.clip, tensorboard=_directory(given.tensorboard)),
    )
    schedule = schedules.get(given.schedule) if isinstance(given.schedule, str) else given.schedule
    partitioners.check_model(model)
    sizes = functools.partial(partitioners.layer_sizes, model)
    resolved = options.resolve(len(model), spot.world, sizes, schedule=schedule, replicas=spot.replicas)
    shared = partitioners.shared_across_ranks(model, resolved.device_map)
    base = schedules.build(resolved.schedule, resolved.placement, resolved.chunks)
    rank, place = None, Place(0, resolved.dp)
    if spot.member is not None:
        rank, replica = divmod(spot.member, resolved.dp)
        place = Place(replica, resolved.dp)
    local = list(range(resolved.ranks)) if rank is None else [rank]
    devices = _devices(spot, resolved)
    precision, dtypes = _precision(options, resolved, model)
    named = list(model.named_parameters())
    owners = _owners(model, named, resolved.device_map)
    described = tuple(
        f"{name} {p.dtype}{list(p.shape)}{'' if p.requires_grad else ' frozen'}" for name, p in named
    )
    replicas = [
        Replica(
            each,
            copied,
            resolved.device_map,
            rank=rank,
            devices=devices[each.replica :: resolved.dp],
            loss=given.loss,
            precision=precision,
        )
        for each, copied in _copies(model, place, in_process=rank is None)
    ]
    built = None
    if given.optimizer is not None:
        owned = {name for (name, _), owner in zip(named, owners, strict=True) if owner in local}
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        built = build_optimizer(given.optimizer, trained, owned)
    plan = with_collectives(base, resolved)
    opening = Opening(
        replicas=resolved.dp,
        options=str(options),
        plan=f"{type(resolved.schedule).__name__} {plan.digest[:16]}",
        seed=torch.initial_seed() if given.seed is None else given.seed,
        seed_given=given.seed is not None,
        parameters=described,
        optimizer=built.words if built else (),
    )
    return opening, Parts(
        options=options,
        resolved=resolved,
        base=base,
        plan=plan,
        layers=[
            (f"{name} {type(layer).__name__}", float(size))
            for (name, layer), size in zip(model._modules.items(), sizes(), strict=True)
        ],
        place=place,
        rank=rank,
        local=local,
        replicas=replicas,
        devices=devices,
        generators=[generator for device in set(devices) for generator in generators(device)],
        owners=owners,
        norm_dtype=widest(parameter.dtype for _, parameter in named),
        shared=shared,
        synchronizes=resolved.dp > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()),
        dtypes=dtypes,
        built=built,
    )


def with_collectives(plan: Plan, resolved: Resolved, *, reduces: bool = True) -> Plan:
    """A plan with what its replicas do together."""
    unshards, every = resolved.zero == 3, None
    if reduces and not plan.forward_only and (resolved.dp > 1 or resolved.zero >= 2):
        every = resolved.reduce_every if resolved.zero >= 2 else plan.microbatches
    if every is None and not unshards:
        return plan
    return schedules.add_collectives(plan, reduce_every=every, unshard=unshards)


def lanes(plan: Plan, replicas: int) -> list[Lane]:
    """The channels that a plan's edges need, in all replicas."""
    found = set()
    for edge in plan.edges:
        for value in (ACTIVATION, GRADIENT):
            sender, receiver = (plan.placement[stage] for stage in schedules.route_of(value, edge))
            if sender != receiver:
                for place in (Place(replica, replicas) for replica in range(replicas)):
                    found.add(Lane(place.member(sender), place.member(receiver), value))
    return sorted(found)


def _check(given: Arguments) -> None:
    _check_callables(loss=given.loss, optimizer=given.optimizer, schedule=given.schedule)
    for name in ("loss", "optimizer", "weight", "split"):
        function = getattr(given, name)
        if function is not None and not callable(function):
            raise TypeError(f"{name}= takes a function, not {function!r}")
    if given.seed is not None and not isinstance(given.seed, int):
        raise TypeError(f"seed= takes a whole number, not {given.seed!r}")


def _directory(tensorboard: Any) -> str | None:
    """What the options say of where traces go: a SummaryWriter's place may differ from rank to rank."""
    if tensorboard is None:
        return None
    if isinstance(tensorboard, str):
        return tensorboard
    if isinstance(tensorboard, Path):
        return str(tensorboard)
    if hasattr(tensorboard, "file_writer"):
        return "SummaryWriter"
    raise TypeError(f"tensorboard= takes a directory or a SummaryWriter, not {tensorboard!r}")


def _check_callables(*, loss: object, optimizer: object, schedule: object) -> None:
    """Refuses what is often given in place of a function, with a word on what to give."""
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer= is an optimizer: give what makes one, such as functools.partial(torch.optim.{name}, "
            "lr=...), which is called with the (name, parameter) pairs"
        )
    if isinstance(loss, type):
        raise TypeError(f"loss= is the class {loss.__name__}: give an instance, {loss.__name__}()")
    if isinstance(schedule, type):
        raise TypeError(
            f"schedule= is the class {schedule.__name__}: give an instance, {schedule.__name__}()"
        )
    if isinstance(schedule, Plan):
        raise TypeError("schedule= is a plan: write it to a file, and give schedules.CSVFile(file)")
    if schedule is not None and not isinstance(schedule, str):
        missing = [name for name in ("placement", "orders") if not callable(getattr(schedule, name, None))]
        if missing:
            raise TypeError(f"schedule= needs the methods placement and orders; this lacks {missing}")


def _devices(spot: Spot, resolved: Resolved) -> list[torch.device]:
    """Each member's device, where it lives in this process."""
    members = resolved.ranks * resolved.dp
    if spot.member is None and spot.device == torch.device("cuda"):
        count = torch.cuda.device_count()
        return [torch.device("cuda", member // resolved.dp % count) for member in range(members)]
    return [spot.device] * members


def _copies(model: nn.Sequential, place: Place, *, in_process: bool) -> Iterator[tuple[Place, nn.Sequential]]:
    """The model itself, and in one process a copy of it for each other replica."""
    yield place, model
    for replica in range(1, place.replicas if in_process else 1):
        try:
            copied = copy.deepcopy(model)
            _follow(copied, model)
            yield Place(replica, place.replicas), copied
        except Exception as error:
            raise PipelineError(
                "in one process each replica is a copy of the model, and copy.deepcopy makes none: "
                f"{type(error).__name__}: {error} (under torchrun each process has its own)"
            ) from error


def _follow(copied: nn.Module, model: nn.Module) -> None:
    """What deepcopy leaves behind of parameters: attributes and hooks."""
    for mine, first in zip(copied.parameters(), model.parameters(), strict=True):
        mine.__dict__.update(first.__dict__)
        for hook in (first._backward_hooks or {}).values():
            mine.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (first._post_accumulate_grad_hooks or {}).values():
            mine.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _precision(
    options: Options, resolved: Resolved, model: nn.Module
) -> tuple[Precision | None, Mapping[str, torch.dtype]]:
    """What computes in half precision, and the type of each parameter then."""
    if resolved.amp == "off":
        return None, {}
    precision = Precision(
        DTYPES[resolved.amp], keep_batchnorm=resolved.keep_batchnorm_fp32, keep=resolved.keep_fp32
    )
    try:
        return precision, precision.dtypes(model)
    except ValueError as error:
        options.refuse("keep_fp32" if resolved.keep_fp32 else "keep_batchnorm_fp32", str(error), cause=error)


def _owners(model: nn.Sequential, named: Named, device_map: DeviceMap) -> list[int]:
    """The rank of each parameter: that of the first layer that has it."""
    layers = {name: index for index, name in enumerate(model._modules)}
    rank_of = [
        rank
        for rank, layers_of in zip(device_map.placement, device_map.stages, strict=True)
        for _ in layers_of
    ]
    return [rank_of[layers[name.split(".")[0]]] for name, _ in named]


# --- With the other replicas ---


def align(parts: Parts, transport: Transport) -> None:
    """Gives all replicas the first one's parameters and buffers to begin with."""
    for replica in parts.replicas:
        transport.across(replica.member(parts.local[0])).align(replica.tensors())


def align_buffers(parts: Parts, transport: Transport) -> None:
    """Gives all replicas the first one's buffers, as DistributedDataParallel does: what is evaluated shall be
    what `state_dict` saves.
    """
    for replica in parts.replicas:
        if parts.rank is not None:
            transport.across(replica.member(parts.rank)).align(replica.buffers())
        elif replica is not parts.replicas[0]:
            with torch.no_grad():
                for mine, first in zip(replica.buffers(), parts.replicas[0].buffers(), strict=True):
                    mine.copy_(first)


def hold(parts: Parts, transport: Transport) -> tuple[Opening, Updates]:
    """Puts parameters where they are held, and master weights into the optimizer."""
    resolved = parts.resolved
    for replica in parts.replicas:
        for index, stage in replica.stages.items():
            across = transport.across(replica.member(parts.plan.placement[index]))
            synchronize(stage.module, across)
    scaler = None
    if resolved.amp == "fp16":
        scaler = LossScaler(resolved.loss_scale if isinstance(resolved.loss_scale, float) else None)
    gradients: Gradients
    if resolved.dp > 1 or resolved.zero or resolved.amp != "off":
        gradients = _reduced(parts, transport, checks_overflow=scaler is not None)
    else:
        gradients = _whole(parts)
    updates = Updates(
        gradients, optimizer=parts.optimizer, clip=resolved.clip, scaler=scaler, device=parts.device
    )
    return Opening(replicas=resolved.dp), updates


def _whole(parts: Parts) -> Whole:
    (replica,) = parts.replicas
    own = {number: parameter for number, (_, parameter) in replica.named.items()}
    return Whole(own, parts.owners, parts.local, parts.norm_dtype, parts.device)


def _reduced(parts: Parts, transport: Transport, *, checks_overflow: bool) -> Reduced:
    resolved = parts.resolved
    check_dense(parts.optimizer)
    for replica in parts.replicas:
        replica.hold(
            parts.local,
            groups=parts.built.groups if parts.built else {},
            dtypes=parts.dtypes,
            apart=parts.shared,
            sharding=Sharding(resolved.zero, resolved.reduce_every),
            bucket_mb=resolved.bucket_mb,
            whole=bool(resolved.zero) and not is_elementwise(parts.optimizer),
            across=transport.across,
            home=functools.partial(home_of, offload=resolved.offload),
        )
    for replica in parts.replicas:
        for held in replica.held():
            held.has_copies = len(parts.replicas) > 1
    if parts.optimizer is not None:
        install(parts.optimizer, [held for replica in parts.replicas for held in replica.held()])
    return Reduced(
        {
            replica.member(rank): holding
            for replica in parts.replicas
            for rank, holding in replica.holdings.items()
        },
        replicas=resolved.dp,
        num_parameters=len(parts.owners),
        checks_overflow=checks_overflow,
        device=parts.device,
    )
