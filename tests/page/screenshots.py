"""Takes pictures of the page.

    python tests/page/screenshots.py docs                           those of docs/timeline.md, in some minutes
    python tests/page/screenshots.py OUT --synthetic                to be looked at after a change of the page
    python tests/page/screenshots.py OUT --runs LOGDIR RUN OTHER    of runs of your own

Those of docs/timeline.md are of two runs of examples/train_gpt.py on two local ranks, which it makes: one
whose first stage is too long, and a balanced one. Of each, the quickest step is shown: the others tell more
of what else the machine does. It prints what `python -m pipe timeline` says of the first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from browsing import Tab, browser, tensorboard  # noqa: E402

MAPS = {"uneven": "0:0-7,1:7-10", "even": "0:0-5,1:5-10"}
"""Runs of the example, and what they are cut into."""

Shot = tuple[str, str, Callable[[Tab], None]]


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        logdir = Path(directory) / "runs"
        if args.runs:
            logdir = Path(args.runs[0])
            shots = list(_of_runs(logdir, *args.runs[1:]))
        elif args.synthetic:
            shots = list(_synthetic(logdir))
        else:
            _run_example(Path(directory))
            shots = list(_of_runs(logdir, *MAPS))
        with tensorboard(logdir) as address, browser(Path(directory) / "profile") as context:
            tab = Tab(context.pages[0], address)
            for name, link, then in shots:
                tab.open(link)
                then(tab)
                tab.page.wait_for_timeout(300)
                tab.page.screenshot(path=args.out / f"{name}.png")
                size = (args.out / f"{name}.png").stat().st_size
                print(f"{name}.png: {size / 1e3:.0f} kB", *tab.complaints)


def _run_example(folder: Path) -> None:
    """In a folder of their own, so that the pictures show its relative paths."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = ["--steps", "120", "--dim", "128", "--sample-bytes", "1"]
    for name, device_map in MAPS.items():
        options = f"chunks=8 device_map={device_map} tensorboard=runs/{name} trace_every=5"
        example = [str(ROOT / "examples" / "train_gpt.py"), *sizes, "--batch-size", "32"]
        subprocess.run(
            [*torchrun, *example, "--pipeline", options], cwd=folder, env=environment, check=True, timeout=600
        )
    run = next(iter(MAPS))
    step = str(_quickest(folder / "runs", run))
    command = [sys.executable, "-m", "pipe", "timeline", "runs", "--run", run, "--step", step]
    print(f"$ python {' '.join(command[1:])}", flush=True)
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)


def _of_runs(logdir: Path, run: str, other: str) -> Iterator[Shot]:
    """The quickest step of the first run, and beside it the other's."""
    shown = f"run={run}&step={_quickest(logdir, run)}"
    yield "timeline", shown, _nothing
    yield "timeline-dark", shown, _dark(_hover(0, 0.45))
    yield "timeline-predicted", f"{shown}&predicted=1", _zoomed(_hover(1, 0.5))
    yield "timeline-compared", f"{shown}&compare={other}&with={_quickest(logdir, other)}", _nothing


def _quickest(logdir: Path, name: str) -> int:
    from pipe.timeline.logdir import read

    run = read(logdir)[name]
    return min(run.steps[1:], key=lambda step: run.header(step).duration)  # the first is a warm-up


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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, help="the folder for the pictures")
    add("--synthetic", action="store_true", help="of runs that the simulator makes")
    add("--runs", nargs=3, metavar=("LOGDIR", "RUN", "OTHER"), help="of runs that are there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
