"""SDPA that torch makes matmuls of on a GPU: what is rewritten, why the rest stays, and that its remedy lets another op take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_inductor import explain
from dash_inductor.rewrite.math_path import OP, PADDED, REASON, REMEDY

LENGTH, HEADS = 256, 8
Attend = Callable[..., Tensor]


def of(heads: int = HEADS, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(1, heads, LENGTH, head_dim, dtype=dtype)


class Model(nn.Module):
    """Attends to scaled query, key and value; frozen: the last two are not."""

    def __init__(self, attend: Attend, dtype: torch.dtype, *, frozen: bool) -> None:
        super().__init__()
        self.scale, self.attend, self.frozen = nn.Parameter(torch.ones(1, dtype=dtype)), attend, frozen

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        key, value = (x if self.frozen else x * self.scale for x in (key, value))
        return self.attend(query * self.scale, key, value, *others)


def row(attend: Attend, inputs: Sequence[Tensor], *, frozen: bool = False) -> Any:
    (found,) = explain(Model(attend, inputs[0].dtype, frozen=frozen), *inputs, device="h100")
    return found


def causal(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)


def padded(query: Tensor, key: Tensor, value: Tensor, padding: Tensor, **options: Any) -> Tensor:
    seen = padding.bool()[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, **options)


def biased(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def repeated(attend: Attend) -> Attend:
    def of_all(query: Tensor, key: Tensor, value: Tensor, *others: Tensor, **options: Any) -> Tensor:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return attend(query, key, value, *others, **options)

    return of_all


def with_gqa(attend: Attend) -> Attend:
    return lambda *inputs: attend(*inputs, enable_gqa=True)


def by_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A mask that hides rows: its last stride is 0."""
    return biased(query, key, value, (torch.arange(LENGTH) % 7 > 0)[:, None].expand(LENGTH, LENGTH))


def by_row_in_full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return biased(query, key, value, (torch.arange(LENGTH) % 7 > 0)[:, None].expand(LENGTH, LENGTH).contiguous())


