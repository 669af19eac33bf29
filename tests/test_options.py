"""Does the option string mean what it says, and does a wrong one say what is wrong?"""

from __future__ import annotations

import dataclasses
import pickle
import re
import subprocess
import sys
from collections import ChainMap
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
    assert Options.parse("amp=off zero=0 bucket_mb=25") == Options.parse("") == Options()


def test_a_flag_is_a_setting() -> None:
    options = Options.parse("amp=fp16 keep_batchnorm_fp32 chunks=5 zero_dp_2 offload")
    assert options == Options(chunks=5, amp="fp16", keep_batchnorm_fp32=True, zero=2, offload="cpu")
    assert str(options) == "chunks=5 amp=fp16 keep_batchnorm_fp32 zero=2 offload=cpu"
    assert [Options.parse(f"zero_dp_{stage}") for stage in (1, 2, 3)] == [Options(zero=z) for z in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("dp=2", {"dp": 2}),
        ("amp=bf16", {"amp": "bf16"}),
        ("amp=fp16 loss_scale=dynamic", {"amp": "fp16", "loss_scale": "dynamic"}),
        ("amp=fp16 loss_scale=1024", {"amp": "fp16", "loss_scale": 1024}),
        (r"amp=bf16 keep_fp32=\.norm\d$|a=b", {"amp": "bf16", "keep_fp32": r"\.norm\d$|a=b"}),
        (
            "amp=bf16 keep_fp32=head, keep_batchnorm_fp32",
            {"amp": "bf16", "keep_batchnorm_fp32": True, "keep_fp32": "head,"},
        ),
        ("offload=disk:/tmp/a=b zero=1", {"offload": "disk:/tmp/a=b", "zero": 1}),
        ("zero=3 reduce_every=1 bucket_mb=.5", {"zero": 3, "reduce_every": 1, "bucket_mb": 0.5}),
        ("tensorboard=runs/a=b", {"tensorboard": "runs/a=b"}),
        ("trace_every=10 tensorboard=/tmp/runs", {"tensorboard": "/tmp/runs", "trace_every": 10}),
    ],
)
def test_reads_each_setting(text: str, fields: dict[str, Any]) -> None:
    options = Options.parse(text)
    assert options == Options(**fields) != Options()
    assert Options.parse(str(options)) == options


