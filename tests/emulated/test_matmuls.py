"""Calls of SDPA that torch makes matmuls of for their few kv heads, or the strides of their mask: the backward is rewritten."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from attention import assert_right, compiled, error, gradients, in_interleavings, rewritten
from tensors import BF16, FP32, normal
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dash_inductor import clear_decisions, decisions, enabled
from dash_inductor.emulation import emulate
from dash_inductor.rewrite.math_path import REASON, REMEDY

NAME = "aten.scaled_dot_product_attention.default"
Attend = Callable[..., Tensor]


def of(
    heads: int, kv_heads: int, q_len: int, kv_len: int, dims: Sequence[int] = (16, 16), dtype: torch.dtype = FP32
) -> list[Tensor]:
    """Query, key and value."""
    shapes = (heads, q_len, dims[0]), (kv_heads, kv_len, dims[0]), (kv_heads, kv_len, dims[1])
    return [normal(2, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def sdpa(**keywords: object) -> Attend:
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, **keywords)


def by_matmuls(attend: Attend) -> Attend:
    """On the CPU another op takes most of these, from torch 2.15 on all."""

    def attended(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*inputs)

    return attended


def narrowed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """By keys, another number in each batch; the first queries of one see none."""
    m, n = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    seen = (n[None] >= torch.tensor([0, 7])[:, None])[:, None, None] & (n <= m)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)


def by_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A float mask that is the same for all keys but one, expanded: its last stride is 0."""
    hidden = torch.arange(query.shape[2]) % 5 == 2
    bias = torch.zeros(query.shape[2]).masked_fill(hidden, -math.inf)[:, None].expand(-1, key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


def in_dims(*shape: int, **keywords: object) -> Attend:
    """SDPA of [*shape, S, D]."""

    def attend(*inputs: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*(x.reshape(*shape, *x.shape[2:]) for x in inputs), **keywords)
        return out.reshape(2, -1, *out.shape[-2:])

    return attend


def in_five(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Rows of an alignment, padded by keys: each row of the 2 has one mask for all queries."""
    query, key, value = (x.unflatten(1, (2, 1)) for x in (query, key, value))
    seen = torch.arange(key.shape[3]) >= torch.tensor([[0, 3], [7, 0]])[:, :, None, None, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen).flatten(1, 2)


def by_pairs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A bias of all heads, queries and keys, which all rows of an alignment share; it hides keys that are far behind."""
    query, key, value = (x.unflatten(1, (2, 1)) for x in (query, key, value))
    distance = torch.arange(query.shape[3])[:, None] - torch.arange(key.shape[3])
    bias = (distance * -0.5).masked_fill(distance > 9, -math.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).flatten(1, 2)


def by_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A mask of each query head and query, which value has a part in."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=value.repeat(1, 2, 1, 1)[..., :1], enable_gqa=True)


CASES = {
    "one kv head": (sdpa(is_causal=True), of(4, 1, 72, 72), "causal"),
    "one kv head, bf16": (sdpa(), of(3, 1, 40, 72, dtype=BF16), "full"),
    "one tensor is key and value": (lambda q, k, v: sdpa()(q, k, k) + v, of(4, 1, 40, 40), "full"),
    "autocast": (narrowed, of(4, 1, 40, 40), "causal"),
    "a scale": (sdpa(scale=0.5), of(2, 1, 40, 40), "full"),
    "value of another head dim": (sdpa(enable_gqa=True), of(4, 2, 40, 40, (16, 32)), "full"),
    "unlike lengths, causal": (sdpa(is_causal=True, enable_gqa=True), of(4, 2, 40, 72), "block_mask"),
    "groups under a mask": (padded, of(4, 2, 72, 72), "block_mask"),
    "rows that see nothing": (by_row, of(4, 2, 40, 40), "block_mask"),
    "a head dim of 25 under a mask": (padded, of(2, 2, 40, 40, (25, 25)), "block_mask"),
    "a head dim of 42 and 25 of value": (sdpa(), of(2, 2, 40, 40, (42, 25)), "full"),
    "a head dim of 20, unlike lengths, causal": (sdpa(is_causal=True), of(2, 2, 40, 72, (20, 20)), "block_mask"),
    "five dimensions": (in_dims(2, 2, 1, is_causal=True), of(2, 2, 40, 40), "causal"),
    "five dimensions, bf16": (in_dims(2, 2, 1), of(2, 2, 40, 72, (16, 32), dtype=BF16), "full"),
    "five dimensions, padded": (in_five, of(2, 2, 40, 40), "block_mask"),
    "five dimensions, a bias": (by_pairs, of(2, 2, 40, 40), "block_mask"),
    "groups under a mask that is learnt": (by_values, of(4, 2, 20, 20), "block_mask"),
    "three dimensions": (in_dims(4), of(2, 2, 40, 40), "full"),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(rewriting: None, name: str) -> None:
    """Right, and the same in three interleavings; the forward keeps its bits."""
    called, inputs, mask = CASES[name]
    attend, dtype = by_matmuls(called), BF16 if called is narrowed else inputs[0].dtype
    grad_out = normal(2, inputs[0].shape[1], inputs[0].shape[2], inputs[2].shape[3], dtype=dtype, seed=3)
    found = in_interleavings(attend, inputs, grad_out)
    decision = decisions()[-1]
    if called is narrowed and torch.__version__ < (2, 13):  # whose Inductor drops the narrowing: the dtypes differ
        assert rewritten() == 0 and decision.reason
        return
    if name == "three dimensions" and torch.__version__ >= (2, 15):  # which makes four of them: flash attention takes these
        assert (rewritten(), decision.reason, decision.remedy) == (0, REASON, REMEDY)
        return
    assert (rewritten(), decision.op, decision.mask) == (1, NAME, mask)
    if grad_out.dtype == FP32:
        assert_right(found, attend, inputs, grad_out)
    else:  # stock computes in fp32 between inputs and gradients; ours rounds what it multiplies, as flash attention does
        right = gradients(sdpa(is_causal=mask == "causal"), [x.double() for x in inputs], grad_out.double())
        assert max(map(error, found, right)) < 2**-7


def shared_by_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A mask of each batch, heads, queries and keys; the rows of an alignment share it."""
    query, key, value = (x.unflatten(1, (2, 1)) for x in (query, key, value))
    bias = query.detach()[:, :1, :, :, :1] * key.detach()[:, :1, :, :, 0, None].mT
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).flatten(1, 2)


def test_gradients_in_use(rewriting: None) -> None:
    """Of projections, as of a model: strides of gradients matter to what comes before the call, and a tensor is used twice."""
    weights = [normal(32, width, seed=seed) / 8 for seed, width in enumerate((64, 16, 16))]

    def model(x: Tensor, *weights: Tensor) -> Tensor:
        query, key, value = ((x @ w).unflatten(-1, (-1, 16)).transpose(1, 2) for w in weights)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True) * query + key * value

    inputs = [normal(2, 40, 32, seed=5), *weights]
    with emulate():
        actual = gradients(compiled(by_matmuls(model)), inputs)
    assert rewritten() == 1 and decisions()[-1].kv_heads == 1
    assert_right(actual, model, inputs)


def without_gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return in_dims(2, 2, 1)(query.detach(), key, value)


@pytest.mark.parametrize(
    ("attend", "inputs", "reason"),
    [
        (sdpa(dropout_p=0.1), of(4, 1, 40, 40), None),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k.detach(), v), of(4, 1, 40, 40), None),
        (lambda q, k, v: in_five(q + 0 * k[:, :1, :1, :1], k, v.detach()), of(2, 2, 40, 40), None),
        pytest.param(
            shared_by_rows, of(2, 2, 40, 40), "a mask of queries and keys that some batches share", marks=pytest.mark.quick
        ),
        pytest.param(without_gradient, of(2, 2, 40, 40), "all need a gradient", marks=pytest.mark.quick),
        pytest.param(in_dims(2, 2, 1, dropout_p=0.5), of(2, 2, 40, 40), "dropout", marks=pytest.mark.quick),
    ],
    ids=[
        *("dropout", "a key without a gradient", "a value without a gradient", "a mask that would be copied"),
        *("a query without a gradient", "dropout of five dimensions"),
    ],
)
def test_what_stays(rewriting: None, attend: Attend, inputs: Sequence[Tensor], reason: str | None) -> None:
    """Five dimensions not for their number, of which others are rewritten."""
    with emulate():
        compiled(by_matmuls(attend))(*(x.requires_grad_() for x in inputs)).sum().backward()
    decision = decisions()[-1]
    assert not decision.rewritten and decision.op == NAME and decision.remedy
    if reason:
        assert decision.reason.startswith(f"{REASON}, with inputs of 5 dimensions: ") and decision.reason.endswith(reason)


@pytest.mark.quick
def test_a_scale_below_0(rewriting: None) -> None:
    """Our kernels take none, whichever forward there is; what the remedy says is rewritten."""
    inputs = of(2, 1, 40, 40)
    with emulate():
        compiled(by_matmuls(sdpa(scale=-0.5, is_causal=True)))(*(x.requires_grad_() for x in inputs)).sum().backward()
    decision = decisions()[-1]
    # The graph has its root twice.
    assert re.fullmatch(rf"{REASON}: scale=-0\.50*1? is not a positive number in the range of fp32", str(decision.reason))
    assert decision.remedy == "multiply the query by it, and pass scale=1.0"
    with emulate():
        mended = by_matmuls(lambda q, k, v: sdpa(scale=1.0, is_causal=True)(q * -0.5, k, v))
        compiled(mended)(*(x.requires_grad_() for x in inputs)).sum().backward()
    assert rewritten() == 1


def test_a_gradient_of_torch_func(rewriting: None) -> None:
    """It is told; since torch 2.15, whose vmap calls flash attention for each sample, it is rewritten."""

    def loss(*inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*inputs).sum()

    with emulate():
        compiled(vmap(grad(loss, argnums=(0, 1, 2))))(*of(2, 2, 40, 40))
    decision = decisions()[-1]
    if torch.__version__ >= (2, 15):
        assert decision.rewritten
    else:
        assert not decision.rewritten and "torch.func" in decision.reason and decision.remedy


def learnt_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key[:, :1], value[:, :1], mask, enable_gqa=True)


def five_dims(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.unflatten(0, (-1, 2)) for x in (query, key, value))).flatten(0, 1)


@pytest.mark.parametrize("attend", [learnt_groups, five_dims])
def test_level_batch_takes_all_batches_or_none(rewriting: None, attend: Attend) -> None:
    """The second one is compiled for any size. What is taken at both has equal bits."""
    found = []
    clear_decisions()
    with enabled(guarantee="batch"), emulate():
        function = torch.compile(attend)
        for batch in (4, 6):
            leaves = [normal(6, 2, 20, 16, seed=seed)[:batch].clone().requires_grad_() for seed in range(3)]
            function(*leaves, normal(1, 2, 20, 20, seed=5).requires_grad_()).square().sum().backward()
            found.append([x.grad[:4] for x in leaves])
    for decision in decisions():
        assert decision.rewritten if attend is learnt_groups else ("guarantee='batch'" in decision.reason and decision.remedy)
    assert len(decisions()) == 2 and (attend is five_dims or all(map(torch.equal, *found)))


LEARNT = {  # by the shape of query, key and value before [S, D], and that of the mask
    "pairs, which rows of an alignment share": ((2, 3, 2), (2, 1, 2, 40, 40)),
    "pairs of each row": ((2, 3, 2), (2, 3, 2, 40, 40)),
    "heads, queries and keys": ((2, 3, 2), (2, 40, 40)),
    "keys of each row": ((2, 3, 2), (2, 3, 1, 1, 40)),
    "one for all": ((2, 3, 2), (40, 40)),
    "three dimensions": ((4,), (4, 40, 40)),
}


PAIRS, *OTHERS = LEARNT


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((PAIRS, dtype) for dtype in (FP32, BF16)),
        *((name, FP32) for name in OTHERS[:3]),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [*((name, BF16) for name in OTHERS), *((x, FP32) for x in OTHERS[3:])]
        ),
    ],
)
def test_masks_that_are_learnt(rewriting: None, name: str, dtype: torch.dtype) -> None:
    """Right, and the same in three interleavings. The pairs are those of AlphaFold, as SDPA of five dimensions takes them."""
    batch, shape = LEARNT[name]
    inputs = [normal(*batch, 40, 16, seed=seed) for seed in range(3)] + [normal(*shape, seed=7)]
    inputs, grad_out = [x.to(dtype) for x in inputs], normal(*batch, 40, 16, seed=3).to(dtype)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    found = in_interleavings(attend, inputs, grad_out)
    decision = decisions()[-1]
    if len(batch) == 1 and torch.__version__ >= (2, 15):  # which makes four of three: the math path is then the user's own wish
        assert (rewritten(), decision.reason, decision.remedy) == (0, REASON, REMEDY)
        return
    assert (rewritten(), decision.op, decision.mask) == (1, NAME, "block_mask")
    right = gradients(attend, [x.double() for x in inputs], grad_out.double())
    assert max(map(error, found, right)) < (2**-7 if dtype is BF16 else 2**-18)
