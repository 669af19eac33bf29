"""What runs when: schedules, the plans made of them, and the proof that a plan works. Imports no torch."""

from schedules.action import Action, Actions
from schedules.csv_file import CSVFile
from schedules.dependencies import Edges, Need, chain, edge_of, needs, route, route_of
from schedules.drawing import draw
from schedules.errors import ScheduleError
from schedules.gpipe import GPipe
from schedules.lowering import build, forward_only
from schedules.one_f_one_b import OneFOneB
from schedules.ops import (
    ACTIVATION,
    COMMUNICATION,
    COMPUTE,
    DEFERRED,
    GRADIENT,
    MAKERS,
    OPS,
    RECV_B,
    RECV_F,
    SAVED,
    SEND_B,
    SEND_F,
    TRANSFERS,
    B,
    F,
    I,
    Op,
    OpSpec,
    W,
)
from schedules.plan import Plan
from schedules.registry import get, names, text_of
from schedules.schedule import Problem, Schedule
from schedules.verifier import verify

__all__ = [
    "ACTIVATION",
    "COMMUNICATION",
    "COMPUTE",
    "DEFERRED",
    "GRADIENT",
    "MAKERS",
    "OPS",
    "RECV_B",
    "RECV_F",
    "SAVED",
    "SEND_B",
    "SEND_F",
    "TRANSFERS",
    "Action",
    "Actions",
    "B",
    "CSVFile",
    "Edges",
    "F",
    "GPipe",
    "I",
    "Need",
    "OneFOneB",
    "Op",
    "OpSpec",
    "Plan",
    "Problem",
    "Schedule",
    "ScheduleError",
    "W",
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
    "text_of",
    "verify",
]
