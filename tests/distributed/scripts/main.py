"""One rank's script: `main.py PROGRAM ARGUMENTS`. `main.py --serve` forks such ranks off itself."""

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> Any:
    """Runs a program as the rank that the environment says; writes down what it returns, and returns it."""
    folder, rank = Path(os.environ["PIPE_TEST_JOB"]), os.environ.get("RANK", "0")
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    import programs

    value = getattr(programs, argv[0])(**json.loads(argv[1]))
    (folder / f"{rank}.json").write_text(json.dumps(value))
    return value


def serve() -> list[str] | None:
    """Forks ranks on demand; returns only in a forked rank, with what it is to run."""
    import torch._dynamo  # the slow part of a first optimizer step

    import pipe

    _ = (pipe.Pipeline, torch)  # resolved lazily
    # Collections of a fork would touch, and so copy, all that it shares with this process.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        children: dict[int, int] = {}
        for rank, environment in enumerate(request["environments"]):
            pid = os.fork()
            if not pid:
                os.environ.update(environment)
                # A rank that hangs says where before it is killed.
                faulthandler.dump_traceback_later(request["limit"] - 1)
                return list(request["argv"])
            children[pid] = rank
        print(json.dumps(_wait(children, request["limit"])), flush=True)
    return None


def _wait(children: dict[int, int], limit: float) -> dict[str, Any]:
    ends: dict[int, tuple[int, float]] = {}
    stop = time.monotonic() + limit
    while len(ends) < len(children) and time.monotonic() < stop:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ends[children[pid]] = (os.waitstatus_to_exitcode(status), time.monotonic())
        else:
            time.sleep(0.01)
    left = [pid for pid, rank in children.items() if rank not in ends]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {"ends": ends, "left": left}


if __name__ == "__main__":
    arguments = serve() if sys.argv[1:] == ["--serve"] else sys.argv[1:]
    if arguments is not None:
        main(arguments)
