"""Does the option string mean what it says, and does a wrong one say what is wrong?"""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedules
from pipe.options import KEYS, OptionError, Options, Resolved, merge


def resolve(options: Options, num_layers: int = 10, world_size: int = 1, **keywords: Any) -> Resolved:
    return options.resolve(num_layers, world_size, lambda: [1] * num_layers, **keywords)


# --- What is understood ---


def test_reads_settings_in_any_order() -> None:
    options = Options.parse("  clip=1\tdevice_map=1:5-10,0:0-5\n chunks=5 timeout=2.5e1 ")
    assert options == Options(chunks=5, device_map="0:0-5,1:5-10", clip=1.0, timeout=25.0)
    assert str(options) == "chunks=5 device_map=0:0-5,1:5-10 clip=1.0 timeout=25.0"


def test_defaults_print_as_nothing() -> None:
    assert str(Options.parse("checkpoint=never timeout=300 device_map=params")) == ""
    assert Options.parse("") == Options()


counts = st.none() | st.integers(1, 999_999_999)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
all_options = st.builds(
    Options,
    chunks=counts,
    device_map=st.sampled_from(["params", "uniform"]),
    ranks=counts,
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    checkpoint=st.sampled_from(["never", "always", "except_last"]),
    clip=st.none() | positive,
    timeout=st.floats(0, 1e6, exclude_min=True),
) | st.builds(Options, device_map=st.sampled_from(["0:0-5,1:5-10", "1:5-10,0:0-5"]), ranks=st.just(2))


@given(all_options)
def test_prints_what_it_reads(options: Options) -> None:
    again = Options.parse(str(options))
    assert again == options
    assert str(again) == str(options)
    assert hash(again) == hash(options)


def test_the_text_is_no_part_of_the_value() -> None:
    options = Options.parse("chunks=05")
    assert options == Options(chunks=5) and options.text == "chunks=05"
    assert repr(options) == repr(Options(chunks=5))
    assert pickle.loads(pickle.dumps(options)) == options


def test_every_field_is_described() -> None:
    fields = [field.name for field in dataclasses.fields(Options) if field.compare]
    assert fields == list(KEYS)
    assert all(key.doc and key.allowed.startswith(name) for name, key in KEYS.items())


def test_reading_options_never_imports_torch() -> None:
    code = "import sys, pipe.options as o; o.Options.parse('chunks=5'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- What is refused, drawn as the user sees it ---

REFUSED = """
chunk=4
^^^^^
unknown key 'chunk'; did you mean 'chunks'?

chunks=0
       ^
0 is too small

chunks=-1
       ^^
'-1' isn't a whole number

chunks=two
       ^^^
chunks takes a whole number: 1, 2, ...

chunks=5 chunks=6
         ^^^^^^^^
chunks is given twice

clip=1 chunks=5;
              ^^
'5;' isn't a whole number (a space separates settings)

chunks=٣
       ^
isn't a whole number

chunks=1_000
       ^^^^^
isn't a whole number

chunks=
^^^^^^^
nothing follows chunks=

chunks= 5
^^^^^^^
no space may stand there

chunks =5
^^^^^^
chunks needs a value, and no space before the =

chunks
^^^^^^
chunks needs a value

clip=1 =5
       ^^
a key is missing before the =

amp=fp16
^^^
unknown key 'amp'

zero=1
^^^^
unknown key 'zero'

dp=2
^^
unknown key 'dp'

tensorboard=runs
^^^^^^^^^^^
unknown key 'tensorboard'

Chunks=4
^^^^^^
did you mean 'chunks'?

verbose chunks=4
^^^^^^^
'verbose' is no flag

zero_dp_1
^^^^^^^^^
'zero_dp_1' is no flag

device_map=0:0-5, 1:5-10
                 ^
a value has no spaces in it

chunks=5 device_map=
         ^^^^^^^^^^^
nothing follows device_map=

device_map=0:0-6,1:5-10
                 ^^^^^^
layer 5 belongs to two ranges

chunks=5 device_map=0:0-4,1:5-10
                          ^^^^^^
layer 4 belongs to no rank

device_map=0:5-3
           ^^^^^
reversed

device_map=0:3
           ^^^
lacks its stop

device_map=0:0-10-2 chunks=5
           ^^^^^^^^
no step

device_map=0:0-5,2:5-10
                 ^^^^^^
rank 1 is missing

device_map=0:1-10
           ^^^^^^
layer 0 belongs to no rank

device_map=0:0-5,
                 ^
a range is missing here

device_map=parms
           ^^^^^
did you mean 'params'?

device_map=time
           ^^^^
'time' is no rule for the map

ranks=3 device_map=0:0-5,1:5-10
      ^
ranks is 3, but device_map has 2 ranks

checkpoint=alway
           ^^^^^
did you mean 'always'?

schedule=1f2b
         ^^^^
schedule takes a name

schedule=csv(no/such/file.csv)
             ^^^^^^^^^^^^^^^^
no/such/file.csv

clip=0
     ^
0 is out of range

clip=nan
     ^^^
clip takes a number over 0

clip=-1.0
     ^^^^
clip takes a number over 0

clip=1e999
     ^^^^^
out of range

timeout=inf
        ^^^
timeout takes seconds

timeout=1e9
        ^^^
more than a year
""".strip("\n").split("\n\n")


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.split("\n")[0])
def test_refuses_and_points_at_the_culprit(case: str) -> None:
    text, carets, message = case.split("\n")
    with pytest.raises(OptionError) as caught:
        Options.parse(text)
    assert f"\n    {text}\n    {carets}\n" in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.text == text


