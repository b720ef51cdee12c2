"""SDPA under masks that the graph makes: right gradients, the same bits in every interleaving, and no mask in memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import FP32_ERROR, compiled, error, mutate, rewritten
from flex import INTERLEAVINGS
from tensors import BF16, FP32, normal, qkv
from torch import Tensor
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.utils.checkpoint import checkpoint

from dash_inductor import decisions, emulation

pytestmark = pytest.mark.usefixtures("rewriting")

LENGTH, WINDOW, HIDDEN = 75, 20, -float("inf")
Mask = Callable[..., Tensor]  # of query, key and small tensors


def positions(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]


def causal(query: Tensor, key: Tensor) -> Tensor:
    m, n = positions(query, key)
    return n <= m


def causal_of_floats(query: Tensor, key: Tensor) -> Tensor:
    return torch.full((query.shape[2], key.shape[2]), HIDDEN, dtype=query.dtype).triu(1)


def everything(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)


def window(query: Tensor, key: Tensor) -> Tensor:
    m, n = positions(query, key)
    return (n <= m) & (n > m - WINDOW)


def padded(query: Tensor, key: Tensor, padding: Tensor) -> Tensor:
    """Rows of the padding on the left see no key."""
    return causal(query, key) & padding.bool()[:, None, None]


def keys_alone(query: Tensor, key: Tensor, padding: Tensor) -> Tensor:
    return padding.bool()[:, None, None]


def documents(query: Tensor, key: Tensor, starts: Tensor) -> Tensor:
    ids = starts.cumsum(1)
    return causal(query, key) & (ids[:, None, :, None] == ids[:, None, None])


def by_head(query: Tensor, key: Tensor) -> Tensor:
    m, n = positions(query, key)
    return ((n <= m) & (n > m - 8 * (1 + torch.arange(query.shape[1])[:, None, None])))[None]


def added(query: Tensor, key: Tensor, padding: Tensor) -> Tensor:
    return causal_of_floats(query, key) + torch.where(padding[:, None, None] > 0, 0.0, HIDDEN).to(query.dtype)


def by_distance(query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
    """A small tensor, indexed by distances that count from its end, says which ones are seen; a query sees itself in any case."""
    m, n = positions(query, key)
    return seen[n - m] | (n == m)


def listed(query: Tensor, key: Tensor) -> Tensor:
    """A tensor that the graph has as it is."""
    return torch.tensor([[position % 3 != 1 for position in range(LENGTH)]])


def nothing(query: Tensor, key: Tensor) -> Tensor:
    """No query sees any key."""
    return torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool)


def one_document(query: Tensor, key: Tensor) -> Tensor:
    """Positions that the graph makes start nowhere anew: the mask is causal, and a constant."""
    ids = torch.arange(query.shape[2])[None].diff(prepend=torch.full((1, 1), -1)).ne(1).cumsum(1)
    return causal(query, key) & (ids[:, None, :, None] == ids[:, None, None])


PADDING = torch.ones(2, LENGTH, dtype=torch.long)
PADDING[0, :40] = 0
PADDING[1, 60:] = 0
STARTS = torch.zeros(2, LENGTH, dtype=torch.long)
STARTS[0, [0, 33, 64]] = 1
STARTS[1, [0, 5]] = 1


def attention(mask: Mask | None, **keywords: Any) -> Callable[..., Tensor]:
    """SDPA of query, key, value and what the mask is made of."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        visible = None if mask is None else mask(query, key, *others)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True, **keywords)

    return attend


def repeated(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
    """As transformers attends under a mask: kv heads are repeated for the query heads of a group."""
    group = query.shape[1] // key.shape[1]
    key, value = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=padded(query, key, *others))


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], others: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
    """dq, dk, dv of query, key, value and grad_out."""
    *inputs, grad_out = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves, *others), leaves, grad_out)


