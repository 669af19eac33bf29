"""What the ranks tell each other before a call, and whether they mean the same thing."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from pipe.errors import DisagreementError, PeerError


def digest(items: Sequence[object]) -> str:
    """A short fingerprint, the same in every process."""
    return hashlib.sha256(repr(list(items)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class LossInfo:
    """What only the last stage's rank learns of a loss: its precision and the names of its metrics."""

    dtype: torch.dtype
    names: tuple[str, ...]


@dataclass(frozen=True)
class Opening:
    """What a rank says when a pipeline is built.

    `replicas` is how many it thinks there are: only then can others be named.
    """

    error: str | None = None
    replicas: int = 1
    options: str = ""
    plan: str = ""
    seed: int = 0
    seed_given: bool = False
    parameters: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """What a rank says before a call.

    Args:
        kind: the method called, with the arguments that all ranks must share.
        error: why this rank can't take part.
        inputs, targets: the number of samples of what it was given; None where it was given nothing.
        cut_inputs, cut_targets: the number of microbatches of what it was given.
        call: how many steps it has made.
        signatures: the first stage's rank's number for the shapes of each microbatch's input.
        environment: its own number for what else shapes its outputs (training flags, autocast and the like).
        settings: a number for the settings of the optimizer's groups (learning rates and the like).
        trained: a number for which of its parameters train, the same in every process.
        prints: fingerprints of the inputs and the targets that it was given.
        weights: the last stage's rank's weight of each microbatch.
        loss: what it knows of this kind of call's loss.
    """

    kind: str
    error: str | None = None
    inputs: int | None = None
    targets: int | None = None
    cut_inputs: int | None = None
    cut_targets: int | None = None
    call: int = 0
    signatures: tuple[int, ...] | None = None
    environment: int = 0
    settings: int = 0
    trained: int = 0
    weights: tuple[float, ...] | None = None
    prints: tuple[int | None, int | None] = (None, None)
    loss: LossInfo | None = None


@dataclass(frozen=True)
class Row:
    """A replica's notes, in the order of its ranks; and which of them speak for its ends."""

    notes: Sequence[Note]
    first: int
    last: int
    name: Callable[[int], str]
    """The rank behind a note, in words."""

    @property
    def count(self) -> int | None:
        """The microbatches that its inputs are cut into."""
        return self.notes[self.first].cut_inputs

    @property
    def weights(self) -> tuple[float, ...]:
        return self.notes[self.last].weights or (1.0,) * (self.count or 0)

    @property
    def cuts_rows(self) -> bool:
        """Whether its microbatches are rows of a batch, which can be cut into fewer."""
        return self.notes[self.first].inputs is not None


def check_openings(openings: Sequence[Opening], name: Callable[[int], str]) -> None:
    """Raises unless all ranks built the same pipeline.

    Raises:
        PeerError: a rank could not build it.
        DisagreementError: they built different ones.
    """
    named = [(name(member), opening) for member, opening in enumerate(openings)]
    _no_errors([(who, opening.error) for who, opening in named], "could not build its pipeline")
    hint = ""
    if any("tensorboard=" in opening.options for opening in openings):
        hint = " (tensorboard= is the same on all ranks, a SummaryWriter too: rank 0's is used)"
    _same([(who, opening.options) for who, opening in named], "option strings", hint)
    _same([(who, opening.plan) for who, opening in named], "plans")
    _same_items([(who, opening.parameters) for who, opening in named], "models")
    _same_items([(who, opening.optimizer) for who, opening in named], "optimizer settings")
    given = {who: opening.seed for who, opening in named if opening.seed_given}
    if given and (len(given) < len(openings) or len(set(given.values())) > 1):
        raise DisagreementError(f"the ranks were given different seeds: {given}")


