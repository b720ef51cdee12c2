"""The table for one chain per CTA: a bipartite edge colouring of KV tiles and Q tiles.

By Koenig's theorem the allowed tiles of a mask, taken as edges, need no more colours than the largest degree: the longest chain or
the busiest dq tile. A colour is a tick of the clock, in which a chain does one step and a dq tile takes one part.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..geometry import Geometry
from .explicit import Explicit


def edge_coloured(geometry: Geometry) -> Explicit:
    """A role per chain. One head takes at most max(longest chain, busiest dq tile) * max(tau, lam).

    Three KV and six Q tiles, four to a chain and two to a Q tile; four ticks:

    >>> rows = "xxxx..", "..xxxx", "xx..xx"
    >>> s = edge_coloured(Geometry.of_blocks([[c == "x" for c in row] for row in rows]))
    >>> [s.steps[j] for j in range(3)]
    [((2, 0), (0, 1), (1, 2), (3, 3)), ((5, 0), (3, 1), (2, 2), (4, 3)), ((0, 0), (1, 1), (4, 2), (5, 3))]
    """
    ticks = colour([geometry.tiles(j) for j in range(geometry.n_kv)], geometry.n_q)
    steps = tuple(tuple((i, tick) for tick, i in enumerate(row) if i >= 0) for row in ticks)
    return Explicit(geometry, (tuple(range(geometry.n_kv)),), steps)


def colour(chains: Sequence[Sequence[int]], n_q: int) -> list[list[int]]:
    """Q tile of every (chain, colour), -1 for none; as many colours as the largest degree. O(edges * (n_kv + n_q)).

    An edge takes the first colour that is free at its chain. Where the Q tile has that colour already, and lacks another, the two
    colours are swapped along the alternating path that begins there (Koenig). The path cannot come to the chain, where the first
    colour is free.
    """
    degrees = [0] * n_q
    for tiles in chains:
        for i in tiles:
            degrees[i] += 1
    count = max(*map(len, chains), *degrees)
    tile_of = [[-1] * count for _ in chains]
    chain_of = [[-1] * count for _ in range(n_q)]
    for j, tiles in enumerate(chains):
        for i in tiles:
            here, there = tile_of[j].index(-1), chain_of[i].index(-1)
            if chain_of[i][here] >= 0:
                _exchange(i, here, there, chain_of, tile_of)
            tile_of[j][here], chain_of[i][here] = i, j
    return tile_of


def _exchange(start: int, first: int, second: int, chain_of: list[list[int]], tile_of: list[list[int]]) -> None:
    """Swap the two colours along the alternating path that leaves Q tile `start` by colour `first`; frees `first` there."""
    path, node, colour, from_tile = [], start, first, True
    while (end := (chain_of if from_tile else tile_of)[node][colour]) >= 0:
        path.append((node, end, colour) if from_tile else (end, node, colour))
        node, colour, from_tile = end, first + second - colour, not from_tile
    for i, j, colour in path:
        chain_of[i][colour] = tile_of[j][colour] = -1
    for i, j, colour in path:
        chain_of[i][first + second - colour], tile_of[j][first + second - colour] = j, i
