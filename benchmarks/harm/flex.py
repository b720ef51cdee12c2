"""FlexAttention: what torch's own tests of it try, in small: functions of the scores, masks, heads, lengths, dtypes, outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from .case import Case

LENGTH = 128
DOCUMENTS = (50, 30, 48)


def identity(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return score


def scaled(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return score * 2


def squared(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return score * score


def relative(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return score + (m - n)


def alibi(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return score + torch.exp2(-(h + 1.0)) * (n - m)


def soft_cap(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return 2 * torch.tanh(score / 2)


def checkerboard(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return torch.where((m - n) % 2 == 0, score, score * 0.5)


def causal_scores(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return torch.where(m >= n, score, -float("inf"))


def causal(b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return m >= n


def window(b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return (m >= n) & (m - n < 40)


def prefix(b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return (n < 40) | (m >= n)


def by_head(b: Any, h: Any, m: Any, n: Any) -> Tensor:
    return (m >= n) & (m - n < 16 + 24 * h)


def flex() -> Iterator[Case]:
    """Each forward alone, and forward and backward."""
    kinds: dict[str, Callable[[], tuple[Callable[..., Any], list[tuple[int, ...]], torch.dtype]]] = {
        **{f"score_mod {mod.__name__}": _kind(score_mod=mod) for mod in SCORE_MODS},
        **{f"mask {mask.__name__}": _kind(mask=mask) for mask in (causal, window, prefix)},
        "mask by head": _kind(mask=by_head, mask_heads=2),
        "documents": partial(_documents),
        "causal, soft-capped": _kind(mask=causal, score_mod=soft_cap),
        "bias, captured": partial(_captured, requires_grad=False),
        "bias, learnt": partial(_captured, requires_grad=True),
        "GQA": _kind(mask=causal, query=(1, 4, LENGTH, 16), enable_gqa=True),
        "keys of all the batch": _kind(query=(2, 2, LENGTH, 16)),
        "more keys": _kind(key=(1, 2, 2 * LENGTH, 16), score_mod=scaled),
        "odd length": _kind(query=(1, 2, 100, 16), key=(1, 2, 77, 16), score_mod=scaled),
        "one query": _kind(query=(1, 2, 1, 16), score_mod=scaled),
        "scale": _kind(scale=0.3),
        "blocks of 64": _kind(mask=causal, block=64),
        "logsumexp": _kind(mask=causal, return_aux=AuxRequest(lse=True)),
        "head dim 64": _kind(query=(1, 2, LENGTH, 64), key=(1, 2, LENGTH, 64), mask=causal),
        "bfloat16": _kind(mask=causal, dtype=torch.bfloat16),
        "float16": _kind(mask=causal, dtype=torch.float16),
    }
    for name, kind in kinds.items():
        for trains in (False, True):
            yield Case(f"{name}, {'trained' if trains else 'forward'}", partial(_made, kind, trains))


SCORE_MODS = (identity, scaled, squared, relative, alibi, soft_cap, checkerboard, causal_scores)
SIZES = (1, 2, LENGTH, 16)


def _kind(**options: Any) -> Callable[[], Any]:
    return partial(_attention, **options)


def _attention(
    *,
    mask: Callable[..., Tensor] | None = None,
    mask_heads: int | None = None,
    block: int = LENGTH,
    query: tuple[int, ...] = SIZES,
    key: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Callable[..., Any], list[tuple[int, ...]], torch.dtype]:
    """A function of query, key and value, and their shapes and dtype."""
    if mask is not None:
        options["block_mask"] = create_block_mask(mask, None, mask_heads, query[2], key[2], device="cpu", BLOCK_SIZE=block)
    return partial(flex_attention, **options), [query, key, key], dtype


def _documents() -> Any:
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))

    def same_document(b: Any, h: Any, m: Any, n: Any) -> Tensor:
        return (ids[m] == ids[n]) & (m >= n)

    return _attention(mask=same_document)


def _captured(requires_grad: bool) -> Any:
    bias = torch.randn(LENGTH, requires_grad=requires_grad)

    def biased(score: Tensor, b: Any, h: Any, m: Any, n: Any) -> Tensor:
        return score + bias[n]

    return _attention(score_mod=biased)


def _made(kind: Callable[[], Any], trains: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    function, shapes, dtype = kind()
    return function, tuple(torch.randn(shape, dtype=dtype).requires_grad_(trains) for shape in shapes)
