"""What Inductor generates for a FlexAttention on a GPU that is not there."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_inductor.codegen.flex import OPTIONS, FlexAttention
from dash_inductor.codegen.mode import deterministic
from dash_inductor.hooks.install import installed

from .generate import Generated, generate, require_sizes


def flex_backward(device: str, attention: FlexAttention, *, rewrite: bool = True, group: str | None = None) -> Generated:
    """The code of a FlexAttention's backward in deterministic mode; not `rewrite`: as stock has it, in no such mode. group: name of
    the process group from whose ranks the graph gathers keys, as torch's hook does, if it does.

    Raises ValueError for sizes that no attention has.
    """
    a = attention
    require_sizes([a.length, a.block, a.mask_heads, a.dim_of_value], a.batch, a.heads, a.kv_heads, a.head_dim, a.dtype)
    functions = attention.functions()

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, grad_out, out, logsumexp, slopes, documents, *lists = tensors
        dq, dk, dv, of_captures = torch.ops.higher_order.flex_attention_backward(
            *(query, key, value, out, logsumexp, grad_out, None, *functions, attention.mask(lists).as_tuple()),
            *(attention.head_dim**-0.5, OPTIONS | dict(attention.kernel_options or {}), (slopes,), (documents,)),
        )
        if group is not None:
            dk, dv = torch.ops.cplib.flex_cp_allgather_backward(dk, dv, 2, group)
        return dq, dk, dv, *(of_captures if attention.trained else [])

    with installed(), deterministic(rewrite):
        return generate(backward, attention.tensors, device)
