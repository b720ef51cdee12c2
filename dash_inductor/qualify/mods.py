"""The functions that FlexAttention takes of a shape: which keys a query sees, and what becomes of a score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from .shapes import Shape

Mod = Callable[..., Any]


def mask_mod(shape: Shape, device: torch.device) -> Mod | None:
    """(b, h, query, key) -> whether the query sees the key; None where each sees all."""
    window = shape.window
    seen: list[Mod] = []
    if shape.causal:
        seen.append(lambda b, h, m, n: m >= n)
    if window is not None:
        seen.append(lambda b, h, m, n: n > m - window)
    if window is not None and not shape.causal:
        seen.append(lambda b, h, m, n: n < m + window)
    if shape.documents:
        tokens = [number for number, length in enumerate(shape.documents) for _ in range(length)]
        document = torch.tensor(tokens, device=device)
        seen.append(lambda b, h, m, n: document[m] == document[n])
    return and_masks(*seen) if len(seen) > 1 else seen[0] if seen else None


def score_mod(shape: Shape, device: torch.device) -> Mod | None:
    """(score, b, h, query, key) -> the score under the soft-cap, and then with ALiBi; None without either."""
    cap = shape.softcap
    slopes = alibi_slopes(shape).to(device) if shape.alibi else None
    if cap is None and slopes is None:
        return None

    def changed(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
        score = score if cap is None else cap * torch.tanh(score / cap)
        return score if slopes is None else score + slopes[h] * (n - m)

    return changed


def alibi_slopes(shape: Shape) -> Tensor:
    """The slope of each query head, fp32."""
    return 2 ** (-8 * torch.arange(1, shape.heads + 1, dtype=torch.float32) / shape.heads)