@pytest.mark.parametrize("key", ["amp", "zero", "dp", "offload", "tensorboard", "trace_every", "loss_scale"])
def test_a_feature_to_come_is_not_mentioned(key: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse(f"{key}=1")
    message = str(caught.value).replace(f"'{key}'", "").replace(f"{key}=1", "")
    assert key not in message
    assert "The keys: chunks, device_map, ranks, schedule, checkpoint, clip, timeout" in message


def test_the_caret_stands_right_below_in_any_text() -> None:
    """Tabs and line ends shifted it, and wide characters did."""
    with pytest.raises(OptionError) as caught:
        Options.parse("clip=1\n\tchunks=五五")
    lines = str(caught.value).split("\n")
    assert lines[1:3] == ["    clip=1  chunks=五五", "                   ^^^^"]


def test_an_error_travels_between_processes() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse("chunk=4")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.text, again.span) == (str(caught.value), "chunk=4", (0, 5))


@pytest.mark.parametrize(
    ("fields", "drawn"),
    [
        ({"chunks": 0}, "chunks=0\n           ^"),
        ({"chunks": True}, "chunks=True\n           ^^^^"),
        ({"chunks": 2.5}, "chunks=2.5\n           ^^^"),
        ({"clip": float("nan")}, "clip=nan\n         ^^^"),
        ({"timeout": None}, "timeout=None\n            ^^^^"),
        ({"device_map": "0:0-6,1:5-10"}, "device_map=0:0-6,1:5-10\n                     ^^^^^^"),
        ({"device_map": ""}, "nothing follows device_map="),
        ({"schedule": "csv(my plan.csv)"}, "a value has no spaces in it"),
        ({"device_map": "0:0-5,1:5-10", "ranks": 3}, "ranks=3\n          ^"),
    ],
)
def test_fields_are_checked_as_the_string_is(fields: dict[str, Any], drawn: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**fields)
    assert drawn in str(caught.value)


def test_fields_become_what_the_string_would() -> None:
    options = Options(clip=1, timeout=60, device_map="1:5-10,0:0-5")
    assert (type(options.clip), type(options.timeout)) == (float, float)
    assert options.device_map == "0:0-5,1:5-10"


def test_a_replaced_field_is_shown_as_it_is_now() -> None:
    options = dataclasses.replace(Options.parse("device_map=0:0-5,1:5-10"), device_map="0:0-5,1:5-9")
    with pytest.raises(OptionError) as caught:
        resolve(options)
    assert caught.value.text == "device_map=0:0-5,1:5-9"


# --- Keywords beside the string ---


def test_keywords_join_the_string() -> None:
    assert merge("chunks=5", clip=1.0, ranks=None) == Options(chunks=5, clip=1.0)
    assert merge("chunks=5", chunks=5) == Options(chunks=5)
    assert merge(Options(device_map="0:0-5,1:5-10"), device_map="1:5-10,0:0-5") == Options(
        device_map="0:0-5,1:5-10"
    )


def test_keywords_may_not_contradict_the_string() -> None:
    with pytest.raises(OptionError) as caught:
        merge("clip=1 chunks=5", chunks=6)
    assert "chunks is 5 here, but 6 as a keyword" in str(caught.value)
    assert "    clip=1 chunks=5\n                  ^\n" in str(caught.value)
    with pytest.raises(OptionError, match="schedule is 1f1b here, but gpipe as a keyword"):
        merge("schedule=1f1b", schedule="gpipe")
    with pytest.raises(OptionError, match="'chunk'; did you mean 'chunks'"):
        merge("", chunk=6)
    with pytest.raises(OptionError, match="0 is too small"):
        merge("", chunks=0)


