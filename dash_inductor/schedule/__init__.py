"""Schedules of a deterministic attention backward: orders, placement, times and the choice among them. No torch."""

from .candidates import Shape
from .checks import check, slack
from .choice import Choice, choose, symbolic_word
from .costs import Costs
from .costs import load as load_costs
from .families import FAMILIES, Ascending, Descending, Schedule, Shift, make
from .geometry import MASKS, Geometry
from .plan import Plan
from .replay import Replay, ScheduleError, replay
from .symmetric import Symmetric
from .table import pack, table_size
from .times import INTEGER, Arithmetic
from .word import decode

__all__ = [
    "FAMILIES",
    "INTEGER",
    "MASKS",
    "Arithmetic",
    "Ascending",
    "Choice",
    "Costs",
    "Descending",
    "Geometry",
    "Plan",
    "Replay",
    "Schedule",
    "ScheduleError",
    "Shape",
    "Shift",
    "Symmetric",
    "check",
    "choose",
    "decode",
    "load_costs",
    "make",
    "pack",
    "replay",
    "slack",
    "symbolic_word",
    "table_size",
]
