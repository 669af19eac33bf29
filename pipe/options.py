"""What did the user ask for? The option string and its frozen value, checked once, here.

    chunks=5 device_map=0:0-5,1:5-10 schedule=1f1b amp=fp16 keep_batchnorm_fp32

`KEYS` describes every setting, its flags too; parsing, printing, checking and the errors all read that table.
Each error shows the text with a caret under the culprit. What needs the model and the world size waits for
`Options.resolve`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from partitioners import DeviceMap, PartitionError, params, uniform

if TYPE_CHECKING:
    from schedules import CSVFile, Schedule

Span = tuple[int, int]


class OptionError(ValueError):
    """A setting that cannot be used. The message shows the text, with a caret under the culprit.

    `text` and `span` (half-open, in characters) say the same to a program; both are empty where no text is to
    blame.
    """

    def __init__(self, message: str, *, text: str = "", span: Span = (0, 0)) -> None:
        super().__init__(message)
        self.text = text
        self.span = span


@dataclass(frozen=True)
class Options:
    """The settings of a pipeline. `str()` gives the string, without defaults, that parses to an equal value.

    `None` means: not said. `device_map` is a map or the name of a rule; see `KEYS` for what each field takes.
    """

    chunks: int | None = None
    device_map: str = "params"
    ranks: int | None = None
    dp: int | None = None
    schedule: str = "1f1b"
    amp: str = "off"
    loss_scale: str | float | None = None
    keep_batchnorm_fp32: bool = False
    keep_fp32: str | None = None
    zero: int = 0
    offload: str | None = None
    bucket_mb: float = 25.0
    reduce_every: int | None = None
    checkpoint: str = "never"
    clip: float | None = None
    tensorboard: str | None = None
    trace_every: int | None = None
    timeout: float = 300.0
    # The string as the user wrote it, which later errors show. Not part of the value.
    text: str = field(default="", compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in KEYS:
            object.__setattr__(self, name, _field(name, getattr(self, name), self.text))
        device_map = self._explicit_map()
        if device_map is not None and self.ranks not in (None, device_map.ranks):
            self.refuse(
                "ranks", f"ranks is {self.ranks}, but device_map has {_count(device_map.ranks, 'rank')}"
            )
        self._check_needs()

    @classmethod
    def parse(cls, text: str) -> Options:
        """Reads whitespace-separated `key=value` pairs and flags, in any order."""
        return cls(**_values(text), text=text)

    def __str__(self) -> str:
        said = ((name, getattr(self, name)) for name in KEYS)
        return " ".join(_written(name, value) for name, value in said if value != _DEFAULTS[name])

    def resolve(
        self,
        num_layers: int,
        world_size: int,
        sizes: Callable[[], Sequence[int]],
        *,
        schedule: Schedule | None = None,
        replicas: int | None = None,
    ) -> Resolved:
        """Fills in what the model and the world leave to fill in.

        `world_size` counts the ranks of all replicas, and `replicas` is what a DeviceMesh's `dp` dimension
        fixes. `sizes` gives the layers' parameter counts, and is called for `device_map=params` only.
        `schedule` is an object given instead of the setting.
        """
        import schedules

        chosen = self._schedule(schedule)
        device_map = self._explicit_map()
        fixed = chosen if isinstance(chosen, schedules.CSVFile) else None
        ranks, dp = self._grid(*self._ranks(device_map, fixed), self._replicas(replicas), world_size)
        # Before the schedule is asked for a placement on so many; a map or a CSV file brings its own.
        if device_map is None and fixed is None and ranks > num_layers:
            self.refuse(
                "ranks", f"{_count(num_layers, 'layer')} cannot fill {ranks} stages, one or more a rank"
            )
        chunks = self._chunks(fixed, ranks)
        wanted = self._wanted(chosen, ranks)
        if device_map is None:
            device_map = self._cut(wanted, num_layers, sizes)
        else:
            self._check_end(num_layers)
            if device_map.placement != wanted:
                self._check_placement(chosen, device_map.placement, wanted, chunks)
        return Resolved(
            ranks=ranks,
            dp=dp,
            chunks=chunks,
            device_map=device_map,
            schedule=chosen,
            amp=self.amp,
            loss_scale="dynamic" if self.amp == "fp16" and self.loss_scale is None else self.loss_scale,
            keep_batchnorm_fp32=self.keep_batchnorm_fp32,
            keep_fp32=self.keep_fp32,
            zero=self.zero,
            offload=self.offload,
            bucket_mb=self.bucket_mb,
            reduce_every=1 if self.reduce_every is None else self.reduce_every,
            checkpoint=self.checkpoint,
            clip=self.clip,
            tensorboard=self.tensorboard,
            trace_every=1 if self.trace_every is None else self.trace_every,
            timeout=self.timeout,
        )

    def _check_needs(self) -> None:
        """A setting that means nothing without another is a mistake, not something to pass over."""
        for name, key in KEYS.items():
            if key.needs is None or getattr(self, name) == _DEFAULTS[name]:
                continue
            other = getattr(self, key.needs.key)
            if not key.needs.values and other == _DEFAULTS[key.needs.key]:
                self.refuse(name, key.needs.problem)
            if key.needs.values and other not in key.needs.values:
                self.refuse(name, f"{key.needs.problem}, but {key.needs.key} is {other}")

    def _explicit_map(self) -> DeviceMap | None:
        return None if self.device_map in _RULES else DeviceMap.parse(self.device_map)

    def _schedule(self, given: Schedule | None) -> Schedule:
        import schedules

        if given is None:
            return schedules.get(self.schedule)
        if self._says("schedule") and schedules.get(self.schedule) != given:
            self.refuse("schedule", f"schedule is {self.schedule} here, but {given!r} as a keyword")
        return given

    def _ranks(self, device_map: DeviceMap | None, fixed: CSVFile | None) -> tuple[str, int | None]:
        """The map or the CSV says, else `ranks`; all that say anything agree. Also: which of them said it."""
        source, ranks = "ranks", self.ranks
        if fixed is not None:
            if ranks not in (None, fixed.ranks):
                self.refuse("ranks", f"ranks is {ranks}, but the schedule's CSV fixes it to {fixed.ranks}")
            source, ranks = "schedule", fixed.ranks
        if device_map is not None:
            if fixed is not None and fixed.ranks != device_map.ranks:
                has = f"device_map has {_count(device_map.ranks, 'rank')}"
                self.refuse("device_map", f"{has}, but the schedule's CSV fixes it to {fixed.ranks}")
            source, ranks = "device_map", device_map.ranks
        return source, ranks

    def _replicas(self, replicas: int | None) -> int | None:
        if replicas is not None and self.dp not in (None, replicas):
            has = _count(replicas, "replica")
            self.refuse("dp", f"dp is {self.dp}, but the mesh's dp dimension has {has}")
        return self.dp if replicas is None else replicas

    def _grid(self, source: str, ranks: int | None, dp: int | None, world_size: int) -> tuple[int, int]:
        """Ranks and replicas: the world size fills in the one that nothing says, and is their product."""
        if world_size == 1:
            return ranks or 1, dp or 1
        if ranks is None and dp is None:
            return world_size, 1
        said = [_count(ranks, "rank")] if ranks is not None else []
        said += [_count(dp, "replica")] if dp is not None else []
        product, both = (ranks or 1) * (dp or 1), len(said) == 2
        if world_size != product if both else world_size % product:
            must = "they must be equal" if both else f"it must be a multiple of {product}"
            self.refuse(
                source if ranks is not None and self._says(source) else "dp",
                f"{' x '.join(said)} on a world size of {world_size}: {must} "
                "(or the world size 1, where one process runs every rank of every replica)",
            )
        return ranks or world_size // product, dp or world_size // product

    def _chunks(self, fixed: CSVFile | None, ranks: int) -> int:
        if fixed is None:
            # Four microbatches a rank keep the bubble of 1F1B, (p - 1) / (m + p - 1), under a fifth.
            return 4 * ranks if self.chunks is None else self.chunks
        if self.chunks not in (None, fixed.microbatches):
            says = f"the schedule's CSV fixes it to {fixed.microbatches}"
            self.refuse("chunks", f"chunks is {self.chunks}, but {says}")
        return fixed.microbatches

    def _wanted(self, schedule: Schedule, ranks: int) -> tuple[int, ...]:
        """The placement that the schedule asks for."""
        try:
            return tuple(schedule.placement(ranks))
        except ValueError as error:
            self.refuse("schedule", str(error), cause=error)

    def _cut(
        self, placement: tuple[int, ...], num_layers: int, sizes: Callable[[], Sequence[int]]
    ) -> DeviceMap:
        try:
            by_count = self.device_map == "uniform"
            cuts = uniform(num_layers, len(placement)) if by_count else params(sizes(), len(placement))
            return DeviceMap.from_cuts(cuts, placement)
        except PartitionError as error:
            key = "schedule" if num_layers < len(placement) and self._says("schedule") else "device_map"
            self.refuse(key, str(error), cause=error)

    def _check_end(self, num_layers: int) -> None:
        text, (start, stop) = self._where("device_map")
        try:
            # Parsed again from what the user wrote, where ranges may stand in another order.
            DeviceMap.parse(text[start:stop]).validate(num_layers)
        except PartitionError as error:
            self.refuse("device_map", str(error), span=error.span, cause=error)

    def _check_placement(
        self, schedule: Schedule, placement: tuple[int, ...], wanted: tuple[int, ...], chunks: int
    ) -> None:
        """A schedule may be able to use a placement that it wouldn't have asked for; a CSV is not."""
        import schedules

        why, cause = "", None
        if not isinstance(schedule, schedules.CSVFile):
            try:
                schedule.orders(schedules.Problem(placement, chunks))
                return
            except schedules.ScheduleError as error:
                why, cause = f" ({error})", error
        self.refuse(
            "device_map",
            f"the stages are, in layer order, on the ranks {_listed(placement)}, but "
            f"the schedule needs them on {_listed(wanted)}{why}",
            cause=cause,
        )

    def _says(self, key: str) -> bool:
        """Whether the user gave this setting, be it the default's value."""
        return _said(self.text, key, getattr(self, key))

    def _where(self, key: str) -> tuple[str, Span]:
        return _shown(self.text, key, getattr(self, key))

    def refuse(
        self, key: str, problem: str, *, span: Span | None = None, cause: Exception | None = None
    ) -> NoReturn:
        text, whole = self._where(key)
        if not self._says(key):
            # It is the default that doesn't work here: there is nothing to point at.
            text, whole = self.text, (0, 0)
        _fail(text, _within(whole, span), problem, KEYS[key].allowed, cause=cause)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Options with nothing left open."""

    ranks: int  # of each replica
    dp: int
    chunks: int
    device_map: DeviceMap
    schedule: Schedule
    amp: str
    loss_scale: str | float | None  # None where amp isn't fp16
    keep_batchnorm_fp32: bool
    keep_fp32: str | None
    zero: int
    offload: str | None
    bucket_mb: float
    reduce_every: int
    checkpoint: str
    clip: float | None
    tensorboard: str | None
    trace_every: int
    timeout: float

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.device_map.placement


def merge(options: Options | str, **keywords: Any) -> Options:
    """Settings given beside the string. None isn't a setting; one given twice has to be the same twice.

    What needs what is checked after they have met: one may be in the string, the other a keyword.
    """
    if isinstance(options, str):
        text, values = options, _DEFAULTS | _values(options)
    else:
        text, values = options.text, {name: getattr(options, name) for name in KEYS}
    for name, given in keywords.items():
        if given is None:
            continue
        if name not in KEYS:
            raise OptionError(f"unknown setting {name!r}{_meant(name)}\nThe settings: {', '.join(KEYS)}")
        value = _field(name, given, "")
        if values[name] != value and _said(text, name, values[name]):
            problem = f"{name} is {values[name]} here, but {given} as a keyword"
            _fail(*_shown(text, name, values[name]), problem, KEYS[name].allowed)
        values[name] = value
    return Options(**values, text=text)


# --- The table ---


class Need(NamedTuple):
    """What a setting means nothing without."""

    key: str
    values: tuple[Any, ...]
    problem: str  # why, for the error


class Key(NamedTuple):
    """One setting: what its text becomes, and what a user is told of it."""

    read: Callable[[str], Any]  # raises a ValueError, perhaps with a `span` into its argument
    allowed: str  # what may stand there, for errors
    doc: str
    words: tuple[str, ...] = ()  # spellings to offer
    # Bare words of the string, and the value each stands for. Under the key's own name that is also what True
    # means as a field; False is then the default.
    flags: Mapping[str, str] = MappingProxyType({})
    # What a field must be, where its text would say too little. A bool is written as a flag only.
    kind: type = object
    needs: Need | None = None


def _integer(text: str) -> int:
    # int() also takes signs, spaces, underscores and the digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"'{text}' isn't a whole number{_separators(text)}")
    if int(text) == 0:
        raise ValueError("0 is too small")
    return int(text)


def _positive(text: str) -> float:
    if not re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise ValueError(f"'{text}' isn't a positive number{_separators(text)}")
    if not 0 < float(text) < math.inf:
        raise ValueError(f"{text} is out of range")
    return float(text)


def _seconds(text: str) -> float:
    seconds = _positive(text)
    # Timers count in 64-bit nanoseconds: further out they overflow, somewhere far from here.
    if seconds > _YEAR:
        raise ValueError(f"{text} seconds are more than a year")
    return seconds


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"'{text}' isn't one of them")
        return text

    return read


def _flag(text: str) -> bool:
    if text != "True":
        raise ValueError(f"'{text}' isn't True")
    return True


def _scale(text: str) -> str | float:
    if text == "dynamic":
        return text
    if text.isidentifier():
        raise ValueError(f"'{text}' is neither dynamic nor a number")
    return _positive(text)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        at = error.pos or 0
        raise OptionError(f"re says: {error.msg}", span=(at, min(at + 1, len(text)))) from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"re says: {error}") from error
    return text


def _zero(text: str) -> int:
    if not re.fullmatch(r"[0-3]", text):
        raise ValueError(f"'{text}' isn't 0, 1, 2 or 3{_separators(text)}")
    return int(text)


def _place(text: str) -> str:
    if text in ("disk", "disk:"):
        raise ValueError("disk lacks its directory")
    if text != "cpu" and not text.startswith("disk:"):
        raise ValueError(f"'{text}' is neither cpu nor disk:DIR")
    return text


def _map(text: str) -> str:
    if text in _RULES:
        return text
    if text.isidentifier():
        raise ValueError(f"'{text}' is no rule for the map")
    return str(DeviceMap.parse(text))


def _schedule(text: str) -> str:
    import schedules

    schedules.get(text)
    return text


_YEAR = 365 * 24 * 3600
_RULES = ("uniform", "params")
_AMP = ("off", "fp16", "bf16")
_CHECKPOINT = ("never", "always", "except_last")

KEYS = {
    "chunks": Key(
        _integer,
        "chunks takes a whole number: 1, 2, ...",
        "Microbatches that a batch is cut into; 4 x ranks unless said.",
    ),
    "device_map": Key(
        _map,
        "device_map takes RANK:START-STOP,... (layers START up to, not including, STOP), uniform or params",
        "Which rank owns which layers, or the rule that decides: as many layers, or parameters, everywhere.",
        _RULES,
    ),
    "ranks": Key(
        _integer,
        "ranks takes a whole number: 1, 2, ...",
        "Ranks of the pipeline, where neither the map nor a CSV schedule says; else world size / dp.",
    ),
    "dp": Key(
        _integer,
        "dp takes a whole number: 1, 2, ...",
        "Replicas of the pipeline; unless said, world size / ranks where something fixes ranks, else 1.",
    ),
    "schedule": Key(
        _schedule,
        "schedule takes a name, with arguments as name(2), or csv(FILE)",
        "The order in which each rank works through the microbatches.",
    ),
    "amp": Key(
        _one_of(_AMP),
        f"amp takes one of: {', '.join(_AMP)}",
        "Layers run in this type; the optimizer keeps fp32 weights.",
        _AMP,
    ),
    "loss_scale": Key(
        _scale,
        "loss_scale takes dynamic or a number over 0, such as 1024",
        "What the loss is multiplied by, so that fp16 holds the gradients; dynamic unless said.",
        ("dynamic",),
        needs=Need(
            "amp", ("fp16",), "loss_scale keeps small gradients from vanishing in fp16: it needs amp=fp16"
        ),
    ),
    "keep_batchnorm_fp32": Key(
        _flag,
        "keep_batchnorm_fp32 is a flag, without =; as a keyword it is True or False",
        "Batch norm stays in fp32.",
        flags={"keep_batchnorm_fp32": "True"},
        kind=bool,
        needs=Need(
            "amp",
            ("fp16", "bf16"),
            "keep_batchnorm_fp32 excepts layers from amp: it needs amp=fp16 or amp=bf16",
        ),
    ),
    "keep_fp32": Key(
        _pattern,
        "keep_fp32 takes a regular expression, for re.search on a module's name or its class's",
        "Modules that stay in fp32.",
        kind=str,
        needs=Need(
            "amp", ("fp16", "bf16"), "keep_fp32 excepts layers from amp: it needs amp=fp16 or amp=bf16"
        ),
    ),
    "zero": Key(
        _zero,
        "zero takes 0, 1, 2 or 3; the flags zero_dp_1, zero_dp_2 and zero_dp_3 say the same",
        "What the replicas share out: 1, the optimizer's state; 2, gradients too; 3, parameters too.",
        flags={"zero_dp_1": "1", "zero_dp_2": "2", "zero_dp_3": "3"},
    ),
    "offload": Key(
        _place,
        "offload takes cpu or disk:DIR; the flag alone means cpu",
        "Where the optimizer's state is kept, if not on the device.",
        ("cpu",),
        flags={"offload": "cpu"},
        needs=Need(
            "zero",
            (1, 2, 3),
            "offload keeps the sharded optimizer's state elsewhere: it needs zero=1, 2 or 3 (zero_dp_1, ...)",
        ),
    ),
    "bucket_mb": Key(
        _positive,
        "bucket_mb takes a number over 0, such as 25",
        "Size of a gradient bucket, in MB.",
    ),
    "reduce_every": Key(
        _integer,
        "reduce_every takes a whole number: 1, 2, ...",
        "Gradients are reduced every so many microbatches; 1 unless said.",
        needs=Need(
            "zero",
            (2, 3),
            "reduce_every is for gradients that are sharded: it needs zero=2 or 3 (zero_dp_2, zero_dp_3)",
        ),
    ),
    "checkpoint": Key(
        _one_of(_CHECKPOINT),
        f"checkpoint takes one of: {', '.join(_CHECKPOINT)}",
        "Activation checkpointing; except_last: where the backward isn't the rank's next compute action.",
        _CHECKPOINT,
    ),
    "clip": Key(
        _positive,
        "clip takes a number over 0, such as 1.0",
        "The global gradient norm is clipped to this; off unless given.",
    ),
    "tensorboard": Key(
        str,
        "tensorboard takes a directory, such as runs/first",
        "Where traces of steps and scalars go; off unless given.",
        kind=str,
    ),
    "trace_every": Key(
        _integer,
        "trace_every takes a whole number: 1, 2, ...",
        "Each so many steps one is traced; 1 unless said.",
        needs=Need("tensorboard", (), "trace_every is for traces: it needs tensorboard=DIR"),
    ),
    "timeout": Key(
        _seconds,
        f"timeout takes seconds: a number over 0, at most {_YEAR} (a year)",
        "Seconds before a silent peer is an error.",
    ),
}
_DEFAULTS: dict[str, Any] = {name: getattr(Options, name) for name in KEYS}
_FLAGS = {flag: (name, value) for name, key in KEYS.items() for flag, value in key.flags.items()}


# --- Reading ---


class _Setting(NamedTuple):
    word: str  # as written; a flag has the key and the value that it stands for
    key: str
    value: str
    span: Span
    value_span: Span


def _values(text: str) -> dict[str, Any]:
    """The value of each setting in the text; whether they go together is another question."""
    values: dict[str, Any] = {}
    first: dict[str, str] = {}
    for setting in _settings(text):
        key = setting.key
        if key in first:
            _fail(text, setting.span, _twice(key, first[key], setting.word), KEYS[key].allowed)
        values[key] = _read(key, setting.value, text, setting.value_span)
        first[key] = setting.word
    return values


def _settings(text: str) -> Iterator[_Setting]:
    """Refuses what is neither `key=value` with a known key nor a flag."""
    for setting in _tokens(text):
        word, key, value, (start, stop), _ = setting
        rest = text[stop:].split(maxsplit=1)
        follows = rest[0] if rest else ""
        if word in _FLAGS and follows[:1] != "=":
            yield setting
            continue
        # A space inside of a setting, by the looks of it.
        torn = follows != "" and "=" not in follows and follows not in _FLAGS
        middle = start + len(key)
        if "=" not in word:
            _fail(text, (start, stop), *_not_a_setting(word, follows))
        if _takes_no_value(key):
            _fail(text, (middle, stop), f"{key} is a flag: it takes no value", KEYS[_FLAGS[key][0]].allowed)
        if key not in KEYS:
            problem = f"unknown key '{key}'{_meant(key)}" if key else "a key is missing before the ="
            _fail(text, (start, middle if key else stop), problem, _keys())
        if not value:
            problem = f"nothing follows {key}={' (no space may stand there)' if torn else ''}"
            _fail(text, (start, stop), problem, KEYS[key].allowed)
        if value.endswith(",") and torn:
            _fail(text, (stop, text.index(follows, stop)), "a value has no spaces in it", KEYS[key].allowed)
        yield setting


def _tokens(text: str) -> Iterator[_Setting]:
    """Cuts the text up, right or wrong."""
    for found in re.finditer(r"\S+", text):
        start, stop = found.span()
        if found[0] in _FLAGS:
            yield _Setting(found[0], *_FLAGS[found[0]], (start, stop), (start, stop))
        else:
            key, _, value = found[0].partition("=")
            yield _Setting(found[0], key, value, (start, stop), (start + len(key) + 1, stop))


def _takes_no_value(word: str) -> bool:
    return word in _FLAGS and (word not in KEYS or KEYS[word].kind is bool)


def _not_a_setting(word: str, follows: str) -> tuple[str, str]:
    if _takes_no_value(word):
        return f"{word} is a flag: no = follows it", KEYS[_FLAGS[word][0]].allowed
    if word in KEYS:
        space = ", and no space before the =" if follows[:1] == "=" else ""
        return f"{word} needs a value{space}", KEYS[word].allowed
    return f"'{word}' is no flag, and settings are written key=value{_meant(word, glued=True)}", _keys()


def _twice(key: str, first: str, second: str) -> str:
    if first == second:
        return f"{key if '=' in first else first} is given twice"
    if first in _FLAGS and second in _FLAGS:
        return f"{first} and {second} exclude each other"
    if first in _FLAGS or second in _FLAGS:
        return f"{key} is given twice, as {first} and as {second}"
    return f"{key} is given twice"


def _field(key: str, value: Any, text: str) -> Any:
    """The value of a field or keyword, as the string would have it."""
    if value is None and _DEFAULTS[key] is None:
        return None
    if key in KEYS[key].flags and isinstance(value, bool):
        return KEYS[key].read(KEYS[key].flags[key]) if value else _DEFAULTS[key]
    shown = _shown(text, key, value)
    if not isinstance(value, KEYS[key].kind):
        _fail(*shown, f"{key} takes a {KEYS[key].kind.__name__}, not {value!r}", KEYS[key].allowed)
    # Through its text, so that a field takes exactly what the string takes, and becomes the same.
    return _read(key, str(value), *shown)


def _read(key: str, value: str, text: str, span: Span) -> Any:
    """The value that the characters `span` of `text` stand for."""
    try:
        if not value or re.search(r"\s", value):
            raise ValueError("a value has no spaces in it" if value else f"nothing follows {key}=")
        return KEYS[key].read(value)
    except ValueError as error:
        problem = f"{key}: {error}{_nearest(value, KEYS[key].words)}"
        inner: Span | None = getattr(error, "span", None)
        _fail(text, _within(span, inner), problem, KEYS[key].allowed, cause=error)


def _shown(text: str, key: str, value: Any) -> tuple[str, Span]:
    """A text in which `key` has this value, and where: the user's if it says so, else one made up here."""
    for setting in _tokens(text):
        try:
            if setting.key == key and setting.value and KEYS[key].read(setting.value) == value:
                return text, setting.value_span
        except ValueError:
            continue
    made_up = _written(key, value)
    return made_up, (0 if made_up == key else len(key) + 1, len(made_up))


