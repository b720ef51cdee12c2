"""Schedules of a deterministic attention backward: orders, placement, times and the choice among them. No torch."""

from .bounds import lower_bound
from .by_name import make, place
from .candidates import GUARANTEES, Shape, candidates, impossible, may_straddle, too_weak, two_pass_time
from .chained import chained_plan, chained_time, chained_word, choose_chained
from .checks import check, slack
from .choice import Choice, choose, decision_source, symbolic_choice, two_pass_plan
from .costs import Costs, TwoPass
from .edge_colouring import edge_coloured
from .families import FAMILIES, ROUND_ROBIN, TABLE, TWO_PASS, Ascending, Descending, Schedule, Shift
from .formula import Formula, formula
from .geometry import MASKS, TABLE_MASK, Geometry
from .list_scheduling import tabulate
from .plan import Placement, Plan, Straddling
from .recursion import monotone_makespan
from .simulator import Deadlock, Simulation, simulate
from .steps import ScheduleError, Step, Steps, unroll
from .symmetric import Symmetric
from .table import pack, pack_plan
from .tables import Blocks, geometry_of, table_plan
from .tabulated import Tabulated
from .times import INTEGER, Arithmetic
from .word import decode

__all__ = [
    "FAMILIES",
    "GUARANTEES",
    "INTEGER",
    "MASKS",
    "ROUND_ROBIN",
    "TABLE",
    "TABLE_MASK",
    "TWO_PASS",
    "Arithmetic",
    "Ascending",
    "Blocks",
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
    "TwoPass",
    "candidates",
    "chained_plan",
    "chained_time",
    "chained_word",
    "check",
    "choose",
    "choose_chained",
    "decision_source",
    "decode",
    "edge_coloured",
    "formula",
    "geometry_of",
    "impossible",
    "lower_bound",
    "make",
    "may_straddle",
    "monotone_makespan",
    "pack",
    "pack_plan",
    "place",
    "simulate",
    "slack",
    "symbolic_choice",
    "table_plan",
    "tabulate",
    "too_weak",
    "two_pass_plan",
    "two_pass_time",
    "unroll",
]
