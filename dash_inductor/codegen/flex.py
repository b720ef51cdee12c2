"""What Inductor generates for a FlexAttention on a GPU that is not there, of a few score_mods and mask_mods."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .generate import Generated

Function = Callable[..., Any]
WINDOW, CAP = 1024, 20.0  # keys before a query that it sees; the most that a score can be

# (b, h, m, n, documents of the positions) -> whether query m sees key n
MASK_MODS: dict[str, Function] = {
    "none": lambda b, h, m, n, documents: _all(),
    "causal": lambda b, h, m, n, documents: m >= n,
    "window": lambda b, h, m, n, documents: (m >= n) & (m - n < WINDOW),
    "documents": lambda b, h, m, n, documents: (m >= n) & (documents[m] == documents[n]),
}


def _all() -> torch.Tensor:
    import torch

    return torch.full((), True, dtype=torch.bool)


def _soft_cap(score: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any) -> Any:
    import torch

    return CAP * torch.tanh(score / CAP)


def _alibi(score: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any) -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        return score + slopes[h] * (n - m)


# (score, b, h, m, n, slopes of the heads) -> score
SCORE_MODS: dict[str, Function] = {
    "none": lambda score, b, h, m, n, slopes: score,
    "soft-cap": _soft_cap,
    "alibi": _alibi,
}


def flex_backward(
    device: str,
    *,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    score_mod: str = "none",
    mask_mod: str = "causal",
    batch: int = 1,
    block: int = 128,
    mask_heads: int = 1,
    dtype: str = "bf16",
    kernel_options: Mapping[str, object] | None = None,
    trained: bool = False,
    rewrite: bool = True,
    value_dim: int | None = None,
) -> Generated:
    """The code of the backward of one FlexAttention with a BlockMask of `block` x `block`, in deterministic mode.

    score_mod and mask_mod are names of SCORE_MODS and MASK_MODS, the latter "none" for no BlockMask; the lists are those of
    `mask_heads` heads, 1 for all. Inputs are [B, H, S, D] views of [B, S, H, D] tensors; `value_dim` is the D of value, None for
    head_dim. trained: ALiBi's slopes have a gradient.
    rewrite=False: as stock has it, in no such mode. Raises ValueError for sizes that no attention has.
    """
    import torch
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention.flex_attention import BlockMask

    from ..hooks.install import install, is_enabled, uninstall
    from .generate import TORCH_DTYPES, deterministic, generate, require_sizes

    value_dim = head_dim if value_dim is None else value_dim
    require_sizes([length, block, mask_heads, value_dim], batch, heads, kv_heads, head_dim, dtype)
    flex = sys.modules["torch._higher_order_ops.flex_attention"]  # the attribute of that name is the HOP
    element = getattr(torch, TORCH_DTYPES[dtype])
    score = torch.zeros((), dtype=element, requires_grad=True)
    indices = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    slopes = torch.zeros(heads, requires_grad=trained)
    # On the CPU, since autograd cannot run on fake CUDA tensors; with Inductor's decompositions, as a joint graph has it.
    forward, joint = flex.create_fw_bw_graph(SCORE_MODS[score_mod], (score, *indices), (slopes,))
    joint = make_fx(joint, decomposition_table=select_decomp_table())(score.detach(), *indices, score.detach(), slopes)
    blocks = -(-length // block)
    options = {"BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False}
    options |= {"WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, **(kernel_options or {})}

    def backward(
        query: Any, key: Any, value: Any, grad_out: Any, out: Any, logsumexp: Any, slopes: Any, documents: Any, *lists: Any
    ) -> tuple[Any, ...]:
        if mask_mod == "none":  # as torch makes one, which it cannot of fake CUDA tensors
            num, indices = (torch.full((1,) * dims, dims == 3, dtype=torch.int32, device="cuda") for dims in (3, 4))
            lists = (num, indices, None, None) * 2
        sizes = (1 << 30 if mask_mod == "none" else block,) * 2
        parts: tuple[Any, ...] = ((length, length), *lists, sizes, MASK_MODS[mask_mod])
        mask = BlockMask(*parts)
        *grads, _ = torch.ops.higher_order.flex_attention_backward(
            *(query, key, value, out, logsumexp, grad_out, None, forward, joint),
            *(mask.as_tuple(), head_dim**-0.5, options, (slopes,), (documents,)),
        )
        return tuple(grads)

    def arguments() -> list[torch.Tensor]:
        def rows(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(batch, length, heads, dim, dtype=element, device="cuda").transpose(1, 2)

        def ints(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device="cuda")

        lists = [x for _ in range(4) for x in (ints(1, mask_heads, blocks), ints(1, mask_heads, blocks, blocks))]
        query, key, value = rows(heads, head_dim), rows(kv_heads, head_dim), rows(kv_heads, value_dim)
        tensors = [query, key, value, rows(heads, value_dim), rows(heads, value_dim)]
        logsumexp, slopes = (torch.empty(size, device="cuda") for size in ((batch, heads, length), (heads,)))
        return [*tensors, logsumexp, slopes, ints(length), *lists]

    was_enabled = is_enabled()
    install()
    try:
        with deterministic(rewrite):
            return generate(backward, arguments, device)
    finally:
        if not was_enabled:
            uninstall()
