"""The rows and ranks of a BlockMask are made once for all attentions of a graph that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attention import compiled, gradients, rewritten
from flex import Attention, causal, window
from tensors import BF16, qkv
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils.checkpoint import checkpoint

from dash_inductor.emulation import emulate

pytestmark = pytest.mark.usefixtures("rewriting")

OF_TABLES = {"matrix": {"arg_NUM", "arg_MATRIX"}, "ranks": {"arg_RANKS", "arg_VISITED"}, "rows": {"arg_RANKS", "arg_ROWS"}}


@contextmanager
def tables_made() -> Iterator[dict[str, int]]:
    """How often each kernel that makes rows and ranks would be launched inside, where nothing is."""
    counts = dict.fromkeys(OF_TABLES, 0)

    def run(self: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        for name, arguments in OF_TABLES.items():
            counts[name] += arguments <= set(self.fn.arg_names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingAutotuner, "run", run)
        yield counts


LENGTH = 64
CAUSAL, WINDOW = (Attention(mask, None, LENGTH) for mask in (causal, window))
OF_LARGER_BLOCKS = Attention(causal, None, LENGTH, block=64)
OF_DOUBLED_SCORES = Attention(causal, lambda score, b, h, m, n: 2 * score, LENGTH)


def layers(*attentions: Attention) -> Callable[..., Tensor]:
    """One after the other; what attentions share is made once."""
    masks = {attention: attention.block_mask() for attention in attentions}
    functions = [attention.function(masks[attention]) for attention in attentions]

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for function in functions:
            query = function(query, key, value).sin()
        return query

    return forward


def in_two_dtypes(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return twice(*(x.to(BF16) for x in (query, key, value))) + twice(query, key, value)


def in_a_checkpoint(*inputs: Tensor) -> Tensor:
    return checkpoint(twice, *inputs, use_reentrant=False)


twice = layers(CAUSAL, CAUSAL)


@pytest.mark.parametrize(
    ("function", "attentions", "tables"),
    [
        (twice, 2, 1),
        (layers(CAUSAL, WINDOW, CAUSAL, WINDOW), 4, 2),
        (layers(CAUSAL, OF_LARGER_BLOCKS), 2, 2),
        (layers(CAUSAL, OF_DOUBLED_SCORES), 2, 2),
        (in_two_dtypes, 4, 1),
        (in_a_checkpoint, 2, 1),
    ],
    ids=["one mask", "two masks", "two block sizes", "two equal BlockMasks", "two dtypes", "checkpointed"],
)
def test_once_for_each_mask_of_a_graph(function, attentions, tables):
    inputs = qkv(1, 2, LENGTH, LENGTH, 16)[:3]
    with emulate(), tables_made() as made:
        gradients(compiled(function), inputs)
    assert rewritten() == attentions
    assert made == dict.fromkeys(OF_TABLES, tables)