counts = st.none() | st.integers(1, 999_999_999)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
unspaced = st.text(min_size=1).filter(lambda text: not re.search(r"\s", text))
anything = st.fixed_dictionaries(
    {
        "chunks": counts,
        "device_map": st.sampled_from(["params", "uniform"]),
        "ranks": counts,
        "dp": counts,
        "schedule": st.sampled_from(["1f1b", "gpipe"]),
        "bucket_mb": positive,
        "checkpoint": st.sampled_from(["never", "always", "except_last"]),
        "clip": st.none() | positive,
        "timeout": st.floats(0, 1e6, exclude_min=True),
    }
)
half = {
    "keep_batchnorm_fp32": st.booleans(),
    "keep_fp32": st.none() | unspaced.map(re.escape) | st.sampled_from(["Norm$", "head,", r"a=b|\s"]),
}
amps = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"amp": st.just("fp16"), "loss_scale": st.none() | st.just("dynamic") | positive, **half}
    ),
    st.fixed_dictionaries({"amp": st.just("bf16"), **half}),
)
places = st.sampled_from([None, "cpu", True, False]) | unspaced.map(lambda folder: f"disk:{folder}")
zeros = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"zero": st.just(1), "offload": places}),
    st.fixed_dictionaries({"zero": st.sampled_from([2, 3]), "offload": places, "reduce_every": counts}),
)
traces = st.just({}) | st.fixed_dictionaries({"tensorboard": unspaced, "trace_every": counts})
all_options = st.builds(
    lambda *parts: Options(**ChainMap(*parts)), anything, amps, zeros, traces
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

tensorbord=runs
^^^^^^^^^^
unknown key 'tensorbord'; did you mean 'tensorboard'?

tensorboard
^^^^^^^^^^^
tensorboard needs a value

tensorboard= trace_every=2
^^^^^^^^^^^^
nothing follows tensorboard=

tensorboard=runs tensorboard=runs/b
                 ^^^^^^^^^^^^^^^^^^
tensorboard is given twice

tensorboard=runs trace_every=0
                             ^
0 is too small

tensorboard=runs trace_every=all
                             ^^^
trace_every takes a whole number: 1, 2, ...

chunks=5 trace_every=10
                     ^^
trace_every is for traces: it needs tensorboard=DIR

Chunks=4
^^^^^^
did you mean 'chunks'?

verbose chunks=4
^^^^^^^
'verbose' is no flag

zero_dp_4
^^^^^^^^^
'zero_dp_4' is no flag, and settings are written key=value; did you mean 'zero_dp_3'?

clip=1 zero_2
       ^^^^^^
'zero_2' is no flag, and settings are written key=value; did you mean zero=2?

zero-dp-2
^^^^^^^^^
did you mean 'zero_dp_2'?

zero-dp-2=1
^^^^^^^^^
unknown key 'zero-dp-2'; did you mean 'zero_dp_2'?

keep_batchnorm
^^^^^^^^^^^^^^
did you mean 'keep_batchnorm_fp32'?

fp16
^^^^
'fp16' is no flag, and settings are written key=value; did you mean amp=fp16?

BF16=true
^^^^
unknown key 'BF16'; did you mean amp=bf16?

cpu
^^^
did you mean offload=cpu?

chunks:5
^^^^^^^^
did you mean chunks=5?

keep_batchnorm_fp32_True
^^^^^^^^^^^^^^^^^^^^^^^^
did you mean 'keep_batchnorm_fp32'?

amp=fp16 keep_batchnorm_fp32=true
                            ^^^^^
keep_batchnorm_fp32 is a flag: it takes no value

amp=fp16 keep_batchnorm_fp32=
                            ^
keep_batchnorm_fp32 is a flag: it takes no value

keep_batchnorm_fp32 =true
^^^^^^^^^^^^^^^^^^^
keep_batchnorm_fp32 is a flag: no = follows it

zero_dp_2=2
         ^^
zero_dp_2 is a flag: it takes no value

zero=1 offload =cpu
       ^^^^^^^
offload needs a value, and no space before the =

zero= 2
^^^^^
nothing follows zero= (no space may stand there)

chunks= offload
^^^^^^^
nothing follows chunks=

dp
^^
dp needs a value

dp=0
   ^
0 is too small

dp=2 dp=3
     ^^^^
dp is given twice

amp=fp-16
    ^^^^^
did you mean 'fp16'?

amp=true
    ^^^^
amp takes one of: off, fp16, bf16

amp=fp16 loss_scale=0
                    ^
0 is out of range

amp=fp16 loss_scale=-2
                    ^^
loss_scale takes dynamic or a number over 0

amp=fp16 loss_scale=dinamic
                    ^^^^^^^
'dinamic' is neither dynamic nor a number; did you mean 'dynamic'?

amp=fp16 keep_fp32=norm(1|2
                       ^
re says: missing ), unterminated subpattern

amp=fp16 keep_fp32=norm|*
                        ^
re says: nothing to repeat

amp=fp16 keep_fp32=a{99999999999}
                   ^^^^^^^^^^^^^^
re says: the repetition number is too large

amp=fp16 keep_fp32=Batch, Layer
                         ^
a value has no spaces in it

zero=4
     ^
'4' isn't 0, 1, 2 or 3

zero=two
     ^^^
zero takes 0, 1, 2 or 3; the flags zero_dp_1, zero_dp_2 and zero_dp_3 say the same

zero=1 offload=disk:
               ^^^^^
disk lacks its directory

zero=1 offload=disk
               ^^^^
disk lacks its directory

zero=1 offload=ssd:/tmp
               ^^^^^^^^
'ssd:/tmp' is neither cpu nor disk:DIR

bucket_mb=0
          ^
0 is out of range

zero=2 reduce_every=0
                    ^
0 is too small

zero_dp_2 zero_dp_3
          ^^^^^^^^^
zero_dp_2 and zero_dp_3 exclude each other

zero_dp_2 zero_dp_2
          ^^^^^^^^^
zero_dp_2 is given twice

zero=2 zero_dp_2
       ^^^^^^^^^
zero is given twice, as zero=2 and as zero_dp_2

zero=1 offload offload=cpu
               ^^^^^^^^^^^
offload is given twice, as offload and as offload=cpu

loss_scale=128
           ^^^
it needs amp=fp16, but amp is off

amp=bf16 loss_scale=dynamic
                    ^^^^^^^
it needs amp=fp16, but amp is bf16

chunks=5 keep_batchnorm_fp32
         ^^^^^^^^^^^^^^^^^^^
it needs amp=fp16 or amp=bf16, but amp is off

keep_fp32=Norm amp=off
          ^^^^
it needs amp=fp16 or amp=bf16, but amp is off

offload chunks=5
^^^^^^^
offload keeps the sharded optimizer's state elsewhere: it needs zero=1, 2 or 3 (zero_dp_1, ...), but zero is 0

zero=0 offload=disk:/tmp
               ^^^^^^^^^
it needs zero=1, 2 or 3 (zero_dp_1, ...), but zero is 0

zero_dp_1 reduce_every=1
                       ^
it needs zero=2 or 3 (zero_dp_2, zero_dp_3), but zero is 1

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


def test_an_unknown_key_is_told_all_there_are() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse("verbosity=1")
    assert str(caught.value).endswith(
        "\nThe keys: chunks, device_map, ranks, dp, schedule, amp, loss_scale, keep_fp32, zero, offload, "
        "bucket_mb, reduce_every, checkpoint, clip, tensorboard, trace_every, timeout"
        "\nThe flags: keep_batchnorm_fp32, zero_dp_1, zero_dp_2, zero_dp_3, offload"
    )


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
        ({"zero": True}, "zero=True\n         ^^^^"),
        ({"dp": True}, "dp=True\n       ^^^^"),
        ({"amp": None}, "amp=None\n        ^^^^"),
        ({"amp": "fp16", "loss_scale": True}, "'True' is neither dynamic nor a number"),
        ({"amp": "fp16", "keep_fp32": True}, "keep_fp32 takes a str, not True"),
        ({"amp": "fp16", "keep_fp32": re.compile("a")}, "keep_fp32 takes a str, not re.compile('a')"),
        ({"amp": "fp16", "keep_fp32": "("}, "keep_fp32=(\n              ^"),
        ({"amp": "fp16", "keep_fp32": "a b"}, "a value has no spaces in it"),
        ({"amp": "fp16", "keep_batchnorm_fp32": 1}, "keep_batchnorm_fp32 takes a bool, not 1"),
        ({"amp": "fp16", "keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32 takes a bool, not 'True'"),
        ({"zero": 1, "offload": 1}, "offload=1\n            ^"),
        ({"offload": True}, "offload=cpu\n            ^^^"),
        ({"keep_batchnorm_fp32": True}, "    keep_batchnorm_fp32\n    ^^^^^^^^^^^^^^^^^^^\n"),
        ({"keep_fp32": "a", "zero": 2}, "keep_fp32 excepts layers from amp: it needs amp=fp16 or amp=bf16"),
        ({"loss_scale": 2}, "loss_scale=2.0\n               ^^^"),
        ({"reduce_every": 2}, "reduce_every is for gradients that are sharded: it needs zero=2 or 3"),
        ({"trace_every": 2}, "trace_every=2\n                ^"),
        ({"tensorboard": True}, "tensorboard takes a str, not True"),
        ({"tensorboard": ""}, "nothing follows tensorboard="),
        ({"tensorboard": "my runs"}, "a value has no spaces in it"),
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
    assert type(Options(amp="fp16", loss_scale=1024).loss_scale) is float
    # As the flag would be; a script's own switch can be passed on as it is.
    assert Options(zero=1, offload=True) == Options.parse("zero=1 offload")  # type: ignore[arg-type]
    assert Options(offload=False).offload is None  # type: ignore[arg-type]
    assert Options(keep_batchnorm_fp32=False) == Options()


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


def test_what_needs_what_is_checked_after_they_have_met() -> None:
    assert merge("zero=1", offload="cpu") == merge("offload", zero=1) == Options(zero=1, offload="cpu")
    assert merge("zero_dp_1 offload", zero=1, offload=True) == Options(zero=1, offload="cpu")
    assert merge("loss_scale=8 keep_batchnorm_fp32", amp="fp16", keep_batchnorm_fp32=True) == Options(
        amp="fp16", loss_scale=8, keep_batchnorm_fp32=True
    )
    assert merge("offload", zero=1).text == "offload"
    assert merge("zero=1", offload=False) == Options(zero=1)
    with pytest.raises(OptionError, match=r"it needs zero=2 or 3 .*, but zero is 1") as caught:
        merge("chunks=5 reduce_every=2", zero=1)
    assert "    chunks=5 reduce_every=2\n                          ^\n" in str(caught.value)
    assert merge("trace_every=5", tensorboard="runs") == Options(tensorboard="runs", trace_every=5)
    with pytest.raises(OptionError, match="it needs amp=fp16") as caught:
        merge("chunks=5", loss_scale="dynamic")
    assert "    loss_scale=dynamic\n               ^^^^^^^\n" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "keywords", "message"),
    [
        ("zero_dp_2", {"zero": 3}, "zero is 2 here, but 3 as a keyword\n    zero_dp_2\n    ^^^^^^^^^\n"),
        ("zero=0", {"zero": 1}, "zero is 0 here, but 1 as a keyword"),
        ("zero=1 offload", {"offload": False}, "offload is cpu here, but False as a keyword"),
        ("zero=1 offload", {"offload": "disk:a"}, "offload is cpu here, but disk:a as a keyword"),
        ("amp=off", {"amp": "bf16"}, "amp is off here, but bf16 as a keyword"),
        (
            "amp=fp16 keep_batchnorm_fp32",
            {"keep_batchnorm_fp32": False},
            "keep_batchnorm_fp32 is True here, but False as a keyword",
        ),
        ("", {"zero_dp_2": True}, "unknown setting 'zero_dp_2'; did you mean zero=2?"),
        ("", {"fp16": True}, "unknown setting 'fp16'; did you mean amp=fp16?"),
    ],
)
def test_flags_may_not_contradict_either(text: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        merge(text, **keywords)
    assert message in str(caught.value)


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
    ("text", "world_size", "replicas", "ranks", "dp"),
    [
        # In one process nothing is to be filled up.
        ("", 1, None, 1, 1),
        ("dp=3", 1, None, 1, 3),
        ("ranks=2", 1, None, 2, 1),
        ("device_map=0:0-5,1:5-10 dp=3", 1, None, 2, 3),
        ("", 1, 1, 1, 1),
        # Else one says, and the world says the other.
        ("", 4, None, 4, 1),
        ("dp=1", 4, None, 4, 1),
        ("dp=2", 4, None, 2, 2),
        ("dp=4", 4, None, 1, 4),
        ("ranks=2", 6, None, 2, 3),
        ("ranks=2 dp=3", 6, None, 2, 3),
        ("device_map=0:0-5,1:5-10", 4, None, 2, 2),
        ("", 6, 2, 3, 2),
        ("dp=2", 6, 2, 3, 2),
        ("ranks=3", 6, 2, 3, 2),
        ("", 6, 1, 6, 1),
    ],
)
def test_ranks_times_replicas_is_the_world_size(
    text: str, world_size: int, replicas: int | None, ranks: int, dp: int
) -> None:
    resolved = resolve(Options.parse(text), world_size=world_size, replicas=replicas)
    assert (resolved.ranks, resolved.dp) == (ranks, dp)
    assert resolved.device_map.ranks == ranks
    assert resolved.chunks == 4 * ranks


