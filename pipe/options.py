"""What did the user ask for? The option string and its frozen value, checked once, here.

    chunks=5 device_map=0:0-5,1:5-10 schedule=1f1b

`KEYS` describes every setting; parsing, printing, checking and the errors all read that table. Each error
shows the text with a caret under the culprit. What needs the model and the world size waits for
`Options.resolve`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
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
    schedule: str = "1f1b"
    checkpoint: str = "never"
    clip: float | None = None
    timeout: float = 300.0
    # The string as the user wrote it, which later errors show. Not part of the value.
    text: str = field(default="", compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in KEYS:
            value = getattr(self, name)
            if value is not None or _DEFAULTS[name] is not None:
                # Through its text, so that a field takes exactly what the string takes, and becomes the same.
                object.__setattr__(self, name, _read(name, str(value), *_shown(self.text, name, value)))
        device_map = self._explicit_map()
        if device_map is not None and self.ranks not in (None, device_map.ranks):
            self._refuse(
                "ranks", f"ranks is {self.ranks}, but device_map has {_count(device_map.ranks, 'rank')}"
            )

    @classmethod
    def parse(cls, text: str) -> Options:
        """Reads whitespace-separated `key=value` pairs, in any order."""
        values: dict[str, Any] = {}
        for setting in _settings(text):
            if setting.key in values:
                _fail(text, setting.span, f"{setting.key} is given twice", KEYS[setting.key].allowed)
            values[setting.key] = _read(setting.key, setting.value, text, setting.value_span)
        return cls(**values, text=text)

    def __str__(self) -> str:
        said = ((name, getattr(self, name)) for name in KEYS)
        return " ".join(f"{name}={value}" for name, value in said if value != _DEFAULTS[name])

    def resolve(
        self,
        num_layers: int,
        world_size: int,
        sizes: Callable[[], Sequence[int]],
        *,
        schedule: Schedule | None = None,
    ) -> Resolved:
        """Fills in what the model and the world leave to fill in.

        `sizes` gives the layers' parameter counts, and is called for `device_map=params` only. `schedule` is
        an object given instead of the setting.
        """
        import schedules

        chosen = self._schedule(schedule)
        device_map = self._explicit_map()
        fixed = chosen if isinstance(chosen, schedules.CSVFile) else None
        ranks = self._ranks(device_map, fixed, world_size)
        # Before the schedule is asked for a placement on so many; a map or a CSV file brings its own.
        if device_map is None and fixed is None and ranks > num_layers:
            self._refuse(
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
            chunks=chunks,
            device_map=device_map,
            schedule=chosen,
            checkpoint=self.checkpoint,
            clip=self.clip,
            timeout=self.timeout,
        )

    def _explicit_map(self) -> DeviceMap | None:
        return None if self.device_map in _RULES else DeviceMap.parse(self.device_map)

    def _schedule(self, given: Schedule | None) -> Schedule:
        import schedules

        if given is None:
            return schedules.get(self.schedule)
        if self._says("schedule") and schedules.get(self.schedule) != given:
            self._refuse("schedule", f"schedule is {self.schedule} here, but {given!r} as a keyword")
        return given

    def _ranks(self, device_map: DeviceMap | None, fixed: CSVFile | None, world_size: int) -> int:
        """The map or the CSV says, else `ranks`, else the world; and all that say anything agree."""
        source, ranks = "ranks", self.ranks
        if fixed is not None:
            if ranks not in (None, fixed.ranks):
                self._refuse("ranks", f"ranks is {ranks}, but the schedule's CSV fixes it to {fixed.ranks}")
            source, ranks = "schedule", fixed.ranks
        if device_map is not None:
            if fixed is not None and fixed.ranks != device_map.ranks:
                has = f"device_map has {_count(device_map.ranks, 'rank')}"
                self._refuse("device_map", f"{has}, but the schedule's CSV fixes it to {fixed.ranks}")
            source, ranks = "device_map", device_map.ranks
        if ranks is None:
            return world_size
        if world_size > 1 and ranks != world_size:
            self._refuse(
                source,
                f"{_count(ranks, 'rank')} on a world size of {world_size}: they must be equal "
                "(or the world size 1, where one process runs every rank)",
            )
        return ranks

    def _chunks(self, fixed: CSVFile | None, ranks: int) -> int:
        if fixed is None:
            # Four microbatches a rank keep the bubble of 1F1B, (p - 1) / (m + p - 1), under a fifth.
            return 4 * ranks if self.chunks is None else self.chunks
        if self.chunks not in (None, fixed.microbatches):
            says = f"the schedule's CSV fixes it to {fixed.microbatches}"
            self._refuse("chunks", f"chunks is {self.chunks}, but {says}")
        return fixed.microbatches

    def _wanted(self, schedule: Schedule, ranks: int) -> tuple[int, ...]:
        """The placement that the schedule asks for."""
        try:
            return tuple(schedule.placement(ranks))
        except ValueError as error:
            self._refuse("schedule", str(error), cause=error)

    def _cut(
        self, placement: tuple[int, ...], num_layers: int, sizes: Callable[[], Sequence[int]]
    ) -> DeviceMap:
        try:
            by_count = self.device_map == "uniform"
            cuts = uniform(num_layers, len(placement)) if by_count else params(sizes(), len(placement))
            return DeviceMap.from_cuts(cuts, placement)
        except PartitionError as error:
            key = "schedule" if num_layers < len(placement) and self._says("schedule") else "device_map"
            self._refuse(key, str(error), cause=error)

    def _check_end(self, num_layers: int) -> None:
        text, (start, stop) = self._where("device_map")
        try:
            # Parsed again from what the user wrote, where ranges may stand in another order.
            DeviceMap.parse(text[start:stop]).validate(num_layers)
        except PartitionError as error:
            self._refuse("device_map", str(error), span=error.span, cause=error)

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
        self._refuse(
            "device_map",
            f"the stages are, in layer order, on the ranks {_listed(placement)}, but "
            f"the schedule needs them on {_listed(wanted)}{why}",
            cause=cause,
        )

    def _says(self, key: str) -> bool:
        """Whether the user gave this setting, be it the default's value."""
        shown, _ = self._where(key)
        return getattr(self, key) != _DEFAULTS[key] or (shown == self.text != "")

    def _where(self, key: str) -> tuple[str, Span]:
        return _shown(self.text, key, getattr(self, key))

    def _refuse(
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

    ranks: int
    chunks: int
    device_map: DeviceMap
    schedule: Schedule
    checkpoint: str
    clip: float | None
    timeout: float

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.device_map.placement


def merge(options: Options | str, **keywords: Any) -> Options:
    """Settings given beside the string. None isn't a setting; one given twice has to be the same twice."""
    if isinstance(options, str):
        options = Options.parse(options)
    values = {name: getattr(options, name) for name in KEYS}
    for name, value in keywords.items():
        if value is None:
            continue
        if name not in KEYS:
            raise OptionError(
                f"unknown setting {name!r}{_nearest(name, KEYS)}\nThe settings: {', '.join(KEYS)}"
            )
        value = _read(name, str(value), *_shown("", name, value))
        if options._says(name) and values[name] != value:
            options._refuse(name, f"{name} is {values[name]} here, but {value} as a keyword")
        values[name] = value
    return Options(**values, text=options.text)


# --- The table ---


class Key(NamedTuple):
    """One setting: what its text becomes, and what a user is told of it."""

    read: Callable[[str], Any]  # raises a ValueError, perhaps with a `span` into its argument
    allowed: str  # what may stand there, for errors
    doc: str
    words: tuple[str, ...] = ()  # spellings to offer


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


def _word(text: str) -> str:
    if text not in _CHECKPOINT:
        raise ValueError(f"'{text}' isn't one of them")
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
        "Ranks of the pipeline, where neither the map nor a CSV schedule says; else the world size.",
    ),
    "schedule": Key(
        _schedule,
        "schedule takes a name, with arguments as name(2), or csv(FILE)",
        "The order in which each rank works through the microbatches.",
    ),
    "checkpoint": Key(
        _word,
        f"checkpoint takes one of: {', '.join(_CHECKPOINT)}",
        "Activation checkpointing; except_last: where the backward isn't the rank's next compute action.",
        _CHECKPOINT,
    ),
    "clip": Key(
        _positive,
        "clip takes a number over 0, such as 1.0",
        "The global gradient norm is clipped to this; off unless given.",
    ),
    "timeout": Key(
        _seconds,
        f"timeout takes seconds: a number over 0, at most {_YEAR} (a year)",
        "Seconds before a silent peer is an error.",
    ),
}
_DEFAULTS = {name: getattr(Options, name) for name in KEYS}


