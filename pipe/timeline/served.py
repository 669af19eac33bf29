"""Which traces does TensorBoard's data provider hold?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pipe.timeline import PLUGIN, SCALARS, TAG

_ALL = 1_000_000  # a provider wants to be told how many points of a series are enough

_AT_ONCE = 16


class NotFound(Exception):
    """There is no such run or step; the message says which there are."""


class Provided:
    """The traces of one experiment, for one request."""

    def __init__(self, provider: Any, context: Any, experiment: str) -> None:
        self._provider, self._asked = provider, {"ctx": context, "experiment_id": experiment}

    def runs(self) -> list[dict[str, Any]]:
        """Every run with its traced steps, and by step what the slider shows, or None where it isn't known.

        What it shows are scalars: those of steps that TensorBoard didn't keep are not known.
        """
        shown = self._scalars()
        return [
            {
                "run": run,
                "steps": list(steps),
                "wall_time": [datum.wall_time for datum in steps.values()],
                "duration": [_times(shown.get((run, "step_seconds"), {}).get(step), 1e6) for step in steps],
                "bubble": [_times(shown.get((run, "bubble"), {}).get(step), 1.0) for step in steps],
            }
            for run, steps in sorted(self._series(None).items())
        ]

    def blobs(self, run: str, step: int) -> list[bytes]:
        """Those of a step. Raises `NotFound`."""
        series = self._series([run])
        if run not in series:
            known = ", ".join(sorted(self._series(None))) or "none"
            raise NotFound(f"there is no run {run!r} with traces; there are: {known}")
        if step not in series[run]:
            steps = list(series[run])
            raise NotFound(f"run {run!r} has no trace of step {step}; it has {_range(steps)}")
        return self._read_blobs([reference.blob_key for reference in series[run][step].values])

    def _read_blobs(self, keys: list[str]) -> list[bytes]:
        """All at once: a call of the fast data server takes 40 ms, whatever it brings."""
        read = partial(self._provider.read_blob, self._asked["ctx"])
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda key: read(blob_key=key), keys))

    def _series(self, runs: list[str] | None) -> dict[str, dict[int, Any]]:
        """By run and step, what refers to the blobs; ascending steps."""
        found = self._read(self._provider.read_blob_sequences, PLUGIN, [TAG], runs)
        return {
            run: {datum.step: datum for datum in sorted(by_tag[TAG], key=lambda datum: int(datum.step))}
            for run, by_tag in found.items()
            if by_tag.get(TAG)
        }

    def _scalars(self) -> dict[tuple[str, str], dict[int, float]]:
        """By run and name, then by step."""
        tags = [f"{SCALARS}{name}" for name in ("step_seconds", "bubble")]
        found = self._read(self._provider.read_scalars, "scalars", tags, None)
        return {
            (run, tag[len(SCALARS) :]): {datum.step: float(datum.value) for datum in data}
            for run, by_tag in found.items()
            for tag, data in by_tag.items()
        }

    def _read(self, read: Any, plugin: str, tags: list[str], runs: list[str] | None) -> Any:
        from tensorboard.data.provider import RunTagFilter

        chosen = RunTagFilter(runs=runs, tags=tags)
        return read(**self._asked, plugin_name=plugin, downsample=_ALL, run_tag_filter=chosen) or {}


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None or value != value else value * factor


def _range(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
