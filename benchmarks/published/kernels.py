"""The published kernels whose main loops are replayed: where each is found, its tile, and how an SM runs it."""

from __future__ import annotations

from dataclasses import dataclass

TORCH, JAX, FA4, TRITON = "torch 2.13.0", "flash_attn3_jax 0.2.3", "flash-attn-4 4.0.0b36", "triton 3.7.1"
MASKS = ("full", "causal")


@dataclass(frozen=True)
class Kernel:
    """One kernel for sm_90.

    Attributes:
        package: what it is taken from. `extract` finds it in the wheel of torch for CUDA or of flash_attn3_jax; flash-attn-4's and
            Triton's it compiles.
        symbol: matches its mangled name, in a wheel; "" where it is compiled.
        rows, columns: of the tile of scores of a step.
        ctas: that share an SM.
        longest_first: whether its CTAs are dealt out so; else as they stand, head by head.
        tma_bytes: that TMA moves to and from shared memory in a step.
        marked: why its figures are in no error; "" for none.
    """

    name: str
    package: str
    backward: bool
    head_dim: int
    mask: str
    rows: int
    columns: int
    symbol: str = ""
    warps: int = 8
    ctas: int = 1
    longest_first: bool = False
    tma_bytes: int = 0
    marked: str = ""

    @property
    def label(self) -> str:
        """By which files and tables name it."""
        return f"{self.name} {'backward' if self.backward else 'forward'} d{self.head_dim} {self.mask}"

    @property
    def name_and_pass(self) -> tuple[str, bool, int]:
        """Of what is one kernel, whatever its mask."""
        return self.name, self.backward, self.head_dim

    @property
    def file(self) -> str:
        """Of its SASS."""
        return self.label.replace(" ", "_") + ".sass"


def _flags(*values: bool | int) -> str:
    return "".join(f"Lb{int(value)}E" for value in values)


def _two_backward(head_dim: int, rows: int, layout: str, mask: str) -> Kernel:
    """flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<..., dropout, causal, local, alibi, even lengths, even head dim, soft-cap>."""
    traits = "".join(f"Li{value}E" for value in (head_dim, rows, 128, *layout.split()))
    flags = _flags(0, mask == "causal", 0, 0, 1, 1, 0)
    symbol = rf"seqk_parallel_kernelI23Flash_bwd_kernel_traitsI{traits}{_flags(0, 0)}N7cutlass6half_t\w+EE{flags}EEv"
    return Kernel("FlashAttention-2", TORCH, True, head_dim, mask, rows, 128, symbol)


def _two_forward(head_dim: int, columns: int, mask: str) -> Kernel:
    """flash_fwd_kernel<..., dropout, causal, local, alibi, even lengths, even head dim, soft-cap, return softmax>."""
    traits = "".join(f"Li{value}E" for value in (head_dim, 128, columns, 4))
    flags = _flags(0, mask == "causal", 0, 0, 1, 1, 0, 0)
    symbol = rf"flash_fwd_kernelI23Flash_fwd_kernel_traitsI{traits}{_flags(0, 0)}N7cutlass6half_t\w+EE{flags}EEv"
    return Kernel("FlashAttention-2", TORCH, False, head_dim, mask, 128, columns, symbol, warps=4, ctas=2)


def _three_backward(rows: int, mask: str) -> Kernel:
    """FlashAttnBwdSm90<CollectiveMainloopBwdSm90<..., causal, local, soft-cap, varlen, deterministic, ...>>, without GQA."""
    flags = _flags(mask == "causal", 0, 0, 0, 0)
    symbol = rf"^_ZN7cutlass13device_kernelI\w+MainloopBwdSm90I\w+ILi{rows}EEE\w+4arch4Sm90E{flags}\w+CollectiveEpilogueBwdI"
    return Kernel(
        "FlashAttention-3", JAX, True, 128, mask, rows, 128, symbol, longest_first=True, tma_bytes=_tma_backward(rows, 128)
    )


def _three_forward(columns: int, mask: str) -> Kernel:
    """CollectiveMainloopFwdSm90<stages, cluster of one, ..., causal, local, soft-cap, varlen, paged, append, qv, ...>."""
    tile = r"NS\w_ILi176EEE\w+" if columns == 176 else r"\w+"
    flags = _flags(mask == "causal", 0, 0, 0, 0, 0, 0)
    cluster = r"ILi2EN4cute5tupleIJNS\w_1CILi1EEE"
    symbol = rf"^_ZN7cutlass13device_kernelI\w+MainloopFwdSm90{cluster}\w+NS\w_ILi128EEE{tile}4arch4Sm90E{flags}"
    return Kernel(
        "FlashAttention-3", JAX, False, 128, mask, 128, columns, symbol, longest_first=True, tma_bytes=2 * 2 * columns * 128
    )


def _four_backward(mask: str) -> Kernel:
    marked = "published of FlashAttention-3, whose kernel of head dim 64 is in no wheel"
    return Kernel(
        "FlashAttention-4", FA4, True, 64, mask, 128, 128, longest_first=True, tma_bytes=_tma_backward(128, 64), marked=marked
    )


def _tma_backward(rows: int, head_dim: int) -> int:
    """Q and dO in 2 bytes come, dQ in 4 bytes goes."""
    return 2 * 2 * rows * head_dim + 4 * rows * head_dim


KERNELS = {
    kernel.label: kernel
    for kernel in (
        *(_two_backward(64, 128, "8 4 4 4", mask) for mask in MASKS),
        *(_two_backward(128, 64, "8 2 4 2", mask) for mask in MASKS),
        *(_two_forward(64, 128, mask) for mask in MASKS),
        *(_two_forward(128, 64, mask) for mask in MASKS),
        _three_backward(80, "full"),
        _three_backward(64, "causal"),
        _three_forward(176, "full"),
        _three_forward(128, "causal"),
        *(_four_backward(mask) for mask in MASKS),
        Kernel("Triton tutorial", TRITON, False, 128, "full", 128, 128),
    )
}
