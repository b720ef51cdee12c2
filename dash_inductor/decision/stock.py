"""What the stock backward is, as far as its source tells: whether it is deterministic, and what it allocates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .decided import Decision

HALF_BYTES, FP32_BYTES = 2, 4
TORCH = ("aten", "prims", "torch_attn", "higher_order", "onnx", "dash")  # namespaces


class Kernel(str, Enum):
    """Backwards of torch that may be deterministic."""

    FLEX = "FlexAttention"
    FLASH = "flash attention"
    EFFICIENT = "memory-efficient attention"


@dataclass(frozen=True)
class Stock:
    """What an attention would keep.

    strict: whether the deterministic mode raises an error where an op is not deterministic. Else it warns, and flash and
    memory-efficient attention are not. implementation: the one of flash attention that is active in torch's registry, if it is
    known to be deterministic in both modes; None for torch's own.
    """

    kernel: Kernel
    strict: bool
    implementation: str | None = None

    @property
    def is_deterministic(self) -> bool:
        """Whether it has the same bits in every run in that mode."""
        return self.strict or self.kernel == Kernel.FLEX or self.implementation is not None


def stock_workspace_bytes(decision: Decision, sms: int) -> int | None:
    """Bytes that the stock op of a decision would allocate on a device of `sms` SMs; None where its source does not tell them.

    Flash attention keeps an fp32 dq for each of its splits, as many as fill the SMs, and in GQA a dk and dv for each query head
    (`mha_bwd` in torch's flash_api.cpp). FlexAttention keeps delta alone (torch's `flex_attention_backward` lowering).
    Memory-efficient attention keeps an fp32 dq and delta (`workspace_size` in torch's mem_eff_attention/kernel_backward.h); its
    rows and columns are padded to blocks that differ from kernel to kernel, here to 64.

    >>> sizes = {"batch": 1, "heads": 16, "kv_heads": 16, "q_len": 8192, "kv_len": 8192, "head_dim": 128}
    >>> flash = "aten._scaled_dot_product_flash_attention_backward.default"
    >>> stock_workspace_bytes(Decision(flash, "h100", "bf16", "causal", **sizes), sms=132) >> 20  # MiB; nine splits
    576
    """
    d = decision
    sizes = d.batch, d.heads, d.kv_heads, d.q_len, d.kv_len
    if not all(isinstance(size, int) for size in sizes):
        return None
    batch, heads, kv_heads, q_len, kv_len = map(int, sizes)
    head_dim, *_ = map(int, str(d.head_dim).split("/")) if str(d.head_dim).replace("/", "").isdigit() else (0,)
    if not head_dim or d.mask == "varlen" or d.left_to or not is_of_torch(d.op):  # sequences are not counted
        return None
    total = batch * heads
    if "_flash_attention_backward" in d.op:
        splits = -(-sms // total)
        rows = _rounded(q_len, 128)
        expanded = 2 * total * kv_len * _rounded(head_dim, 8) * HALF_BYTES if kv_heads != heads else 0
        dim = _rounded(head_dim, 32 if head_dim <= 128 else 64)
        return FP32_BYTES * total * rows * (splits * dim + 1) + expanded
    if "efficient_attention_backward" in d.op:
        return FP32_BYTES * total * (_rounded(q_len, 64) * _rounded(head_dim, 64) + q_len)
    if "flex_attention_backward" in d.op:
        return FP32_BYTES * total * q_len
    return None


def is_of_torch(op: str) -> bool:
    """Whether an op, "namespace.name.overload", is torch's own or ours. What has no namespace is torch's as well."""
    return "." not in op or op.partition(".")[0] in TORCH


def stock_is_deterministic(decision: Decision, *, warn_only: bool) -> bool | None:
    """Whether the stock op of a decision gives the same bits in every run under `torch.use_deterministic_algorithms(True)`.

    None where that is up to others: SDPA's math path is what its matmuls are. Of another package's op, how it is called tells.
    What Inductor chooses by timing, a forward too, does not. Flash and memory-efficient attention ask for strict mode (`mha_bwd` as
    above, `attention_backward.cu`); FlexAttention adds gradients of captured tensors by atomics.
    """
    if not is_of_torch(decision.op):
        return None if decision.stock_differs is None else not decision.stock_differs
    if decision.chosen_by_timing:
        return False
    if decision.device == "cpu" or decision.left_to:
        return True
    if decision.stock_differs:
        return False
    if "flex_attention_backward" in decision.op:
        return True
    if any(name in decision.op for name in ("flash_attention", "efficient_attention", "varlen_attn")):
        return not warn_only
    return False if "cudnn" in decision.op else None


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
