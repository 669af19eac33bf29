"""What should a person do about a step's idle time? Sentences."""

from __future__ import annotations

from collections.abc import Iterator

from pipe.timeline.balance import LEAST, Move, Stage
from pipe.timeline.idle import CAUSES, Idle
from pipe.timeline.trace import Trace

_UNEVEN = 1.1
"""From so many times the mean on, a stage isn't called balanced, even if no move helps."""
_WORTH_IT = 0.1
"""The share of all ranks' time from which on a cause is worth a sentence."""
_REMEDIES = {
    "fill": "Warm-up and drain are {share} of the ranks' time: more microbatches than {microbatches}, or a "
    "schedule with a smaller bubble (interleaved, zb_h1, zb_v), shrink them.",
    "wait": "Waiting for other stages inside the schedule is {share} of the ranks' time, most of it for "
    "stage {stage}.",
    "communication": "Communication is {share} of the ranks' time: a faster link, or stages cut where less "
    "is handed over, shrink it.",
    "optimizer": "The optimizer, behind the schedule, is {share} of the ranks' time.",
    "overhead": "The engine itself, and what the trace has no event for, is {share} of the ranks' time: the "
    "microbatches are too small to hide it.",
}


def advice(
    trace: Trace, slowest: Stage | None, move: Move | None, times: Idle, took_turns: bool
) -> Iterator[str]:
    """On balance first, where there are several stages; then on what takes most of the idle time."""
    if slowest is not None:
        yield _on_balance(trace, slowest, move)
    if took_turns:
        yield (
            "No two ranks ever computed at once. Those of one process take turns; between processes, "
            "microbatches this short end before the next rank begins: give each more to compute."
        )
    else:
        yield from _on_idle_time(trace, times)


def _on_balance(trace: Trace, slowest: Stage, move: Move | None) -> str:
    ratio = f"tage {slowest.stage} (rank {slowest.rank}) is {slowest.ratio:.2f} x the mean"
    if move is not None:
        return (
            f"S{ratio}; moving layer {_layer(trace, move.layer)} from stage {move.source} to stage "
            f"{move.target} is predicted to save {move.saving:.0%} of the step."
        )
    if slowest.ratio < _UNEVEN:
        return f"The stages are balanced: the slowest, s{ratio}."
    start, stop = slowest.layers
    if stop - start == 1:
        return (
            f"S{ratio}, and has one layer, {_layer(trace, start)}: "
            "only a smaller layer, or a faster device, would help."
        )
    return f"S{ratio}, but no single layer moved is predicted to save over {LEAST:.0%} of the step."


def _on_idle_time(trace: Trace, times: Idle) -> Iterator[str]:
    """On the cause that takes most, if it takes a good part of the step."""
    total = times.duration * len(trace.members)
    by_cause = dict(zip(CAUSES, times.causes.sum(axis=0).tolist(), strict=True))
    groups = {
        "fill": by_cause["warm_up"] + by_cause["drain"],
        "wait": by_cause["activation"] + by_cause["gradient"],
        **{cause: by_cause[cause] for cause in ("communication", "optimizer", "overhead")},
    }
    worst = max(groups, key=lambda cause: groups[cause])
    if groups[worst] > _WORTH_IT * total:
        yield _REMEDIES[worst].format(
            share=f"{groups[worst] / total:.0%}",
            microbatches=trace.header.microbatches,
            stage=int(times.waits.sum(axis=(0, 1))[:-1].argmax()),
        )


def _layer(trace: Trace, layer: int) -> str:
    """Its index over all stages, and its name; "6 Linear", which says the index itself, as 6 (Linear)."""
    names = trace.header.layer_names
    if layer >= len(names):
        return str(layer)
    first, _, rest = names[layer].partition(" ")
    return f"{layer} ({rest if first == str(layer) and rest else names[layer]})"
