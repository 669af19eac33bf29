"""How a failing rank tells the others, and how they find out who is to blame for a broken connection."""

import sys
import time
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")

# Ranks that lost contact hear from each other in milliseconds: each wakes its neighbours as it hangs up.
_VERDICT_S = 2.0
# How long a rank waits for the others to have heard: an elastic agent kills all .1 s after the first end.
_LINGER_S = 5.0
_POLL_S = 0.02
_ANYONE = -1


class LostContact(Exception):
    """A transfer failed under us.

    Args:
        peer: the rank at its other end; None where it may be any.
        silent: whether the time ran out, and the connection didn't break.
    """

    def __init__(self, message: str, peer: int | None, silent: bool) -> None:
        super().__init__(message)
        self.peer = peer
        self.silent = silent


class Bulletin:
    """The board in the store where the ranks of a pipeline write why it ended; the first report stands.

    A rank that fails posts a report before it hangs up. One that loses contact posts whom it waited for: if
    no report turns up, those whom others waited for and who posted nothing themselves are to blame.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, name: Callable[[int], str]
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._timeout = timeout

    def post(self, report: str) -> str:
        """Writes a report, unless there is one; returns the one that stands."""
        return self._try(lambda: str(self._store.compare_set("report", "", report), "utf-8"), report)

    def miss(self, lost: LostContact) -> None:
        """Writes that this rank lost contact."""
        peer = _ANYONE if lost.peer is None else lost.peer
        self._try(lambda: self._store.set(f"lost/{self._rank}", f"{peer} {int(lost.silent)}"), None)

    def verdict(self) -> str:
        """The report that stands, or is agreed on now."""
        end = time.monotonic() + _VERDICT_S
        while True:
            report = self._try(lambda: self._read("report") or "", "the rank that hosts the store ended")
            if report:
                return report
            lost: dict[int, tuple[int, bool]] = self._try(self._lost, {})
            missing = [rank for rank in range(self._size) if rank not in lost]
            left: dict[int, str] = self._try(partial(self._words, "left", missing), {})
            unexplained = len(missing) - len(left)
            if not unexplained or (unexplained == 1 and not left) or time.monotonic() > end:
                return self.post(self._blame(lost, missing, left))
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """Writes that this rank is gone, and why: others may still wait for it."""
        error = getattr(sys, "last_value", None)  # set where an exception is ending the interpreter
        word = "closed its pipeline" if error is None else f"ended with {type(error).__name__}: {error}"
        self._try(lambda: self._store.set(f"left/{self._rank}", word), None)

    def linger(self) -> None:
        """Says that this rank has heard, and waits a while for the others to say so."""
        end = time.monotonic() + _LINGER_S
        heard = self._try(lambda: self._store.add("heard", 1), self._size)
        while time.monotonic() < end:
            if heard + self._try(lambda: self._store.add("blamed", 0), 0) >= self._size:
                return
            time.sleep(_POLL_S)
            heard = self._try(lambda: self._store.add("heard", 0), self._size)

    def _blame(self, lost: dict[int, tuple[int, bool]], missing: list[int], left: dict[int, str]) -> str:
        waited_for = {peer for peer, _ in lost.values()}
        blamed = [rank for rank in missing if rank in waited_for or _ANYONE in waited_for]
        if not blamed:
            return f"{self._names(sorted(lost))} lost contact with each other, and none of them failed"
        if self._try(lambda: self._store.add("verdicts", 1), 0) == 1:
            self._try(lambda: self._store.add("blamed", len(blamed)), 0)
        if left:
            return "; ".join(f"{self._name(rank)} {word}" for rank, word in left.items())
        who = self._names(blamed)
        # Where one rank runs out of time and hangs up, others see their connections break.
        if any(silent for _, silent in lost.values()):
            return f"{who} gave no sign of life for {self._timeout:g} s (timeout={self._timeout:g})"
        return f"{who} ended without a word: killed?"

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(map(self._name, ranks))

    def _lost(self) -> dict[int, tuple[int, bool]]:
        found = {}
        for rank, text in self._words("lost", range(self._size)).items():
            peer, silent = text.split()
            found[rank] = int(peer), silent == "1"
        return found

    def _words(self, kind: str, ranks: Iterable[int]) -> dict[int, str]:
        texts = {rank: self._read(f"{kind}/{rank}") for rank in ranks}
        return {rank: text for rank, text in texts.items() if text is not None}

    def _read(self, key: str) -> str | None:
        return str(self._store.get(key), "utf-8") if self._store.check([key]) else None

    def _try(self, act: Callable[[], T], otherwise: T) -> T:
        """The store's host may be the very rank that ended."""
        try:
            return act()
        except RuntimeError:
            return otherwise


def forget_frames(error: BaseException | None, folder: str) -> None:
    """Clears the locals that an error's traceback keeps of functions in a folder.

    gloo closes its sockets, and so wakes the other side, only once nothing refers to a group. The frames of
    the user's own code stay as they are, for a debugger.
    """
    while error is not None:
        trace: types.TracebackType | None = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.startswith(folder):
                try:
                    trace.tb_frame.clear()
                except RuntimeError:  # still running
                    pass
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
