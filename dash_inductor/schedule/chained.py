"""Where CTAs cannot be promised to run together: one ticket per chain, or two passes."""

from __future__ import annotations

from functools import lru_cache

from . import word
from .by_name import make
from .candidates import Shape, two_pass_time
from .costs import Costs
from .families import TWO_PASS
from .geometry import Geometry
from .plan import Plan
from .recursion import monotone_makespan
from .times import INTEGER

MOST_CHAINS = 16_384  # so many are timed one by one, more heads in proportion


def chained_plan(geometry: Geometry, family: str, heads: int, group: int) -> Plan:
    """A mono family with a worker, which is a ticket, for every chain."""
    return Plan(make(family, geometry, geometry.n_kv), heads, heads, group)


@lru_cache(1024)
def chained_time(shape: Shape, costs: Costs, family: str) -> int:
    """The makespan in ns where `costs.workers` CTAs take the tickets.

    >>> from dash_inductor.devices.cost_files import load_costs
    >>> shape = Shape(256, 256, 2, 1, 64, 16, 32, "full")
    >>> chained_time(shape, load_costs("emulated", block_m=16, block_n=32, head_dim=64), "ascending")
    50250
    """
    geometry = shape.geometry
    heads = min(shape.heads, max(1, MOST_CHAINS // geometry.n_kv))
    plan = chained_plan(geometry, family, heads, shape.group)
    ns = monotone_makespan(plan, step_ns=costs.step_ns, hop_ns=costs.hop_ns, resident=costs.workers)
    return INTEGER.ceil_div(ns * shape.heads, heads)


@lru_cache(1024)
def choose_chained(shape: Shape, costs: Costs, family: str) -> str:
    """`family`, or "two_pass" where `costs` have it and it is faster by the margin; a pure function of its arguments."""
    if costs.two_pass is None:
        return family
    two = two_pass_time(shape, costs.two_pass, INTEGER)
    slower = two.penalty or two.ns * (100 + costs.two_pass.margin_percent) >= chained_time(shape, costs, family) * 100
    return family if slower else TWO_PASS


def chained_word(shape: Shape, costs: Costs, family: str) -> int:
    """`choose_chained` as a word, which generated code computes; roles and heads in flight follow from the sizes."""
    return word.encode(choose_chained(shape, costs, family), 0, 0, 0, False)
