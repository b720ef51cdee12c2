"""Placement: which worker (CTA) runs which chain of which head, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from .families import MONO, Schedule
from .geometry import check_count, check_range
from .tabulated import Tabulated


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
    >>> plan.launch, plan.residency
    ('grouped', 2)
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
        g = self.schedule.geometry
        return self.heads * self.group * sum(g.steps(j) for j in range(g.n_kv))

    @property
    def launch(self) -> str:
        """'chained' when worker w may be ticket w of one ticket per (head, chain), else 'grouped'."""
        chained = self._one_mono_pass and self.heads_in_flight == self.heads
        return "chained" if chained else "grouped"

    @property
    def residency(self) -> int:
        """CTAs that are resident together in a launch that always ends; Simulation.residency has the least such number.

        The roles of one head, or 1 where a chain waits for chains of earlier tickets only.
        Tickets are taken in order, so that the CTAs of one head slot come together.
        """
        return 1 if self._one_mono_pass else self.schedule.roles

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

    @property
    def _one_mono_pass(self) -> bool:
        schedule = self.schedule
        return schedule.name in MONO and schedule.passes == 1 and not schedule.boustrophedon


@dataclass(frozen=True)
class Straddling:
    """Static round robin, the placement of a plain persistent kernel: a baseline, which one table for all heads cannot express.

    The units of all heads (what a role does in a pass) stand in one line, and worker w runs units w, w + workers, ...
    Where roles do not divide the workers, heads straddle rounds. With by_launch ranks follow the steps of the launch, round
    by round (the DASH authors' shift); else they are the schedule's own.

    >>> from .geometry import Geometry
    >>> from .families import Shift
    >>> plan = Straddling(Shift(Geometry(6, 6, 1, 2, "full"), roles=3), heads=2, workers=2, by_launch=True)
    >>> list(plan.tasks(0)), list(plan.tasks(1))
    ([(0, 0), (0, 2), (1, 1)], [(0, 1), (1, 0), (1, 2)])
    >>> [[plan.schedule_of(head).rank(0, j) for j in range(3)] for head in range(2)]
    [[0, 1, 2], [0, 2, 1]]
    """

    schedule: Schedule
    heads: int
    workers: int
    group: int = 1
    by_launch: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "workers", "group"):
            check_count(name, getattr(self, name))

    def schedule_of(self, head: int) -> Schedule:
        """The schedule of the head's ranks."""
        return self._by_launch[head * len(self._units) % self.workers] if self.by_launch else self.schedule

    def tasks(self, worker: int) -> Iterator[tuple[int, int]]:
        """(head, chain) of the worker in order."""
        for line in range(worker, self.heads * len(self._units), self.workers):
            head, unit = divmod(line, len(self._units))
            yield from ((head, j) for j in self._units[unit])

    @cached_property
    def _units(self) -> list[list[int]]:
        """Chains of every (pass, role)."""
        slots, passes = self.schedule.slots, self.schedule.passes
        rows = [slots[len(slots) // passes * p : len(slots) // passes * (p + 1)] for p in range(passes)]
        units = [[row[a] for row in part if row[a] >= 0] for part in rows for a in range(self.schedule.roles)]
        return [unit for unit in units if unit]

    @cached_property
    def _by_launch(self) -> dict[int, Schedule]:
        """Schedules by the worker of a head's first unit."""
        g = self.schedule.geometry
        width = max(sum(g.steps(j) for j in unit) for unit in self._units)
        found: dict[int, Schedule] = {}
        for start in {head * len(self._units) % self.workers for head in range(self.heads)}:
            steps: dict[int, tuple[tuple[int, int], ...]] = {}
            for unit, chains in enumerate(self._units):
                clock = (start + unit) // self.workers * width
                for j in chains:
                    order = self.schedule.order(j)
                    steps[j] = tuple(zip(order, range(clock, clock + len(order)), strict=True))
                    clock += len(order)
            found[start] = Tabulated(g, self.schedule.slots, tuple(steps[j] for j in range(g.n_kv)))
        return found