def check_notes(rows: Sequence[Row], *, targeted: bool) -> int:
    """The number of microbatches that each replica runs in a call; raises unless all mean the same call.

    That is the fewest that any replica has: the others cut their batches again.

    Args:
        rows: one a replica.
        targeted: whether the call has targets.

    Raises:
        PeerError: a rank can't take part.
        DisagreementError: the ranks call different things.
        ValueError: inputs and targets don't match, or are missing.
    """
    named = [(row.name(rank), note) for row in rows for rank, note in enumerate(row.notes)]
    kind = named[0][1].kind
    check_kinds(named)
    _no_errors([(who, note.error) for who, note in named], f"can't take part in {kind}")
    _same([(who, note.call) for who, note in named], "numbers of steps made so far")
    if len({note.settings for _, note in named}) > 1:
        raise DisagreementError(
            "the ranks' optimizers have different settings by now (lr, weight_decay, ...): an LR scheduler "
            "steps on all ranks alike"
        )
    _check_samples(rows)
    for row in rows:
        _check_row(row, kind, targeted=targeted)
    for notes in zip(*(row.notes for row in rows), strict=True):
        if len({note.trained for note in notes}) > 1:
            raise DisagreementError(
                "the replicas train different parameters: requires_grad must be the same on all"
            )
    counts = {index: row.count for index, row in enumerate(rows)}
    if len(set(counts.values())) > 1 and not all(row.cuts_rows for row in rows):
        raise DisagreementError(f"the replicas were given different numbers of microbatches: {counts}")
    return min(count for count in counts.values() if count is not None)


def _check_row(row: Row, kind: str, *, targeted: bool) -> None:
    """Whether one replica's ranks were given the same batch."""
    notes = row.notes
    _same_samples(row)
    inputs, targets = row.count, notes[row.last].cut_targets
    if inputs is None:
        raise ValueError(f"{kind} needs inputs on the rank of the first stage ({row.name(row.first)})")
    if targeted and targets is None:
        raise ValueError(f"{kind} needs targets on the rank of the last stage ({row.name(row.last)})")
    if targeted and inputs != targets:
        raise ValueError(f"the inputs make {inputs} microbatches and the targets {targets}")
    counts = {
        row.name(rank): count
        for rank, n in enumerate(notes)
        for count in (n.cut_inputs, n.cut_targets)
        if count
    }
    if len(set(counts.values())) > 1:
        raise DisagreementError(f"the ranks were given different numbers of microbatches: {counts}")
    for which, what in enumerate(("inputs", "targets")):
        if len({note.prints[which] for note in notes if note.prints[which] is not None}) > 1:
            raise DisagreementError(
                f"the ranks were given different {what}: a loader that shuffles does it alike on all "
                "ranks of a replica (torch.manual_seed, a seeded generator); a rank that has no use for them "
                "may pass None"
            )


def _check_samples(rows: Sequence[Row]) -> None:
    """Every replica needs some: one without would leave the others waiting."""
    empty = [index for index, row in enumerate(rows) if any(0 in (n.inputs, n.targets) for n in row.notes)]
    if empty and len(rows) == 1:
        raise ValueError("the batch has no samples")
    if empty:
        counts = [row.notes[row.first].inputs for row in rows]
        raise ValueError(
            f"replica {empty[0]} has no samples, and every replica needs one at least; they have {counts}"
        )


def check_kinds(notes: Iterable[tuple[str, Note]]) -> None:
    """Raises unless all ranks make the same call.

    Raises:
        DisagreementError: they don't.
    """
    _same([(who, note.kind) for who, note in notes], "calls")


def _same_samples(row: Row) -> None:
    notes = row.notes
    inputs = {row.name(rank): note.inputs for rank, note in enumerate(notes) if note.inputs is not None}
    targets = {row.name(rank): note.targets for rank, note in enumerate(notes) if note.targets is not None}
    if len({*inputs.values(), *targets.values()}) <= 1:
        return
    first, last = notes[row.first].inputs, notes[row.last].targets
    if first is not None and last is not None and first != last:
        raise ValueError(f"the inputs have {first} samples and the targets {last}")
    raise DisagreementError(
        f"the ranks were given batches of different sizes: inputs {inputs}, targets {targets}"
    )


def _no_errors(errors: Sequence[tuple[str, str | None]], what: str) -> None:
    failed = [f"{who} {what}: {error}" for who, error in errors if error is not None]
    if failed:
        raise PeerError("; ".join(failed))


def _same(values: Sequence[tuple[str, object]], what: str, hint: str = "") -> None:
    if any(value != values[0][1] for _, value in values):
        differing = "; ".join(f"{who}: {value!r}" for who, value in values)
        raise DisagreementError(f"the ranks have different {what}: {differing}{hint}")


def _same_items(lists: Sequence[tuple[str, Sequence[str]]], what: str) -> None:
    """Like `_same`, for long lists: tells the first item that differs."""
    first, expected = lists[0]
    for who, items in lists:
        pairs = zip_longest(expected, items, fillvalue="nothing")
        differing = next(((ours, theirs) for ours, theirs in pairs if ours != theirs), None)
        if differing:
            raise DisagreementError(
                f"the ranks have different {what}: {differing[0]} on {first}, {differing[1]} on {who}"
            )
