"""The public face: a model, an option string and a schedule become something with a `step`."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import partitioners
import schedules
from partitioners import DeviceMap
from pipe import microbatch as cutting
from pipe.agreement import LossInfo, Note, Opening, check_kinds, check_notes, check_openings
from pipe.boundary import Parcel, Pytree, pack
from pipe.call import Call
from pipe.distributed.failure import LostContact
from pipe.distributed.groups import Groups, checked_device, world_size
from pipe.distributed.transport import DistributedTransport
from pipe.errors import PipelineError
from pipe.executor import Run, execute
from pipe.microbatch import Split, Weight
from pipe.optimization import Named, OptimizerFactory, Updates, build_optimizer
from pipe.options import Options, merge
from pipe.program import Step, compile_program
from pipe.randomness import generators, layer_seeds, preserved
from pipe.stage import Loss, Stage
from pipe.transport import BATCH, InProcess, Key, Lane, Transport
from schedules import ACTIVATION, GRADIENT, Plan, Schedule

T = TypeVar("T")
Pairs: TypeAlias = Sequence[tuple[Any, Any]]

# Shape numbers are remembered for this many different shapes; then all ranks forget them together.
_REMEMBERED_SHAPES = 4096


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
        self.peak_live: dict[int, int] = {}
        self._weight, self._split = weight, split
        if not isinstance(options, str | Options):
            raise TypeError(
                f"the second argument is an option string or an Options, not a {type(options).__name__}"
            )
        world = world_size(mesh)
        self._device = checked_device(device, world)
        self._rank: int | None = None  # None: all ranks live here
        self._transport: Transport = InProcess()
        self._closed: str | None = None
        self._calls = 0
        self._programs: dict[tuple[int, bool], dict[int, list[Step]]] = {}
        # What the last stage's rank knows of the loss, in steps (True) and evaluations, by environment.
        self._loss_info: dict[tuple[bool, int], LossInfo] = {}
        self._signatures, self._shapes = _Numbers(), _Numbers()
        if world > 1:
            transport = DistributedTransport(Groups(mesh, self._device, _timeout(options)), self._device)
            self._transport, self._rank = transport, transport.rank
        try:
            self._seed = self._agree_on(
                lambda: self._build(model, merge(options, clip=clip), schedule, loss, optimizer, seed, world)
            )
            if isinstance(self._transport, DistributedTransport):
                self._transport.open(_lanes(self.plan))
        except LostContact as error:
            self._fail(error)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------- construction

    def _agree_on(self, build: Callable[[], Opening]) -> int:
        """Builds this rank's part and makes sure that the others built theirs alike; returns the seed."""
        failure: Exception | None = None
        try:
            opening = build()
        except Exception as error:
            failure, opening = error, Opening(error=_words(error))
        # A rank that can't go on has to say so, or the others would wait for it.
        openings = self._transport.all_gather([opening])
        if failure is not None:
            raise failure
        check_openings(openings)
        return openings[0].seed

    def _build(
        self,
        model: nn.Sequential,
        options: Options,
        schedule: Schedule | str | None,
        loss: Loss | None,
        optimizer: OptimizerFactory | None,
        seed: int | None,
        world: int,
    ) -> Opening:
        _check_callables(loss=loss, optimizer=optimizer, schedule=schedule)
        for name, given in (
            ("loss", loss),
            ("optimizer", optimizer),
            ("weight", self._weight),
            ("split", self._split),
        ):
            if given is not None and not callable(given):
                raise TypeError(f"{name}= takes a function, not {given!r}")
        if seed is not None and not isinstance(seed, int):
            raise TypeError(f"seed= takes a whole number, not {seed!r}")
        if isinstance(schedule, str):
            schedule = schedules.get(schedule)
        partitioners.check_model(model)
        sizes = functools.partial(partitioners.layer_sizes, model)
        self.options = options
        self._resolved = resolved = options.resolve(len(model), world, sizes, schedule=schedule)
        device_map = resolved.device_map
        partitioners.shared_across_ranks(model, device_map)
        self.plan = schedules.build(resolved.schedule, resolved.placement, resolved.chunks)
        self._first, self._last = resolved.placement[0], resolved.placement[-1]
        self._local = list(range(resolved.ranks)) if self._rank is None else [self._rank]
        self._num_layers = len(model)
        devices = self._devices(resolved.ranks)
        if self._rank is None:
            self._transport = InProcess(devices)
        self.stages = {
            index: Stage(
                index,
                module.to(devices[resolved.placement[index]]),
                first_layer=device_map.stages[index].start,
                is_first=index == 0,
                is_last=index == len(device_map.stages) - 1,
                device=devices[resolved.placement[index]],
                loss=loss,
            )
            for index, module in partitioners.split(model, device_map, self._rank).items()
        }
        self._generators = [generator for device in set(devices) for generator in generators(device)]
        named = list(model.named_parameters())
        owners = _owners(model, named, device_map)
        groups: tuple[str, ...] = ()
        if optimizer is not None:
            owned = {name for (name, _), owner in zip(named, owners, strict=True) if owner in self._local}
            trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
            self.optimizer, groups = build_optimizer(optimizer, trained, owned)
        self._updates = Updates(
            named,
            owners,
            self._local,
            optimizer=self.optimizer,
            clip=resolved.clip,
            device=devices[self._local[0]],
        )
        self._programs[resolved.chunks, True] = self._compile(self.plan)
        return Opening(
            options=str(options),
            plan=f"{type(resolved.schedule).__name__} {self.plan.digest[:16]}",
            seed=torch.initial_seed() if seed is None else seed,
            seed_given=seed is not None,
            parameters=tuple(
                f"{name} {p.dtype}{list(p.shape)}{'' if p.requires_grad else ' frozen'}" for name, p in named
            ),
            optimizer=groups,
        )

    def _devices(self, ranks: int) -> list[torch.device]:
        """Each rank's device, where it lives in this process."""
        if self._rank is None and self._device == torch.device("cuda"):
            return [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(ranks)]
        return [self._device] * ranks

    def _compile(self, plan: Plan) -> dict[int, list[Step]]:
        return {r: compile_program(plan, r, self.stages, self._resolved.checkpoint) for r in self._local}

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
        kind = f"step(update={update})"
        call, runs = self._prepare(kind, inputs, targets, microbatches, trains=True)
        weight = sum(call.weights)
        try:
            call.reference = self._updates.begin(weight)
            call.seeds = layer_seeds(self._seed, self._calls, 0, call.microbatches, self._num_layers)
            self._calls += 1
            with preserved(self._generators), torch.enable_grad():
                execute(runs, self._transport, call)
            self._updates.accumulated(weight)
            loss = self._share_loss(call)
            if update:
                self.metrics |= self._updates.update(self._transport)
        except BaseException as error:
            self._fail(error, runs, trains=True)
        self.peak_live = {run.rank: run.peak_live for run in runs}
        return loss

    def evaluate(
        self, inputs: Pytree = None, targets: Pytree = None, *, microbatches: Pairs | None = None
    ) -> Tensor:
        """The mean loss of a batch in eval mode, without gradients: a 0-d tensor, the same on every rank.

        Arguments and errors as for `step`.
        """
        with self._evaluating():
            call, runs = self._prepare("evaluate", inputs, targets, microbatches, trains=False)
            try:
                execute(runs, self._transport, call)
                return self._share_loss(call)
            except BaseException as error:
                self._fail(error, runs)

    def predict(self, inputs: Pytree = None, *, to: Literal["all", "last"] = "all") -> Pytree:
        """The model's output for a batch in eval mode, without gradients, its rows in the batch's order.

        Args:
            inputs: needed on the first stage's rank.
            to: "all" gives the rows to every rank; "last" to the last stage's rank only, and None to the
                others.
        """
        if to not in ("all", "last"):
            raise ValueError(f'to={to!r}: it must be "all" or "last"')
        kind = f"predict(to={to!r})"
        with self._evaluating():
            call, runs = self._prepare(kind, inputs, None, None, trains=False, predicts=True)
            try:
                execute(runs, self._transport, call)
                rows = None
                if self._owns(self._last):
                    rows = cutting.join(
                        [call.predictions[index].value() for index in range(call.microbatches)]
                    )
                return rows if to == "last" else self._transport.broadcast_value(rows, self._last)
            except BaseException as error:
                self._fail(error, runs)

    # ------------------------------------------------------- before a call: agree

    def _prepare(
        self,
        kind: str,
        inputs: Pytree,
        targets: Pytree,
        pairs: Pairs | None,
        *,
        trains: bool,
        predicts: bool = False,
    ) -> tuple[Call, list[Run]]:
        """Cuts the batch, makes sure that all ranks mean the same call, and lays out its runs."""
        self._check_open()
        failure: Exception | None = None
        cut = cutting.Cut()
        try:
            if trains and torch.is_inference_mode_enabled():
                raise PipelineError("step can't train inside of torch.inference_mode()")
            cut = cutting.cut(inputs, targets, pairs, chunks=self.chunks, split_by=self._split)
            note = self._note(kind, cut, trains, predicts)
        except Exception as error:
            failure, note = error, Note(kind, error=_words(error))
        notes = self._all_gather(note)
        if failure is not None:
            raise failure
        first, last = (0, 0) if self._rank is None else (self._first, self._last)
        count = check_notes(notes, first, last, targeted=not predicts)
        weights = notes[last].weights or (1.0,) * count
        programs = self._program(count, trains)
        signatures = notes[first].signatures
        assert signatures is not None
        environment = tuple(note.environment for note in notes)
        if len(self._shapes) > _REMEMBERED_SHAPES:  # on all ranks at once: they number the same things
            self._shapes.forget()
            self._signatures.forget()
            self._transport.forget_shapes()
            for stage in self.stages.values():
                stage.forget_shapes()
        keys = [
            self._shapes.of((trains and weight > 0, signature, environment))
            for weight, signature in zip(weights, signatures, strict=True)
        ]
        call = Call(
            trains,
            count,
            keys,
            weights,
            1.0,
            targets=cut.targets,
            predicts=predicts,
            loss_info=notes[last].loss,
            environment=note.environment,
        )
        runs = [Run(rank, programs[rank]) for rank in self._local]
        for run in runs:
            if run.rank == self._first:
                run.mailbox.update(_posted(cut.inputs))
        return call, runs

    def _note(self, kind: str, cut: cutting.Cut, trains: bool, predicts: bool) -> Note:
        """What this process tells the others before a call."""
        owns_first, owns_last = self._owns(self._first), self._owns(self._last) and not predicts
        inputs, targets = (cut.inputs if owns_first else None), (cut.targets if owns_last else None)
        if owns_last and self.stages[len(self.plan.placement) - 1].loss is None:
            raise PipelineError(f"{kind} needs a loss: pass loss= to Pipeline")
        for part in (inputs, targets):
            if part is not None and self._has_fixed_plan:
                self._check_fixed(len(part), trains)
        environment = self._signatures.of(self._environment())
        return Note(
            kind,
            inputs=cut.input_samples,
            targets=cut.target_samples,
            prints=self._prints(cut, predicts),
            cut_inputs=None if cut.inputs is None else len(cut.inputs),
            cut_targets=None if cut.targets is None or predicts else len(cut.targets),
            call=self._calls,
            signatures=None if inputs is None else tuple(self._signatures.of(_signature(x)) for x in inputs),
            environment=environment,
            weights=None if targets is None else tuple(cutting.weigh(targets, self._weight)),
            loss=self._loss_info.get((trains, environment)),
        )

    def _prints(self, cut: cutting.Cut, predicts: bool) -> tuple[int | None, int | None]:
        """Fingerprints of inputs and targets, where there are other ranks to compare them with."""
        if self._rank is None:
            return None, None
        return cutting.fingerprint(cut.inputs), None if predicts else cutting.fingerprint(cut.targets)

    @property
    def _has_fixed_plan(self) -> bool:
        """Whether the plan is a file's, for so many microbatches and no others."""
        return isinstance(self._resolved.schedule, schedules.CSVFile)

    def _check_fixed(self, count: int, trains: bool) -> None:
        if count > self.chunks or (trains and count != self.chunks):
            made = "1 microbatch" if count == 1 else f"{count} microbatches"
            raise ValueError(
                f"{made}, but the CSV plan is for {self.chunks}: a step needs {self.chunks} samples or more "
                "(drop_last=True in a DataLoader leaves out a shorter last batch)"
            )

    def _environment(self) -> Hashable:
        """What shapes this process's outputs beside its inputs."""
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return (autocast, *(stage.fingerprint() for stage in self.stages.values()))

    def _program(self, microbatches: int, trains: bool) -> dict[int, list[Step]]:
        """This process's programs for a number of microbatches, made and compared at their first use."""
        programs = self._programs.get((microbatches, trains))
        if programs is None:
            plan = self.plan
            if microbatches != self.chunks and not (self._has_fixed_plan and not trains):
                plan = schedules.build(self._resolved.schedule, plan.placement, microbatches)
            if not trains:
                plan = schedules.forward_only(plan, microbatches)
            check_openings([Opening(plan=digest) for digest in self._all_gather(plan.digest)])
            programs = self._programs[microbatches, trains] = self._compile(plan)
        return programs

    def _check_open(self) -> None:
        if self._closed is not None:
            raise PipelineError(f"this pipeline is closed{self._closed}")

    def _all_gather(self, item: T) -> list[T]:
        try:
            return self._transport.all_gather([item])
        except LostContact as error:
            self._fail(error)

    def _owns(self, rank: int) -> bool:
        return self._rank is None or self._rank == rank

    # --------------------------------------------------------------- after a call

    def _share_loss(self, call: Call) -> Tensor:
        """The call's mean loss on every rank; sets `metrics`."""
        mean, values, found = torch.zeros((), dtype=torch.float64), {}, None
        if call.losses:
            mean = call.mean(call.losses)
            values = {name: call.mean(numbers) for name, numbers in _columns(call.metrics).items()}
            found = LossInfo(next(iter(call.losses.values())).dtype, tuple(values))
            self._loss_info[call.trains, call.environment] = found
        info = call.loss_info
        if self._rank is None:
            info = found
        elif info is None:
            info = self._transport.all_gather([found])[self._last]
        elif found not in (None, info):
            raise PipelineError(f"loss gave {found}, and {info} in earlier calls: ranks must know beforehand")
        info = info or LossInfo(torch.get_default_dtype(), ())
        numbers = torch.stack([mean, *values.values()])
        if self._rank is not None:
            numbers = numbers.to(self._device) if found is not None else self._zeros(1 + len(info.names))
            numbers = self._transport.broadcast(numbers, self._last)
        # A metric may be a count, which a half-precision loss's type could not hold.
        metrics = numbers[1:].to(torch.promote_types(info.dtype, torch.float32))
        self.metrics = dict(zip(info.names, metrics, strict=True))
        return numbers[0].to(info.dtype)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self._device)

    def _fail(self, error: BaseException, runs: Sequence[Run] = (), *, trains: bool = False) -> NoReturn:
        """Ends a call that failed. In one process the next may succeed; between processes all is over."""
        for stage in self.stages.values():
            stage.saved.clear()
            stage.deferred.clear()
        if trains:
            self._updates.discard()
        for run in runs:
            run.mailbox.clear()  # parcels under way hold on to their connection
        instead = self._transport.fail(error, runs[0].stands_at() if runs else f"rank {self._rank}")
        if self._rank is not None:
            self._closed = f" since a call failed: {_words(error)}"
        if instead is not None:
            raise instead from None
        raise error

    # ------------------------------------------------------------------- the rest

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Eval mode without gradients; afterwards every module's mode is as it was."""
        modules = [module for stage in self.stages.values() for module in stage.module.modules()]
        modes = [module.training for module in modules]
        for stage in self.stages.values():
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
        """Parameters and persistent buffers under the unsplit model's names.

        Args:
            full: gather all stages on the CPU of rank 0 (a collective; empty on other ranks). Otherwise this
                process's own stages, not copied: everything, in one process.
        """
        own = {index: stage.module.state_dict() for index, stage in self.stages.items()}
        if full:
            self._check_open()
            check_kinds(self._all_gather(Note("state_dict(full=True)")))
            try:
                parts = self._transport.gather(
                    [pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), own)]
                )
            except LostContact as error:
                self._fail(error)
            own = {index: state for part in parts or [] for index, state in part.items()}
        return {name: value for index in sorted(own) for name, value in own[index].items()}

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
        """Whether this is the process that should log: rank 0, or the only one."""
        return not self._rank

    @property
    def bubble(self) -> float:
        """The share of a step in which ranks are predicted to wait, under the schedules' default costs."""
        return self.plan.bubble

    def __repr__(self) -> str:
        where = "in one process" if self._rank is None else f"this is rank {self._rank}"
        return f"Pipeline({str(self.options)!r}: {self.ranks} ranks, {where}; {list(self.stages.values())})"

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
            self._transport.fail(error, f"rank {self._rank}, between two calls")
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


