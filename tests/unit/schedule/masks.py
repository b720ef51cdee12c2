"""Block masks as attention has them: [n_kv][n_q], k Q tiles to a KV tile."""

from __future__ import annotations

import random
from collections.abc import Callable

from dash_inductor.schedule import Geometry


def masks(n: int, k: int, seed: int = 0) -> dict[str, Geometry]:
    """One of each kind."""
    rng, window = random.Random(seed), max(1, n // 4)
    cuts = rng.sample(range(1, n), min(3, n - 1))

    def document(j: int) -> int:
        return sum(j >= cut for cut in cuts)

    kinds: dict[str, Callable[[int, int], bool]] = {
        "full": lambda i, j: True,
        "causal": lambda i, j: i // k >= j,
        "window": lambda i, j: 0 <= i // k - j <= window,
        "document": lambda i, j: i // k >= j and document(i // k) == document(j),
        "prefix": lambda i, j: i // k >= j or j < n // 3,
        "random": lambda i, j: rng.random() < 0.4 or i == j,
        "sink": lambda i, j: i // k >= j and (i // k - j <= window or j == 0),
        "dilated": lambda i, j: i // k >= j and (i // k - j) % 3 == 0,
    }
    return {name: Geometry.of_blocks([[sees(i, j) for i in range(n * k)] for j in range(n)]) for name, sees in kinds.items()}