# --- What the model and the world fill in ---


@pytest.mark.parametrize(
    ("text", "world_size", "device_map", "chunks"),
    [
        ("", 1, "0:0-10", 4),
        ("", 2, "0:0-5,1:5-10", 8),
        ("ranks=2", 1, "0:0-5,1:5-10", 8),
        ("ranks=2 chunks=3", 2, "0:0-5,1:5-10", 3),
        ("device_map=1:4-10,0:0-4", 1, "0:0-4,1:4-10", 8),
        ("device_map=uniform ranks=4", 4, "0:0-2,1:2-5,2:5-8,3:8-10", 16),
    ],
)
def test_fills_in_the_rest(text: str, world_size: int, device_map: str, chunks: int) -> None:
    resolved = resolve(Options.parse(text), world_size=world_size)
    assert str(resolved.device_map) == device_map
    assert resolved.chunks == chunks
    assert resolved.ranks == resolved.device_map.ranks
    assert resolved.placement == tuple(range(resolved.ranks))
    assert resolved.schedule == schedules.get("1f1b")


def test_params_asks_for_sizes_and_uniform_does_not() -> None:
    def no_sizes() -> Sequence[int]:
        raise AssertionError("nobody needs them")

    sizes = [9, 1, 1, 1, 1]
    assert str(Options(ranks=2).resolve(5, 1, lambda: sizes).device_map) == "0:0-1,1:1-5"
    assert str(Options(ranks=2, device_map="uniform").resolve(5, 1, no_sizes).device_map) == "0:0-2,1:2-5"


UNRESOLVED = """
chunks=5 device_map=0:0-5,1:5-12
                          ^^^^^^
1:5-12 goes past the last layer: the model has 10 layers, 0 to 9

device_map=1:5-9,0:0-5
           ^^^^^
layer 9 belongs to no rank: the map ends at 9, the model has 10 layers

chunks=2 ranks=16
               ^^
10 layers cannot fill 16 stages

device_map=0:0-2,1:2-5,0:5-7,1:7-10
           ^^^^^^^^^^^^^^^^^^^^^^^^
on the ranks 0,1,0,1, but the schedule needs them on 0,1
""".strip("\n").split("\n\n")


@pytest.mark.parametrize("case", UNRESOLVED, ids=lambda case: case.split("\n")[0])
def test_points_at_what_the_model_cannot_do(case: str) -> None:
    text, carets, message = case.split("\n")
    with pytest.raises(OptionError) as caught:
        resolve(Options.parse(text), schedule=OneStageEach() if ",0:5" in text else None)
    assert f"\n    {text}\n    {carets}\n" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "carets"),
    [
        ("ranks=3", "      ^"),
        ("clip=1 device_map=0:0-5,1:5-8,2:8-10", "                  ^^^^^^^^^^^^^^^^^^"),
    ],
)
def test_ranks_must_be_the_world_size(text: str, carets: str) -> None:
    for world_size in (2, 4, 6):
        with pytest.raises(OptionError) as caught:
            resolve(Options.parse(text), world_size=world_size)
        assert f"3 ranks on a world size of {world_size}: they must be equal" in str(caught.value)
        assert f"\n    {text}\n    {carets}\n" in str(caught.value)


def test_a_map_of_too_many_ranks_is_the_maps_fault() -> None:
    text = "device_map=0:0-1,1:1-2,2:2-3"
    with pytest.raises(OptionError, match="2:2-3 goes past the last layer: the model has 2 layers") as caught:
        resolve(Options.parse(text), num_layers=2)
    assert "\n    " + " " * text.index("2:2-3") + "^^^^^\n" in str(caught.value)


def test_a_world_too_large_for_the_model_is_no_fault_of_the_text() -> None:
    with pytest.raises(OptionError, match="10 layers cannot fill 16 stages") as caught:
        resolve(Options.parse("chunks=5"), world_size=16)
    assert "^" not in str(caught.value)


# --- Schedules ---


@dataclass(frozen=True)
class OneStageEach:
    """Can use no placement but the one it asks for, as a user's own schedule may."""

    def placement(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(ranks))

    def orders(self, problem: schedules.Problem) -> Sequence[Sequence[schedules.Action]]:
        if problem.placement != self.placement(len(set(problem.placement))):
            raise schedules.ScheduleError("one stage a rank, please")
        return []