@pytest.mark.parametrize(
    ("text", "carets"),
    [
        ("ranks=3", "      ^"),
        ("clip=1 device_map=0:0-5,1:5-8,2:8-10", "                  ^^^^^^^^^^^^^^^^^^"),
    ],
)
def test_ranks_must_fit_the_world_size(text: str, carets: str) -> None:
    for world_size in (2, 4, 7):
        with pytest.raises(OptionError) as caught:
            resolve(Options.parse(text), world_size=world_size)
        assert f"3 ranks on a world size of {world_size}: it must be a multiple of 3" in str(caught.value)
        assert f"\n    {text}\n    {carets}\n" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "world_size", "replicas", "message"),
    [
        (
            "ranks=3 dp=2\n          ^",
            4,
            None,
            "3 ranks x 2 replicas on a world size of 4: they must be equal "
            "(or the world size 1, where one process runs every rank of every replica)",
        ),
        (
            "ranks=2 dp=1\n          ^",
            4,
            None,
            "2 ranks x 1 replica on a world size of 4: they must be equal",
        ),
        ("ranks=3\n          ^", 4, 2, "3 ranks x 2 replicas on a world size of 4: they must be equal"),
        (
            "clip=1 dp=3\n              ^",
            4,
            None,
            "3 replicas on a world size of 4: it must be a multiple of 3",
        ),
        ("dp=8\n       ^", 4, None, "8 replicas on a world size of 4: it must be a multiple of 8"),
        ("dp=2\n       ^", 4, 4, "dp is 2, but the mesh's dp dimension has 4 replicas"),
        ("dp=2\n       ^", 1, 1, "dp is 2, but the mesh's dp dimension has 1 replica\n"),
        ("chunks=5\ndp takes", 5, 2, "2 replicas on a world size of 5: it must be a multiple of 2"),
    ],
)
def test_points_at_what_the_world_cannot_do(
    text: str, world_size: int, replicas: int | None, message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        resolve(Options.parse(text.split("\n")[0]), world_size=world_size, replicas=replicas)
    assert f"\n    {text}" in str(caught.value)
    assert message in str(caught.value)


def test_what_is_not_said_has_a_value_in_effect() -> None:
    resolved = resolve(Options())
    assert (resolved.amp, resolved.loss_scale, resolved.zero, resolved.offload) == ("off", None, 0, None)
    assert (resolved.keep_batchnorm_fp32, resolved.keep_fp32) == (False, None)
    assert (resolved.bucket_mb, resolved.reduce_every) == (25.0, 1)
    assert (resolved.tensorboard, resolved.trace_every) == (None, 1)
    assert resolve(Options(amp="fp16")).loss_scale == "dynamic"
    assert resolve(Options(amp="bf16")).loss_scale is None


def test_what_is_said_stays() -> None:
    text = "amp=fp16 loss_scale=8.0 keep_batchnorm_fp32 keep_fp32=head zero=2 offload=cpu bucket_mb=1.0"
    more = "reduce_every=2 checkpoint=always clip=1.0 tensorboard=runs trace_every=5"
    resolved = resolve(Options.parse(f"{text} {more}"))
    said = {name: getattr(resolved, name) for name in KEYS if name not in ("device_map", "schedule")}
    assert str(Options(**said)) == f"chunks=4 ranks=1 dp=1 {text} {more}"


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
    assert resolve(Options(), world_size=4, schedule=csv).dp == 2
    with pytest.raises(OptionError, match="2 ranks on a world size of 5: it must be a multiple of 2"):
        resolve(Options(), world_size=5, schedule=csv)
    text = f"schedule=csv({csv.path})"
    with pytest.raises(OptionError, match="2 ranks on a world size of 5") as caught:
        resolve(Options.parse(text), world_size=5)
    assert "^" * (len(text) - len("schedule=")) in str(caught.value)


def test_beside_a_csv_object_only_dp_can_be_pointed_at(csv: schedules.CSVFile) -> None:
    with pytest.raises(OptionError, match="2 ranks x 3 replicas on a world size of 4") as caught:
        resolve(Options.parse("dp=3"), world_size=4, schedule=csv)
    assert "    dp=3\n       ^\n" in str(caught.value)


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
