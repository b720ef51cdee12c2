"""The symmetric family: a long chain and a short one make a pair; all pairs of a causal triangle are equally long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat

from ..geometry import Geometry, check_count, check_range
from .base import Order, in_step, parts, pass_and_role, ring


@dataclass(frozen=True)
class Symmetric(Order):
    """Roles take pairs of chains (u, n_kv - 1 - u), an odd n_kv's middle chain alone. For causal masks.

    The big chains of a pass first go round the rectangle of tiles that they all see, as a ring, then up their own part
    below it; then the small chains go down. The step on the worker, through both chains and all passes, is the clock.

    >>> s = Symmetric(Geometry(6, 6, 1, 2, "causal"), roles=2)
    >>> s.slots
    ((0, 1), (2, -1))
    >>> [s.visits(j) for j in range(3)]
    [(2, 3, 4, 5, 0, 1), (4, 5, 2, 3), (5, 4)]
    >>> [[s.rank(i, j) for i in range(s.geometry.first_q_tile(j), 6)] for j in range(3)]
    [[0, 0, 0, 0, 1, 1], [1, 1, 0, 0], [2, 2]]
    """

    geometry: Geometry
    roles: int
    first_pass_roles: int = 0  # roles of the first pass; 0 for all
    most_stride: int = 0  # tiles between two roles on the ring; 0 for k, the most that serves
    name = "symmetric"
    mirrored = False

    def __post_init__(self) -> None:
        if not self.geometry.is_causal:
            window = "" if self.geometry.window is None else f" with window={self.geometry.window}"
            use = "shift" if self.geometry.mask == "full" else "descending or searched"
            raise ValueError(f"family symmetric needs a causal mask, got mask={self.geometry.mask!r}{window}: use {use}")
        check_range("roles", self.roles, self.pairs, "one per pair of KV tiles at most")
        if not self.first_pass_roles:
            object.__setattr__(self, "first_pass_roles", self.roles)
        check_range("first_pass_roles", self.first_pass_roles, self.roles, "roles")
        check_count("most_stride", self.most_stride, least=0)

    @property
    def pairs(self) -> int:
        """Number of pairs, the single middle chain included."""
        return -(-self.geometry.n_kv // 2)

    @cached_property
    def passes(self) -> int:
        """Pairs that a role runs for one head, at most."""
        return len(self.parts)

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """Pairs of each pass."""
        return parts(self.pairs, self.roles, self.first_pass_roles)

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Chain of each (slot, role), -1 for none: slot 2p has the big chains of pass p, slot 2p + 1 the small ones."""
        n = self.geometry.n_kv
        rows = []
        for part in self.parts:
            none = [-1] * (self.roles - len(part))
            rows.append((*part, *none))
            rows.append((*(n - 1 - u if u != n - 1 - u else -1 for u in part), *none))
        return tuple(rows)

    def pass_and_role(self, j: int) -> tuple[int, int]:
        """(pass, role) of chain j."""
        return pass_and_role(min(j, self.geometry.n_kv - 1 - j), self.roles, self.first_pass_roles)

    def visits(self, j: int) -> tuple[int, ...]:
        """Q tiles of chain j in visiting order."""
        g = self.geometry
        if j >= self.pairs:
            return tuple(reversed(g.tiles(j)))
        p, a = self.pass_and_role(j)
        active = len(self.parts[p])
        r0 = min(g.n_q, g.first_q_tile(self.parts[p][-1]))
        rect = g.n_q - r0
        stride = max(1, min(self.most_stride or g.ratio, rect // active))
        return ring(a, stride, r0, g.n_q) + tuple(range(g.first_q_tile(j), r0))

    def clock(self, i: int, j: int) -> int:
        """Virtual time of (i, j): its step on the worker, counted through the passes."""
        return self._clocks[j][i]

    def commits(self) -> Iterator[tuple[int, int]]:
        """Step by step, pass by pass."""
        for part in self.parts:
            yield from in_step(self._steps(u) for u in part)

    def _steps(self, u: int) -> Iterator[tuple[int, int]]:
        """(Q tile, chain) of pair u, the big chain first."""
        chains = dict.fromkeys((u, self.geometry.n_kv - 1 - u))
        return chain.from_iterable(zip(self.visits(j), repeat(j)) for j in chains)

    @cached_property
    def _clocks(self) -> list[dict[int, int]]:
        clocks: list[dict[int, int]] = [{} for _ in range(self.geometry.n_kv)]
        pairs = [list(self._steps(u)) for u in range(self.pairs)]
        width = max(map(len, pairs))  # the same start of a pass for every role
        for u, steps in enumerate(pairs):
            for t, (i, j) in enumerate(steps):
                clocks[j][i] = self.pass_and_role(u)[0] * width + t
        return clocks
