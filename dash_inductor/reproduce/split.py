"""Attention's gradients alone, of a batch that is split: at the level `batch` they have the bits of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decision import Decision, decisions
from ..devices.target import own_device
from . import compare

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SDPA = "scaled_dot_product"  # in the names of its ops


def of_this_process() -> dict[str, Any]:
    """What came of the attentions that this process took into use, as a run of a step has it: how many tensors were compared, how
    many differ, and the first that does. Of SDPA at the level `batch`, without a mask in blocks and of sizes that are known."""
    found = [each for decision in _splittable(decisions()) for each in _compared(decision)]
    differing = [(name, difference) for name, difference in found if difference is not None]
    name, first = differing[0] if differing else (None, None)
    return {"tensors": len(found), "differing": len(differing), "parameter": name, "difference": first and asdict(first)}


def _splittable(found: Sequence[Decision]) -> list[Decision]:
    """Each kind once."""
    kinds = {(each.shape, each.mask): each for each in found if _may_be_split(each)}
    return list(kinds.values())


def _may_be_split(decision: Decision) -> bool:
    sizes = decision.batch, decision.heads, decision.kv_heads, decision.q_len, decision.kv_len
    known = all(isinstance(size, int) for size in sizes) and decision.batch != 1
    plain = SDPA in decision.op and decision.mask in ("full", "causal") and not decision.dropout
    return decision.rewritten and decision.guarantee == "batch" and known and plain


def _compared(decision: Decision) -> Iterator[tuple[str, compare.TensorDifference | None]]:
    """By name, how out and gradients of the parts differ from those of the whole."""
    key_dim, _, value_dim = str(decision.head_dim).partition("/")
    device = own_device()
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: Any, length: Any, columns: str) -> Tensor:
        size: Any = decision.batch, heads, length, int(columns)
        return torch.randn(size, generator=generator, device=device).to(DTYPES[decision.dtype])

    attend = torch.compile(F.scaled_dot_product_attention)

    def gradients(grad_out: Tensor, *inputs: Tensor) -> list[Tensor]:
        query, key, value = (x.detach().requires_grad_() for x in inputs)
        is_grouped = decision.heads != decision.kv_heads
        out = attend(query, key, value, is_causal=decision.mask == "causal", enable_gqa=is_grouped)
        return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out)]

    of_query, of_key = (decision.heads, decision.q_len), (decision.kv_heads, decision.kv_len)
    value_dim = value_dim or key_dim
    tensors = normal(*of_query, value_dim), normal(*of_query, key_dim), normal(*of_key, key_dim), normal(*of_key, value_dim)
    whole, *parts = (gradients(*(x[part] for x in tensors)) for part in (slice(None), slice(0, 1), slice(1, None)))
    for name, x, *of_parts in zip(("out", "dq", "dk", "dv"), whole, *parts, strict=True):
        yield f"{name} of {decision.place or decision.op} ({decision.shape})", compare.difference(x, torch.cat(of_parts))