class _Numbers:
    """Gives equal things equal numbers, never used twice."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._next = 0

    def of(self, thing: Hashable) -> int:
        number = self._known.get(thing)
        if number is None:
            number = self._known[thing] = self._next
            self._next += 1
        return number

    def __len__(self) -> int:
        return len(self._known)

    def forget(self) -> None:
        self._known.clear()


def _signature(microbatch: Pytree) -> Hashable:
    """What of an input shapes the outputs: structure, shapes, dtypes, and values that may be sizes."""
    tensors, layout = pack(microbatch)
    if any(tensor.requires_grad for tensor in tensors):
        raise ValueError("inputs that require a gradient would not get one: detach() them")
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    if layout.spec is None:
        return shapes
    telling = tuple(value for value in layout.values if isinstance(value, int | str))
    return (shapes, repr(layout.spec), layout.kinds, telling)


def _posted(inputs: Sequence[Pytree] | None) -> dict[Key, Parcel]:
    """The microbatches of the batch as they lie in the first stage's mailbox."""
    parcels = {}
    for index, microbatch in enumerate(inputs or ()):
        tensors, layout = pack(microbatch)
        parcels[Key(ACTIVATION, BATCH, 0, index)] = Parcel(tensors, layout, (False,) * len(tensors))
    return parcels