def in_five(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return causal(*(x.unflatten(1, (2, -1)) for x in (query, key, value))).flatten(1, 2)


def in_eights(attend: Attend) -> Attend:
    """Of tensors whose head dims are padded, with the scale that they had."""

    def of_padded(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        inputs = (F.pad(x, (0, -x.shape[3] % 8)) for x in (query, key, value))
        return attend(*inputs, *others, scale=query.shape[3] ** -0.5)[..., : value.shape[3]]

    return of_padded


ALL, ONE, FOUR, PADDING = (of(),) * 3, of(1), of(4), torch.ones(1, LENGTH, dtype=torch.int64)
FEW = "key and value have {}, and query 8, {}".format
UNDER_MASK = "under a mask, which neither flash nor memory-efficient attention takes"
REPEAT = "repeat key and value for each query head (repeat_interleave along dim 1): our backward reads them without the copies"
ODD = "head dim {} is no multiple of 8".format
ALL_TRAIN = "unlike the matmuls of SDPA: it is not seen that query, key and value all need a gradient"
CASES: dict[str, tuple[Attend, Sequence[Tensor], str, str, Attend]] = {
    "one kv head": (causal, (of(), ONE, ONE), FEW("1 head", "without enable_gqa"), "pass enable_gqa=True", with_gqa(causal)),
    "one kv head, a mask": (padded, (of(), ONE, ONE, PADDING), FEW("1 head", UNDER_MASK), REPEAT, repeated(padded)),
    "groups, a mask": (with_gqa(padded), (of(), FOUR, FOUR, PADDING), FEW("4 heads", UNDER_MASK), REPEAT, repeated(padded)),
    "groups, lengths": (
        *(with_gqa(causal), (of(), of(4)[:, :, :128], of(4)[:, :, :128])),
        FEW("4 heads", "under a causal mask of unlike lengths, which neither flash nor memory-efficient attention takes"),
        *(REPEAT, repeated(causal)),
    ),
    "groups, head dims": (
        *(with_gqa(causal), (of(), FOUR, of(4, head_dim=32))),
        FEW("4 heads", "with another head dim of value, which neither flash nor memory-efficient attention takes"),
        *(REPEAT, repeated(causal)),
    ),
    "a head dim of 25, a mask": (padded, (*(of(head_dim=25),) * 3, PADDING), f"{ODD(25)}, {UNDER_MASK}", PADDED, in_eights(padded)),
    "a head dim of 20 of value": (
        *(causal, (of(head_dim=40), of(head_dim=40), of(head_dim=20))),
        f"{ODD(20)}, with another head dim of value, which neither flash nor memory-efficient attention takes",
        *(PADDED, in_eights(causal)),
    ),
    "a head dim of 36, groups, a mask": (
        *(with_gqa(padded), (of(head_dim=36), of(4, 36), of(4, 36), PADDING)),
        FEW("4 heads", f"and {ODD(36)}, {UNDER_MASK}").replace("8, and", "8 and"),
        *(f"{REPEAT} and {PADDED}", in_eights(repeated(padded))),
    ),
    "a mask of rows": (
        *(by_row, ALL, "the last stride of the mask is 0, not 1"),
        *("call .contiguous() on it, after it is expanded", by_row_in_full),
    ),
    "five dimensions": (
        *(
            in_five,
            ALL,
            f"{REASON}, with inputs of 5 dimensions: {ALL_TRAIN}",
        ),
        *("reshape query, key and value to four dimensions: [batch, heads, length, head dim]", causal),
    ),
    "columns": (
        *(lambda q, k, v: causal(q.mT.contiguous().mT, k, v), ALL, "the last stride of the query is 256, not 1"),
        *("make it contiguous in its last dimension", causal),
    ),
    "fp32, groups": (
        *(with_gqa(causal), (of(dtype=torch.float32), *(of(4, dtype=torch.float32),) * 2)),
        *("dtype fp32 is not one of bf16, fp16", "compute attention in bf16 or fp16, for instance under torch.autocast"),
        lambda *inputs: with_gqa(causal)(*(x.bfloat16() for x in inputs)),
    ),
}


REWRITTEN = [name for name in CASES if name not in ("columns", "fp32, groups")]  # where all has gradients


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_reasons(name):
    attend, inputs, reason, remedy, mended = CASES[name]
    found = row(attend, inputs, frozen=name in REWRITTEN)
    reason = reason if reason.startswith(REASON) else f"{REASON}: {reason}"
    assert (found.op, found.reason, found.remedy) == (OP, reason, remedy)
    assert row(mended, inputs).rewritten


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name):
    attend, inputs, *_ = CASES[name]
    found = row(attend, inputs)
    assert (found.op, found.reason) == (OP, None)
    assert found.decision.batch * found.decision.kv_heads == inputs[1].shape[0] * inputs[1].shape[1]


def test_what_the_graph_does_not_show_is_not_said():
    found = row(causal, (torch.zeros(2, HEADS, LENGTH, 64, dtype=torch.bfloat16), of(), of()))
    assert (found.op, found.reason, found.remedy) == (OP, REASON, REMEDY)


def test_a_bias_of_the_users():
    """In columns; once it is contiguous, it is another op's, which has a reason of its own."""
    inputs = of(), of(), of(), torch.zeros(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)
    found = row(lambda q, k, v, bias: biased(q, k, v, bias.mT), inputs, frozen=True)
    assert found.reason == f"{REASON}: the last stride of the mask is {LENGTH}, not 1"
    assert row(lambda q, k, v, bias: biased(q, k, v, bias.mT), inputs).rewritten
    mended = row(lambda q, k, v, bias: biased(q, k, v, bias.mT.contiguous()), inputs)
    assert "efficient" in mended.op
