"""Placement: which worker (CTA) runs which chain of which head, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .families import MONO, Schedule


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
        if self.heads < 1:
            raise ValueError(f"heads must be at least 1, got {self.heads}")
        if not 1 <= self.heads_in_flight <= self.heads:
            raise ValueError(f"heads_in_flight must be in 1..{self.heads} (heads), got {self.heads_in_flight}")
        if self.group < 1:
            raise ValueError(f"group must be at least 1, got {self.group}")

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
        """CTAs that must be resident together for the plan to end.

        The roles of one head, or 1 where a chain waits for chains of earlier tickets only.
        Tickets are taken in order, so that the CTAs of one head slot come together.
        """
        return 1 if self._one_mono_pass else self.schedule.roles

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
