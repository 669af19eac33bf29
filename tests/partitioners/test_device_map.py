"""Does a device map read, print and refuse what it should?"""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioners import DeviceMap, PartitionError, Range


def test_reads_a_map() -> None:
    device_map = DeviceMap.parse("0:0-5,1:5-10")
    assert device_map.ranges == (Range(0, 0, 5), Range(1, 5, 10))
    assert device_map.placement == (0, 1)
    assert device_map.stages == (range(0, 5), range(5, 10))
    assert device_map.ranks == 2
    device_map.validate(10)


def test_a_rank_may_own_several_ranges() -> None:
    device_map = DeviceMap.parse("0:0-2,1:2-5,0:5-7,1:7-10")
    assert device_map.placement == (0, 1, 0, 1)
    assert device_map.ranks == 2


def test_the_order_in_the_text_is_free() -> None:
    device_map = DeviceMap.parse("1:5-10,0:0-5")
    assert device_map == DeviceMap.parse("0:0-5,1:5-10")
    assert str(device_map) == "0:0-5,1:5-10"


def test_ranks_need_not_follow_the_layers() -> None:
    assert DeviceMap.parse("1:0-5,0:5-10").placement == (1, 0)


@given(st.data())
def test_prints_what_it_reads(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    ranks = data.draw(st.integers(1, len(counts)))
    extra = st.integers(0, ranks - 1)
    placement = data.draw(st.permutations([*range(ranks), *(data.draw(extra) for _ in counts[ranks:])]))
    cuts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]

    device_map = DeviceMap.from_cuts(cuts, placement)
    shuffled = ",".join(data.draw(st.permutations(str(device_map).split(","))))

    assert DeviceMap.parse(shuffled) == device_map
    assert device_map.placement == tuple(placement)
    assert device_map.stages == tuple(range(*ends) for ends in pairwise(cuts))
    device_map.validate(cuts[-1])


# Below each map, what the error is about.
REFUSED = """
0:0-6,1:5-10            layer 5 belongs to two ranges, 0:0-6 and 1:5-10
      ^^^^^^
0:0-7,1:5-10            layers 5 to 6 belong to two ranges
      ^^^^^^
0:0-10,1:5-7            layers 5 to 6 belong to two ranges
       ^^^^^
0:0-4,1:5-10            layer 4 belongs to no rank
      ^^^^^^
1:6-10,0:0-4            layers 4 to 5 belong to no rank: 1:6-10 follows 0:0-4
^^^^^^
0:5-3                   0:5-3 is reversed
^^^^^
0:0-0                   0:0-0 is empty
^^^^^
0:3                     lacks its stop: layer 3 alone is 0:3-4
^^^
0-5,1:5-10              lacks its rank: write RANK:0-5
^^^
0:0-10-2                no step
^^^^^^^^
0:0-5,2:5-10            rank 1 is missing: 2:5-10 names rank 2
      ^^^^^^
1:0-10                  rank 0 is missing
^^^^^^
0:1-10                  layer 0 belongs to no rank
^^^^^^
0:0-5,,1:5-10           a range is missing here
      ^
0:0-5,                  a range is missing here
      ^
0:0-5, 1:5-10           has a space
      ^^^^^^^
0:0-٣                   isn't ASCII
^^^^^
-1:0-5                  negative
^^^^^^
0:-1-5                  negative
^^^^^^
0:0-5;1:5-10            isn't of the form RANK:START-STOP
^^^^^^^^^^^^
+0:0-5                  isn't of the form RANK:START-STOP
^^^^^^
0:0-1_0                 isn't of the form RANK:START-STOP
^^^^^^^
0:0-99999999999999999   isn't of the form RANK:START-STOP
^^^^^^^^^^^^^^^^^^^^^
""".strip("\n").split("\n")


@pytest.mark.parametrize(("case", "carets"), list(zip(REFUSED[::2], REFUSED[1::2], strict=True)))
def test_refuses_and_says_where(case: str, carets: str) -> None:
    text, message = case[:24].rstrip(), case[24:]
    with pytest.raises(PartitionError) as caught:
        DeviceMap.parse(text)
    assert message in str(caught.value)
    start = carets.index("^")
    # Nothing stands where a range is missing: the caret then marks the place between two characters.
    missing = message.startswith("a range is missing")
    assert caught.value.span == (start, start if missing else start + carets.count("^"))


def test_refuses_an_empty_text() -> None:
    with pytest.raises(PartitionError, match="empty") as caught:
        DeviceMap.parse("")
    assert caught.value.span == (0, 0)


@pytest.mark.parametrize(
    ("num_layers", "message", "span"),
    [
        (8, "1:5-10 goes past the last layer: the model has 8 layers, 0 to 7", (0, 6)),
        (4, "0:0-5 goes past the last layer: the model has 4 layers", (7, 12)),
        (11, "layer 10 belongs to no rank: the map ends at 10, the model has 11 layers", (0, 6)),
        (13, "layers 10 to 12 belong to no rank", (0, 6)),
    ],
)
def test_must_end_where_the_model_does(num_layers: int, message: str, span: tuple[int, int]) -> None:
    with pytest.raises(PartitionError) as caught:
        DeviceMap.parse("1:5-10,0:0-5").validate(num_layers)
    assert message in str(caught.value)
    assert caught.value.span == span


def test_a_map_made_without_text_is_checked_too() -> None:
    with pytest.raises(PartitionError, match="two ranges") as caught:
        DeviceMap((Range(0, 0, 6), Range(1, 5, 10)))
    assert caught.value.span is None
    with pytest.raises(PartitionError, match="empty"):
        DeviceMap(())
    with pytest.raises(PartitionError, match="negative"):
        DeviceMap((Range(-1, 0, 3),))
    with pytest.raises(PartitionError, match="2 stages take 3 cuts, not 2"):
        DeviceMap.from_cuts((0, 5), (0, 1))


def test_an_error_keeps_its_span_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PartitionError("no", (1, 2))))
    assert (str(error), error.span) == ("no", (1, 2))
