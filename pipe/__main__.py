"""Which plan would run, and how well; and how well did it? `python -m pipe` says it, without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import schedules
from pipe.timeline.trace import TraceError
from schedules import (
    REDUCE_GRAD,
    SCHEDULES,
    UNSHARD,
    Auto,
    Costs,
    Plan,
    Problem,
    Schedule,
    ScheduleError,
    Timeline,
)

_Cost = float | tuple[float, ...]

_EPILOG = """\
Schedules: {names}, csv(FILE), or what other distributions add. Arguments go in brackets, as
"interleaved(3)". Costs and times are in one unit of your choice; a cost is one number, or one a stage with
commas between, as --forward 1,1,2,1.

examples:
  python -m pipe draw 1f1b --ranks 4 --microbatches 8
  python -m pipe simulate zb_v -p 8 -m 64 --latency 0.1 --trace zb_v.json
  python -m pipe compare -p 8 -m 64 --input 0.9 --weight 0.8 --memory 8
  python -m pipe simulate "auto(8)" -p 8 -m 64 --input 0.9 --weight 0.8
  python -m pipe simulate "looped_bfs(2)" -p 4 -m 8 --zero 3 --unshard 0.5 --reduce 0.5
  python -m pipe verify plan.csv
  python -m pipe timeline runs --step 100 --svg step.svg
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; wrong input is a message on stderr and 2."""
    parser = _parser()
    args = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = args.run
    try:
        run(args)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
    except (ScheduleError, TraceError, OSError) as error:
        print(f"{parser.prog} {args.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _draw(args: argparse.Namespace) -> None:
    timeline = schedules.simulate(_plan(args), _costs(args))
    print(timeline.draw(color=_color(args)))
    _write(args, timeline)


def _verify(args: argparse.Namespace) -> None:
    file = schedules.CSVFile(args.file)
    plan = schedules.build(file, file.placement(file.ranks), file.microbatches)
    print(f"{args.file}: holds")
    _print_rows(
        [
            ("ranks", f"{plan.ranks}, {plan.num_stages} stages"),
            ("microbatches", str(plan.microbatches)),
            ("actions", _counted(plan)),
            ("weight gradients", "in microbatch order" if plan.in_order else "NOT in microbatch order"),
            ("peak live", _several(plan.peak_live)),
            *_collective_rows(plan),
            ("digest", plan.digest),
        ]
    )


def _counted(plan: Plan) -> str:
    compute = sum(map(len, plan.orders))
    collectives = sum(map(len, plan.programs)) - sum(map(len, plan.without_collectives.programs))
    transfers = sum(map(len, plan.programs)) - compute - collectives
    counted = f"{compute} computations, {transfers} sends and receives"
    return f"{counted}, {collectives} collectives" if collectives else counted


def _collective_rows(plan: Plan) -> list[tuple[str, str]]:
    if not plan.has_collectives:
        return []
    return [
        ("reductions a stage", _several(plan.reductions)),
        ("unshards a stage", _several(plan.unshards)),
        ("peak unsharded", _several(plan.peak_unsharded)),
    ]


def _simulate(args: argparse.Namespace) -> None:
    timeline = schedules.simulate(
        _plan(args), _costs(args), rendezvous=args.rendezvous, blocking=args.blocking
    )
    bubble = timeline.bubble
    schedule = schedules.get(args.schedule)
    if isinstance(schedule, Auto):
        problem = Problem(timeline.plan.placement, timeline.plan.microbatches, timeline.costs)
        found = schedule.search(problem)
        print(f"found by {found.method}; lower bound {found.bound:g}, gap {found.gap:.2%}")
    print(f"makespan {timeline.makespan:g}, span {timeline.span:g}")
    print(f"bubble {timeline.rate:.2%} of ranks x makespan\n")
    columns = (timeline.busy, *bubble, timeline.peak_live, timeline.peak_bytes)
    head = ("rank", "busy", *(name.replace("_", "-") for name in bubble._fields), "peak live", "peak bytes")
    rows = [(str(rank), *(f"{column[rank]:g}" for column in columns)) for rank in range(timeline.plan.ranks)]
    _print_table([head, *rows])
    if args.critical:
        path = " ".join(str(action) for _, _, action in timeline.critical_path)
        print(f"\ncritical path: {path}")
    _write(args, timeline)


def _compare(args: argparse.Namespace) -> None:
    rows = [("schedule", "makespan", "span", "bubble", "peak", "fits")]
    for name in SCHEDULES:
        schedule: Schedule = schedules.get(name) if name != "auto" else Auto(iterations=args.iterations)
        placement = schedule.placement(args.ranks)
        shares = len(placement) // args.ranks  # a rank's work, over so many stages
        costs = _costs(args, placement)
        try:
            plan = schedules.build(schedule, placement, args.microbatches, costs=costs, memory=args.memory)
        except ScheduleError:  # auto, where not one microbatch fits: what would it do in more memory?
            plan = schedules.build(schedule, placement, args.microbatches, costs=costs)
        timeline = schedules.simulate(_with_collectives(args, plan), costs)
        peak = float(timeline.peak_bytes.max())
        fits = "-" if args.memory is None else ("yes" if peak <= args.memory * (1 + 1e-9) else "no")
        label = f"{name}({shares})" if name in ("interleaved", "looped_bfs") else name
        rows.append(
            (label, f"{timeline.makespan:g}", f"{timeline.span:g}", f"{timeline.rate:.2%}", f"{peak:g}", fits)
        )
    _print_table(rows if args.memory is not None else [row[:-1] for row in rows])


def _timeline(args: argparse.Namespace) -> None:
    from pipe.timeline.command import timeline  # and with it tensorboard's formats

    timeline(
        args.logdir,
        run=args.run_name,
        step=args.step,
        svg_file=args.svg,
        trace_file=args.trace,
        csv_file=args.csv,
    )


def _plan(args: argparse.Namespace) -> Plan:
    schedule = schedules.get(args.schedule)
    if isinstance(schedule, schedules.CSVFile):
        ranks, microbatches = args.ranks or schedule.ranks, args.microbatches or schedule.microbatches
    else:
        ranks, microbatches = args.ranks or 4, args.microbatches or 8
    placement = args.placement or schedule.placement(ranks)
    return _with_collectives(args, schedules.build(schedule, placement, microbatches, costs=_costs(args)))


def _with_collectives(args: argparse.Namespace, plan: Plan) -> Plan:
    """With those of the ZeRO stage asked for; its own, where none is."""
    if args.reduce_every is not None and (args.zero or 0) < 2:
        raise ScheduleError("--reduce-every needs --zero 2 or 3: below, a stage reduces once")
    if args.zero is not None:
        every = plan.microbatches if args.zero < 2 else args.reduce_every or 1
        plan = schedules.add_collectives(plan, reduce_every=every, unshard=args.zero == 3)
    for option, cost, op, counts, zero in (
        ("--reduce", args.reduce, REDUCE_GRAD, plan.reductions, "--zero"),
        ("--unshard", args.unshard, UNSHARD, plan.unshards, "--zero 3"),
    ):
        if cost is not None and not any(counts):
            raise ScheduleError(f"{option} is the cost of what the plan lacks, {op}: {zero} puts it in")
    return plan


def _costs(args: argparse.Namespace, placement: tuple[int, ...] | None = None) -> Costs:
    """The costs of the options; with a placement, a rank's numbers, evenly over its stages."""

    def cost(number: _Cost | None) -> Any:
        return number if placement is None or number is None else _shared(number, placement)

    return Costs(
        F=cost(args.forward),
        B=cost(args.backward),
        I=cost(args.input),
        W=cost(args.weight),
        pair=cost(args.pair),
        unshard=cost(args.unshard) or 0.0,
        reduce_grad=cost(args.reduce) or 0.0,
        latency=args.latency,
        bandwidth=args.bandwidth,
        boundary_bytes=args.boundary_bytes,
        activation_bytes=cost(args.activation_bytes),
        released_at_input=args.released_at_input,
    )


