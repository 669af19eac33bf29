"""What the ranks tell each other before a call, and whether they mean the same thing."""

import hashlib
from collections.abc import Sequence
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
    """What a rank says when a pipeline is built."""

    error: str | None = None
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
    weights: tuple[float, ...] | None = None
    prints: tuple[int | None, int | None] = (None, None)
    loss: LossInfo | None = None


def check_openings(openings: Sequence[Opening]) -> None:
    """Raises unless all ranks built the same pipeline.

    Raises:
        PeerError: a rank could not build it.
        DisagreementError: they built different ones.
    """
    _no_errors([opening.error for opening in openings], "could not build its pipeline")
    _same([opening.options for opening in openings], "option strings")
    _same([opening.plan for opening in openings], "plans")
    _same_items([opening.parameters for opening in openings], "models")
    _same_items([opening.optimizer for opening in openings], "optimizer settings")
    given = {rank: opening.seed for rank, opening in enumerate(openings) if opening.seed_given}
    if given and (len(given) < len(openings) or len(set(given.values())) > 1):
        raise DisagreementError(f"the ranks were given different seeds: {given}")


def check_notes(notes: Sequence[Note], first: int, last: int, *, targeted: bool) -> int:
    """The number of microbatches of a call; raises unless all ranks mean the same call.

    Args:
        first, last: which note speaks for the first and the last stage.
        targeted: whether the call has targets.

    Raises:
        PeerError: a rank can't take part.
        DisagreementError: the ranks call different things.
        ValueError: inputs and targets don't match, or are missing.
    """
    check_kinds(notes)
    _no_errors([note.error for note in notes], f"can't take part in {notes[0].kind}")
    _same([note.call for note in notes], "numbers of steps made so far")
    _same_samples(notes, first, last)
    inputs, targets = notes[first].cut_inputs, notes[last].cut_targets
    if inputs is None:
        raise ValueError(f"{notes[0].kind} needs inputs on the rank of the first stage (rank {first})")
    if targeted and targets is None:
        raise ValueError(f"{notes[0].kind} needs targets on the rank of the last stage (rank {last})")
    if targeted and inputs != targets:
        raise ValueError(f"the inputs make {inputs} microbatches and the targets {targets}")
    counts = {rank: count for rank, n in enumerate(notes) for count in (n.cut_inputs, n.cut_targets) if count}
    if len(set(counts.values())) > 1:
        raise DisagreementError(f"the ranks were given different numbers of microbatches: {counts}")
    for which, what in enumerate(("inputs", "targets")):
        if len({note.prints[which] for note in notes if note.prints[which] is not None}) > 1:
            raise DisagreementError(
                f"the ranks were given different {what}: a loader that shuffles does it alike on all "
                "ranks (torch.manual_seed, a seeded generator); a rank that has no use for them may pass None"
            )
    return inputs


def check_kinds(notes: Sequence[Note]) -> None:
    """Raises unless all ranks make the same call.

    Raises:
        DisagreementError: they don't.
    """
    _same([note.kind for note in notes], "calls")


def _same_samples(notes: Sequence[Note], first: int, last: int) -> None:
    inputs = {rank: note.inputs for rank, note in enumerate(notes) if note.inputs is not None}
    targets = {rank: note.targets for rank, note in enumerate(notes) if note.targets is not None}
    if len({*inputs.values(), *targets.values()}) <= 1:
        return
    if first in inputs and last in targets and inputs[first] != targets[last]:
        raise ValueError(f"the inputs have {inputs[first]} samples and the targets {targets[last]}")
    raise DisagreementError(
        f"the ranks were given batches of different sizes: inputs {inputs}, targets {targets}"
    )


def _no_errors(errors: Sequence[str | None], what: str) -> None:
    failed = {rank: error for rank, error in enumerate(errors) if error is not None}
    if failed:
        raise PeerError("; ".join(f"rank {rank} {what}: {error}" for rank, error in failed.items()))


def _same(values: Sequence[object], what: str) -> None:
    if any(value != values[0] for value in values):
        differing = "; ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
        raise DisagreementError(f"the ranks have different {what}: {differing}")


def _same_items(lists: Sequence[Sequence[str]], what: str) -> None:
    """Like `_same`, for long lists: tells the first item that differs."""
    for rank, items in enumerate(lists):
        pairs = zip_longest(lists[0], items, fillvalue="nothing")
        differing = next(((ours, theirs) for ours, theirs in pairs if ours != theirs), None)
        if differing:
            raise DisagreementError(
                f"the ranks have different {what}: {differing[0]} on rank 0, {differing[1]} on rank {rank}"
            )
