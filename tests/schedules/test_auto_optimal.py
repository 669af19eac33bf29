"""How far is `Auto` from the best order that there is?"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from optimum import OPTIMA, Case, cases, optimum

from schedules import Auto, Costs, Found, Problem

_ROWS = json.loads(OPTIMA.read_text())


class Compared(NamedTuple):
    case: Case
    best: int
    found: Found

    @property
    def excess(self) -> float:
        return self.found.value / self.best - 1


def committed() -> list[tuple[Case, int]]:
    """What `optimum.py` wrote."""
    return [(Case(**{field: row[field] for field in Case._fields}), row["optimum"]) for row in _ROWS]


def compared(case: Case, best: int) -> Compared:
    costs = Costs(F=case.F, I=case.I, W=case.W, latency=case.latency, released_at_input=case.freed / 2)
    problem = Problem(range(case.ranks), case.microbatches, costs, case.memory / 2)
    found = Auto(objective=case.objective).search(problem)  # type: ignore[arg-type]
    assert found.bound <= best <= found.value
    return Compared(case, best, found)


def summary(rows: Sequence[Compared]) -> str:
    groups = defaultdict(list)
    for row in rows:
        groups[row.case.ranks, row.case.microbatches].append(row)
    lines = [" p  m  cases  optimal  proven by the bound  worst"]
    for (p, m), group in sorted(groups.items()):
        optimal, proven = sum(r.excess == 0 for r in group), sum(r.found.gap == 0 for r in group)
        worst = max(row.excess for row in group)
        lines.append(f"{p:>2} {m:>2} {len(group):>6} {optimal:>8} {proven:>20} {worst:>6.2%}")
    return "\n".join(lines)


def table(rows: Sequence[Compared]) -> str:
    lines = ["optimum  auto   bound  excess  objective  memory  m  costs F; I; W; latency"]
    for case, best, found in rows:
        numbers = "; ".join(",".join(map(str, costs)) for costs in (case.F, case.I, case.W))
        lines.append(
            f"{best:>7} {found.value:>5g} {found.bound:>7g} {found.value / best - 1:>7.2%}"
            f"  {case.objective:<9} {case.memory / 2:>7g}{'*' if case.freed else ' '}"
            f"{case.microbatches:>2}  {numbers}; {case.latency}"
        )
    return "\n".join(lines)


def test_within_one_percent_of_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    """Random costs and memories, p <= 4, m <= 6. The whole table is in the test's output (-rP)."""
    rows = [compared(*row) for row in committed()]
    print(table(rows))
    with capsys.disabled():
        print(f"\n{summary(rows)}")
    assert len(rows) >= 100 and {row.case.objective for row in rows} == {"makespan", "span"}
    assert max(row.excess for row in rows) <= 0.01


def test_the_solver_finds_what_is_committed() -> None:
    fresh, kept = cases(12), committed()[:12]
    assert [case for case, _ in kept] == fresh
    for case, best in kept:
        assert optimum(case) == (best, best)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_within_one_percent_of_more_optima(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for case in cases(500, seed=11):
        best, bound = optimum(case)
        assert best == bound
        rows.append(compared(case, best))
    print(table(rows))
    with capsys.disabled():
        print(f"\n{summary(rows)}")
    assert max(row.excess for row in rows) <= 0.01


@pytest.mark.parametrize(
    ("objective", "memory", "m", "costs", "latency", "best"),
    [
        ("makespan", 4, 8, (1, 1, 1), 0, 27),
        ("span", 7, 8, (1, 1, 1), 0, 24),
        ("makespan", 3, 8, (1, 1, 1), 0, 31),
        ("makespan", 2, 8, (1, 1, 1), 0, 41),
        ("span", 4, 8, (2, 2, 1), 0, 49),
        ("span", 8, 8, (2, 2, 1), 0, 45),
        ("makespan", 4, 6, (10, 10, 5), 1, 207),
    ],
)
def test_optima_at_p4(
    objective: str, memory: int, m: int, costs: tuple[int, int, int], latency: int, best: int
) -> None:
    """The ones that test_auto.py expects, proven."""
    case = Case(*([cost] * 4 for cost in costs), latency, m, 2 * memory, 0, objective)
    assert optimum(case) == (best, best)
