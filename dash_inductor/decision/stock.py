"""What the stock backward is, as far as its source tells: whether it is deterministic, and what it allocates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .decided import Decision

HALF_BYTES, FP32_BYTES = 2, 4
TORCH = ("aten", "prims", "torch_attn", "higher_order", "onnx", "dash")  # namespaces


class Kernel(str, Enum):
    """Backwards of torch that may be deterministic."""

    FLEX = "FlexAttention"
    FLASH = "flash attention"
    EFFICIENT = "memory-efficient attention"
    CUDNN = "cuDNN attention"


class Verdict(str, Enum):
    """Whether a backward has the same bits in every run. CLAIMED: its authors say so, and a source gives a reason to doubt it."""

    YES = "yes"
    CLAIMED = "claimed"
    NO = "no"
    UNKNOWN = "unknown"


YES, CLAIMED, NO, UNKNOWN = Verdict


@dataclass(frozen=True)
class Known:
    """What is known of a kernel: with deterministic mode off, under warn_only, and in strict mode.

    An op that does not read the mode is as in strict mode where it is called with deterministic=True, and else as with the mode
    off. source: the address of who says so. since: the first torch for which it holds.
    """

    off: Verdict
    warn_only: Verdict
    strict: Verdict
    source: str
    since: tuple[int, int] = (0, 0)


NOTHING = Known(UNKNOWN, UNKNOWN, UNKNOWN, "")
_PYTORCH, _FLASH_ATTENTION = "https://github.com/pytorch/pytorch", "https://github.com/Dao-AILab/flash-attention"
_OF_2_13 = f"{_PYTORCH}/blob/cf30153c4c131c8164ee7798e5022d810682e2cb/torch"
_NATIVE = f"{_PYTORCH}/blob/00afd8f2c6576adb7dbe25e4763523ae43fef70e/aten/src/ATen/native/transformers/cuda/attention_backward.cu"
_FA2 = f"{_FLASH_ATTENTION}/blob/88c4e5dbf677dd184cf953599414e0be622835e1/flash_attn/flash_attn_interface.py"
_FRONTEND = "https://github.com/NVIDIA/cudnn-frontend/pull/554"
_XFORMERS = "https://github.com/facebookresearch/xformers/blob/89177a9e60b4e522d3a08b0d7fb87daa56d0bae5/xformers/ops/fmha/flash.py"
# By kernel, and by implementation where it is not torch's own: FA3, FA4 and CUDNN, as torch's registry calls them; and packages,
# whose ops do not read the mode: FA2, which is flash_attn, FA3 and FA4, which are its successors, and xformers.
DETERMINISM: dict[tuple[Kernel, str | None], Known] = {
    (Kernel.FLEX, None): Known(YES, YES, YES, f"{_OF_2_13}/_inductor/kernel/flex/flex_attention.py"),
    (Kernel.FLASH, None): Known(NO, NO, YES, _NATIVE),
    (Kernel.EFFICIENT, None): Known(NO, NO, YES, _NATIVE),
    (Kernel.CUDNN, None): Known(NO, NO, NO, f"{_PYTORCH}/pull/182551"),
    (Kernel.FLASH, "FA2"): Known(NO, NO, YES, _FA2),
    # It tells the next in order that a sum is written when what it adds is read. Nobody has shown that bits differ.
    (Kernel.FLASH, "FA3"): Known(NO, CLAIMED, CLAIMED, f"{_FLASH_ATTENTION}/issues/2244"),
    (Kernel.FLASH, "FA4"): Known(NO, YES, YES, f"{_OF_2_13}/nn/attention/_fa4.py"),
    # It takes varlen_attn's op, and that of SDPA on cuDNN, which strict mode does not choose.
    **{(kernel, "CUDNN"): Known(NO, YES, YES, _FRONTEND, since=(2, 13)) for kernel in (Kernel.FLASH, Kernel.CUDNN)},
    # Its ops have no argument for another way than atomics.
    (Kernel.FLASH, "xformers"): Known(NO, NO, NO, _XFORMERS),
}
# The kernels that ops run, whose names here have neither overload nor "_backward".
OPS = {
    "flex_attention_backward": Kernel.FLEX,  # in eager mode "flex_attention" is made of matmuls
    "torch_attn._varlen_attn": Kernel.FLASH,
    "aten._scaled_dot_product_flash_attention": Kernel.FLASH,
    "aten._flash_attention": Kernel.FLASH,
    "aten._scaled_dot_product_efficient_attention": Kernel.EFFICIENT,
    "aten._efficient_attention": Kernel.EFFICIENT,
    "aten._scaled_dot_product_cudnn_attention": Kernel.CUDNN,
    "aten._cudnn_attention": Kernel.CUDNN,
}
OF_CUDNN = "torch_attn._varlen_attn", "aten._scaled_dot_product_cudnn_attention"  # which that implementation takes


@dataclass(frozen=True)
class Stock:
    """What an attention would keep.

    strict: whether the deterministic mode raises an error where an op is not deterministic, or else warns; of an op that does not
    read the mode, whether it is called with deterministic=True. implementation: whose kernel it is, None for torch's own. called:
    whether the op does not read the mode.
    """

    kernel: Kernel
    strict: bool
    implementation: str | None = None
    called: bool = False

    @property
    def verdict(self) -> Verdict:
        """Whether it has the same bits in every run in that mode."""
        known = known_of(self.kernel, self.implementation)
        return known.strict if self.strict else known.warn_only

    @property
    def is_deterministic(self) -> bool:
        """Whether it is known to have the same bits in every run in that mode."""
        return self.verdict == YES

    @property
    def may_stay(self) -> bool:
        """Whether speed may leave an attention to it. A claim is enough where the user set the flag of the op."""
        return self.is_deterministic or (self.called and self.verdict == CLAIMED)


def known_of(kernel: Kernel | None, implementation: str | None) -> Known:
    """What is known of a kernel, under the torch that is installed; `NOTHING` where nobody has looked into it."""
    known = DETERMINISM.get((kernel, implementation), NOTHING) if kernel else NOTHING
    if known.since > (0, 0):
        import torch  # lazily: who names a GPU that is not there needs none

        return known if tuple(map(int, torch.__version__.split(".")[:2])) >= known.since else NOTHING
    return known


def known_of_package(implementation: str | None) -> Known:
    """What is known of an op of a package, by what it implements."""
    return DETERMINISM[Kernel.FLASH, implementation] if implementation else NOTHING


def serves(implementation: str, op: str, named: Mapping[str, Any]) -> bool:
    """Whether an implementation that is active in torch's registry runs in the place of torch's own kernel of an op, called with
    these arguments. One that is not known is taken to."""
    if implementation == "CUDNN":  # `_bwd` of cudnn-frontend's sdpa_provider.py
        falls_back = any(named.get(name) is not None for name in ("attn_bias", "cum_seq_q")) or named.get("dropout_p", 0.0) != 0.0
        return _name(op) in OF_CUDNN and not falls_back
    taken = (Kernel.FLASH,) if implementation in ("FA3", "FA4") else (Kernel.FLASH, Kernel.CUDNN)
    return kernel_of(op) in taken


def kernel_of(op: str) -> Kernel | None:
    """The kernel that an op of torch runs; None for another op."""
    return OPS.get(_name(op))


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
    if not head_dim or d.mask == "varlen" or d.implementation:  # sequences are not counted
        return None
    total, kernel = batch * heads, kernel_of(d.op)
    if kernel == Kernel.FLASH:
        splits = -(-sms // total)
        rows = _rounded(q_len, 128)
        expanded = 2 * total * kv_len * _rounded(head_dim, 8) * HALF_BYTES if kv_heads != heads else 0
        dim = _rounded(head_dim, 32 if head_dim <= 128 else 64)
        return FP32_BYTES * total * rows * (splits * dim + 1) + expanded
    if kernel == Kernel.EFFICIENT:
        return FP32_BYTES * total * (_rounded(q_len, 64) * _rounded(head_dim, 64) + q_len)
    if kernel == Kernel.FLEX:
        return FP32_BYTES * total * q_len
    return None


def is_of_torch(op: str) -> bool:
    """Whether an op, "namespace.name.overload", is torch's own or ours. What has no namespace is torch's as well."""
    return "." not in op or op.partition(".")[0] in TORCH


def stock_is_deterministic(decision: Decision, *, warn_only: bool) -> bool | None:
    """Whether the stock op of a decision gives the same bits in every run under `torch.use_deterministic_algorithms(True)`.

    None where that is not known, or claimed alone (`claim_of`), and where it is up to others: SDPA's math path is what its matmuls
    are.
    """
    return {YES: True, NO: False}.get(_known(decision, warn_only)[0])


def claim_of(decision: Decision, *, warn_only: bool) -> str | None:
    """Where it says why one may doubt that the stock op of a decision is deterministic, which its authors claim; None where they do
    not, and where nobody doubts it."""
    verdict, source = _known(decision, warn_only)
    return source if verdict == CLAIMED else None


def _known(decision: Decision, warn_only: bool) -> tuple[Verdict, str]:
    """The verdict in the mode in force, and its source."""
    d, of_torch = decision, is_of_torch(decision.op)
    known = known_of(kernel_of(d.op), d.implementation) if of_torch else known_of_package(d.implementation)
    # As it is called: FlexAttention adds gradients of captured tensors by atomics, in any mode. Or by what Inductor has timed.
    if d.stock_differs or d.chosen_by_timing:
        return NO, known.source
    if d.device == "cpu" if of_torch else d.stock_differs is False:
        return YES, known.source
    return known.warn_only if of_torch and warn_only else known.strict, known.source


def _name(op: str) -> str:
    name = op.removesuffix(".default")
    return name if name in OPS else name.removesuffix("_backward")


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
