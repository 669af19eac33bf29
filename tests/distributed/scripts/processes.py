"""Runs a program of `programs.py` on several processes, and tells how each of them ended.

    fork      plain processes with RANK, WORLD_SIZE and so on, forked off one that has torch imported
    spawn     the same from scratch, which takes seconds
    torchrun  under `torchrun --standalone`
    launch    under `pipe.launch`, from a script

Every process writes to a folder of its own job: `<rank>.pid`, `<rank>.err`, `<rank>.out`, and
`<rank>.json` with what the program returned. `raised` holds the time of the failure that the program
stages.
"""

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent
ROOT = SCRIPTS.parents[2]
_MAIN = str(SCRIPTS / "main.py")
PYTHON = sys.executable
# Processes that a test starts carry this variable, so that those it leaves behind can be found.
TAG = "PIPE_TEST_JOB"


class Ended(NamedTuple):
    """How one rank's process ended."""

    code: int | None  # negative: by that signal; None: not known, since the process belongs to a launcher
    at: float
    out: str
    err: str
    value: Any  # what the program returned; None if it didn't


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        code: the launcher's own exit code (0 where there is none).
        said: what the launcher itself wrote.
        raised: when the staged failure happened.
        left: processes that were still there afterwards (and were killed then).
    """

    ranks: list[Ended]
    code: int
    said: str
    at: float
    raised: float | None
    left: list[int]

    @property
    def values(self) -> list[Any]:
        return [rank.value for rank in self.ranks]

    @property
    def seconds(self) -> list[float]:
        """From the staged failure to the end of each process, and of the launcher."""
        assert self.raised is not None, f"the failure never happened\n{self}"
        return [round(at - self.raised, 2) for at in (*(rank.at for rank in self.ranks), self.at)]

    def __str__(self) -> str:
        lines = [f"launcher: {self.code}, left behind: {self.left}", self.said[-3000:]]
        for number, rank in enumerate(self.ranks):
            lines += [
                f"--- rank {number}: exit code {rank.code}, value {rank.value}",
                rank.out[-500:],
                rank.err[-3000:],
            ]
        return "\n".join(lines)


class Job:
    """A folder, and the processes that write to it."""

    def __init__(self, program: str, ranks: int, arguments: Mapping[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pipe-job-"))
        self.ranks = ranks
        self.argv = [program, json.dumps(arguments)]
        self.environment = _environment() | {TAG: str(self.folder)}

    def of_rank(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would have put into a rank's environment."""
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        return {**{key: str(value) for key, value in (numbers | where).items()}, TAG: str(self.folder)}

    def pids(self) -> dict[int, int]:
        return {rank: int(text) for rank in range(self.ranks) if (text := self.read(f"{rank}.pid"))}

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def outcome(
        self,
        ends: Mapping[int, tuple[int | None, float]],
        *,
        code: int = 0,
        said: str = "",
        left: Iterable[int] = (),
    ) -> Outcome:
        now = time.monotonic()
        ranks = []
        for rank in range(self.ranks):
            status, at = ends.get(rank, (None, now))
            value = self.read(f"{rank}.json")
            out, err = self.read(f"{rank}.out"), self.read(f"{rank}.err")
            ranks.append(Ended(status, at, out, err, json.loads(value) if value else None))
        raised = self.read("raised")
        shutil.rmtree(self.folder, ignore_errors=True)
        return Outcome(ranks, code, said, now, float(raised) if raised else None, list(left))


def _environment() -> dict[str, str]:
    """This process's, without what would make a rank of it."""
    kept = {key: value for key, value in os.environ.items() if key not in _OURS}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPTS)]), "OMP_NUM_THREADS": "1"}


_OURS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", TAG}


# ------------------------------------------------------------------ four ways to start


def fork(program: str, *, ranks: int = 4, limit: float = 30.0, **arguments: Any) -> Outcome:
    """Plain processes, forked off a template; `ranks=0` is one process that is no rank."""
    job = Job(program, max(ranks, 1), arguments)
    port = free_port()
    environments = [job.of_rank(rank, port) if ranks else {TAG: str(job.folder)} for rank in range(job.ranks)]
    ends, left = _template().run(job, environments, limit)
    return job.outcome(ends, left=left)


