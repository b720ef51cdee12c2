"""The functions that FlexAttention takes of a shape: which keys a query sees, and what becomes of a score."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Mod = Callable[..., Any]


def mask_mod(shape: Shape, device: torch.device) -> Mod | None:
    """(b, h, query, key) -> whether the query sees the key; None where each sees all."""
    import torch
    from torch.nn.attention.flex_attention import and_masks

    window = shape.window
    seen: list[Mod] = []
    if shape.causal:
        seen.append(lambda b, h, m, n: m >= n)
    if window is not None:
        seen.append(lambda b, h, m, n: n > m - window)
    if window is not None and not shape.causal:
        seen.append(lambda b, h, m, n: n < m + window)
    if shape.documents:
        document = torch.repeat_interleave(torch.tensor(shape.documents)).to(device)  # of each token
        seen.append(lambda b, h, m, n: document[m] == document[n])
    return and_masks(*seen) if len(seen) > 1 else seen[0] if seen else None


def score_mod(shape: Shape) -> Mod | None:
    """(score, b, h, query, key) -> the score under the soft-cap; None without one."""
    import torch

    cap = shape.softcap
    if cap is None:
        return None

    def capped(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
