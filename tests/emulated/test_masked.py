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
from tensors import BF16, FP32, columns, normal, qkv
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
SCORES = normal(2, 4, LENGTH, LENGTH)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
LEAST = torch.finfo().min


def given(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """A mask as it is; of floats, in the dtype that SDPA wants."""
    return mask if mask.dtype == torch.bool else mask.to(query.dtype)


def given_in_part(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    return causal(query, key) & ~mask


def computed(query: Tensor, key: Tensor, x: Tensor) -> Tensor:
    """By matmuls: nothing that a kernel could ask."""
    return (x @ x.mT > 0) | torch.eye(LENGTH, dtype=torch.bool)


def cropped(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    """As open_clip cuts its causal buffer of floats."""
    return bias[: query.shape[2], : key.shape[2]].to(query.dtype)


def scaled(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    return (bias * 0.5).to(query.dtype)


def of_pixart(query: Tensor, key: Tensor, padding: Tensor) -> Tensor:
    """-10000 hides no key: it is a bias."""
    bias = (1 - padding.to(query.dtype)) * -10000.0
    return bias[:, None, None].expand(-1, query.shape[1], query.shape[2], -1)


def by_least(query: Tensor, key: Tensor, padding: Tensor) -> Tensor:
    """The least number, and twice that."""
    hidden = (1.0 - padding)[:, None, None] * LEAST
    return torch.where(causal(query, key), hidden, LEAST).to(query.dtype)


def of_hunyuan(query: Tensor, key: Tensor, padding: Tensor) -> Tensor:
    """Pairs of tokens that are no padding; every query sees the first key."""
    rows = padding.bool().view(2, 1, 1, LENGTH).repeat(1, 1, LENGTH, 1)
    mask = (rows & rows.transpose(2, 3)).bool()
    mask[:, :, :, 0] = True
    return mask


def of_falcon(query: Tensor, key: Tensor, padding: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi by the place among the tokens that are no padding, rounded to bf16; keys are hidden by a float mask."""
    place = ((padding.cumsum(-1) - 1) * padding)[:, None]
    alibi = (slopes[:, None].bfloat16() * place).reshape(2 * len(slopes), 1, LENGTH).to(query.dtype)
    hidden = torch.where(padded(query, key, padding), 0.0, LEAST)
    return (alibi.view(2, len(slopes), 1, -1) / 4).masked_fill(hidden < -1, LEAST).to(query.dtype)


def of_x_transformers(query: Tensor, key: Tensor, slopes: Tensor) -> Tensor:
    m, n = positions(query, key)
    alibi = -(n - m).abs() * slopes[:, None, None]
    return alibi[None].expand(2, -1, -1, -1).masked_fill(n > m, LEAST / 2).to(query.dtype)


RIGHT = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [60]])).long()
CAPTURED = [
    (given, (BIAS > 0,)),
    (given, (BIAS,)),
    (given_in_part, (SCORES > 0.5,)),
    (computed, (normal(LENGTH, 9),)),
    (of_pixart, (PADDING,)),
    (of_falcon, (RIGHT, SLOPES)),
]
CAPTURED_BY_NIGHT = [
    (of_x_transformers, (SLOPES,)),
    (given, (SCORES[:, :1],)),
    (given, (SCORES[:1, :, :, :1],)),
    (given, (SCORES.transpose(2, 3),)),
    (cropped, (torch.full((LENGTH + 2, LENGTH + 2), HIDDEN).triu(1),)),
    (scaled, (BIAS,)),
    (by_least, (RIGHT,)),
    (of_hunyuan, (PADDING,)),
]


@pytest.mark.parametrize(
    ("mask", "others"), [*CAPTURED, *(pytest.param(*each, marks=pytest.mark.nightly) for each in CAPTURED_BY_NIGHT)]
)
def test_captured_masks(mask, others):
    """What is no function of positions and small tensors is read from memory."""
    check(attention(mask), others, "block_mask")


def test_biases_of_half_precision():
    check(attention(given), (BIAS.to(BF16),), "block_mask", dtype=BF16)


def of_two_numbers(query: Tensor, key: Tensor) -> Tensor:
    return torch.where(causal(query, key), 0.0, -3.0).to(query.dtype)


def test_a_bias_that_positions_decide():
    """It is in no memory, and all keys are seen."""
    check(attention(of_two_numbers), (), "full")


@pytest.mark.parametrize(
    ("mask", "other", "name"),
    [(given, BIAS, "primals_"), (given, BIAS > 0, "keep_"), (computed, normal(LENGTH, 9), ""), (scaled, BIAS, "")],
)
def test_what_is_captured_is_read_where_it_is(mask, other, name):
    """The backward has no other tensor of queries and keys; what the stock op reads is saved as it is, and what it does not read,
    as the booleans that it makes a bias of, as a copy. All layers share it."""
    *tensors, _ = qkv(2, 4, LENGTH, LENGTH, 16)

    def two_layers(query: Tensor, *others: Tensor) -> Tensor:
        return attention(mask)(query + attention(mask)(query, *others), *others)

    _, backward = code_of(two_layers, [*(x.requires_grad_() for x in tensors), other])
    square = rf"\((?:\d+, \d+, )?{LENGTH}, {LENGTH}\)"
    (line,) = (line for line in backward.splitlines() if re.search(square, line) and "rand_strided" not in line)
    assert line.strip().startswith("assert_size_stride") and name in line
    assert rewritten() == 2 and backward.count("# dash_inductor template: mask_matrix") == 1


@pytest.mark.parametrize(
    ("mask", "made_of"),
    [
        (padded, lambda length: (torch.arange(length) < torch.tensor([[length - 9], [20]])).long()),
        pytest.param(given, lambda length: normal(2, 1, length, length), marks=pytest.mark.quick),
    ],
)
def test_dynamic_lengths(mask, made_of):
    """One graph for all of them, of a mask that is read and of one that is captured."""
    made = compiled(attention(mask), dynamic=True)
    for length in (LENGTH, 40, 97):
        tensors, other = qkv(2, 2, length, length, 16), made_of(length)
        with emulation.emulate():
            actual = gradients(made, tensors, (other,))
        expected = reference(attention(mask), tensors, (other,))
        assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < FP32_ERROR, length
    assert rewritten() == 1


def test_a_length_that_equals_the_head_dim():
    """Both are one symbol, of which a guard on the head dim makes a number. SDPA takes its math path, for the strides."""
    tensors = columns(qkv(2, 4, 16, 16, 16, kv_heads=1))
    with emulation.emulate():
        actual = gradients(compiled(attention(window, scale=1.0), dynamic=True), tensors)
    assert rewritten() == 1
    expected = reference(attention(window, scale=1.0), tensors)
    assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < FP32_ERROR


def test_rows_that_a_bias_hides():
    """Zero gradients, of -inf as of the least number and parts of it, which stock averages."""
    tensors, bias = qkv(2, 4, LENGTH, LENGTH, 16), BIAS.clone()
    bias[:10] = LEAST
    bias[10:20] = torch.linspace(0.3, 1, 10)[:, None] * LEAST
    bias[20:30] = HIDDEN
    with emulation.emulate():
        dq, dk, dv = gradients(compiled(attention(given)), tensors, (bias,))
    assert rewritten() == 1
    assert not dq[:, :, :30].any() and dq[:, :, 30:].all() and dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(7, 9, dtype=torch.bool), r"expanded size|must match|broadcast"),
        (torch.ones(LENGTH, LENGTH, dtype=torch.long), r"dtype"),
        (torch.ones(LENGTH, LENGTH, device="meta"), r"device|meta"),
    ],
)
def test_wrong_masks(mask, error):
    """torch's error."""
    with pytest.raises(Exception, match=error), emulation.emulate():
        compiled(attention(lambda query, key: mask))(*(x.requires_grad_() for x in qkv(1, 2, LENGTH, LENGTH, 16)[:3]))
