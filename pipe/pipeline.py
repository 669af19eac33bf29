"""The public face: a model, an option string and a schedule become something with a `step`."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

import partitioners
import schedules
from partitioners import DeviceMap
from pipe import microbatch as cutting
from pipe.across import Pending
from pipe.agreement import LossInfo, Note, Opening, check_kinds, check_openings
from pipe.boundary import Pytree
from pipe.call import Call
from pipe.distributed.failure import LostContact
from pipe.distributed.groups import Groups, checked_device, mesh_replicas, world_size
from pipe.distributed.transport import DistributedTransport
from pipe.errors import PipelineError
from pipe.executor import Run, execute
from pipe.microbatch import Split, Weight
from pipe.offload import home_of
from pipe.optimization import Gradients, Updates, Whole
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
from pipe.preparation import Batch, Kind, Pairs, Preparation, Prepared, with_collectives
from pipe.randomness import generators, layer_seeds, preserved
from pipe.reduction import Reduced
from pipe.replica import Replica
from pipe.sampling import BatchShard
from pipe.shards import Held, Sharding
from pipe.stage import Loss, Stage
from pipe.sync_batch_norm import synchronize
from pipe.transport import InProcess, Lane, Place, Transport, member_name
from schedules import ACTIVATION, GRADIENT, Plan, Schedule

T = TypeVar("T")


class Pipeline:
    """Trains an `nn.Sequential` in stages, microbatch by microbatch.

    Under torchrun every process runs the same script and is one rank; in a world of one process all ranks
    live in it.

    Args:
        model: the whole model, on every rank. The pipeline uses its layers themselves and keeps only its
            own stages'.
        options: the option string, such as `"chunks=5 device_map=0:0-5,1:5-10"`, or an `Options`.
        schedule: a schedule (`schedules.OneFOneB()`, or your own) or its name, in place of `schedule=` in the
            string.
        loss: `(output, target) -> mean loss` of a microbatch, or `-> (mean loss, {name: value})`.
        optimizer: called with `[(unsplit name, parameter), ...]`, returns a `torch.optim.Optimizer`. None:
            evaluation and prediction only.
        clip: clip gradients by their global norm.
        weight: `target -> number`, a microbatch's weight in the mean; by default its number of samples.
        split: `(batch, microbatches) -> sequence`, how inputs and targets are cut; by default along dim 0.
        seed: of the layers' random draws; by default rank 0's `torch.initial_seed()`.
        mesh: a DeviceMesh with a `pp` dimension; other dimensions belong to the module.
        device: of this process's stages; by default `cuda:LOCAL_RANK`, or the CPU.

    Raises:
        OptionError: the option string, or a combination of options, is wrong.
        partitioners.PartitionError: the model can't be split so.
        schedules.ScheduleError: the schedule's plan doesn't hold.
        PeerError: another rank could not build its pipeline.
        DisagreementError: the ranks build different pipelines.
    """

    def __init__(
        self,
        model: nn.Sequential,
        options: str | Options = "",
        *,
        schedule: Schedule | str | None = None,
        loss: Loss | None = None,
        optimizer: OptimizerFactory | None = None,
        clip: float | None = None,
        weight: Weight | None = None,
        split: Split | None = None,
        seed: int | None = None,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.metrics: dict[str, Tensor] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.scaler: LossScaler | None = None
        self.peak_live: dict[int, int] = {}
        self.traffic: dict[int, dict[str, int]] = {}
        if not isinstance(options, str | Options):
            raise TypeError(
                f"the second argument is an option string or an Options, not a {type(options).__name__}"
            )
        world = world_size(mesh)
        self._device = checked_device(device, world)
        self._member: int | None = None  # None: all members live here
        self._transport: Transport = InProcess()
        self._closed: str | None = None
        self._calls = 0
        self._replicas: list[Replica] = []
        self._place = Place()
        self._rank: int | None = None
        if world > 1:
            transport = DistributedTransport(Groups(mesh, self._device, _timeout(options)), self._device)
            self._transport, self._member = transport, transport.member
        try:
            built = self._agree_on(
                lambda: self._build(
                    model,
                    merge(options, clip=clip),
                    schedule,
                    loss,
                    optimizer,
                    seed,
                    {"weight": weight, "split": split},
                    world,
                    mesh_replicas(mesh) if world > 1 else None,
                )
            )
            if isinstance(self._transport, DistributedTransport):
                self._transport.open(_lanes(self.plan, self.dp), self.dp)
                self._align()
            self._agree_on(lambda: self._hold(built))
            self._preparation = Preparation(
                self._transport,
                self._resolved,
                built.plan,
                self._replicas,
                rank=self._rank,
                device=self._device,
                weight=weight,
                split=split,
            )
        except LostContact as error:
            self._fail(error)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------- construction

    def _agree_on(self, build: Callable[[], tuple[Opening, T]]) -> T:
        """Builds this process's part and makes sure that the others built theirs alike."""
        failure: Exception | None = None
        result: T | None = None
        try:
            opening, result = build()
        except Exception as error:
            failure, opening = error, Opening(error=_words(error))
        # A rank that can't go on has to say so, or the others would wait for it.
        openings = self._transport.all_gather([opening])
        if failure is not None:
            raise failure
        check_openings(openings, functools.partial(member_name, max(o.replicas for o in openings)))
        if opening.plan:
            self._seed = openings[0].seed
        return result  # type: ignore[return-value]

    def _build(
        self,
        model: nn.Sequential,
        options: Options,
        schedule: Schedule | str | None,
        loss: Loss | None,
        optimizer: OptimizerFactory | None,
        seed: int | None,
        functions: Mapping[str, object],
        world: int,
        replicas: int | None,
    ) -> tuple[Opening, "_Parts"]:
        """The stages and the user's optimizer, each by itself."""
        _check_callables(loss=loss, optimizer=optimizer, schedule=schedule)
        for name, given in ({"loss": loss, "optimizer": optimizer} | dict(functions)).items():
            if given is not None and not callable(given):
                raise TypeError(f"{name}= takes a function, not {given!r}")
        if seed is not None and not isinstance(seed, int):
            raise TypeError(f"seed= takes a whole number, not {seed!r}")
        if isinstance(schedule, str):
            schedule = schedules.get(schedule)
        partitioners.check_model(model)
        sizes = functools.partial(partitioners.layer_sizes, model)
        self.options = options
        self._resolved = resolved = options.resolve(
            len(model), world, sizes, schedule=schedule, replicas=replicas
        )
        partitioners.shared_across_ranks(model, resolved.device_map)
        plan = schedules.build(resolved.schedule, resolved.placement, resolved.chunks)
        self.plan = with_collectives(plan, resolved)
        self._num_layers = len(model)
        if self._member is not None:
            self._rank, replica = divmod(self._member, resolved.dp)
            self._place = Place(replica, resolved.dp)
        else:
            self._place = Place(0, resolved.dp)
        self._local = list(range(resolved.ranks)) if self._rank is None else [self._rank]
        devices = self._devices()
        if self._rank is None:
            self._transport = InProcess(devices, replicas=resolved.dp)
        precision, dtypes = _precision(options, resolved, model)
        named = list(model.named_parameters())
        owners = _owners(model, named, resolved.device_map)
        described = tuple(
            f"{name} {p.dtype}{list(p.shape)}{'' if p.requires_grad else ' frozen'}" for name, p in named
        )
        for place, copied in self._copies(model):
            self._replicas.append(
                Replica(
                    place,
                    copied,
                    resolved.device_map,
                    rank=self._rank,
                    devices=devices[place.replica :: resolved.dp],
                    loss=loss,
                    precision=precision,
                )
            )
        self._generators = [generator for device in set(devices) for generator in generators(device)]
        built = None
        if optimizer is not None:
            owned = {name for (name, _), owner in zip(named, owners, strict=True) if owner in self._local}
            trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
            built = build_optimizer(optimizer, trained, owned)
            self.optimizer = built.optimizer
        opening = Opening(
            replicas=resolved.dp,
            options=str(options),
            plan=f"{type(resolved.schedule).__name__} {self.plan.digest[:16]}",
            seed=torch.initial_seed() if seed is None else seed,
            seed_given=seed is not None,
            parameters=described,
            optimizer=built.words if built else (),
        )
        return opening, _Parts(plan, built, named, owners, dtypes, devices)

    def _copies(self, model: nn.Sequential) -> Iterator[tuple[Place, nn.Sequential]]:
        """The model itself, and in one process a copy of it for each other replica."""
        yield self._place, model
        if self._rank is None:
            for replica in range(1, self._resolved.dp):
                try:
                    yield Place(replica, self._resolved.dp), copy.deepcopy(model)
                except Exception as error:
                    raise PipelineError(
                        "in one process each replica is a copy of the model, and copy.deepcopy makes none: "
                        f"{_words(error)} (under torchrun each process has its own)"
                    ) from error

    def _align(self) -> None:
        """All replicas begin with the first one's parameters and buffers."""
        for replica in self._replicas:
            across = self._transport.across(replica.member(self._local[0]))
            across.align(replica.tensors())

    def _hold(self, parts: "_Parts") -> tuple[Opening, None]:
        """Puts parameters where they are held, and master weights into the optimizer."""
        for replica in self._replicas:
            for index, stage in replica.stages.items():
                across = self._transport.across(replica.member(self.plan.placement[index]))
                synchronize(stage.module, across)
        resolved, gradients = self._resolved, None
        device = parts.devices[self._place.member(self._local[0])]
        if resolved.amp == "fp16":
            fixed = resolved.loss_scale if isinstance(resolved.loss_scale, float) else None
            self.scaler = LossScaler(fixed)
        if resolved.dp > 1 or resolved.zero or resolved.amp != "off":
            gradients = self._reduced(parts, device)
        else:
            gradients = Whole(parts.named, parts.owners, self._local, device)
        self._updates = Updates(
            gradients, optimizer=self.optimizer, clip=resolved.clip, scaler=self.scaler, device=device
        )
        return Opening(replicas=resolved.dp), None

    def _reduced(self, parts: "_Parts", device: torch.device) -> Gradients:
        resolved = self._resolved
        check_dense(self.optimizer)
        for replica in self._replicas:
            replica.hold(
                self._local,
                groups=parts.built.groups if parts.built else {},
                dtypes=parts.dtypes,
                sharding=Sharding(resolved.zero, resolved.reduce_every),
                bucket_mb=resolved.bucket_mb,
                whole=bool(resolved.zero) and not is_elementwise(self.optimizer),
                across=self._transport.across,
                home=functools.partial(home_of, offload=resolved.offload),
            )
        if self.optimizer is not None:
            install(self.optimizer, list(self._held()))
        return Reduced(
            {
                replica.member(rank): holding
                for replica in self._replicas
                for rank, holding in replica.holdings.items()
            },
            replicas=resolved.dp,
            num_parameters=len(parts.named),
            checks_overflow=self.scaler is not None,
            device=device,
        )

    def _held(self) -> Iterator[Held]:
        for replica in self._replicas:
            yield from replica.held()

    def _devices(self) -> list[torch.device]:
        """Each member's device, where it lives in this process."""
        members = self.ranks * self.dp
        if self._rank is None and self._device == torch.device("cuda"):
            count = torch.cuda.device_count()
            return [torch.device("cuda", member // self.dp % count) for member in range(members)]
        return [self._device] * members

    # -------------------------------------------------------------------- calls

    def step(
        self,
        inputs: Pytree = None,
        targets: Pytree = None,
        *,
        microbatches: Pairs | None = None,
        update: bool = True,
    ) -> Tensor:
        """Forward and backward of a batch, and an optimizer step.

        Args:
            inputs: the batch; needed on the first stage's rank.
            targets: needed on the last stage's rank.
            microbatches: in place of both: `(input, target)` pairs, cut already, of any shapes.
            update: False accumulates gradients and leaves the optimizer step to a later call.

        Returns:
            The mean loss of this call's batch before the update, a 0-d tensor, the same on every rank.

        Raises:
            ValueError: inputs and targets that don't match.
            DisagreementError: the ranks call different things.
            PeerError: another rank failed; the message says which, where and why.
        """
        if update and self.optimizer is None:
            raise PipelineError(
                "step needs an optimizer: pass optimizer= to Pipeline (or update=False to accumulate)"
            )
        kind = Kind(f"step(update={update})", trains=True, updates=update)
        prepared = self._prepare(kind, Batch(inputs, targets, microbatches))
        runs = prepared.runs
        self._sent()  # what other calls have sent is none of this one's
        try:
            reference = self._updates.begin(prepared.weight)
            for replica, call in zip(self._replicas, prepared.calls, strict=True):
                call.reference, call.scaler = reference, self.scaler
                call.seeds = layer_seeds(
                    self._seed, self._calls, replica.place.replica, call.microbatches, self._num_layers
                )
            self._calls += 1
            with preserved(self._generators), torch.enable_grad():
                execute(runs, self._transport)
            self._updates.accumulated(prepared.weight)
            loss = self._share_loss(prepared)
            if update:
                self.metrics |= self._updates.update(self._transport)
            self._rest()
        except BaseException as error:
            self._fail(error, runs, trains=True)
        self.peak_live = {run.rank: run.peak_live for run in runs[: len(self._local)]}
        self.traffic = self._sent()
        return loss

    def evaluate(
        self, inputs: Pytree = None, targets: Pytree = None, *, microbatches: Pairs | None = None
    ) -> Tensor:
        """The mean loss of a batch in eval mode, without gradients: a 0-d tensor, the same on every rank.

        Arguments and errors as for `step`.
        """
        with self._evaluating():
            prepared = self._prepare(Kind("evaluate", trains=False), Batch(inputs, targets, microbatches))
            try:
                execute(prepared.runs, self._transport)
                loss = self._share_loss(prepared)
                self._rest()
                return loss
            except BaseException as error:
                self._fail(error, prepared.runs)

    def predict(self, inputs: Pytree = None, *, to: Literal["all", "last"] = "all") -> Pytree:
        """The model's output for a batch in eval mode, without gradients, its rows in the batch's order.

        Args:
            inputs: needed on the first stage's rank.
            to: "all" gives the rows to every rank; "last" to the last stage's rank only, and None to the
                others.
        """
        if to not in ("all", "last"):
            raise ValueError(f'to={to!r}: it must be "all" or "last"')
        kind = Kind(f"predict(to={to!r})", trains=False, predicts=True)
        with self._evaluating():
            prepared = self._prepare(kind, Batch(inputs))
            try:
                execute(prepared.runs, self._transport)
                rows, last = None, self.plan.placement[-1]
                if self._rank in (None, last):
                    rows = cutting.join(
                        [
                            call.predictions[index].value()
                            for call in prepared.calls
                            for index in range(call.microbatches)
                        ]
                    )
                self._rest()
                return (
                    rows if to == "last" else self._transport.broadcast_value(rows, self._place.member(last))
                )
            except BaseException as error:
                self._fail(error, prepared.runs)

    def _prepare(self, kind: Kind, batch: Batch) -> Prepared:
        self._check_open()
        try:
            return self._preparation.prepare(kind, batch, made=self._calls)
        except LostContact as error:
            self._fail(error)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise PipelineError(f"this pipeline is closed{self._closed}")

    def _all_gather(self, item: T) -> list[T]:
        try:
            return self._transport.all_gather([item])
        except LostContact as error:
            self._fail(error)

    # --------------------------------------------------------------- after a call

    def _share_loss(self, prepared: Prepared) -> Tensor:
        """The call's mean loss, over all replicas, on every rank; sets `metrics`."""
        found = [_loss_info(call) for call in prepared.calls]
        for call, info in zip(prepared.calls, found, strict=True):
            if info is not None:
                self._preparation.learn_loss(call, info)
        info = self._loss_info(prepared.calls[0], found)
        names = info.names if info else ()
        own = [
            call.mean_of(names) if there else torch.zeros(1 + len(names), dtype=torch.float64)
            for call, there in zip(prepared.calls, found, strict=True)
        ]
        numbers = self._mean_of_replicas(own, prepared)
        info = info or LossInfo(torch.get_default_dtype(), ())
        # A metric may be a count, which a half-precision loss's type could not hold.
        metrics = numbers[1:].to(torch.promote_types(info.dtype, torch.float32))
        self.metrics = dict(zip(info.names, metrics, strict=True))
        return numbers[0].to(info.dtype)

    def _loss_info(self, call: Call, found: Sequence[LossInfo | None]) -> LossInfo | None:
        """What there is to share: known from earlier calls, or told now by those that have a loss."""
        known = call.loss_info
        if self._rank is None or known is None:
            everyone = [info for part in self._transport.all_gather([list(found)]) for info in part]
            there = [info for info in everyone if info is not None]
            known = there[0] if there else None
        else:
            there = [info for info in found if info is not None]
        if any(info != known for info in there):
            raise PipelineError(
                f"loss gave {there}, and {known} in earlier calls: ranks must know beforehand"
            )
        return known

    def _mean_of_replicas(self, own: Sequence[Tensor], prepared: Prepared) -> Tensor:
        """Each replica's numbers, weighed, as the last stages' ranks have them."""
        own = [numbers.to(self._home) for numbers in own]
        last = self.plan.placement[-1]
        if self._rank is None:
            everyone = list(own)
        elif self.dp == 1:
            return self._transport.broadcast(own[0], last)
        else:
            members = self.ranks * self.dp
            said = self._transport.all_gather_tensors(own, [own[0].numel()] * members)
            everyone = said[last * self.dp : (last + 1) * self.dp]
        if len(everyone) == 1:
            return everyone[0]
        total = prepared.weight or 1.0
        shares = [weight / total for weight in prepared.weights]
        return torch.stack([numbers * share for numbers, share in zip(everyone, shares, strict=True)]).sum(0)

    def _rest(self) -> None:
        for replica in self._replicas:
            replica.rest()

    def _sent(self) -> dict[int, dict[str, int]]:
        """What replicas have sent each other since this was asked last, by rank."""
        sent: dict[int, dict[str, int]] = {}
        for replica in self._replicas:
            for rank in self._local:
                counter = self._transport.across(replica.member(rank)).sent
                sent.setdefault(rank, dict(counter))
                counter.clear()
        return sent

    def _fail(self, error: BaseException, runs: Sequence[Run] = (), *, trains: bool = False) -> NoReturn:
        """Ends a call that failed. In one process the next may succeed; between processes all is over."""
        for replica in self._replicas:
            replica.forget()
        if trains:
            self._updates.discard()
        for run in runs:
            run.mailbox.clear()  # parcels under way hold on to their connection
        instead = self._transport.fail(error, runs[0].stands_at() if runs else self._name)
        if self._rank is not None:
            self._closed = f" since a call failed: {_words(error)}"
        if instead is not None:
            raise instead from None
        raise error

    # ------------------------------------------------------------------- the rest

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Eval mode without gradients; afterwards every module's mode is as it was."""
        modules = [module for replica in self._replicas for module in replica.modules()]
        modes = [module.training for module in modules]
        for stage in (stage for replica in self._replicas for stage in replica.stages.values()):
            stage.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            # By train(), which a module may have made its own; outer ones first, since it reaches inwards.
            for module, mode in zip(modules, modes, strict=True):
                if module.training != mode:
                    module.train(mode)

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Parameters and persistent buffers under the unsplit model's names, in the precision that they are
        trained in.

        A collective of all ranks where `full`, and where master weights are sharded over replicas.

        Args:
            full: gather all stages on the CPU of rank 0 (empty on other ranks). Otherwise this process's own
                stages: everything, in one process. What isn't gathered for it isn't copied.
        """
        is_scattered = self.dp > 1 and any(held.is_scattered for held in self._held())
        if full or (is_scattered and self._rank is not None):
            self._check_open()
            said = self._all_gather([Note(f"state_dict(full={full})")])
            check_kinds([(self._member_name(member), notes[0]) for member, notes in enumerate(said)])
        try:
            own = self._states()
            if full:
                mine = own if self._place.replica == 0 else {}
                parts = self._transport.gather(
                    [pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), mine)]
                )
                own = {index: state for part in parts or [] for index, state in part.items()}
        except LostContact as error:
            self._fail(error)
        return {name: value for index in sorted(own) for name, value in own[index].items()}

    def _states(self) -> dict[int, dict[str, Any]]:
        """The state of each stage of this process's first replica."""
        pending: list[Pending] = []
        values: dict[int, Tensor] = {}
        for replica in self._replicas:
            trained = dict(replica.named)
            for held in replica.held():
                one, found = held.values()
                pending.append(one)
                if replica is self._replicas[0]:
                    values |= {id(trained[name]): value for name, value in found.items()}
        for one in pending:
            one()
        states = {}
        for index, stage in self.stages.items():
            states[index] = state = stage.module.state_dict()
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                if name in state and id(parameter) in values:
                    state[name] = values[id(parameter)]
        return states

    def shard(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> BatchShard:
        """This process's share of each batch: a batch sampler, for `DataLoader(dataset, batch_sampler=...)`.

        Args:
            batch_size: of the global batch, which all replicas share, so that a run doesn't depend on how
                many there are. In one process the share is all of it.
        """
        share = Place() if self._rank is None else self._place
        return BatchShard(
            dataset,
            batch_size,
            share.replica,
            share.replicas,
            replicas=self.dp,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    @property
    def stages(self) -> dict[int, Stage]:
        """This process's stages; in one process, those of replica 0."""
        return self._replicas[0].stages

    @property
    def dp(self) -> int:
        """Replicas of the pipeline."""
        return self._resolved.dp

    @property
    def replica(self) -> int | None:
        """This process's replica; None where all live in it."""
        return None if self._rank is None else self._place.replica

    @property
    def chunks(self) -> int:
        """Microbatches that a full batch is cut into."""
        return self._resolved.chunks

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self._resolved.ranks

    @property
    def rank(self) -> int | None:
        """This process's rank; None where all ranks live in it."""
        return self._rank

    @property
    def is_main(self) -> bool:
        """Whether this is the process that should log: rank 0 of replica 0, or the only one."""
        return not self._member

    @property
    def bubble(self) -> float:
        """The share of a step in which ranks are predicted to wait, under the schedules' default costs."""
        return self.plan.bubble

    @property
    def _home(self) -> torch.device:
        """Where this process's own numbers are."""
        return self.stages[min(self.stages)].device

    @property
    def _name(self) -> str:
        return "this process" if self._rank is None else self._place.name(self._rank)

    def _member_name(self, member: int) -> str:
        return member_name(self.dp, member)

    def __repr__(self) -> str:
        where = "in one process" if self._rank is None else f"this is {self._name}"
        copies = "" if self.dp == 1 else f" x {self.dp} replicas"
        stages = list(self.stages.values())
        return f"Pipeline({str(self.options)!r}: {self.ranks} ranks{copies}, {where}; {stages})"

    def close(self) -> None:
        """Gives connections back; the pipeline can't be used afterwards. Closing twice does nothing."""
        if self._closed is None:
            self._closed = ""
        self._transport.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._closed is None:
            # Between two calls the others can't see that this rank is gone, and would wait.
            self._transport.fail(error, f"{self._name}, between two calls")
        self.close()


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


class _Parts(NamedTuple):
    """What `_build` leaves for `_hold`."""

    plan: Plan
    built: Built | None
    named: Named
    owners: list[int]
    dtypes: Mapping[str, torch.dtype]
    devices: list[torch.device]


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


def _loss_info(call: Call) -> LossInfo | None:
    """What a call has shown of the loss, where it had any."""
    if not call.losses:
        return None
    rows = list(call.metrics.values())
    names = list(rows[0]) if rows else []
    for index, row in call.metrics.items():
        if list(row) != names:
            raise PipelineError(f"loss returned metrics {names}, and {list(row)} in microbatch {index}")
    return LossInfo(next(iter(call.losses.values())).dtype, tuple(names))


def _owners(model: nn.Sequential, named: Named, device_map: DeviceMap) -> list[int]:
    """The rank of each parameter: that of the first layer that has it."""
    layers = {name: index for index, name in enumerate(model._modules)}
    rank_of = [
        rank
        for rank, layers_of in zip(device_map.placement, device_map.stages, strict=True)
        for _ in layers_of
    ]
    return [rank_of[layers[name.split(".")[0]]] for name, _ in named]


def _lanes(plan: Plan, replicas: int) -> list[Lane]:
    """The channels that a plan's edges need, in all replicas."""
    found = set()
    for edge in plan.edges:
        for value in (ACTIVATION, GRADIENT):
            sender, receiver = (plan.placement[stage] for stage in schedules.route_of(value, edge))
            if sender != receiver:
                for place in (Place(replica, replicas) for replica in range(replicas)):
                    found.add(Lane(place.member(sender), place.member(receiver), value))
    return sorted(found)


def _timeout(options: str | Options) -> float:
    """The time limit as far as it can be read; what is wrong with the options is said later, on all ranks."""
    try:
        return (Options.parse(options) if isinstance(options, str) else options).timeout
    except ValueError:
        return Options.timeout


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
