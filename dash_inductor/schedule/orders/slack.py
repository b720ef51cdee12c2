"""How far apart in time the contributors of a Q tile are under an order's own clock."""

from __future__ import annotations

from itertools import pairwise

from .base import Order


def slack(order: Order) -> int | None:
    """Smallest clock distance between consecutive contributors of a Q tile on different workers, in steps; None without any.

    With slack s the order never stalls while a hop costs at most s steps.

    >>> from ..geometry import Geometry
    >>> from .monotone import Ascending
    >>> from .shift import Shift
    >>> full = Geometry(6, 6, 1, 2, "full")
    >>> slack(Ascending(full, roles=3)), slack(Shift(full, roles=3)), slack(Ascending(full, roles=1))
    (0, 2, None)
    """
    g = order.geometry
    smallest = None
    for i in range(g.n_q):
        line = sorted(g.contributors(i), key=lambda j: order.rank(i, j))
        for before, after in pairwise(line):
            if _worker(order, before) != _worker(order, after):
                distance = (order.clock(i, after) - order.clock(i, before)) // order.clock_unit
                smallest = distance if smallest is None else min(smallest, distance)
    return smallest


def _worker(order: Order, j: int) -> int:
    """Worker of chain j within its head slot, in a head whose first round is even."""
    p, a = order.pass_and_role(j)
    return order.roles - 1 - a if order.mirrored and p % 2 else a
