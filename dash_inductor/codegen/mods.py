"""A few score_mods and mask_mods by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Function = Callable[..., Any]
WINDOW, NARROW, CAP = 1024, 96, 20.0  # keys before a query that it sees; the most that a score can be

# (b, h, m, n, documents of the positions) -> whether query m sees key n
MASK_MODS: dict[str, Function] = {
    "none": lambda b, h, m, n, documents: _all(),
    "causal": lambda b, h, m, n, documents: m >= n,
    "window": lambda b, h, m, n, documents: (m >= n) & (m - n < WINDOW),
    "narrow": lambda b, h, m, n, documents: (m >= n) & (m - n < NARROW),
    "documents": lambda b, h, m, n, documents: (m >= n) & (documents[m] == documents[n]),
}


def _all() -> torch.Tensor:
    import torch

    return torch.full((), True, dtype=torch.bool)


def _alibi(score: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any) -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        return score + slopes[h] * (n - m)


def _relative(score: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any) -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        return score + slopes[(m - n).abs() % slopes.shape[0]]


def _soft_cap(score: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any) -> Any:
    return CAP * (score / CAP).tanh()


# (score, b, h, m, n, slopes of the heads) -> score. The relative one takes them for a table of distances.
SCORE_MODS: dict[str, Function] = {
    "none": lambda score, b, h, m, n, slopes: score,
    "soft-cap": _soft_cap,
    "alibi": _alibi,
    "relative": _relative,
    "soft-cap-alibi": lambda score, *place: _alibi(_soft_cap(score, *place), *place),
}
