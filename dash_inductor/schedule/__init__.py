"""Schedules of a deterministic attention backward: orders, placement, times and the choice among them. No torch, no files.

Names below need Python alone; `choice`, `candidates`, `searched` and `formulas` are modules of their own, since they need sympy.
"""

from .bounds import lower_bound
from .costs import Costs, TwoPass
from .families import FAMILIES, GUARANTEES, MONOTONE, ROUND_ROBIN, SEARCHED, TWO_PASS
from .geometry import BLOCKS_MASK, MASKS, Blocks, Geometry
from .orders.base import Order
from .orders.edge_colouring import edge_coloured
from .orders.explicit import Explicit
from .orders.list_scheduling import search_order
from .orders.monotone import Ascending, Descending
from .orders.shift import Shift
from .orders.slack import slack
from .orders.symmetric import Symmetric
from .packing import pack, pack_plan
from .placement import GroupedPlan, Plan, RoundRobinPlan, make_order, place_heads
from .simulator import Deadlock, Simulation, simulate
from .steps import ScheduleError, Step, Steps, unroll
from .tiled_problem import TiledProblem
