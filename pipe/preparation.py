"""What happens before a call: the batch is cut, all ranks agree on the call, and their runs are laid out."""

import zlib
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

import schedules
from pipe import microbatch as cutting
from pipe.agreement import LossInfo, Note, Opening, Row, check_notes, check_openings
from pipe.assembly import Parts, with_collectives
from pipe.boundary import Parcel, Pytree, pack
from pipe.call import Call
from pipe.errors import PipelineError
from pipe.executor import Run
from pipe.microbatch import Cut, Split, Weight
from pipe.program import Step, compile_program
from pipe.replica import Replica
from pipe.transport import BATCH, Key, Place, Transport, member_name
from schedules import ACTIVATION, Plan

Pairs: TypeAlias = Sequence[tuple[Any, Any]]

# Shape numbers are remembered for this many different shapes; then all ranks forget them together.
_REMEMBERED_SHAPES = 4096


class Batch(NamedTuple):
    """What a call was given."""

    inputs: Pytree = None
    targets: Pytree = None
    pairs: Pairs | None = None


class Kind(NamedTuple):
    """A call, and what is done in it."""

    text: str
    trains: bool
    updates: bool = False
    predicts: bool = False


class Programs(NamedTuple):
    """A plan, and what each local replica's ranks do of it."""

    plan: Plan
    by_replica: list[dict[int, list[Step]]]


class Prepared(NamedTuple):
    """A call that all ranks of all replicas have agreed on."""

    runs: list[Run]
    calls: list[Call]  # of each replica that lives in this process
    weights: list[float]  # of each replica
    plan: Plan
    samples: int | None  # of all replicas, where they were counted

    @property
    def weight(self) -> float:
        """W of contract 11."""
        return sum(self.weights)


