"""What the pass makes of the offsets of packed sequences: intervals of keys and kinds of blocks, of any offsets at all."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_inductor.rewrite.offsets import Offsets
from dash_inductor.rewrite.varlen import NOWHERE, Window, block_matrix, intervals

ROWS, KEYS = 4, 8
SEQUENCES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 21)), min_size=1, max_size=6)
WINDOW = st.tuples(*[st.none() | st.integers(0, 9)] * 2)
GARBAGE = st.lists(st.tuples(*[st.integers(-(2**31), 2**31 - 1) | st.integers(-20, 60)] * 2), min_size=2, max_size=6)


def seen_by(sequences: list[tuple[int, int]], window: Window, tail: int) -> Tensor:
    """bool [queries, keys], by a rule for each pair; the last query of a sequence is in line with its last key."""
    before, behind = window
    q_total, kv_total = (sum(lengths) + tail for lengths in zip(*sequences, strict=True))
    seen = torch.zeros(q_total, kv_total, dtype=torch.bool)
    q = k = 0
    for q_len, kv_len in sequences:
        for m in range(q_len):
            for n in range(kv_len):
                ahead = (n - kv_len) - (m - q_len)
                seen[q + m, k + n] = (before is None or ahead >= -before) and (behind is None or ahead <= behind)
        q, k = q + q_len, k + kv_len
    return seen


def in_blocks(x: Tensor, fill: bool) -> Tensor:
    """[blocks of keys, blocks of Q, ROWS, KEYS] of [queries, keys]."""
    rows, keys = (-(-size // block) * block for size, block in zip(x.shape, (ROWS, KEYS), strict=True))
    whole = torch.full((rows, keys), fill)
    whole[: x.shape[0], : x.shape[1]] = x
    return whole.view(rows // ROWS, ROWS, keys // KEYS, KEYS).permute(2, 0, 1, 3)


@given(SEQUENCES, WINDOW, st.integers(1, 7))
def test_of_right_offsets(sequences: list[tuple[int, int]], window: Window, tail: int) -> None:
    """Elements exactly; a block is never 0 where any is seen, and 2 only where all are."""
    seen = seen_by(sequences, window, tail)
    cu_q, cu_k = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in zip(*sequences, strict=True))
    first, last = intervals(seen.shape[0], Offsets(cu_q, cu_q), Offsets(cu_k, cu_k), window, ROWS)
    key = torch.arange(seen.shape[1])
    by_interval = (key >= first.view(-1, 1)) & (key <= last.view(-1, 1))
    assert torch.equal(by_interval[: seen.shape[0]], seen) and not by_interval[seen.shape[0] :].any()
    (matrix,) = block_matrix(first, last, seen.shape[1], KEYS)[0]
    blocks = in_blocks(seen, False).flatten(2)
    assert matrix.dtype == torch.int8 and matrix.shape == blocks.shape[:2]
    assert not (blocks.any(-1) & (matrix == 0)).any() and not (~blocks.all(-1) & (matrix == 2)).any()
    if len(sequences) == 1:
        assert torch.equal(matrix != 0, blocks.any(-1)) and torch.equal(matrix == 2, blocks.all(-1))


@given(GARBAGE, WINDOW)
def test_of_garbage(offsets: list[tuple[int, int]], window: Window) -> None:
    """Nothing is read out of range, which eager indexing would refuse; a block that is 2 has no hidden element."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in zip(*offsets, strict=True))
    first, last = intervals(30, Offsets(cu_q, cu_q), Offsets(cu_k, cu_k), window, ROWS)
    (matrix,) = block_matrix(first, last, 50, KEYS)[0]
    key = torch.arange(56)
    by_interval = (key >= first.view(-1, 1)) & (key <= last.view(-1, 1))
    blocks = in_blocks(by_interval, False).flatten(2)
    assert not (blocks.any(-1) & (matrix == 0)).any() and not (~blocks.all(-1) & (matrix == 2)).any()


@pytest.mark.parametrize("length", [1, ROWS, 9])
def test_queries_of_no_sequence(length: int) -> None:
    offsets = torch.tensor([2, 2], dtype=torch.int32)
    first, last = intervals(length, Offsets(offsets, offsets), Offsets(offsets, offsets), (None, None), ROWS)
    assert first.shape == last.shape == (-(-length // ROWS), ROWS)
    assert (first == NOWHERE).all() and (last == -1).all()
    assert not block_matrix(first, last, 20, KEYS).any()
