"""What runs when: schedules, the plans made of them, and the proof that a plan works. Imports no torch."""

from schedules.action import Action, Actions
from schedules.auto import Auto, Found
from schedules.collectives import add_collectives
from schedules.costs import Costs
from schedules.csv_file import CSVFile
from schedules.dependencies import Edges, Need, chain, edge_of, needs, route, route_of
from schedules.drawing import draw
from schedules.dualpipe_v import DualPipeV
from schedules.errors import ScheduleError
from schedules.gpipe import GPipe, LoopedBFS
from schedules.interleaved import Interleaved
from schedules.lowering import build, forward_only
from schedules.one_f_one_b import Eager1F1B, OneFOneB
from schedules.ops import (
    ACTIVATION,
    COLLECTIVES,
    COMMUNICATION,
    COMPUTE,
    DEFERRED,
    GRADIENT,
    MAKERS,
    OPS,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SAVED,
    SEND_B,
    SEND_F,
    TRANSFERS,
    UNSHARD,
    B,
    F,
    I,
    Op,
    OpSpec,
    W,
)
from schedules.plan import Plan
from schedules.registry import SCHEDULES, get, names, text_of
from schedules.schedule import Problem, Schedule
from schedules.simulator import simulate
from schedules.timeline import Bubble, Held, Timeline
from schedules.v_memory import VHalf, VMin
from schedules.verifier import verify
from schedules.zb_v import ZBV
from schedules.zero_bubble import ZBH1, ZBH2

__all__ = [
    "ACTIVATION",
    "COLLECTIVES",
    "COMMUNICATION",
    "COMPUTE",
    "DEFERRED",
    "GRADIENT",
    "MAKERS",
    "OPS",
    "RECV_B",
    "RECV_F",
    "REDUCE_GRAD",
    "RESHARD",
    "SAVED",
    "SCHEDULES",
    "SEND_B",
    "SEND_F",
    "TRANSFERS",
    "UNSHARD",
    "ZBH1",
    "ZBH2",
    "ZBV",
    "Action",
    "Actions",
    "Auto",
    "B",
    "Bubble",
    "CSVFile",
    "Costs",
    "DualPipeV",
    "Eager1F1B",
    "Edges",
    "F",
    "Found",
    "GPipe",
    "Held",
    "I",
    "Interleaved",
    "LoopedBFS",
    "Need",
    "OneFOneB",
    "Op",
    "OpSpec",
    "Plan",
    "Problem",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "VHalf",
    "VMin",
    "W",
    "add_collectives",
    "build",
    "chain",
    "draw",
    "edge_of",
    "forward_only",
    "get",
    "names",
    "needs",
    "route",
    "route_of",
    "simulate",
    "text_of",
    "verify",
]
