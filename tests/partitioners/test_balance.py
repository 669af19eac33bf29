"""Are the cuts the best there are? Against every possible cut."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioners import PartitionError, params, uniform


def best_of_all(sizes: list[int], num_stages: int) -> tuple[int, ...]:
    """Brute force, with the tie rules spelt out once more."""

    def key(cuts: tuple[int, ...]) -> tuple[object, ...]:
        stages = [sum(sizes[start:stop]) for start, stop in pairwise(cuts)]
        counts = [stop - start for start, stop in pairwise(cuts)]
        return max(stages), sum(size**2 for size in stages), counts[0], counts[-1], counts

    inner = combinations(range(1, len(sizes)), num_stages - 1)
    return min(((0, *cuts, len(sizes)) for cuts in inner), key=key)


# Small sizes, zero among them, make ties; large ones make the general case.
layer_sizes = st.lists(st.integers(0, 3) | st.integers(0, 10**15), min_size=1, max_size=9)


@given(layer_sizes, st.data())
def test_params_finds_the_best_cuts(sizes: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(sizes)))
    assert params(sizes, num_stages) == best_of_all(sizes, num_stages)


@given(st.integers(1, 40), st.data())
def test_uniform_differs_by_at_most_one_and_is_params_for_equal_layers(
    num_layers: int, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    cuts = uniform(num_layers, num_stages)
    counts = [stop - start for start, stop in pairwise(cuts)]
    assert (cuts[0], cuts[-1], len(counts)) == (0, num_layers, num_stages)
    assert max(counts) - min(counts) <= 1
    assert cuts == params([1] * num_layers, num_stages)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "cuts"),
    [
        (10, 1, (0, 10)),
        (10, 2, (0, 5, 10)),
        (9, 2, (0, 4, 9)),
        (10, 4, (0, 2, 5, 8, 10)),
        (9, 4, (0, 2, 4, 7, 9)),
        (11, 4, (0, 2, 5, 8, 11)),
        (4, 4, (0, 1, 2, 3, 4)),
    ],
)
def test_inner_stages_take_the_rest(num_layers: int, num_stages: int, cuts: tuple[int, ...]) -> None:
    assert uniform(num_layers, num_stages) == cuts


def test_a_large_layer_stands_alone() -> None:
    assert params([1, 1, 10, 1, 1], 3) == (0, 2, 3, 5)


def test_no_stage_is_empty_even_if_layers_are() -> None:
    assert params([0, 0, 0], 3) == (0, 1, 2, 3)
    assert params([5, 0, 0], 2) == (0, 1, 3)


@pytest.mark.parametrize("cut", [uniform, lambda n, k: params([1] * n, k)])
def test_stages_need_layers(cut: object) -> None:
    assert callable(cut)
    with pytest.raises(PartitionError, match="12 layers cannot fill 16 stages"):
        cut(12, 16)
    with pytest.raises(PartitionError, match="0 layers cannot fill 1 stages"):
        cut(0, 1)
    with pytest.raises(PartitionError, match="0 stages"):
        cut(12, 0)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(PartitionError, match="layer 1 has a negative size, -3"):
        params([1, -3], 2)


def test_a_thousand_layers_take_no_more_than_seconds() -> None:
    start = time.perf_counter()
    params([(7 * layer) % 31 for layer in range(1000)], 16)
    assert time.perf_counter() - start < 5