class Preparation:
    """Prepares the calls of one pipeline.

    Args:
        weight, split: the user's own ways to weigh and to cut.
    """

    def __init__(
        self, transport: Transport, parts: Parts, *, weight: Weight | None, split: Split | None
    ) -> None:
        self._transport = transport
        self._parts = parts
        self._resolved = parts.resolved
        self._replicas = parts.replicas
        self._weight, self._split = weight, split
        self._programs: dict[tuple[int, bool, bool], Programs] = {}
        # What the last stage's rank knows of the loss, in steps (True) and evaluations, by environment.
        self._loss_info: dict[tuple[bool, int], LossInfo] = {}
        self._signatures, self._shapes = _Numbers(), _Numbers()
        # Found out before any call, so that a plan that the engine can't run is refused at once.
        self._programs[parts.plan.microbatches, True, True] = Programs(parts.plan, self._compile(parts.plan))

    def prepare(self, kind: Kind, batch: Batch, *, made: int) -> Prepared:
        """Agrees with all ranks on a call.

        Args:
            made: how many steps this process has made.
        """
        for replica in self._replicas[1:]:
            replica.follow(self._replicas[0])
        cuts, rows = self._agree(kind, batch, made, self._resolved.chunks)
        count = check_notes(rows, targeted=not kind.predicts)
        if any(row.count != count for row in rows):
            cuts, rows = self._agree(kind, batch, made, count)
            count = check_notes(rows, targeted=not kind.predicts)
        if self.has_fixed_plan:
            self._check_fixed(count, kind.trains)
        if self._parts.synchronizes and kind.trains:
            _check_weights(rows)
        plan, programs = self._program(count, kind)
        if len(self._shapes) > _REMEMBERED_SHAPES:  # on all ranks at once: they number the same things
            self._forget_shapes()
        counts = [row.notes[row.first].inputs for row in rows]
        samples = sum(count for count in counts if count) if None not in counts else None
        prepared = Prepared([], [], [sum(row.weights) for row in rows], plan, samples)
        # Known only where all replicas know it, or some would ask for it and others not.
        infos = {row.notes[row.last].loss for row in rows}
        known = infos.pop() if len(infos) == 1 else None
        for replica, cut, own in zip(self._replicas, cuts, programs, strict=True):
            call = self._call(kind, cut, rows[replica.place.replica], count, known)
            prepared.calls.append(call)
            runs = [
                Run(rank, own[rank], call, name=replica.place.name(rank), member=replica.member(rank))
                for rank in self._parts.local
            ]
            for run in runs:
                if run.rank == self._parts.first:
                    run.mailbox.update(_posted(cut.inputs))
            prepared.runs.extend(runs)
        return prepared

    def learn(self, prepared: Prepared, info: LossInfo | None) -> None:
        """Remembers what a call has shown of the loss."""
        for call in prepared.calls:
            if info is not None:
                self._loss_info[call.trains, call.environment] = info

    @property
    def has_fixed_plan(self) -> bool:
        """Whether the plan is a file's, for so many microbatches and no others."""
        return isinstance(self._resolved.schedule, schedules.CSVFile)

    # --------------------------------------------------------------- agreement

    def _agree(self, kind: Kind, batch: Batch, made: int, chunks: int) -> tuple[list[Cut], list[Row]]:
        """Cuts the batch and tells the others of it; returns what this process has, and what all have."""
        failure: Exception | None = None
        cuts: list[Cut] = []
        try:
            if kind.trains and torch.is_inference_mode_enabled():
                raise PipelineError("step can't train inside of torch.inference_mode()")
            for replica in self._replicas:
                replica.check_unwritten()
            cuts = cutting.cut(*batch, chunks=chunks, split_by=self._split, replicas=len(self._replicas))
            notes = [
                self._note(kind, replica, cut, made)
                for replica, cut in zip(self._replicas, cuts, strict=True)
            ]
        except Exception as error:
            failure, notes = error, [Note(kind.text, error=f"{type(error).__name__}: {error}")]
        said = [note for part in self._transport.all_gather([notes]) for note in part]
        if failure is not None:
            raise failure
        return cuts, self._rows(said)

    def _rows(self, notes: Sequence[Note]) -> list[Row]:
        """Notes by replica. In one process one note speaks for all ranks of its replica."""
        replicas = self._resolved.dp
        if self._parts.rank is None:
            return [Row([note], 0, 0, partial(_replica_name, index)) for index, note in enumerate(notes)]
        return [
            Row(notes[index::replicas], self._parts.first, self._parts.last, Place(index, replicas).name)
            for index in range(replicas)
        ]

    def _note(self, kind: Kind, replica: Replica, cut: Cut, made: int) -> Note:
        """What this process tells the others before a call, of one replica."""
        owns_first, owns_last = (
            self._owns(self._parts.first),
            self._owns(self._parts.last) and not kind.predicts,
        )
        inputs, targets = (cut.inputs if owns_first else None), (cut.targets if owns_last else None)
        if owns_last and replica.stages[self._parts.plan.num_stages - 1].loss is None:
            raise PipelineError(f"{kind.text} needs a loss: pass loss= to Pipeline")
        for part in (inputs, targets):
            if part is not None and self.has_fixed_plan:
                self._check_fixed(len(part), kind.trains)
        environment = self._signatures.of(self._environment(replica))
        return Note(
            kind.text,
            inputs=cut.input_samples,
            targets=cut.target_samples,
            prints=self._prints(cut, kind.predicts),
            cut_inputs=None if cut.inputs is None else len(cut.inputs),
            cut_targets=None if cut.targets is None or kind.predicts else len(cut.targets),
            call=made,
            signatures=None if inputs is None else tuple(self._signatures.of(_signature(x)) for x in inputs),
            environment=environment,
            settings=_settings(self._parts.optimizer) if kind.updates else 0,
            trained=hash(tuple(stage.trained() for stage in replica.stages.values())),
            weights=None if targets is None else tuple(cutting.weigh(targets, self._weight)),
            loss=self._loss_info.get((kind.trains, environment)),
        )

    def _prints(self, cut: Cut, predicts: bool) -> tuple[int | None, int | None]:
        """Fingerprints of inputs and targets, where there are other ranks to compare them with."""
        if self._parts.rank is None:
            return None, None
        return cutting.fingerprint(cut.inputs), None if predicts else cutting.fingerprint(cut.targets)

    def _check_fixed(self, count: int, trains: bool) -> None:
        chunks = self._resolved.chunks
        if count > chunks or (trains and count != chunks):
            made = "1 microbatch" if count == 1 else f"{count} microbatches"
            raise ValueError(
                f"{made}, but the CSV plan is for {chunks}: a step needs {chunks} samples or more "
                "(drop_last=True in a DataLoader leaves out a shorter last batch)"
            )

    def _environment(self, replica: Replica) -> Hashable:
        """What shapes this process's outputs beside its inputs."""
        kind = self._parts.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return (autocast, *(stage.fingerprint() for stage in replica.stages.values()))

    def _owns(self, rank: int) -> bool:
        return self._parts.rank is None or self._parts.rank == rank

    # -------------------------------------------------------------------- runs

    def _call(self, kind: Kind, cut: Cut, row: Row, count: int, known: LossInfo | None) -> Call:
        """The call as one replica makes it."""
        signatures = row.notes[row.first].signatures
        assert signatures is not None
        environments = tuple(note.environment for note in row.notes)
        keys = [
            self._shapes.of((kind.trains and weight > 0, signature, environments))
            for weight, signature in zip(row.weights, signatures, strict=True)
        ]
        return Call(
            kind.trains,
            count,
            keys,
            row.weights,
            1.0,
            targets=cut.targets,
            predicts=kind.predicts,
            loss_info=known,
            environment=row.notes[0 if self._parts.rank is None else self._parts.rank].environment,
        )

    def _program(self, microbatches: int, kind: Kind) -> Programs:
        """Each local replica's programs, made and compared at their first use."""
        # Gradients that are kept in full are reduced once, before the update.
        reduces = kind.trains and (kind.updates or self._resolved.zero >= 2)
        programs = self._programs.get((microbatches, kind.trains, reduces))
        if programs is None:
            plan = self._parts.base
            if microbatches != plan.microbatches and not (self.has_fixed_plan and not kind.trains):
                plan = schedules.build(self._resolved.schedule, plan.placement, microbatches)
            if not kind.trains:
                plan = schedules.forward_only(plan, microbatches)
            plan = with_collectives(plan, self._resolved, reduces=reduces)
            digests = [Opening(plan=digest) for digest in self._transport.all_gather([plan.digest])]
            check_openings(digests, partial(member_name, self._resolved.dp))
            programs = Programs(plan, self._compile(plan))
            self._programs[microbatches, kind.trains, reduces] = programs
        return programs

    def _compile(self, plan: Plan) -> list[dict[int, list[Step]]]:
        return [
            {
                rank: compile_program(
                    plan,
                    rank,
                    replica.stages,
                    self._resolved.checkpoint,
                    place=replica.place,
                    holding=replica.holdings.get(rank),
                )
                for rank in self._parts.local
            }
            for replica in self._replicas
        ]

    def _forget_shapes(self) -> None:
        self._shapes.forget()
        self._signatures.forget()
        self._transport.forget_shapes()
        for replica in self._replicas:
            for stage in replica.stages.values():
                stage.forget_shapes()


