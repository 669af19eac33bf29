"""Which rows of a product cover every pair of values? `make test` runs those, `make test-full` all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from itertools import product as cartesian
from typing import Any

import pytest

Row = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
# A value is known by its index: values need be neither hashable nor different from one another.
_Indices = tuple[int, ...]
_Pair = tuple[tuple[int, int], tuple[int, int]]


def product(factors: Factors, *, valid: Callable[[Row], bool] | None = None) -> list[Row]:
    """Every combination, the last factor varying fastest, less those that `valid` rejects."""
    return [_row(factors, indices) for indices in _valid_rows(factors, valid)]


def covering(factors: Factors, *, valid: Callable[[Row], bool] | None = None) -> list[Row]:
    """Rows that hold each value, and each pair of values of two factors, that any valid row holds.

    Greedy: always the row that adds most pairs, the first such one in the product's order. So the same
    factors give the same rows, in any process, and the first row is the product's first. It looks through
    the product for each row it takes, so is meant for products of thousands.
    """
    return [_row(factors, indices) for indices in _chosen(_valid_rows(factors, valid))]


def cases(factors: Factors, *, valid: Callable[[Row], bool] | None = None) -> list[Any]:
    """The whole product for `pytest.mark.parametrize`; rows outside the covering array are marked `full`.

        @pytest.mark.parametrize(("ranks", "chunks"), cases({"ranks": [1, 2], "chunks": [1, 4]}))

    Each case has the values in the factors' order, and an id such as `ranks=2-chunks=4`.
    """
    rows = _valid_rows(factors, valid)
    chosen = set(_chosen(rows))
    return [
        pytest.param(
            *_row(factors, indices).values(),
            id="-".join(f"{name}={_short(value)}" for name, value in _row(factors, indices).items()),
            marks=() if indices in chosen else (pytest.mark.full,),
        )
        for indices in rows
    ]


def _valid_rows(factors: Factors, valid: Callable[[Row], bool] | None) -> list[_Indices]:
    rows = cartesian(*(range(len(values)) for values in factors.values()))
    return [row for row in rows if valid is None or valid(_row(factors, row))]


def _row(factors: Factors, indices: _Indices) -> Row:
    return {name: values[at] for (name, values), at in zip(factors.items(), indices, strict=True)}


def _chosen(rows: list[_Indices]) -> list[_Indices]:
    pairs_of = {row: _pairs(row) for row in rows}
    missing = set().union(*pairs_of.values())
    chosen = []
    while missing:
        # max() takes the first of equals.
        best = max(pairs_of, key=lambda row: len(pairs_of[row] & missing))
        missing -= pairs_of.pop(best)
        chosen.append(best)
    return chosen


def _pairs(row: _Indices) -> set[_Pair]:
    """The pairs a row holds; a single factor is paired with itself, so that its values are covered too."""
    values = list(enumerate(row))
    return set(combinations(values, 2)) if len(values) > 1 else {(value, value) for value in values}


def _short(value: Any) -> str:
    return str(getattr(value, "__name__", value))