def reference(function: Callable[..., Tensor], tensors: list[Tensor], others: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
    """The same by the stock op in float64."""
    return gradients(function, [x.double() for x in tensors], others)


def check(
    function: Callable[..., Tensor],
    others: tuple[Tensor, ...],
    mask: str,
    *,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (LENGTH, LENGTH),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = FP32,
    dynamic: bool = False,
) -> None:
    """One attention, rewritten; right, in the same bits in every interleaving."""
    tensors = qkv(2, heads[0], *lengths, dims[0], kv_heads=heads[1], dtype=dtype, value_dim=dims[1])
    made = compiled(function, dynamic=dynamic)
    seen = []
    for seed, resident in INTERLEAVINGS if mask == "block_mask" else ((0, None), (1, None)):
        with emulation.emulate(seed, resident=resident):
            seen.append(gradients(made, tensors, others))
    assert rewritten() == 1
    assert (decisions()[-1].mask, decisions()[-1].kv_heads) == (mask, decisions()[-1].kv_heads if dynamic else heads[1])
    assert all(torch.equal(a, b) for actual in seen for a, b in zip(actual, seen[0], strict=True))
    allowed = FP32_ERROR if dtype == FP32 else 2e-2
    expected = reference(function, tensors, others)
    assert max(error(a, e) for a, e in zip(seen[0], expected, strict=True)) < allowed


@pytest.mark.parametrize(
    ("mask", "others", "kind"),
    [
        (causal, (), "causal"),
        pytest.param(causal_of_floats, (), "causal", marks=pytest.mark.nightly),
        pytest.param(one_document, (), "causal", marks=pytest.mark.nightly),
        (everything, (), "full"),
        (window, (), "block_mask"),
        (padded, (PADDING,), "block_mask"),
        pytest.param(keys_alone, (PADDING,), "block_mask", marks=pytest.mark.nightly),
        pytest.param(documents, (STARTS,), "block_mask", marks=pytest.mark.nightly),
        pytest.param(by_head, (), "block_mask", marks=pytest.mark.nightly),
        pytest.param(added, (PADDING,), "block_mask", marks=pytest.mark.nightly),
        pytest.param(by_distance, (torch.arange(2 * LENGTH) % 7 < 3,), "block_mask", marks=pytest.mark.nightly),
        (listed, (), "block_mask"),
        (nothing, (), "block_mask"),
    ],
)
def test_masks(mask, others, kind):
    check(attention(mask), others, kind)


@pytest.mark.parametrize("mask", [window, pytest.param(padded, marks=pytest.mark.nightly)])
def test_half_precision(mask):
    check(attention(mask), (PADDING,) if mask is padded else (), "block_mask", dtype=BF16)


@pytest.mark.parametrize("lengths", [(LENGTH, 30), (30, LENGTH)])
def test_lengths_that_differ(lengths):
    """is_causal counts from the first query and key."""
    check(attention(None, is_causal=True), (), "block_mask", lengths=lengths)
    assert decisions()[-1].q_len == lengths[0] and decisions()[-1].kv_len == lengths[1]


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_repeated_keys(dynamic):
    """kv heads are read unrepeated, and so are their gradients."""
    check(repeated, (PADDING,), "block_mask", dynamic=dynamic)


@pytest.mark.parametrize(
    ("mask", "others", "options"),
    [
        (padded, (PADDING,), {"dims": (192, 128), "heads": (2, 2)}),
        (documents, (STARTS,), {"dims": (256, 256), "dtype": BF16}),
        (by_head, (), {"dims": (136, 136)}),
        pytest.param(padded, (PADDING,), {"dims": (192, 128), "heads": (2, 2), "dynamic": True}, marks=pytest.mark.nightly),
        pytest.param(window, (), {"dims": (256, 256), "lengths": (30, LENGTH)}, marks=pytest.mark.nightly),
    ],
)
def test_large_head_dims(mask: Mask, others: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """They take two passes; recomputed by a checkpoint too."""
    masked = attention(mask)
    check(lambda *inputs: checkpoint(masked, *inputs, use_reentrant=False), others, "block_mask", **options)
    assert decisions()[-1].template == "two_pass"


@pytest.mark.parametrize("mask", [everything, causal])
def test_large_head_dims_under_masks_in_closed_form(mask: Mask) -> None:
    """Such as a mask of ones."""
    check(attention(mask), (), "full" if mask is everything else "causal", dims=(192, 128), heads=(2, 2))
    assert decisions()[-1].template == "two_pass"


def test_a_scale():
    check(attention(window, scale=0.5), (), "block_mask")


def test_dynamic_lengths():
    """One graph for all of them."""
    made = compiled(attention(padded), dynamic=True)
    for length in (LENGTH, 40, 97):
        tensors, padding = qkv(2, 2, length, length, 16), (torch.arange(length) < torch.tensor([[length - 9], [20]])).long()
        with emulation.emulate():
            actual = gradients(made, tensors, (padding,))
        expected = reference(attention(padded), tensors, (padding,))
        assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < FP32_ERROR, length
    assert rewritten() == 1


def test_one_key_of_any_number_of_queries():
    """The mask is not read: the checkpoint computes it anew, and the kernel loads it. dk is rounding alone: few queries."""
    masked = attention(window)
    check(lambda *inputs: checkpoint(masked, *inputs, use_reentrant=False), (), "block_mask", lengths=(10, 1), dynamic=True)


def test_rows_that_see_no_key():
    """Zero gradients, as padding wants. Of row 40, which sees one key, dq is 0 but for rounding."""
    tensors = qkv(2, 2, LENGTH, LENGTH, 16)
    with emulation.emulate():
        dq, dk, dv = gradients(compiled(attention(padded)), tensors, (PADDING,))
    assert rewritten() == 1
    assert not dq[0, :, :40].any() and not dk[0, :, :40].any() and not dv[0, :, :40].any()
    assert not dk[1, :, 60:].any() and dq[0, :, 41:].all() and dk[1, :, :60].all()


def layers(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    """Three under one mask, and one under another."""
    for _ in range(3):
        query = query + attention(padded)(query, key, value, padding)
    return query + attention(window)(query, key, value)


def code_of(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[str, str]:
    """The code of forward and backward."""
    torch._dynamo.reset()
    with emulation.emulate():
        _, (forward, backward) = run_fw_bw_and_get_code(lambda: torch.compile(function, fullgraph=True, dynamic=False)(*inputs))
    return forward, backward


def test_no_mask_in_memory():
    """Neither saved for the backward nor read by it; its blocks are made once for each mask of the graph."""
    *tensors, _ = qkv(2, 2, LENGTH, LENGTH, 16)
    forward, backward = code_of(layers, [*(x.requires_grad_() for x in tensors), PADDING])
    square = rf"\(\d+, \d+, {LENGTH}, {LENGTH}\)|\({LENGTH}, {LENGTH}\)"
    assert re.search(square, forward)  # the stock forward reads a mask
    assert not re.search(square, backward)
    templates = {name: template for template, name in re.findall(r"template: (\w+)\n(?:.*\n)*?def (triton_tem_\w+)\(", backward)}
    launched = [templates[name] for name in re.findall(r"(triton_tem_\w+)\.run\(", backward)]
    assert rewritten() == launched.count("block_mask") == 4
    assert launched.count("mask_matrix") == launched.count("block_rows") == 2


def mutants() -> dict[str, tuple[str, dict[str, str]]]:
    return {
        "a block that is seen in part is full": ("MASK_MATRIX", {"tl.where(seen == size, 2, ": "tl.where(seen > 0, 2, "}),
        "a block that is full is not seen": ("MASK_MATRIX", {"tl.where(seen == size, 2, ": "tl.where(seen == size, 0, "}),
        "of the last keys": ("MASK_MATRIX", {"jb = program // Q_BLOCKS % KV_BLOCKS": "jb = 0*program"}),
        "of the first batch element": ("MASK_MATRIX", {"z = zh // MASK_H": "z = 0*zh"}),
    }


@pytest.mark.parametrize("name", mutants())
def test_mutants(monkeypatch, name):
    template, changes = mutants()[name]
    mutate(monkeypatch, template, name.replace(" ", "_"), changes)
    tensors = qkv(2, 2, LENGTH, LENGTH, 16)
    with emulation.emulate():
        actual = gradients(compiled(attention(padded)), tensors, (PADDING,))
    expected = reference(attention(padded), tensors, (PADDING,))
    assert rewritten() == 1
    assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) > 1e-2


BIAS = normal(LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (lambda query, key: BIAS, "a float bias is an input of the graph"),
        (lambda query, key: BIAS > 0, "a mask is an input of the graph"),
        (lambda query, key: causal(query, key) & (BIAS > 0), "a mask is an input of the graph"),
        (lambda query, key: causal_of_floats(query, key).clamp(min=-1e9), "which is no function of positions and small tensors"),
    ],
)
def test_what_is_declined(mask, reason):
    """With what to do instead."""
    tensors = qkv(1, 2, LENGTH, LENGTH, 16)
    with emulation.emulate():
        gradients(compiled(attention(mask)), tensors)
    assert rewritten() == 0 and reason in str(decisions()[-1].reason)


def test_a_mask_of_the_wrong_shape():
    """torch's error."""
    with pytest.raises(Exception, match=r"expanded size|must match|broadcast"), emulation.emulate():
        compiled(attention(lambda query, key: torch.ones(7, 9, dtype=torch.bool)))(*qkv(1, 2, LENGTH, LENGTH, 16)[:3])
