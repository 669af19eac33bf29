"""What does TensorBoard's tab "Pipeline" consist of? The plugin: its page, and the routes that feed it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorboard.plugins import base_plugin

from pipe.timeline import PLUGIN

# TensorBoard imports this at its start, whatever it is started for: the rest is imported when it is needed.
if TYPE_CHECKING:
    from pipe.timeline.served import Provided
    from pipe.timeline.trace import Trace

KEPT = 500
"""The traced steps of a run that TensorBoard keeps, unless --samples_per_plugin says: by itself, just 10."""
_STATIC = Path(__file__).with_name("static")
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_WSGI = Callable[..., Any]


class Loader(base_plugin.TBLoader):  # type: ignore[misc]
    """What the entry point names."""

    def fix_flags(self, flags: Any) -> None:
        """Before a data server starts: how many steps it keeps."""
        flags.samples_per_plugin.setdefault(PLUGIN, KEPT)

    def load(self, context: Any) -> PipelinePlugin:
        return PipelinePlugin(context)


class PipelinePlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """The page is under `static/`. `/steps`, `/step` and `/export` answer it, errors as `{"error": text}`."""

    plugin_name = PLUGIN

    def __init__(self, context: Any) -> None:
        self._provider = context.data_provider

    def get_plugin_apps(self) -> dict[str, _WSGI]:
        routes = {"/steps": _steps, "/step": _step, "/export": _export}
        apps = {route: _app(partial(self._answer, answer)) for route, answer in routes.items()}
        for file in sorted(_STATIC.rglob("*")):
            if file.is_file() and file.suffix in _TYPES:
                apps[f"/{file.relative_to(_STATIC).as_posix()}"] = _app(partial(_file, file))
        return apps

    def is_active(self) -> bool:
        """TensorBoard itself finds out whether there is any data."""
        return False

    def frontend_metadata(self) -> Any:
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Pipeline")

    def _answer(self, answer: Callable[[Provided, Any], _Answer], request: Any) -> _Answer:
        """The answer, or an error that the page can show."""
        from tensorboard import context, plugin_util
        from tensorboard.errors import PublicError

        from pipe.timeline.served import NotFound, Provided
        from pipe.timeline.trace import TraceError

        environ = request.environ
        try:
            provided = Provided(
                self._provider, context.from_environ(environ), plugin_util.experiment_id(environ)
            )
            return answer(provided, request.args)
        except _BadRequest as error:
            return _error(400, error)
        except NotFound as error:
            return _error(404, error)
        except TraceError as error:
            return _error(422, error)
        except PublicError as error:
            return _error(error.http_code, error)


class _Answer(NamedTuple):
    content: bytes
    content_type: str
    code: int = 200
    gzipped: bool = False
    headers: tuple[tuple[str, str], ...] = ()


class _BadRequest(Exception):
    """The page, or whoever asks, asked for what doesn't exist."""


def _steps(provided: Provided, _: Any) -> _Answer:
    return _json({"version": 1, "runs": provided.runs()})


def _step(provided: Provided, arguments: Any) -> _Answer:
    """Header, members and summary. The members go as they are stored: they are most of it."""
    from pipe.timeline.blobs import from_blobs, prediction_data, unpack
    from pipe.timeline.summary import summarize, summary_data

    blobs = provided.blobs(*_run_and_step(arguments))
    trace = from_blobs(blobs)
    summary = summarize(trace)
    header = unpack(blobs[0], "header") | {"predicted": prediction_data(summary.predicted)}
    parts = (
        b'{"header":',
        _dumped(header),
        b',"members":[',
        b",".join(map(gzip.decompress, blobs[1:])),
        b'],"summary":',
        _dumped(summary_data(summary, trace)),
        b"}",
    )
    return _Answer(gzip.compress(b"".join(parts), 4, mtime=0), "application/json", gzipped=True)


def _export(provided: Provided, arguments: Any) -> _Answer:
    form = arguments.get("format", "")
    if form not in _EXPORTS:
        raise _BadRequest(f"format={form!r}: a step can be exported as {', '.join(_EXPORTS)}")
    from pipe.timeline.blobs import from_blobs

    run, step = _run_and_step(arguments)
    export, content_type, suffix = _EXPORTS[form]
    content = export(from_blobs(provided.blobs(run, step))).encode()
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run).strip("-") or "run"
    headers = (("Content-Disposition", f'attachment; filename="pipeline-{name}-step-{step}.{suffix}"'),)
    return _Answer(content, content_type, headers=headers)


def _chrome(trace: Trace) -> str:
    from pipe.timeline.chrome import chrome_trace

    return chrome_trace(trace)


def _csv(trace: Trace) -> str:
    from pipe.timeline.summary import summarize
    from pipe.timeline.table import csv_table

    return csv_table(trace, summarize(trace).predicted)


def _svg(trace: Trace) -> str:
    from pipe.timeline.picture import svg

    return svg(trace)


_EXPORTS: dict[str, tuple[Callable[[Trace], str], str, str]] = {
    "chrome": (_chrome, "application/json", "json"),
    "csv": (_csv, "text/csv", "csv"),
    "svg": (_svg, "image/svg+xml", "svg"),
}


def _file(path: Path, _: Any) -> _Answer:
    return _Answer(path.read_bytes(), _TYPES[path.suffix])


def _run_and_step(arguments: Any) -> tuple[str, int]:
    run, step = arguments.get("run"), arguments.get("step", "")
    if run is None:
        raise _BadRequest("run= is missing: which run?")
    if not (step.isascii() and step.isdigit()):
        raise _BadRequest(f"step={step!r} is no step (0, 1, ...)")
    return run, int(step)


def _error(code: int, error: Exception) -> _Answer:
    return _json({"error": str(error)}, code)


def _json(data: Any, code: int = 200) -> _Answer:
    return _Answer(_dumped(data), "application/json", code)


def _dumped(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()


def _app(answer: Callable[[Any], _Answer]) -> _WSGI:
    """A WSGI app of what makes an answer of a request."""
    from tensorboard.backend.http_util import Respond
    from werkzeug.wrappers import Request

    def respond(request: Request) -> Any:
        content, content_type, code, gzipped, headers = answer(request)
        encoding = "gzip" if gzipped else None
        return Respond(request, content, content_type, code, content_encoding=encoding, headers=list(headers))

    return Request.application(respond)
