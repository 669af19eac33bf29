"""The public face: a model, an option string and a schedule become something with a `step`."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from pipe import microbatch as cutting
from pipe.across import Pending
from pipe.agreement import Note, Opening, check_kinds, check_openings
from pipe.assembly import Arguments, Spot, align, align_buffers, assemble, hold, lanes
from pipe.boundary import Pytree
from pipe.distributed.failure import LostContact
from pipe.distributed.groups import Groups, checked_device, mesh_replicas, world_size
from pipe.distributed.transport import DistributedTransport
from pipe.errors import PipelineError
from pipe.executor import Run, execute
from pipe.microbatch import Split, Weight
from pipe.optimizers import OptimizerFactory
from pipe.options import Options
from pipe.preparation import Batch, Kind, Pairs, Preparation, Prepared
from pipe.randomness import layer_seeds, preserved
from pipe.recorder import NoRecorder, Recorder
from pipe.replica import Replica
from pipe.sampling import BatchShard
from pipe.sharing import share_loss
from pipe.stage import Loss, Stage
from pipe.transport import InProcess, Place, Transport, member_name
from schedules import Schedule

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
        tensorboard: the directory in which stage timelines and scalars are written (also in the string), or a
            `torch.utils.tensorboard.SummaryWriter` of your own; on all ranks alike, rank 0 writes.

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
        tensorboard: Any = None,
    ) -> None:
        self.metrics: dict[str, Tensor] = {}
        self.peak_live: dict[int, int] = {}
        self.traffic: dict[int, dict[str, int]] = {}
        self._replicas: list[Replica] = []
        self._recorder: Recorder | NoRecorder = NoRecorder()
        self._closed: str | None = None
        self._calls = 0
        self._buffers_differ = False  # replicas' statistics, since the last step
        if not isinstance(options, str | Options):
            raise TypeError(
                f"the second argument is an option string or an Options, not a {type(options).__name__}"
            )
        given = Arguments(model, options, clip, schedule, loss, optimizer, weight, split, seed, tensorboard)
        world = world_size(mesh)
        device = checked_device(device, world)
        self._transport: Transport = InProcess()
        self._name = "this process"
        member = None
        if world > 1:
            transport = DistributedTransport(Groups(mesh, device, _timeout(options)), device)
            self._transport, member = transport, transport.member
            self._name = transport.name(member)
        spot = Spot(world, member, mesh_replicas(mesh) if world > 1 else None, device)
        try:
            parts = self._agree_on(lambda: assemble(given, spot))
            self._parts, self._replicas, self._place = parts, parts.replicas, parts.place
            self.options, self.plan, self.optimizer = parts.options, parts.plan, parts.optimizer
            self._rank, self._name = parts.rank, parts.name
            if isinstance(self._transport, DistributedTransport):
                self._transport.open(lanes(parts.plan, parts.resolved.dp), parts.resolved.dp)
            else:
                self._transport = InProcess(parts.devices, replicas=parts.resolved.dp)
            align(parts, self._transport)
            self._updates = self._agree_on(lambda: hold(parts, self._transport))
            self.scaler = self._updates.scaler
            self._preparation = Preparation(self._transport, parts, weight=weight, split=split)
            directory = parts.resolved.tensorboard
            if directory is not None:
                target = tensorboard if hasattr(tensorboard, "file_writer") else directory
                self._recorder = Recorder(target, parts.resolved.trace_every, parts, self._transport)
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
        entered, recorder = time.perf_counter_ns(), self._recorder
        prepared = self._prepare(kind, Batch(inputs, targets, microbatches))
        runs = prepared.runs
        self._sent()  # what other calls have sent is none of this one's
        try:
            reference = self._updates.begin(prepared.weight)
            for replica, call in zip(self._replicas, prepared.calls, strict=True):
                call.reference, call.scaler = reference, self.scaler
                call.seeds = layer_seeds(
                    self._seed, self._calls, replica.place.replica, call.microbatches, len(self._parts.layers)
                )
            recorder.begin(self._calls, prepared, entered)
            self._calls += 1
            with preserved(self._parts.generators), torch.enable_grad():
                execute(runs, self._transport)
            for replica in self._replicas:
                replica.check_layers()
            self._updates.accumulated(prepared.weight)
            loss = self._share_loss(prepared, updates=update)
            recorder.mark("c")
            if update:
                reduced = functools.partial(recorder.mark, "g")
                self.metrics |= self._updates.update(self._transport, reduced=reduced)
            self._rest()
            if update:
                recorder.mark("o")
            recorder.finish(loss, self.metrics)
        except BaseException as error:
            self._fail(error, runs, trains=True)
        self.peak_live = {run.rank: run.peak_live for run in runs[: len(self._parts.local)]}
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
                rows, last = None, self._parts.last
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
            prepared = self._preparation.prepare(kind, batch, made=self._calls)
            if kind.trains:
                self._buffers_differ = self.dp > 1
            elif self._buffers_differ:
                align_buffers(self._parts, self._transport)
                self._buffers_differ = False
            return prepared
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

    def _share_loss(self, prepared: Prepared, *, updates: bool = False) -> Tensor:
        """The call's mean loss on every rank; sets `metrics`."""
        say = self._updates.say() if updates else None
        shared = share_loss(prepared, self._parts, self._transport, say)
        if say is not None:
            self._updates.hear(shared.said)
        self.metrics = shared.metrics
        self._preparation.learn(prepared, shared.info)
        return shared.loss

    def _rest(self) -> None:
        for replica in self._replicas:
            replica.rest()

    def _sent(self) -> dict[int, dict[str, int]]:
        """What replicas have sent each other since this was asked last, by rank."""
        sent: dict[int, dict[str, int]] = {}
        for replica in self._replicas:
            for rank in self._parts.local:
                counter = self._transport.across(replica.member(rank)).sent
                sent.setdefault(rank, dict(counter))
                counter.clear()
        return sent

    def _fail(self, error: BaseException, runs: Sequence[Run] = (), *, trains: bool = False) -> NoReturn:
        """Ends a call that failed. In one process the next may succeed; between processes all is over."""
        for replica in self._replicas:
            replica.forget(for_good=self._rank is not None)
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
            full: copies of all stages on the CPU of rank 0 (empty on other ranks). Otherwise this process's
                own stages: everything, in one process; not copied, where nothing had to be gathered for it.
        """
        is_scattered = self.dp > 1 and any(
            held.is_scattered for replica in self._replicas for held in replica.held()
        )
        if full or (is_scattered and self._rank is not None):
            self._check_open()
            said = self._all_gather([Note(f"state_dict(full={full})")])
            check_kinds([(self._member_name(member), notes[0]) for member, notes in enumerate(said)])
        try:
            own = self._states()
            if full:
                mine = own if self._place.replica == 0 else {}
                parts = self._transport.gather(
                    [pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), mine)]
                )
                own = {index: state for part in parts or [] for index, state in part.items()}
        except LostContact as error:
            self._fail(error)
        return {name: value for index in sorted(own) for name, value in own[index].items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes parameters and persistent buffers under the unsplit model's names, as `state_dict(full=True)`
        gives them, into this process's stages and its optimizer's master weights. Every rank calls it, with
        the same state. The optimizer's own state stays as it is.

        Raises:
            KeyError: a state that lacks something.
            RuntimeError: a tensor of another shape.
        """
        self._check_open()
        for replica in self._replicas:
            replica.load(state)

    def _states(self) -> dict[int, dict[str, Any]]:
        """The state of each stage of this process's first replica."""
        pending: list[Pending] = []
        values: dict[int, Tensor] = {}
        for replica in self._replicas:
            trained = dict(replica.named.values())
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
        return self._parts.resolved.dp

    @property
    def replica(self) -> int | None:
        """This process's replica; None where all live in it."""
        return None if self._rank is None else self._place.replica

    @property
    def chunks(self) -> int:
        """Microbatches that a full batch is cut into."""
        return self._parts.resolved.chunks

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self._parts.resolved.ranks

    @property
    def rank(self) -> int | None:
        """This process's rank; None where all ranks live in it."""
        return self._rank

    @property
    def is_main(self) -> bool:
        """Whether this is the process that should log: rank 0 of replica 0, or the only one."""
        return not self._rank and not self._place.replica

    @property
    def bubble(self) -> float:
        """The share of a step in which ranks are predicted to wait, under the schedules' default costs."""
        return self.plan.bubble

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
        self._recorder.close()
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


def _timeout(options: str | Options) -> float:
    """The time limit as far as it can be read; what is wrong with the options is said later, on all ranks."""
    try:
        return (Options.parse(options) if isinstance(options, str) else options).timeout
    except ValueError:
        return Options.timeout


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
