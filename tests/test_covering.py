"""Does a covering array hold what it promises, and little more?"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from covering import cases, covering, product
from hypothesis import given
from hypothesis import strategies as st

small_factors = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(
    lambda counts: {f"f{at}": list(range(count)) for at, count in enumerate(counts)}
)


def pairs(rows: list[dict[str, Any]]) -> set[tuple[tuple[str, Any], ...]]:
    return {pair for row in rows for size in (1, 2) for pair in combinations(row.items(), size)}


@given(small_factors)
def test_holds_every_value_and_pair(factors: dict[str, list[int]]) -> None:
    rows = covering(factors)
    assert pairs(rows) == pairs(product(factors))
    assert all(row in product(factors) for row in rows)
    assert rows == covering(factors)


@given(small_factors, st.randoms(use_true_random=False))
def test_holds_every_possible_pair_where_rows_are_left_out(
    factors: dict[str, list[int]], random: Any
) -> None:
    allowed = [row for row in product(factors) if random.random() < 0.6]
    assert product(factors, valid=allowed.__contains__) == allowed
    rows = covering(factors, valid=allowed.__contains__)
    assert pairs(rows) == pairs(allowed)
    assert all(row in allowed for row in rows)


def test_is_much_smaller_than_the_product() -> None:
    factors = {name: list(range(4)) for name in "abcde"}
    assert len(product(factors)) == 1024
    assert 16 <= len(covering(factors)) <= 32


def test_values_need_not_be_hashable() -> None:
    rows = covering({"sizes": [[1], [1]], "on": [True]})
    assert rows == [{"sizes": [1], "on": True}, {"sizes": [1], "on": True}]


def test_cases_mark_what_the_array_leaves_out() -> None:
    factors: dict[str, list[Any]] = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [len, max]}
    marked = cases(factors)
    assert [dict(zip(factors, case.values, strict=True)) for case in marked] == product(factors)
    unmarked = [dict(zip(factors, case.values, strict=True)) for case in marked if not case.marks]
    assert pairs(unmarked) == pairs(covering(factors))
    assert len(unmarked) == len(covering(factors)) < len(marked)
    assert marked[0].id == "a=1-b=1-c=len"
    assert {mark.name for case in marked for mark in case.marks} == {"full"}
