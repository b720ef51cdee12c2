"""Schedules of a deterministic attention backward: orders, placement, times and the choice among them. No torch."""

from .bounds import lower_bound
from .by_name import make
from .candidates import GUARANTEES, Shape, candidates
from .checks import check, slack
from .choice import Choice, choose, decision_source, symbolic_choice
from .costs import Costs, known_devices
from .costs import load as load_costs
from .edge_colouring import edge_coloured
from .families import FAMILIES, TABLE, Ascending, Descending, Schedule, Shift
from .formula import Formula, formula
from .geometry import MASKS, TABLE_MASK, Geometry
from .list_scheduling import tabulate
from .plan import Placement, Plan, Straddling
from .recursion import monotone_makespan
from .simulator import Deadlock, Simulation, simulate
from .steps import ScheduleError, Step, Steps, unroll
from .symmetric import Symmetric
from .table import pack, table_size
from .tabulated import Tabulated
from .times import INTEGER, Arithmetic
from .word import decode

__all__ = [
    "FAMILIES",
    "GUARANTEES",
    "INTEGER",
    "MASKS",
    "TABLE",
    "TABLE_MASK",
    "Arithmetic",
    "Ascending",
    "Choice",
    "Costs",
    "Deadlock",
    "Descending",
    "Formula",
    "Geometry",
    "Placement",
    "Plan",
    "Schedule",
    "ScheduleError",
    "Shape",
    "Shift",
    "Simulation",
    "Step",
    "Steps",
    "Straddling",
    "Symmetric",
    "Tabulated",
    "candidates",
    "check",
    "choose",
    "decision_source",
    "decode",
    "edge_coloured",
    "formula",
    "known_devices",
    "load_costs",
    "lower_bound",
    "make",
    "monotone_makespan",
    "pack",
    "simulate",
    "slack",
    "symbolic_choice",
    "table_size",
    "tabulate",
    "unroll",
]
