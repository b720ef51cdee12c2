"""Greedy list scheduling: a table for any block mask.

A role that is free does, of the Q tiles its chain still has to visit and nobody keeps busy, the one that lacks most parts; at
the end of its chain it takes the next one that can begin. No step is put off for the sake of another. The result is
rarely more than a few percent above the lower bound; where it is, another variant of the rule often does better.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, permutations

from ..bounds import lower_bound
from ..geometry import Geometry, check_count, check_range
from .edge_colouring import edge_coloured
from .explicit import Explicit

EFFORT = 20_000  # steps that may be scheduled in search of a better variant


def search_order(geometry: Geometry, roles: int, step_ns: int = 1, hop_ns: int = 1) -> Explicit:
    """The best table found for one head on `roles` CTAs; step_ns is tau of the whole group of query heads, hop_ns lam.

    The first of equals among the variants of the greedy rule, two at least and as many as EFFORT allows, and the edge
    colouring if every chain can have a CTA of its own. Nothing but the arguments decides.

    Chains of four, two and four steps that share one Q tile, on two CTAs:

    >>> g = Geometry.of_blocks([[c == "x" for c in row] for row in ("xxxx..", "..x.x.", "x.x.xx")])
    >>> s = search_order(g, roles=2, step_ns=10, hop_ns=4)
    >>> s.slots, [s.visits(j) for j in range(3)], max(clock for steps in s.steps for _, clock in steps)
    (((0, 2), (1, -1)), [(2, 0, 1, 3), (2, 4), (0, 2, 4, 5)], 60)
    """
    check_range("roles", roles, geometry.n_kv, "one per KV tile at most")
    check_count("step_ns", step_ns)
    check_count("hop_ns", hop_ns, least=0)
    bound = lower_bound(geometry, heads=1, workers=roles, step_ns=step_ns, hop_ns=hop_ns)
    best: tuple[int, Explicit] | None = None
    tries = max(2, EFFORT // sum(geometry.steps(j) for j in range(geometry.n_kv)))
    for _, variant in zip(range(tries), _variants(geometry, roles), strict=False):
        scheduled = list_schedule(geometry, roles, step_ns, hop_ns, variant)
        if best is None or scheduled[0] < best[0]:
            best = scheduled
        if best[0] == bound:
            break
    assert best is not None
    if roles == geometry.n_kv and best[0] > bound:
        coloured = edge_coloured(geometry)
        if _ends(coloured, step_ns, hop_ns) < best[0]:
            return coloured
    return best[1]


@dataclass(frozen=True)
class Variant:
    """What the rule leaves open.

    chains: those that each role may take, in order; or one row for all roles.
    last: of the Q tiles that lack most parts, take the last instead of the first.
    patient: a role that finds no chain that can begin stays idle, rather than take one and wait in it.
    """

    chains: tuple[tuple[int, ...], ...]
    last: bool = False
    patient: bool = True


def _variants(geometry: Geometry, roles: int) -> Iterator[Variant]:
    """Chains dealt in advance; the longest first; in the order of j; each chain once before all others; in any order."""
    present = [j for j in range(geometry.n_kv) if geometry.steps(j)]
    longest = sorted(present, key=geometry.steps, reverse=True)
    dealt = _deal(geometry, longest, roles)
    for last in (False, True):
        yield Variant(dealt, last)
        yield Variant((tuple(longest),), last)
    for last in (False, True):
        yield Variant((tuple(longest),), last, patient=False)
    for order in chain((present,), ([j, *(x for x in longest if x != j)] for j in longest[1:]), permutations(longest)):
        for last in (False, True):
            for patient in (True, False):
                yield Variant((tuple(order),), last, patient)


def _deal(geometry: Geometry, longest: list[int], roles: int) -> tuple[tuple[int, ...], ...]:
    """Chains for every role, the largest load least: MULTIFIT (Coffman, Garey, Johnson 1978), a bisection over first fits."""

    def fit(room: int) -> list[list[int]] | None:
        dealt: list[list[int]] = [[] for _ in range(roles)]
        loads = [0] * roles
        for j in longest:
            role = next((a for a in range(roles) if loads[a] + geometry.steps(j) <= room), None)
            if role is None:
                return None
            dealt[role].append(j)
            loads[role] += geometry.steps(j)
        return dealt

    low, high = 1, sum(map(geometry.steps, longest))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle) else (middle + 1, high)
    return tuple(map(tuple, fit(high) or ()))


def list_schedule(geometry: Geometry, roles: int, step_ns: int, hop_ns: int, variant: Variant) -> tuple[int, Explicit]:
    """(makespan in ns, table) of one variant. Sets of Q tiles are bits of an int."""
    pools = [list(row) for row in variant.chains]
    tiles = [sum(1 << i for i in geometry.tiles(j)) for j in range(geometry.n_kv)]
    lacking = [0] * (geometry.n_kv + 1)  # Q tiles by the number of parts they lack
    lack = [len(geometry.contributors(i)) for i in range(geometry.n_q)]
    for i, parts in enumerate(lack):
        lacking[parts] |= 1 << i
    most = max(lack)

    anyone = (1 << geometry.n_q) - 1  # Q tiles that any role may add to
    own = [0] * roles  # Q tiles that only this role may add to, because it added the last part
    author = [-1] * geometry.n_q
    opens = [0] * geometry.n_q  # when a step that adds to the tile may begin in any role
    opening: list[tuple[int, int]] = []  # heap of (time, Q tile); of no meaning unless opens says the same
    todo = [0] * roles  # Q tiles left of the role's chain
    taken: list[list[int]] = [[] for _ in range(roles)]
    steps: list[list[tuple[int, int]]] = [[] for _ in range(geometry.n_kv)]
    free = [(0, 0, a) for a in range(roles)]  # heap of (time, minus the steps left, role)
    while free:
        now, _, a = heapq.heappop(free)
        while opening and opening[0][0] <= now:
            time, i = heapq.heappop(opening)
            if opens[i] == time:
                anyone |= 1 << i
        allowed = anyone | own[a]
        if not todo[a]:
            pool = pools[a % len(pools)]
            if not pool:
                continue
            first = next((j for j in pool if tiles[j] & allowed), None)
            if first is None and variant.patient:
                heapq.heappush(free, (opening[0][0], 0, a))
                continue
            j = pool[0] if first is None else first
            pool.remove(j)
            taken[a].append(j)
            todo[a] = tiles[j]
        left = todo[a].bit_count()
        if not todo[a] & allowed:
            heapq.heappush(free, (min(time for time, i in opening if opens[i] == time and todo[a] >> i & 1), -left, a))
            continue
        while not lacking[most]:
            most -= 1
        parts = most
        while not (best := todo[a] & allowed & lacking[parts]):
            parts -= 1
        i = (best if variant.last else best & -best).bit_length() - 1
        tile = 1 << i
        lacking[parts] ^= tile
        lacking[parts - 1] |= tile
        todo[a] ^= tile
        end = now + step_ns
        steps[taken[a][-1]].append((i, end))
        if author[i] >= 0:
            own[author[i]] &= ~tile
        anyone &= ~tile
        author[i], own[a], opens[i] = a, own[a] | tile, end + hop_ns - step_ns
        heapq.heappush(opening, (opens[i], i))
        heapq.heappush(free, (end, 1 - left, a))

    for j in range(geometry.n_kv):
        if not geometry.steps(j):  # its dk and dv are zero, and someone has to write them
            min(taken, key=len).append(j)
    slots = tuple(tuple(row[s] if s < len(row) else -1 for row in taken) for s in range(max(map(len, taken))))
    makespan = max(end for row in steps for _, end in row)
    return makespan, Explicit(geometry, slots, tuple(map(tuple, steps)), clock_unit=step_ns)


def _ends(schedule: Explicit, step_ns: int, hop_ns: int) -> int:
    """Makespan in ns of a table with a role per chain."""
    free: dict[int, int] = {}
    added: dict[int, int] = {}
    for i, j in schedule.commits():
        end = max(free.get(j, 0) + step_ns, added[i] + hop_ns if i in added else 0)
        free[j] = added[i] = end
    return max(free.values())