@dataclass(frozen=True)
class TwoEach:
    def placement(self, ranks: int) -> tuple[int, ...]:
        return (*range(ranks), *range(ranks))

    def orders(self, problem: schedules.Problem) -> Sequence[Sequence[schedules.Action]]:
        return []


def test_a_schedule_decides_how_many_stages_there_are() -> None:
    resolved = resolve(Options(ranks=2), schedule=TwoEach())
    assert str(resolved.device_map) == "0:0-2,1:2-5,0:5-8,1:8-10"
    assert resolved.schedule == TwoEach()
    with pytest.raises(OptionError, match="10 layers cannot fill 12 stages"):
        resolve(Options(ranks=6), schedule=TwoEach())


def test_a_schedule_may_take_another_placement_than_it_asks_for() -> None:
    options = Options(device_map="0:0-2,1:2-4,1:4-6,0:6-10")
    assert resolve(options, schedule=TwoEach()).placement == (0, 1, 1, 0)


def test_a_schedule_may_not_contradict_the_string() -> None:
    same = schedules.get("gpipe")
    assert resolve(Options.parse("schedule=gpipe"), schedule=same).schedule is same
    for name in ("gpipe", "1f1b"):
        with pytest.raises(OptionError, match=rf"schedule is {name} here, but TwoEach\(\) as a keyword"):
            resolve(Options.parse(f"schedule={name}"), schedule=TwoEach())


CSV = """\
0F0,0F1,0B0,0F2,0B1,0B2
1F0,1B0,1F1,1B1,1F2,1B2
"""


@pytest.fixture
def csv(tmp_path: Path) -> schedules.CSVFile:
    """Fixes two ranks, a stage each, and three microbatches."""
    path = tmp_path / "plan.csv"
    path.write_text(CSV)
    return schedules.CSVFile(str(path))


@pytest.mark.parametrize("text", ["", "chunks=3", "ranks=2 chunks=3", "device_map=0:0-5,1:5-10"])
def test_a_csv_fixes_chunks_ranks_and_placement(text: str, csv: schedules.CSVFile) -> None:
    resolved = resolve(Options.parse(text), schedule=csv)
    assert (resolved.ranks, resolved.chunks, resolved.placement) == (2, 3, (0, 1))
    assert resolve(Options.parse(text), world_size=2, schedule=csv) == resolved
    assert resolve(Options.parse(f"{text} schedule=csv({csv.path})")) == resolved


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunks=4", "chunks is 4, but the schedule's CSV fixes it to 3"),
        ("ranks=3", "ranks is 3, but the schedule's CSV fixes it to 2"),
        ("device_map=0:0-10", "device_map has 1 rank, but the schedule's CSV fixes it to 2"),
        ("device_map=0:5-10,1:0-5", "on the ranks 1,0, but the schedule needs them on 0,1"),
    ],
)
def test_nothing_else_may_say_otherwise(text: str, message: str, csv: schedules.CSVFile) -> None:
    with pytest.raises(OptionError) as caught:
        resolve(Options.parse(text), schedule=csv)
    assert message in str(caught.value)
    assert f"\n    {text}\n" in str(caught.value)


def test_a_csv_must_fit_the_world(csv: schedules.CSVFile) -> None:
    with pytest.raises(OptionError, match="2 ranks on a world size of 4"):
        resolve(Options(), world_size=4, schedule=csv)
    text = f"schedule=csv({csv.path})"
    with pytest.raises(OptionError, match="2 ranks on a world size of 4") as caught:
        resolve(Options.parse(text), world_size=4)
    assert "^" * (len(text) - len("schedule=")) in str(caught.value)


def test_a_csv_in_the_string_is_no_different(csv: schedules.CSVFile) -> None:
    with pytest.raises(OptionError, match="chunks is 4, but the schedule's CSV fixes it to 3"):
        resolve(Options.parse(f"chunks=4 schedule=csv({csv.path})"))


def test_1f1b_takes_one_stage_a_rank() -> None:
    with pytest.raises(OptionError, match=r"the schedule needs them on 0,1 .*1f1b needs one stage per rank"):
        resolve(Options.parse("device_map=0:0-2,1:2-5,0:5-7,1:7-10"))
    assert resolve(Options.parse("device_map=1:0-2,0:2-10")).placement == (1, 0)
    resolve(Options.parse("device_map=0:0-2,1:2-5,0:5-7,1:7-10 schedule=gpipe"))


def test_a_csv_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"gone\.csv"):
        Options.parse(f"schedule=csv({tmp_path}/gone.csv)")
