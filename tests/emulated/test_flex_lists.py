"""A BlockMask's lists of Q blocks in any order, and wrong ones: each launch ends, and writes into its own memory alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from attention import FP32_ERROR, compiled, differing, error, rewritten
from flex import causal
from tensors import qkv
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dash_inductor import decisions
from dash_inductor.emulation import emulate

LENGTH, BLOCK, BLOCKS = 120, 32, 4
MOST, LEAST = 2**31 - 1, -(2**31)
MARGIN = 512  # elements before and behind each buffer

Rows = Sequence[Sequence[int]]  # of each block of keys, the blocks of Q


@pytest.fixture
def margins(rewriting: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether nothing has written around the memory that generated code allocates."""
    seen: list[tuple[Tensor, Tensor]] = []
    poisoned = torch._C._dynamo.guards._empty_strided_cpu

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else 0
        memory = poisoned((elements + 2 * MARGIN,), (1,), dtype)
        for margin in (memory[:MARGIN], memory[MARGIN + elements :]):
            seen.append((margin, margin.clone()))
        return memory.as_strided(size, stride, MARGIN)

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", empty_strided)
    return lambda: len(seen) > 0 and all(torch.equal(*(x.view(torch.uint8) for x in pair)) for pair in seen)


def lists(partial: Rows, full: Rows, counts: int | None = None, rest: int = 0) -> list[Tensor]:
    """Counts and indices of both, `rest` behind the entries; `counts` in the place of the true ones."""
    tensors = []
    for rows in (partial, full):
        true = [len(row) if counts is None else counts for row in rows]
        padded = [[*row, *[rest] * (BLOCKS - len(row))] for row in rows]
        tensors += [torch.tensor(x, dtype=torch.int32)[None, None] for x in (true, padded)]
    return tensors


def seen_by(q_lists: Sequence[Tensor]) -> Tensor:
    """bool [S_q, S_k]: what the lists let a query see under the causal mask, to which full blocks are not subject."""
    kinds = torch.zeros(BLOCKS, BLOCKS)
    for kind, (counts, indices) in enumerate((q_lists[:2], q_lists[2:]), 1):
        for j in range(BLOCKS):
            for i in indices[0, 0, j, : max(0, int(counts[0, 0, j]))].tolist():
                if 0 <= i < BLOCKS:
                    kinds[i, j] = kind
    kinds = kinds.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:LENGTH, :LENGTH]
    rows, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    return (kinds == 2) | ((kinds == 1) & (rows >= keys))


def expected(tensors: Sequence[Tensor], seen: Tensor) -> tuple[Tensor, ...]:
    """dq, dk, dv in float64 of what is `seen` in the backward, the forward's mask being causal."""
    query, key, value, grad_out = (x.double() for x in tensors)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    p = (scores - lse).exp().where(seen, 0.0)
    ds = p * (grad_out @ value.mT - (out * grad_out).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
    return ds @ key, ds.mT @ query, p.mT @ grad_out


PARTIAL, FULL = [[0, 3], [1, 3], [2, 3], [3]], [[1, 2], [2], [], []]
NOTHING: Rows = [[]] * BLOCKS
VALID = {
    "as they are made": lists(PARTIAL, FULL),
    "unsorted": lists([row[::-1] for row in PARTIAL], [row[::-1] for row in FULL]),
    "no block full": lists([[3, 1, 0, 2], [2, 3, 1], [3, 2], [3]], NOTHING),
    "anything behind the entries": lists(PARTIAL, FULL, rest=MOST),
    "entries that come twice": lists([[0, 3, 0], [3, 1, 3, 3], [2, 3], [3] * 4], [[1, 2, 2, 1], [2, 2], [], []]),
    "blocks in both lists": lists([[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]], FULL),
}
HOSTILE = {
    "empty": lists(NOTHING, NOTHING),
    "a block of keys that nobody sees, a block of Q that sees nothing": lists([[0], [], [2], []], [[2], [], [], []]),
    "other blocks than the forward's": lists([[3], [2], [1], [0]], [[], [0, 3], [], [1]]),
    "blocks in both lists, on the diagonal": lists(PARTIAL, [[0, 1], [1, 2], [2], [3]]),
    "counts past the lists": lists([[0, 3, 0, 3], [1, 3, 1, 3], [2, 3, 2, 3], [3] * 4], [[1, 2, 1, 2]] * 4, counts=MOST),
    "negative counts": lists(PARTIAL, FULL, counts=-3),
    "indices out of range": lists([[0, 4, 3], [MOST, 1, 3], [2, 3, -1], [LEAST, 3]], [[2, 1, 128], [5, 2], [-4], [MOST, LEAST]]),
}


def drawn(seed: int) -> list[Tensor]:
    draw = random.Random(seed)

    def tensor(size: int, *ends: int) -> Tensor:
        values = [draw.choice([draw.randint(*ends), draw.randint(0, BLOCKS - 1)]) for _ in range(size)]
        return torch.tensor(values, dtype=torch.int32).view(1, 1, BLOCKS, -1)

    return [x for _ in range(2) for x in (tensor(BLOCKS, -1, BLOCKS + 2)[..., 0], tensor(BLOCKS**2, -3, BLOCKS + 3))]


@pytest.mark.parametrize(
    ("cases", "valid"),
    [(VALID, True), (HOSTILE, False), ({f"drawn {seed}": drawn(seed) for seed in range(5)}, False)],
    ids=["valid", "hostile", "drawn"],
)
def test_gradients_are_those_of_what_the_lists_say(cases, valid, margins):
    """By whatever number of resident CTAs; the same compiled code for all lists. Those of one mask give the same bits."""
    *inputs, grad_out = tensors = qkv(1, 2, LENGTH, LENGTH, 16)
    made = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    kv_lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    attend = compiled(lambda query, key, value, mask: flex_attention(query, key, value, block_mask=mask))
    leaves = [x.requires_grad_() for x in inputs]
    bits: list[tuple[Tensor, ...]] = []
    for index, (name, q_lists) in enumerate(cases.items()):
        mask = BlockMask((LENGTH, LENGTH), *kv_lists, *q_lists, (BLOCK, BLOCK), causal)
        resident = (1, 2, None)[index % 3]
        with dynamo_config.patch(error_on_recompile=index > 0), emulate(index, resident=resident):
            actual = torch.autograd.grad(attend(*leaves, mask), leaves, grad_out)
        seen = seen_by(q_lists)
        assert not valid or torch.equal(seen, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        with torch.no_grad():
            errors = [error(a, e) for a, e in zip(actual, expected(tensors, seen), strict=True)]
        assert max(errors) < FP32_ERROR, (name, errors)
        assert margins(), name
        bits.append(actual)
    assert not valid or all(differing(other, bits[0]) == [] for other in bits)
    assert (rewritten(), decisions()[-1].mask) == (1, "block_mask")
