"""Placement: which worker (CTA) runs which chain of which head, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from .families import MONO, Schedule, Shift
from .geometry import check_count, check_range
from .symmetric import Symmetric


class Placement(Protocol):
    """What the simulator asks of a plan.

    heads: kv heads, batch included; group: query heads of each, the innermost loop of a step; workers: CTAs launched.
    """

    @property
    def heads(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def workers(self) -> int: ...
    def schedule_of(self, head: int) -> Schedule: ...
    def tasks(self, worker: int) -> Iterator[tuple[int, int]]: ...


def steps_of(plan: Plan | Straddling) -> int:
    """Tile steps of all heads, query heads of a group counted."""
    g = plan.schedule.geometry
    return plan.heads * plan.group * sum(map(g.steps, range(g.n_kv)))


@dataclass(frozen=True)
class Plan:
    """A schedule placed for `heads` kv heads (batch included), `heads_in_flight` of them at a time.

    group is the number of query heads per kv head, the innermost loop of a step. Worker w has head slot w // roles and
    role w % roles; it runs heads slot, slot + heads_in_flight, ... and all passes of each. With boustrophedon, roles
    are mirrored in odd rounds (head round * passes + pass): who had the longest chain then has the shortest.

    >>> from .geometry import Geometry
    >>> from .families import Descending
    >>> s = Descending(Geometry(6, 6, 1, 2, "causal_top_left"), roles=2, boustrophedon=True)
    >>> plan = Plan(s, heads=2, heads_in_flight=1)
    >>> list(plan.tasks(0)), list(plan.tasks(1))
    ([(0, 0), (1, 0)], [(0, 1), (0, 2), (1, 1), (1, 2)])
    >>> plan.residency
    2
    """

    schedule: Schedule
    heads: int
    heads_in_flight: int
    group: int = 1

    def __post_init__(self) -> None:
        check_count("heads", self.heads)
        check_range("heads_in_flight", self.heads_in_flight, self.heads, "heads")
        check_count("group", self.group)

    @classmethod
    def fit(cls, schedule: Schedule, heads: int, workers: int, group: int = 1) -> Plan:
        """As many heads in flight as `workers` CTAs allow; ValueError where the roles of one head are more than that."""
        check_count("heads", heads)
        check_count("workers", workers)
        check_range("roles", schedule.roles, workers, "workers")
        return cls(schedule, heads, min(heads, workers // schedule.roles), group)

    @property
    def family(self) -> str:
        """Its name."""
        return self.schedule.name

    @property
    def roles(self) -> int:
        """CTAs that share a head."""
        return self.schedule.roles

    @property
    def workers(self) -> int:
        """CTAs of a grouped launch."""
        return self.heads_in_flight * self.schedule.roles

    @property
    def rounds(self) -> int:
        """Heads that a worker takes part in, at most."""
        return -(-self.heads // self.heads_in_flight)

    @property
    def steps(self) -> int:
        """Tile steps of all heads, query heads of a group counted."""
        return steps_of(self)

    @property
    def residency(self) -> int:
        """CTAs that are resident together in a launch that always ends; Simulation.residency has the least such number.

        The roles of one head, or 1 where a chain waits for chains of earlier tickets only.
        Tickets are taken in order, so that the CTAs of one head slot come together.
        """
        s = self.schedule
        return 1 if s.name in MONO and s.passes == 1 and not s.boustrophedon else s.roles

    def schedule_of(self, head: int) -> Schedule:
        """The same for every head."""
        return self.schedule

    def tasks(self, worker: int) -> Iterator[tuple[int, int]]:
        """(head, chain) of the worker in order; empty chains included, for their dk and dv are still written."""
        schedule = self.schedule
        head_slot, a = divmod(worker, schedule.roles)
        slots = schedule.slots
        per_pass = len(slots) // schedule.passes
        for turn, head in enumerate(range(head_slot, self.heads, self.heads_in_flight)):
            for slot, row in enumerate(slots):
                mirrored = schedule.boustrophedon and (turn * schedule.passes + slot // per_pass) % 2 == 1
                chain = row[schedule.roles - 1 - a if mirrored else a]
                if chain >= 0:
                    yield head, chain


@dataclass(frozen=True)
class Straddling:
    """Static round robin: the units of all heads (what a role does in a pass) in one line, worker w runs units w, w + workers, ...

    Where units do not divide the workers, heads straddle rounds. Under shift and symmetric a head that begins in the middle
    of a round then has a smaller first pass, so that nobody waits: `workers` are one line of roles through all heads. A mono
    schedule keeps its ranks, and waits (a baseline: what a plain persistent kernel does).

    >>> from .geometry import Geometry
    >>> from .families import Shift
    >>> plan = Straddling(Shift(Geometry(6, 6, 1, 2, "full"), roles=2), heads=2, workers=2)
    >>> list(plan.tasks(0)), list(plan.tasks(1))
    ([(0, 0), (0, 2), (1, 1)], [(0, 1), (1, 0), (1, 2)])
    >>> plan.schedule_of(1).parts
    (range(0, 1), range(1, 3))
    >>> [[plan.schedule_of(head).rank(0, j) for j in range(3)] for head in range(2)]
    [[0, 1, 2], [0, 1, 2]]
    """

    schedule: Schedule
    heads: int
    workers: int
    group: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "workers", "group"):
            check_count(name, getattr(self, name))
        roles, most = self.schedule.roles, min(self.units, self.workers)
        if isinstance(self.schedule, Shift | Symmetric) and roles != most:
            raise ValueError(f"roles must be {most} (all units of a head, or workers), got {roles}")

    @property
    def family(self) -> str:
        """Its name."""
        return f"{self.schedule.name}_round_robin"

    @property
    def roles(self) -> int:
        """CTAs in the one line."""
        return self.workers

    @property
    def heads_in_flight(self) -> int:
        """Lines of roles."""
        return 1

    @property
    def units(self) -> int:
        """Chains, or pairs of them, of a head."""
        return len(self._units)

    @property
    def steps(self) -> int:
        """Tile steps of all heads, query heads of a group counted."""
        return steps_of(self)

    @property
    def residency(self) -> int:
        """CTAs that are resident together."""
        return self.workers

    def schedule_of(self, head: int) -> Schedule:
        """The schedule of a head; the same for all that begin at the same place of a round."""
        if not isinstance(self.schedule, Shift | Symmetric):
            return self.schedule
        lead = min(self.schedule.roles, self.workers - head * self.units % self.workers)
        return self._by_lead.setdefault(lead, replace(self.schedule, lead=lead))

    def tasks(self, worker: int) -> Iterator[tuple[int, int]]:
        """(head, chain) of the worker in order."""
        for line in range(worker, self.heads * self.units, self.workers):
            head, unit = divmod(line, self.units)
            yield from ((head, j) for j in self._units[unit])

    @cached_property
    def _units(self) -> list[list[int]]:
        """Chains of every (pass, role)."""
        slots, passes = self.schedule.slots, self.schedule.passes
        rows = [slots[len(slots) // passes * p : len(slots) // passes * (p + 1)] for p in range(passes)]
        units = [[row[a] for row in part if row[a] >= 0] for part in rows for a in range(self.schedule.roles)]
        return [unit for unit in units if unit]

    @cached_property
    def _by_lead(self) -> dict[int, Schedule]:
        return {}  # one schedule, with its ranks, for all heads that begin alike