def _shared(cost: _Cost, placement: tuple[int, ...]) -> _Cost:
    ranks = 1 + max(placement)
    shares = len(placement) // ranks
    if isinstance(cost, float):
        return cost / shares
    if len(cost) != ranks:
        raise ScheduleError(f"{len(cost)} costs for {ranks} ranks: give one number, or one a rank")
    return tuple(cost[rank] / shares for rank in placement)


def _write(args: argparse.Namespace, timeline: Timeline) -> None:
    if args.svg:
        timeline.svg(args.svg)
    if args.trace:
        timeline.chrome_trace(args.trace)
    if args.csv:
        Path(args.csv).write_text(_plan(args).to_csv(), encoding="utf-8")


def _color(args: argparse.Namespace) -> bool | None:
    return {"auto": None, "always": True, "never": False}[args.color]


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([f"{first:<{widths[0]}}", *cells]))


def _several(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers[:32])) + (" ..." if len(numbers) > 32 else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipe",
        description="Looks at pipeline schedules before anything runs, and at traces of what did. "
        "Needs no GPU and loads no torch.",
        epilog=_EPILOG.format(names=", ".join(SCHEDULES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    draw = _command(commands, "draw", _draw, "draw a schedule as a grid of time")
    draw.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")
    verify = _command(commands, "verify", _verify, "prove that a CSV plan works, or show where it does not")
    verify.add_argument("file", metavar="FILE.csv", help="one row a rank, one action a cell, as torch's")
    simulate = _command(commands, "simulate", _simulate, "time a schedule; say what ranks wait for")
    simulate.add_argument("--rendezvous", action="store_true", help="a send blocks until it has arrived")
    simulate.add_argument("--blocking", action="store_true", help="a receive blocks where it stands")
    simulate.add_argument("--critical", action="store_true", help="print the critical path too")
    for command in (draw, simulate):
        command.add_argument("schedule", metavar="SCHEDULE", help='as 1f1b, "interleaved(2)" or "csv(FILE)"')
        _add_size(command, ranks=None, microbatches=None)
        command.add_argument(
            "--placement", type=_placement, help="each stage's rank, as 0,1,1,0 [the schedule's]"
        )
        _add_costs(command)
        _add_collectives(command)
        command.add_argument("--svg", metavar="FILE", help="write a picture")
        command.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
        command.add_argument("--csv", metavar="FILE", help="write the plan")
    compare = _command(commands, "compare", _compare, "a table of all named schedules")
    _add_size(compare, ranks=4, microbatches=8)
    _add_costs(compare)
    _add_collectives(compare)
    compare.add_argument(
        "--memory", type=_number, help="what a rank can hold, in the unit of --activation-bytes"
    )
    compare.add_argument(
        "--iterations",
        type=_whole,
        default=0,
        metavar="N",
        help="orders that auto tries beyond its rules of thumb; some thousands take seconds [0]",
    )
    compare.description = (
        "A table of all named schedules. Costs and bytes are those of a rank's whole share of the model (one "
        "number, or one a rank); schedules with several stages a rank split them evenly. peak: the most that "
        "a rank holds, in microbatches unless --activation-bytes says how much one takes."
    )
    _add_timeline(commands)
    return parser


def _add_timeline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "timeline", _timeline, "say where a traced step's time went")
    command.add_argument("logdir", metavar="LOGDIR", help="TensorBoard's log directory, or one run's")
    command.add_argument("--run", dest="run_name", metavar="NAME", help="of several runs [the latest]")
    command.add_argument("--step", type=_index, metavar="N", help="[the last one traced]")
    command.add_argument("--svg", metavar="FILE", help="write a picture of the step")
    command.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    command.add_argument("--csv", metavar="FILE", help="write a table, one row an event")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], None],
    text: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=run)
    return command


