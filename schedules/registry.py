"""Which schedule does a name mean?"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from schedules.auto import Auto
from schedules.csv_file import CSVFile
from schedules.errors import ScheduleError
from schedules.family import FAMILY
from schedules.schedule import Schedule

GROUP = "pipe.schedules"
"""The entry-point group by which other distributions add names, each a class or a function."""

SCHEDULES: dict[str, type[Any]] = {**FAMILY, "auto": Auto}
"""The named schedules: each can be made without arguments, and is tested by being here."""

_BUILT_IN: dict[str, type[Any]] = {**SCHEDULES, "csv": CSVFile}
_TEXT = re.compile(r"(?P<name>[^\s()]+)(?:\((?P<arguments>.*)\))?")


def get(text: str) -> Schedule:
    """The schedule of `gpipe`, `1f1b`, `csv(FILE)` or a name with numbers, as `interleaved(2)`."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} names no schedule: write NAME or NAME(ARGUMENTS)", span=(0, len(text)))
    factory = _factory(match["name"], match.span("name"))
    arguments = _arguments(factory, match)
    try:
        inspect.signature(factory).bind(*arguments)
    except TypeError as error:
        raise ScheduleError(f"{text!r}: {error}", span=_argument_span(match)) from None
    try:
        return cast(Schedule, factory(*arguments))
    except ScheduleError as error:
        error.span = error.span or _argument_span(match)
        raise


def names() -> tuple[str, ...]:
    """All names: the built-in ones, then those of other distributions."""
    others = sorted(point.name for point in entry_points(group=GROUP) if point.name not in _BUILT_IN)
    return (*_BUILT_IN, *dict.fromkeys(others))


def text_of(schedule: Schedule) -> str | None:
    """The text that `get` makes this very schedule of; None for a class of the user's own."""
    for name, factory in _BUILT_IN.items():
        if type(schedule) is factory:
            return _spelled(name, schedule)
    for point in entry_points(group=GROUP):
        # Loading imports the distribution, so only what the schedule's own module suggests is loaded.
        if point.attr == type(schedule).__qualname__ and _load(point) is type(schedule):
            return _spelled(point.name, schedule)
    return None


def _factory(name: str, span: tuple[int, int]) -> Callable[..., object]:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for point in entry_points(group=GROUP, name=name):
        return _load(point)
    known = names()
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ScheduleError(f"unknown schedule {name!r}{hint}; the schedules are {', '.join(known)}", span=span)


def _load(point: EntryPoint) -> Callable[..., object]:
    try:
        return cast(Callable[..., object], point.load())
    except Exception as error:
        source = point.dist.name if point.dist is not None else point.value
        raise ScheduleError(f"schedule {point.name!r} of {source} cannot be loaded: {error!r}") from error


def _arguments(factory: Callable[..., object], match: re.Match[str]) -> list[int | str]:
    """Numbers, except for a file's name, which is the whole text (it may hold commas and digits)."""
    text: str | None = match["arguments"]
    if text is None or not text.strip():
        return []
    if factory is CSVFile:
        return [text]
    arguments: list[int | str] = []
    for argument in text.split(","):
        if not re.fullmatch(r"[0-9]+", argument.strip()):
            raise ScheduleError(
                f"{argument.strip()!r} is no number: a schedule's arguments are numbers, as interleaved(2)",
                span=match.span("arguments"),
            )
        arguments.append(int(argument))
    return arguments


def _argument_span(match: re.Match[str]) -> tuple[int, int]:
    return match.span("name" if match["arguments"] is None else "arguments")


def _spelled(name: str, schedule: object) -> str | None:
    if not dataclasses.is_dataclass(schedule):
        return name
    fields = [field for field in dataclasses.fields(schedule) if field.init]
    values = [getattr(schedule, field.name) for field in fields]
    while fields and values[-1] == fields[-1].default:  # what `get` puts in by itself
        fields.pop()
        values.pop()
    if type(schedule) is not CSVFile and not all(isinstance(value, int) for value in values):
        return None  # a text has numbers only
    return f"{name}({','.join(map(str, values))})" if values else name