def _check_weights(rows: Sequence[Row]) -> None:
    """A microbatch of weight 0 has no backward, in which others' SyncBatchNorm would wait for it."""
    for microbatch, weights in enumerate(zip(*(row.weights for row in rows), strict=True)):
        if 0 in weights and any(weights):
            raise ValueError(
                f"microbatch {microbatch} weighs nothing on some replicas ({list(weights)}), where "
                "SyncBatchNorm needs all: share the batch out so that each counts, or take BatchNorm"
            )


def _settings(optimizer: torch.optim.Optimizer | None) -> int:
    """A number for the settings that are numbers, the same in every process."""
    groups = optimizer.param_groups if optimizer else ()
    settings = [
        (key, value)
        for group in groups
        for key, value in group.items()
        if isinstance(value, int | float | tuple)
    ]
    return zlib.crc32(repr(settings).encode())


def _replica_name(replica: int, rank: int) -> str:
    return f"replica {replica}"


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


def _posted(inputs: Sequence[Pytree] | None) -> Mapping[Key, Parcel]:
    """The microbatches of the batch as they lie in the first stage's mailbox."""
    parcels = {}
    for index, microbatch in enumerate(inputs or ()):
        tensors, layout = pack(microbatch)
        parcels[Key(ACTIVATION, BATCH, 0, index)] = Parcel(tensors, layout, (False,) * len(tensors))
    return parcels
