"""In which order does 1F1B work? (PipeDream-Flush: Narayanan et al., arXiv 2006.09503.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.action import Action, Actions
from schedules.errors import ScheduleError
from schedules.ops import B, F
from schedules.schedule import Problem, shown


@dataclass(frozen=True)
class OneFOneB:
    """Forwards until the first gradient is there, then one backward, one forward. Idle (p-1)(F+B).

                 warm-up                  steady state        drain
        rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- .  B3--- .  B4---
        rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- .  B4--- .  .
        rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- .  .  .  .

    Stage s of p keeps at most p - s activations, whatever the number of microbatches.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        if problem.num_stages != problem.ranks:
            raise ScheduleError(
                f"1f1b needs one stage per rank, and placement {shown(problem.placement)} puts "
                f"{problem.num_stages} stages on {problem.ranks} ranks: "
                f"{shown(self.placement(problem.ranks))} would do, or gpipe, which takes any placement"
            )
        stages = (problem.stages_of(rank)[0] for rank in range(problem.ranks))
        return [_order(stage, problem.num_stages - stage, problem.microbatches) for stage in stages]


def _order(stage: int, depth: int, microbatches: int) -> Actions:
    """`depth` stages are at or behind this one: so many forwards go out before a gradient comes back."""
    warm_up = min(microbatches, depth)
    steady = microbatches - warm_up
    return Actions.join(
        [
            Actions.run(stage, F, 0, warm_up),
            Actions.weave(Actions.run(stage, B, 0, steady), Actions.run(stage, F, warm_up, microbatches)),
            Actions.run(stage, B, steady, microbatches),
        ]
    )