def _add_size(command: argparse.ArgumentParser, *, ranks: int | None, microbatches: int | None) -> None:
    command.add_argument("-p", "--ranks", type=_count, default=ranks, help="[4, or the CSV's]")
    command.add_argument("-m", "--microbatches", type=_count, default=microbatches, help="[8, or the CSV's]")


def _add_costs(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("costs", "a number, or one a stage with commas between")
    group.add_argument("--forward", type=_cost, default=1.0, metavar="F", help="time of a forward [1]")
    group.add_argument("--backward", type=_cost, metavar="B", help="of a whole backward [input + weight]")
    group.add_argument("--input", type=_cost, default=1.0, metavar="I", help="of its input-gradient part [1]")
    group.add_argument(
        "--weight", type=_cost, default=1.0, metavar="W", help="of its weight-gradient part [1]"
    )
    group.add_argument("--pair", type=_cost, metavar="T", help="of an overlapped pair [forward + backward]")
    group.add_argument("--latency", type=_number, default=0.0, metavar="T", help="of a transfer [0]")
    group.add_argument(
        "--bandwidth",
        type=_number,
        default=float("inf"),
        metavar="N",
        help="bytes per unit of time [no limit]",
    )
    group.add_argument(
        "--boundary-bytes", type=_number, default=0.0, metavar="N", help="bytes of a transfer [0]"
    )
    group.add_argument(
        "--activation-bytes",
        type=_cost,
        default=1.0,
        metavar="N",
        help="what a microbatch keeps on a stage [1]",
    )
    group.add_argument(
        "--released-at-input", type=_number, default=0.0, metavar="SHARE", help="share of it freed at I [0]"
    )


def _add_collectives(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "data parallelism", "collectives run beside the computation; costs as above"
    )
    group.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        help="put in what a ZeRO stage needs: 0 and 1 reduce once a stage, 2 as --reduce-every says, "
        "3 gathers the weights too [none, or the CSV's own]",
    )
    group.add_argument(
        "--reduce-every", type=_count, metavar="K", help="reduce after K microbatches and the last [1]"
    )
    group.add_argument("--reduce", type=_cost, metavar="T", help="time of a stage's gradient reduction [0]")
    group.add_argument(
        "--unshard", type=_cost, metavar="T", help="time in which a stage's weights are gathered [0]"
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count (1, 2, ...)")
    return int(text)


def _index(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no step (0, 1, ...)")
    return int(text)


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of iterations (0, 1, ...)")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return number


def _cost(text: str) -> _Cost:
    numbers = tuple(map(_number, text.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def _placement(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no placement: each stage's rank, as 0,1,1,0")
    return tuple(map(int, parts))


if __name__ == "__main__":
    sys.exit(main())