def spawn(program: str, *, ranks: int = 4, limit: float = 60.0, **arguments: Any) -> Outcome:
    """Plain processes from scratch."""
    job = Job(program, ranks, arguments)
    port = free_port()
    processes = [
        subprocess.Popen([sys.executable, _MAIN, *job.argv], env=job.environment | job.of_rank(rank, port))
        for rank in range(ranks)
    ]
    ends: dict[int, tuple[int | None, float]] = {}
    stop = time.monotonic() + limit
    while len(ends) < ranks and time.monotonic() < stop:
        for rank, process in enumerate(processes):
            if rank not in ends and process.poll() is not None:
                ends[rank] = (process.returncode, time.monotonic())
        time.sleep(0.02)
    left = [process.pid for process in processes if process.poll() is None]
    _kill(left)
    return job.outcome(ends, left=left)


def torchrun(program: str, *, ranks: int = 4, limit: float = 60.0, **arguments: Any) -> Outcome:
    job = Job(program, ranks, arguments)
    command = [*TORCHRUN, "--nproc-per-node", str(ranks), _MAIN]
    return _under_launcher(job, [*command, *job.argv], limit)


def launch(program: str, *, ranks: int = 4, limit: float = 60.0, **arguments: Any) -> Outcome:
    job = Job(program, ranks, arguments)
    command = [sys.executable, str(SCRIPTS / "launched.py"), str(ranks)]
    return _under_launcher(job, [*command, *job.argv], limit)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def script(command: list[str], *, stdin: str | None = None, limit: float = 60.0) -> Outcome:
    """Any command, whose processes are looked for in the same way; its output is `said`."""
    return _under_launcher(Job("", 0, {}), command, limit, stdin=stdin)


def interrupted(program: str, *, ranks: int, limit: float = 60.0, **arguments: Any) -> Outcome:
    """Under torchrun, which gets a Ctrl-C once all ranks have written `<rank>.ready`."""
    job = Job(program, ranks, arguments)
    command = [*TORCHRUN, "--nproc-per-node", str(ranks), _MAIN, *job.argv]

    def ctrl_c(agent: "subprocess.Popen[str]") -> None:
        ready = [job.folder / f"{rank}.ready" for rank in range(ranks)]
        stop = time.monotonic() + limit
        while not all(path.exists() for path in ready):
            if agent.poll() is not None or time.monotonic() > stop:
                return
            time.sleep(0.05)
        (job.folder / "raised").write_text(str(time.monotonic()))
        agent.send_signal(signal.SIGINT)

    return _under_launcher(job, command, limit, then=ctrl_c)


def _under_launcher(
    job: Job,
    command: list[str],
    limit: float,
    *,
    stdin: str | None = None,
    then: "Callable[[subprocess.Popen[str]], None] | None" = None,
) -> Outcome:
    said = job.folder / "launcher"
    with said.open("w") as output:
        agent = subprocess.Popen(
            command,
            env=job.environment,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if stdin is not None:
        assert agent.stdin is not None
        agent.stdin.write(stdin)
        agent.stdin.close()
    if then is not None:
        then(agent)
    ends: dict[int, tuple[int | None, float]] = {}
    stop = time.monotonic() + limit
    while agent.poll() is None and time.monotonic() < stop:
        _note_ends(job, ends)
        time.sleep(0.02)
    ended = agent.poll() is not None
    time.sleep(0.1)  # a process that is on its way out isn't left behind
    _note_ends(job, ends)
    left = tagged(job)
    if not ended:
        agent.kill()
        agent.wait()
    _kill(left)
    return job.outcome(ends, code=agent.returncode, said=job.read("launcher"), left=left)


def _note_ends(job: Job, ends: dict[int, tuple[int | None, float]]) -> None:
    for rank, pid in job.pids().items():
        if rank not in ends and not _runs(pid):
            ends[rank] = (None, time.monotonic())


# ------------------------------------------------------------------------- processes


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def tagged(job: Job) -> list[int]:
    """The processes that were started for a job and still run."""
    mark = f"{TAG}={job.folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0") and _runs(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                pass  # it has ended, or belongs to somebody else
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class _Template:
    """A process with torch imported that forks ranks on demand (`main.py --serve`)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, _MAIN, "--serve"],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        atexit.register(self._end)

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it reads on until here
        self._process.wait()

    def run(
        self, job: Job, environments: list[dict[str, str]], limit: float
    ) -> tuple[dict[int, tuple[int | None, float]], list[int]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"argv": job.argv, "environments": environments, "limit": limit}
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = json.loads(self._process.stdout.readline())
        return {int(rank): (code, at) for rank, (code, at) in answer["ends"].items()}, answer["left"]


@cache
def _template() -> _Template:
    return _Template()
