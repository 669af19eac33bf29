"""Which schedules have an order of their own, and what are they called?"""

from __future__ import annotations

from typing import Any

from schedules.dualpipe_v import DualPipeV
from schedules.gpipe import GPipe, LoopedBFS
from schedules.interleaved import Interleaved
from schedules.one_f_one_b import Eager1F1B, OneFOneB
from schedules.v_memory import VHalf, VMin
from schedules.zb_v import ZBV
from schedules.zero_bubble import ZBH1, ZBH2

FAMILY: dict[str, type[Any]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "eager_1f1b": Eager1F1B,
    "interleaved": Interleaved,
    "looped_bfs": LoopedBFS,
    "zb_h1": ZBH1,
    "zb_h2": ZBH2,
    "zb_v": ZBV,
    "v_half": VHalf,
    "v_min": VMin,
    "dualpipe_v": DualPipeV,
}
"""By the name in the option string; `Auto` searches for something better than these."""