def _columns(metrics: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
    """Metrics by name, then by microbatch; every microbatch must have the same names."""
    rows = list(metrics.values())
    names = list(rows[0]) if rows else []
    for index, row in metrics.items():
        if list(row) != names:
            raise PipelineError(f"loss returned metrics {names}, and {list(row)} in microbatch {index}")
    return {name: {index: row[name] for index, row in metrics.items()} for name in names}


def _owners(model: nn.Sequential, named: Named, device_map: DeviceMap) -> list[int]:
    """The rank of each parameter: that of the first layer that has it."""
    layers = {name: index for index, name in enumerate(model._modules)}
    rank_of = [
        rank
        for rank, layers_of in zip(device_map.placement, device_map.stages, strict=True)
        for _ in layers_of
    ]
    return [rank_of[layers[name.split(".")[0]]] for name, _ in named]


def _lanes(plan: Plan) -> list[Lane]:
    """The channels that a plan's edges need."""
    found = set()
    for edge in plan.edges:
        for value in (ACTIVATION, GRADIENT):
            sender, receiver = (plan.placement[stage] for stage in schedules.route_of(value, edge))
            if sender != receiver:
                found.add(Lane(sender, receiver, value))
    return sorted(found)


def _timeout(options: str | Options) -> float:
    """The time limit as far as it can be read; what is wrong with the options is said later, on all ranks."""
    try:
        return (Options.parse(options) if isinstance(options, str) else options).timeout
    except ValueError:
        return Options.timeout


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
