"""Placement: which worker (CTA) runs which chain of which head, in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .families import FAMILIES, MONOTONE, REGISTER, ROUND_ROBIN
from .geometry import Geometry, check_count, check_range
from .orders.base import Order


class Plan(ABC):
    """An order placed for `heads` kv heads, batch included.

    group: query heads of each, the innermost loop of a step. workers: CTAs launched. roles: CTAs that share a head, under a round
    robin all workers.
    """

    order: Order
    heads: int
    group: int
    roles: int
    heads_in_flight: int
    workers: int

    @property
    def family(self) -> str:
        """Family name, such as 'shift'."""
        return self.order.name

    @property
    def steps(self) -> int:
        """Tile steps of all heads, query heads of a group counted."""
        g = self.order.geometry
        return self.heads * self.group * sum(map(g.steps, range(g.n_kv)))

    def order_of(self, head: int) -> Order:
        """The order of a head; most plans have one for all."""
        return self.order

    @abstractmethod
    def tasks(self, worker: int) -> Iterator[tuple[int, int]]:
        """(head, chain) of the worker in order; empty chains included, for their dk and dv are still written."""


@dataclass(frozen=True)
class GroupedPlan(Plan):
    """An order placed for `heads` kv heads (batch included), `heads_in_flight` of them at a time: heads stay whole.

    group is the number of query heads per kv head, the innermost loop of a step. Worker w has head slot w // roles and
    role w % roles; it runs heads slot, slot + heads_in_flight, ... and all passes of each. If the order is mirrored, roles
    are mirrored in odd rounds (head round * passes + pass): the role that had the longest chain then has the shortest.

    >>> from .geometry import Geometry
    >>> from .orders.monotone import Descending
    >>> s = Descending(Geometry(6, 6, 1, 2, "causal"), roles=2, mirrored=True)
    >>> plan = GroupedPlan(s, heads=2, heads_in_flight=1)
    >>> list(plan.tasks(0)), list(plan.tasks(1))
    ([(0, 0), (1, 0)], [(0, 1), (0, 2), (1, 1), (1, 2)])
    """

    order: Order
    heads: int
    heads_in_flight: int
    group: int = 1

    def __post_init__(self) -> None:
        check_count("heads", self.heads)
        check_range("heads_in_flight", self.heads_in_flight, self.heads, "heads")
        check_count("group", self.group)

    @cached_property
    def roles(self) -> int:
        """CTAs that share a head."""
        return self.order.roles

    @cached_property
    def workers(self) -> int:
        """CTAs of a grouped launch."""
        return self.heads_in_flight * self.order.roles

    @property
    def rounds(self) -> int:
        """Heads that a worker takes part in, at most."""
        return -(-self.heads // self.heads_in_flight)

    def tasks(self, worker: int) -> Iterator[tuple[int, int]]:
        """(head, chain) of the worker: its role in every head of its slot, pass by pass."""
        order = self.order
        head_slot, a = divmod(worker, order.roles)
        slots = order.slots
        per_pass = len(slots) // order.passes
        for turn, head in enumerate(range(head_slot, self.heads, self.heads_in_flight)):
            for slot, row in enumerate(slots):
                mirrored = order.mirrored and (turn * order.passes + slot // per_pass) % 2 == 1
                chain = row[order.roles - 1 - a if mirrored else a]
                if chain >= 0:
                    yield head, chain


@dataclass(frozen=True)
class RoundRobinPlan(Plan):
    """Static round robin: the units of all heads (a chain, or a pair) form one queue; worker w takes items w, w + workers, ...

    Where units do not divide the workers, heads straddle rounds. Under shift and symmetric a head that begins in the middle
    of a round then has a smaller first pass, so that nobody waits: `workers` are the roles of one queue through all heads. A
    monotone order keeps its ranks, and waits (a baseline: what a plain persistent kernel does).

    >>> from .geometry import Geometry
    >>> from .orders.shift import Shift
    >>> plan = RoundRobinPlan(Shift(Geometry(6, 6, 1, 2, "full"), roles=2), heads=2, workers=2)
    >>> list(plan.tasks(0)), list(plan.tasks(1))
    ([(0, 0), (0, 2), (1, 1)], [(0, 1), (1, 0), (1, 2)])
    >>> plan.order_of(1).parts
    (range(0, 1), range(1, 3))
    >>> [[plan.order_of(head).rank(0, j) for j in range(3)] for head in range(2)]
    [[0, 1, 2], [0, 1, 2]]
    """

    order: Order
    heads: int
    workers: int
    group: int = 1
    heads_in_flight = 1  # there is one queue

    def __post_init__(self) -> None:
        for name in ("heads", "workers", "group"):
            check_count(name, getattr(self, name))
        roles, most = self.order.roles, min(self.units, self.workers)
        if self.family in ROUND_ROBIN and roles != most:
            raise ValueError(f"roles must be {most} (all units of a head, or workers), got {roles}")

    @property
    def family(self) -> str:
        """The family's name."""
        return f"{self.order.name}_round_robin"

    @cached_property
    def roles(self) -> int:
        """CTAs that take from the queue."""
        return self.workers

    @property
    def units(self) -> int:
        """Chains, or pairs of them, of a head."""
        return len(self._units)

    def order_of(self, head: int) -> Order:
        """The order of a head; the same for all that begin at the same place of a round."""
        if self.family not in ROUND_ROBIN:  # no head begins with fewer roles
            return self.order
        order: Any = self.order  # which has that field
        first_pass_roles = min(order.roles, self.workers - head * self.units % self.workers)
        return self._by_first_pass_roles.setdefault(first_pass_roles, replace(order, first_pass_roles=first_pass_roles))

    def tasks(self, worker: int) -> Iterator[tuple[int, int]]:
        """(head, chain) of the worker: every item of the queue that it takes."""
        for item in range(worker, self.heads * self.units, self.workers):
            head, unit = divmod(item, self.units)
            yield from ((head, j) for j in self._units[unit])

    @cached_property
    def _units(self) -> list[list[int]]:
        """Chains of every (pass, role)."""
        slots, passes = self.order.slots, self.order.passes
        rows = [slots[len(slots) // passes * p : len(slots) // passes * (p + 1)] for p in range(passes)]
        units = [[row[a] for row in part if row[a] >= 0] for part in rows for a in range(self.order.roles)]
        return [unit for unit in units if unit]

    @cached_property
    def _by_first_pass_roles(self) -> dict[int, Order]:
        return {}  # one order, with its ranks, for all heads that begin alike


def make_order(family: str, geometry: Geometry, roles: int, *, stride: int | None = None, mirrored: bool = False) -> Order:
    """The order of a family; ValueError when there is none, or it does not take the argument or mask.

    >>> make_order("descending", Geometry(6, 6, 1, 2, "causal"), 2, mirrored=True).passes
    2
    """
    known, given = REGISTER.get(family), dict[str, Any]()
    if known is None or known.queue_of is not None:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if stride is not None:
        if not known.has_stride:
            raise ValueError(
                f"stride is for {' and '.join(name for name in FAMILIES if REGISTER[name].has_stride)}, not for {family}"
            )
        check_count("stride", stride)
        given["stride"] = stride
    if mirrored:
        if not known.is_monotone:
            raise ValueError(f"mirrored is for {' and '.join(MONOTONE)}, not for {family}")
        given["mirrored"] = True
    return known.order(geometry, roles, **given)


def place_heads(
    family: str,
    geometry: Geometry,
    roles: int,
    *,
    heads: int,
    heads_in_flight: int,
    group: int = 1,
    stride: int | None = None,
    mirrored: bool = False,
) -> Plan:
    """A plan of `heads` kv heads, each of `group` query heads. Of a round robin, `roles` are all workers.

    >>> place_heads("shift_round_robin", Geometry(6, 6, 1, 2, "full"), 2, heads=2, heads_in_flight=1).order_of(1).parts
    (range(0, 1), range(1, 3))
    """
    if family not in ROUND_ROBIN:
        order = make_order(family, geometry, roles, stride=stride, mirrored=mirrored)
        return GroupedPlan(order, heads, heads_in_flight, group)
    if heads_in_flight != 1:
        raise ValueError(f"heads_in_flight must be 1 for {family}, whose heads stand in one queue, got {heads_in_flight}")
    check_count("roles", roles)
    units = REGISTER[family].units(geometry.n_kv)
    order = make_order(ROUND_ROBIN[family], geometry, min(units, roles), stride=stride, mirrored=mirrored)
    return RoundRobinPlan(order, heads, roles, group)
