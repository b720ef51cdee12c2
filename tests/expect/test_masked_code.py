"""SDPA under a mask that the graph makes, on an H100 that is not there: the graph, the launches, the kernels."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
from kernels import MAIN, assert_expected, broken_gates, kernel, text
from torch import Tensor

import dash_inductor
from benchmarks.machine_code.generate import TEMPLATE, Generated, generate
from dash_inductor.codegen.mode import deterministic
from tests.ptx.graphs import masked_backward

aten, prims = torch.ops.aten, torch.ops.prims
BATCH, HEADS, KV_HEADS, LENGTH = 2, 16, 4, 4096
MATRIX = "template: mask_matrix\n"
# LDL and STL of the main loop, by GPU, head dim and Triton.
SPILLED = {("h100", 64, "3.6"): 25, ("h100", 64, "3.7"): 1, ("h100", 64, "3.8"): 9}


def masked(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
    """By the memory-efficient op, as transformers trains on a GPU: causal and padded, kv heads repeated, rows of the mask aligned.

    In the ops of a joint graph, of which fake CUDA tensors know some and Python's indexing others.
    """
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    position = prims.iota(length, start=0, step=1, dtype=torch.int64, device=query.device, requires_grad=False)
    causal = (position.unsqueeze(0) <= position.unsqueeze(1)).unsqueeze(0).unsqueeze(0)
    seen = causal & prims.convert_element_type(padding, torch.bool).unsqueeze(1).unsqueeze(1)
    zero, hidden = (aten.full([], number, dtype=query.dtype, device=query.device) for number in (0.0, -float("inf")))
    bias = aten.slice(aten.constant_pad_nd(torch.where(seen, zero, hidden), [0, 4]), 3, 0, length)
    bias = bias.expand(*query.shape[:2], length, length)
    keys, values = (
        aten.view(x.unsqueeze(2).expand(-1, -1, group, -1, -1).clone(memory_format=torch.contiguous_format), query.shape)
        for x in (key, value)
    )
    saved = aten._scaled_dot_product_efficient_attention(query, keys, values, bias, True)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(grad_out, query, keys, values, bias, *saved, 0.0, wanted)
    repeated = [key.shape[0], key.shape[1], group, *key.shape[2:]]
    return dq, *(aten.sum(aten.view(x, repeated), [2]) for x in (dk, dv))


def code(
    head_dim: int = 64,
    length: int = LENGTH,
    key: str = "h100",
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    *,
    warn_only: bool = False,
    **settings: Any,
) -> Generated:
    def inputs() -> list[Tensor]:
        rows = [
            torch.empty(BATCH, length, n, head_dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            for n in (heads, kv_heads, kv_heads, heads)
        ]
        return [*rows, torch.empty(BATCH, length, dtype=torch.int64, device="cuda")]

    with deterministic(warn_only=warn_only), dash_inductor.enabled(**settings):
        return generate(masked, inputs, key)


@pytest.fixture(scope="module")
def generated() -> Generated:
    return code(kernel="triton")


def launches(generated: Generated) -> list[str]:
    """Our kernels' by their templates' names, in order, without the stream."""
    names = {name: match[1] for name, source in generated.kernels.items() if (match := TEMPLATE.search(source))}
    lines = re.findall(r"(triton_tem\w+)\.run\((.*), stream=\w+\)", generated.source)
    return [f"{names[name]}({arguments})" for name, arguments in lines]


def test_graph_and_launches(generated: Generated) -> None:
    """From where the forward ends. The backward reads kv heads unrepeated, and no mask."""
    nodes = generated.graph.splitlines()
    ours = next(n for n, line in enumerate(nodes) if line.startswith("slice_tensor"))
    assert_expected("\n".join([*nodes[ours:], "", *launches(generated)]), "masked_graph_and_launches")


def test_the_matrix_of_blocks(generated: Generated) -> None:
    assert_expected(text(generated, MATRIX), "mask_matrix")


def test_no_kernel_of_ours_reads_the_mask(generated: Generated) -> None:
    """Only the stock forward does."""
    square = rf"\({BATCH}, {HEADS}, {LENGTH}, {LENGTH}\)"
    (bias,) = set(re.findall(rf"reinterpret_tensor\((\w+), {square}", generated.source))
    assert not any(re.search(rf"\b{bias}\b", line) for line in launches(generated))


@pytest.mark.parametrize("key", ["h100", *(pytest.param(key, marks=pytest.mark.nightly) for key in ("rtx4090", "rtx5090"))])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gates(head_dim: int, key: str) -> None:
    """The rules of the other kernels hold, but for a few registers that chains in parts leave too few."""
    made = code(head_dim, key=key, template="one_pass", kernel="triton")
    name, _ = kernel(made, MAIN)
    _, sentences = broken_gates(made, key, name, head_dim)
    spilled = SPILLED.get((key, head_dim, triton.__version__[:3]))
    assert sentences == ([f"the main loop spills: {spilled} LDL and STL"] if spilled else [])


def test_what_is_recorded(generated: Generated) -> None:
    (decision,) = generated.decisions
    assert (decision.op, decision.mask, decision.heads, decision.kv_heads, decision.reason) == (
        *("aten._scaled_dot_product_efficient_attention_backward.default", "block_mask"),
        *(HEADS, KV_HEADS, None),
    )


@pytest.mark.parametrize("warn_only", [False, True], ids=["strict", "warn_only"])
@pytest.mark.parametrize("reserved", [0, 4])
def test_few_tiles(warn_only: bool, reserved: int) -> None:
    """One kv head for many query heads. Two passes take it; where SMs are reserved stock's kernel does if the mode makes that
    deterministic."""
    generated = code(length=512, heads=64, kv_heads=1, warn_only=warn_only, sm_reserve=reserved)
    (decision,), is_left = generated.decisions, bool(reserved) and not warn_only
    assert decision.template == (None if is_left else "one_pass" if reserved else "two_pass")
    assert bool(launches(generated)) != is_left
    assert (decision.reason or "").startswith("few KV tiles: one pass has work for 6 CTAs, and needs work for") == is_left
    assert generated.source.count("_scaled_dot_product_efficient_attention_backward.default(") == is_left


def under(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Under a mask or a bias that the graph is given."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, *(aten.full([], x, dtype=query.dtype, device=query.device) for x in (0.0, -float("inf"))))
    bias = mask.expand(*query.shape[:2], *mask.shape[2:])
    saved = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)
    wanted = [True, True, True, False]
    return aten._scaled_dot_product_efficient_attention_backward(grad_out, query, key, value, bias, *saved, 0.0, wanted)[:3]


@pytest.mark.parametrize(("dtype", "length"), [(torch.bool, LENGTH), (torch.bfloat16, LENGTH), (torch.bfloat16, 2**16)])
def test_what_is_given_is_read_where_it_is(dtype: torch.dtype, length: int) -> None:
    """By the kernel and by the one that makes the matrix of blocks, along its own dimensions; past 2**31 elements by 64 bits."""

    def inputs() -> list[Tensor]:
        rows = [torch.empty(1, length, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(4)]
        return [*rows, torch.empty(1, 1, length, length, dtype=dtype, device="cuda")]

    with deterministic(), dash_inductor.enabled(template="one_pass", kernel="triton"):
        made = generate(under, inputs, "h100")
    readers = {line.partition("(")[0] for line in launches(made) if re.search(r"\bmask_1\b", line)}
    assert [decision.rewritten for decision in made.decisions] == [True] and readers == {"mask_matrix", "block_mask"}
    _, source = kernel(made, MAIN)
    loads = re.findall(rf"tl\.load\(in_ptr\d+ \+ (tmp\d+) \+ {length}\*(tmp\d+)\)", source)
    assert len(loads) == (1 if dtype == torch.bool else 2)  # of a bias, one for what it hides
    is_wide = [f"{name} = tmp" in source and bool(re.search(rf"{name} = tmp\d+\.to\(tl\.int64\)", source)) for name in loads[0]]
    assert is_wide == [length > LENGTH] * 2


def test_a_learnt_mask() -> None:
    """The kernel stores its gradient; at head dim 128 it spills, by Triton so much, and no more."""
    spilled = {"3.6": 153, "3.7": 147, "3.8": 124, "3.9": 135}
    with dash_inductor.enabled(template="one_pass"):
        generated = masked_backward("h100", [(BATCH, HEADS, LENGTH, 128)] * 4, False, "bf16", False, "learnt")
    name, _ = kernel(generated, MAIN)
    _, broken = broken_gates(generated, "h100", name, 128, most_local=spilled.get(triton.__version__[:3], max(spilled.values())))
    assert broken == []
