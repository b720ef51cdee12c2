"""Schedules of a deterministic attention backward: orders, placement, times and the choice among them. No torch, no files.

Names below need Python alone; `choice`, `candidates` and `formulas` are modules of their own, since they need sympy.
"""

from .costs import Costs, TwoPass
from .families import FAMILIES, GUARANTEES, MONOTONE, ROUND_ROBIN, TWO_PASS
from .geometry import MASKS, Geometry
from .orders.base import Order
from .orders.monotone import Ascending, Descending
from .orders.shift import Shift
from .orders.symmetric import Symmetric
from .packing import pack, pack_plan
from .placement import GroupedPlan, Plan, RoundRobinPlan, make_order, place_heads
from .tiled_problem import TiledProblem

__all__ = [
    "FAMILIES",
    "GUARANTEES",
    "MASKS",
    "MONOTONE",
    "ROUND_ROBIN",
    "TWO_PASS",
    "Ascending",
    "Costs",
    "Descending",
    "Geometry",
    "GroupedPlan",
    "Order",
    "Plan",
    "RoundRobinPlan",
    "Shift",
    "Symmetric",
    "TiledProblem",
    "TwoPass",
    "make_order",
    "pack",
    "pack_plan",
    "place_heads",
]