def _written(key: str, value: Any) -> str:
    return key if value is True and KEYS[key].kind is bool else f"{key}={value}"


def _said(text: str, key: str, value: Any) -> bool:
    """Whether the user gave this setting, be it the default's value."""
    return bool(value != _DEFAULTS[key] or _shown(text, key, value)[0] == text != "")


# --- Errors ---


def _fail(text: str, span: Span, problem: str, allowed: str, *, cause: Exception | None = None) -> NoReturn:
    """Raises the error, drawn.

    unknown key 'chunk'; did you mean 'chunks'?
        chunk=4 device_map=0:0-5,1:5-10
        ^^^^^
    The keys: chunks, device_map, ...
    """
    lines = [problem]
    if text:
        # Line ends and tabs are as wide as a space here, so that the carets stand where they should.
        lines.append("    " + re.sub(r"\s", " ", text))
    if text and span != (0, 0):
        start, stop = span
        lines.append("    " + " " * _width(text[:start]) + "^" * max(1, _width(text[start:stop])))
    lines.append(allowed)
    raise OptionError("\n".join(lines), text=text, span=span) from cause


def _width(text: str) -> int:
    """Columns on a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def _within(outer: Span, inner: Span | None) -> Span:
    return outer if inner is None else (outer[0] + inner[0], outer[0] + inner[1])


def _keys() -> str:
    keys = (name for name, key in KEYS.items() if key.kind is not bool)
    return f"The keys: {', '.join(keys)}\nThe flags: {', '.join(_FLAGS)}"


def _meant(word: str, *, glued: bool = False) -> str:
    """The setting that has this word for a value, or (`glued`) that lacks only its =; else the nearest."""
    if word in _FLAGS:
        return "; did you mean {}={}?".format(*_FLAGS[word])
    for name, key in KEYS.items():
        if word.lower() in key.words:
            return f"; did you mean {name}={word.lower()}?"
        value = word[len(name) :].lstrip("_-:") if glued and word.lower().startswith(name) else ""
        if value and key.kind is not bool and _reads(key, value):
            return f"; did you mean {name}={value}?"
    return _nearest(word, [*KEYS, *_FLAGS])


def _reads(key: Key, value: str) -> bool:
    try:
        key.read(value)
    except ValueError:
        return False
    return True


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _separators(text: str) -> str:
    return " (a space separates settings)" if text[-1] in ",;" else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(placement: Sequence[int]) -> str:
    return ",".join(map(str, placement))
