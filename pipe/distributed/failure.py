"""How a failing rank tells the others, and how they find out why a connection broke."""

import time
import types

from torch.distributed import Store  # type: ignore[attr-defined]

_REPORT, _HEARD = "failure", "heard"
# A failing rank writes its report before it hangs up, so it is there when others look; this allows for a
# slow store.
_LOOK_S = 2.0
# How long a rank waits for the others to have heard: an elastic agent kills all .1 s after the first one
# ends.
_LINGER_S = 5.0


class LostContact(Exception):
    """A transfer failed under us; who is to blame is in the store."""


class Bulletin:
    """The board in the store on which the first failure of a pipeline is written, once."""

    def __init__(self, store: Store, size: int) -> None:
        self._store = store
        self._size = size

    def post(self, report: str) -> str:
        """Writes a report, unless there is one; returns the one that stands."""
        try:
            return str(self._store.compare_set(_REPORT, "", report), "utf-8")
        except RuntimeError:  # the store's host is gone
            return report

    def read(self) -> str | None:
        """The report that stands, waiting a little for one that is being written."""
        end = time.monotonic() + _LOOK_S
        try:
            while not self._store.check([_REPORT]):
                if time.monotonic() > end:
                    return None
                time.sleep(0.02)
            return str(self._store.get(_REPORT), "utf-8")
        except RuntimeError:
            return None

    def linger(self) -> None:
        """Says that this rank has heard, and waits a while for the others to say so."""
        end = time.monotonic() + _LINGER_S
        try:
            heard = self._store.add(_HEARD, 1)
            while heard < self._size and time.monotonic() < end:
                time.sleep(0.02)
                heard = self._store.add(_HEARD, 0)
        except RuntimeError:
            pass


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
