"""What does a plan look like, as a grid of time?"""

from __future__ import annotations

from schedules.action import Action
from schedules.clock import costs, start_times
from schedules.index import Index, compute_only
from schedules.ops import COMPUTE, OPS
from schedules.plan import Plan
from schedules.verifier import check_orders

_RULER = 5


def draw(plan: Plan) -> str:
    """One row a rank, one column a unit of time: the orders at default costs, transfers taking no time.

        F forward, B-- backward (2 columns); number = microbatch; . bubble
          time  0        5
        rank 0  F0 F1 .  .  B0--- B1---
        rank 1  .  F0 B0--- F1 B1--- .

    A rank's second stage carries one prime (F0'), its third two, ...
    """
    index = Index.of(compute_only(plan))
    check_orders(index)
    starts, durations = start_times(index).tolist(), costs(index).tolist()
    primes = {
        stage: "'" * place for rank in range(plan.ranks) for place, stage in enumerate(plan.stages_of(rank))
    }
    width = 2 + len(str(plan.microbatches - 1)) + max(map(len, primes.values()))
    columns = max(map(sum, zip(starts, durations, strict=True)))
    margin = len(f"rank {plan.ranks - 1}")
    ruler = "".join(str(time).ljust(width * _RULER) for time in range(0, columns, _RULER))
    lines = [_legend(plan, primes), f"{'time':>{margin}}  {ruler.rstrip()}"]
    for rank, order in enumerate(index.plan.programs):
        low, high = index.offsets[rank : rank + 2].tolist()
        row = [".".ljust(width)] * columns
        for action, start, duration in zip(order, starts[low:high], durations[low:high], strict=True):
            row[start : start + duration] = _cells(action, primes[action.stage], duration, width)
        lines.append(f"{f'rank {rank}':<{margin}}  {''.join(row).rstrip()}")
    return "\n".join(lines)


def _cells(action: Action, prime: str, duration: int, width: int) -> list[str]:
    """The action's columns, of which the last ends in a space."""
    text = f"{action.op}{action.microbatch}{prime}"
    text = text.ljust(duration * width - 1, "-" if duration > 1 else " ") + " "
    return [text[place : place + width] for place in range(0, len(text), width)]


def _legend(plan: Plan, primes: dict[int, str]) -> str:
    codes = {int(code) for order in plan.orders for code in set(order.ops.tolist())}
    used = [OPS[op] for op in COMPUTE if OPS[op].code in codes]
    parts = [
        f"{spec.text}-- {spec.meaning} ({spec.cost} columns)"
        if spec.cost > 1
        else f"{spec.text} {spec.meaning}"
        for spec in used
    ]
    stages = "; ' = the rank's next stage" if any(primes.values()) else ""
    return f"{', '.join(parts)}; number = microbatch{stages}; . bubble"