# --- Reading ---


class _Setting(NamedTuple):
    key: str
    value: str
    span: Span
    value_span: Span


def _settings(text: str) -> Iterator[_Setting]:
    """Cuts the text up, and refuses what isn't `key=value` with a known key."""
    for found in re.finditer(r"\S+", text):
        key, equals, value = found[0].partition("=")
        start, stop = found.span()
        middle = start + len(key)
        rest = text[stop:].split(maxsplit=1)
        follows = rest[0] if rest else ""
        torn = follows != "" and "=" not in follows  # a space inside of a setting, by the looks of it
        if not equals:
            _fail(text, found.span(), _not_a_setting(key, follows), _keys())
        if key not in KEYS:
            problem = f"unknown key '{key}'{_nearest(key, KEYS)}" if key else "a key is missing before the ="
            _fail(text, (start, middle if key else stop), problem, _keys())
        if not value:
            problem = f"nothing follows {key}={' (no space may stand there)' if torn else ''}"
            _fail(text, (start, stop), problem, KEYS[key].allowed)
        if value.endswith(",") and torn:
            _fail(text, (stop, text.index(follows, stop)), "a value has no spaces in it", KEYS[key].allowed)
        yield _Setting(key, value, (start, stop), (middle + 1, stop))


def _not_a_setting(word: str, follows: str) -> str:
    if word in KEYS:
        return f"{word} needs a value" + (", and no space before the =" if follows[:1] == "=" else "")
    return f"'{word}' is no flag, and settings are written key=value{_nearest(word, KEYS)}"


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
    for found in re.finditer(rf"(?<!\S){key}=(\S+)", text):
        try:
            if KEYS[key].read(found[1]) == value:
                return text, found.span(1)
        except ValueError:
            continue
    return f"{key}={value}", (len(key) + 1, len(f"{key}={value}"))


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
    return f"The keys: {', '.join(KEYS)}"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _separators(text: str) -> str:
    return " (a space separates settings)" if text[-1] in ",;" else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(placement: Sequence[int]) -> str:
    return ",".join(map(str, placement))
