"""What is the best that any order can do? (CP-SAT's proof, on small cases.)

`python tests/schedules/optimum.py` writes the cases of `optima.json` anew, with their proven optima.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

OPTIMA = Path(__file__).parent / "optima.json"


class Case(NamedTuple):
    """Whole costs by stage, one stage a rank; memory in halves of a microbatch, of which I frees `freed`."""

    F: list[int]
    I: list[int]  # noqa: E741 - the op's own letter
    W: list[int]
    latency: int
    microbatches: int
    memory: int
    freed: int
    objective: str

    @property
    def ranks(self) -> int:
        return len(self.F)


def cases(number: int, seed: int = 3) -> list[Case]:
    """Random ones: equal and unequal stages, all memories, p <= 4, m <= 6."""
    random = Random(seed)

    def one(low: int, high: int) -> int:
        return low + int(random.random() * (high - low + 1))

    found = []
    for place in range(number):
        p, m = one(2, 4), one(3, 6)
        even = random.random() < 0.3
        costs = [[one(2, 12)] * p if even else [one(2, 12) for _ in range(p)] for _ in range(3)]
        latency = one(1, 4) if random.random() < 0.5 else 0
        memory = 2 * one(1, p + 2) + (random.random() < 0.2)
        freed = 1 if random.random() < 0.4 else 0
        objective = ("makespan", "span")[place % 2]
        found.append(Case(*costs, latency, m, memory, freed, objective))
    return found


def optimum(case: Case, seconds: float = 120.0) -> tuple[int, int]:
    """(best found, bound): equal where proven."""
    from ortools.sat.python import cp_model

    p, m = case.ranks, case.microbatches
    horizon = m * sum(case.F + case.I + case.W) + 4 * p * m * case.latency
    model = cp_model.CpModel()
    start: dict[tuple[str, int, int], Any] = {}
    end: dict[tuple[str, int, int], Any] = {}
    for s in range(p):
        intervals = []
        for op, costs in (("F", case.F), ("I", case.I), ("W", case.W)):
            for k in range(m):
                at = start[op, s, k] = model.new_int_var(0, horizon, f"{s}{op}{k}")
                end[op, s, k] = at + costs[s]
                intervals.append(model.new_fixed_size_interval_var(at, costs[s], f"{s}{op}{k} runs"))
                if k:
                    model.add(at >= end[op, s, k - 1])
        model.add_no_overlap(intervals)
    for k in range(m):
        for s in range(p):
            if s:
                model.add(start["F", s, k] >= end["F", s - 1, k] + case.latency)
                model.add(start["I", s - 1, k] >= end["I", s, k] + case.latency)
            model.add(start["I", s, k] >= end["F", s, k])
            model.add(start["W", s, k] >= end["I", s, k])
    for s in range(p):
        held, sizes = [], []
        for k in range(m):
            for until, size in (("W", 2 - case.freed), ("I", case.freed)):
                if size:
                    length = model.new_int_var(0, horizon, "")
                    held.append(
                        model.new_interval_var(start["F", s, k], length, end[until, s, k], f"{s} holds {k}")
                    )
                    sizes.append(size)
        model.add_cumulative(held, sizes, case.memory)
    value = model.new_int_var(0, horizon, "value")
    for s in range(p):
        began = start["F", s, 0] if case.objective == "span" else 0
        model.add(value >= end["W", s, m - 1] - began)
    if case.objective == "span":  # ranks begin as soon as they can
        for s in range(p):
            model.add(start["F", s, 0] == sum(case.F[:s]) + s * case.latency)
    model.minimize(value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_time_in_seconds = seconds
    solver.solve(model)
    return round(solver.objective_value), round(solver.best_objective_bound)


def main() -> None:
    rows = []
    for case in cases(int(sys.argv[1]) if len(sys.argv) > 1 else 120):
        best, bound = optimum(case)
        print(case, best, bound, flush=True)
        if best == bound:
            rows.append({**case._asdict(), "optimum": best})
    lines = ",\n".join(json.dumps(row) for row in rows)
    OPTIMA.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
