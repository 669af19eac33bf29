"""Takes pictures of the page: `python tests/page/screenshots.py OUT [LOGDIR RUN [RUN]]`.

Of a directory's runs, for docs/timeline.md: the last step of the first run in both modes, a zoomed one with
arrows, a selection, and, with a second run, the comparison. Without a directory: of synthetic runs, to be
looked at after a change of the page.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from browsing import Tab, browser, tensorboard  # noqa: E402

Shot = tuple[str, str, Callable[[Tab], None]]


def main(out: Path, logdir: Path | None = None, *runs: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        if logdir is None:
            logdir = Path(directory) / "runs"
            shots = list(_synthetic(logdir))
        else:
            shots = list(_of_runs(*runs))
        with tensorboard(logdir) as address, browser(Path(directory) / "profile") as context:
            tab = Tab(context.pages[0], address)
            for name, link, then in shots:
                tab.open(link)
                then(tab)
                tab.page.wait_for_timeout(300)
                tab.page.screenshot(path=out / f"{name}.png")
                print(f"{name}.png: {(out / f'{name}.png').stat().st_size / 1e3:.0f} kB", *tab.complaints)


def _of_runs(run: str, other: str | None = None) -> Iterator[Shot]:
    yield "timeline", f"run={run}", _nothing
    yield "timeline-dark", f"run={run}", _dark(_hover(1, 0.4))
    yield "timeline-zoomed", f"run={run}&predicted=1", _zoomed(_hover(0, 0.5))
    yield "timeline-selected", f"run={run}", _selected
    if other:
        yield "timeline-compared", f"run={run}&compare={other}", _nothing


def _synthetic(logdir: Path) -> Iterator[Shot]:
    from timeline.synthetic import plan_of, write_run

    from schedules import Costs, add_collectives

    costs = Costs(latency=0.05)
    some: dict[str, Any] = {"steps": 6, "options": "chunks=8 tensorboard=runs"}
    interleaved: dict[str, Any] = {"memory": True, "schedule": "interleaved(2)", **some}
    write_run(logdir / "two", plan_of("1f1b", 2, 8), costs, schedule="1f1b", **some)
    slow = Costs(F=[1, 1, 1, 1.5, 1, 1, 1, 1], B=[2, 2, 2, 3, 2, 2, 2, 2], latency=0.05)
    write_run(logdir / "virtual", plan_of("interleaved(2)", 4, 8), slow, **interleaved)
    write_run(logdir / "split", plan_of("zb_h1", 4, 8), costs, schedule="zb_h1", replicas=2, **some)
    sharded = add_collectives(plan_of("looped_bfs", 2, 4), reduce_every=1, unshard=True)
    write_run(logdir / "sharded", sharded, Costs(unshard=0.8, reduce_grad=1.5, latency=0.05), replicas=2)
    write_run(logdir / "large", plan_of("interleaved(2)", 16, 256), costs, steps=1, schedule="interleaved(2)")
    for run in ("two", "virtual", "split", "sharded", "large"):
        yield run, f"run={run}", _nothing
    yield "two-dark", "run=two", _dark(_hover(1, 0.5))
    yield "virtual-dark", "run=virtual&predicted=1", _dark(_hover(2, 0.4))
    yield "virtual-predicted", "run=virtual&predicted=1", _hover(1, 0.4)
    yield "virtual-selected", "run=virtual", _selected
    yield "compared", "run=split&compare=virtual", _nothing
    yield "large-zoomed", "run=large", _zoomed(_hover(7, 0.4))
    yield "large-dark", "run=large&predicted=1", _dark(_nothing)


def _nothing(tab: Tab) -> None:
    pass


def _hover(member: int, share: float) -> Callable[[Tab], None]:
    """Points at the computation so far into a member's step."""

    def then(tab: Tab) -> None:
        kinds: str = tab[f"state.trace.members[{member}].kind"]
        computes = [event for event, kind in enumerate(kinds) if kind in "FBIW"]
        tab.point(member, computes[int(share * len(computes))])

    return then


def _zoomed(then: Callable[[Tab], None]) -> Callable[[Tab], None]:
    def zoom(tab: Tab) -> None:
        then(tab)
        actions: int = tab["bars.total"]
        while tab["bars.drawn"] > min(300, actions / 2):
            tab.key("w")
            tab.page.wait_for_timeout(50)
        then(tab)

    return zoom


def _dark(then: Callable[[Tab], None]) -> Callable[[Tab], None]:
    def dark(tab: Tab) -> None:
        tab.page.evaluate("document.body.classList.add('dark-mode')")
        tab.until("it.dark === true")
        then(tab)

    return dark


def _selected(tab: Tab) -> None:
    box: Any = tab.frame.locator(".marks").bounding_box()
    x, y = box["x"] + box["width"] * 0.4, box["y"] + 90
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x + box["width"] * 0.25, y, steps=5)
    tab.page.mouse.up()
    tab.until("it.selection")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None, *sys.argv[3:])
