"""What stock's backwards cost where they are deterministic: FlexAttention's, torch's own in strict mode, FlashAttention's.

Figures of a GPU serve those that share its architecture. A percentage is the time of a stock kernel over that of our Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..decision import Kernel, Stock


@dataclass(frozen=True)
class Speed:
    """A speed, in TFLOPS of a main kernel, counted as our cost files count theirs, and how it is known."""

    tflops: float
    known: str

    def __str__(self) -> str:
        return f"{self.tflops:.0f} TFLOPS, {self.known}"


# FlexAttention's backward on sm_90, by padded head dim up to, and whether there is a mask. At 128: whole backwards on an H200
# (benchmarks/results/h200/triton/attention.csv) less 131 us for a copy of grad_out and delta, tiles on the diagonal counted whole.
# At 64 full: that at 128 by the ratio of both loops' replayed cycles (`benchmarks/machine_code/replay`), 5,018 and 3,336 a step of
# 64 x 128; masked: between 296, as 128's masked to full, and 340, by whole backwards of 2,048 positions beside ours in that file.
# At 32: 64's, by the ratio of our own (h200.toml).
_REPLAYED = "estimated from an H200's at head dim 128"
FLEX = {
    (32, False): Speed(131, _REPLAYED),
    (32, True): Speed(124, _REPLAYED),
    (64, False): Speed(335, _REPLAYED),
    (64, True): Speed(318, _REPLAYED),
    (128, False): Speed(445, "measured on an H200"),
    (128, True): Speed(393, "measured on an H200"),
}


def speed_of_flex(arch: int | str, head_dim: int, mask: str) -> Speed | None:
    """The speed of FlexAttention's backward without functions, for a padded head dim; None where there is no figure.

    >>> speed_of_flex(90, 128, "causal").tflops
    393
    """
    if arch != 90 or head_dim > 128:
        return None
    return FLEX[next(up_to for up_to in (32, 64, 128) if head_dim <= up_to), mask != "full"]


@dataclass(frozen=True)
class StockCost:
    """Times in percent of what one pass takes for the same elements of the scores.

    shared: where all SMs are kept busy as the kernel can. chain: of one CTA, which takes a KV tile of one query head at least.
    """

    shared: int
    chain: int


# What SDPA without a mask tensor takes with deterministic mode off, by padded head dim up to, and whether it is causal. On sm_90
# that is cuDNN: main kernels on an H200, 8,192 positions (benchmarks/results/h200/kernel_times.csv), tiles on the diagonal counted
# whole.
_CUDNN = "cuDNN's, measured on an H200"
NOT_DETERMINISTIC = {
    90: {
        (64, False): Speed(487, _CUDNN),
        (64, True): Speed(451, _CUDNN),
        (128, False): Speed(610, _CUDNN),
        (128, True): Speed(573, _CUDNN),
    },
    80: dict.fromkeys([(128, False), (128, True)], Speed(197, "FlashAttention 2's paper: 63 % of an A100's peak")),
}
ASYNCHRONOUS = 90, 100, 103  # architectures with such matrix instructions as an H100's

# By kernel, whether the GPU is ASYNCHRONOUS, and padded head dim up to.
COSTS = {
    # A CTA takes every so many-th KV tile of a query head; there are one to two for each SM (flash_bwd_launch_template.h).
    # shared: whole backwards on an H200, causal (benchmarks/results/h200/triton/attention.csv): 1.572 ms beside 1.345 of ours at
    # d = 64 and 2,048 positions, a copy of grad_out taken off, and 182 TFLOPS beside our main kernel's 372 at d = 128 and 8,192.
    # chain: 370 and 343 TFLOPS, of the kernel that is not deterministic (FlashAttention-3's paper), beside our 389 and 406.
    (Kernel.FLASH, True, 64): StockCost(shared=117, chain=105),
    (Kernel.FLASH, True, 128): StockCost(shared=205, chain=118),
    # A100: 63 % of 312 TFLOPS (FlashAttention-2's paper, not deterministic), and the H100's ratios beside it: proxies.
    (Kernel.FLASH, False, 64): StockCost(shared=96, chain=62),
    (Kernel.FLASH, False, 128): StockCost(shared=137, chain=71),
    # A CTA takes a whole query head: num_splits_key is 1 (attention_backward.cu). A100, d = 64: 4.085 ms with split keys, 23.958 ms
    # with 25 CTAs of whole heads (pytorch PR 101847, without the GPU's name). At d = 128 and of an SM of an H100 as much: proxies.
    (Kernel.EFFICIENT, True, 64): StockCost(shared=380, chain=517),
    (Kernel.EFFICIENT, True, 128): StockCost(shared=473, chain=643),
    (Kernel.EFFICIENT, False, 64): StockCost(shared=167, chain=227),
    (Kernel.EFFICIENT, False, 128): StockCost(shared=212, chain=287),
}


def stock_cost(kernel: Kernel, arch: int | str, head_dim: int) -> StockCost:
    """The cost of flash or memory-efficient attention in strict mode, for a padded head dim.

    >>> stock_cost(Kernel.FLASH, 90, 128)
    StockCost(shared=205, chain=118)
    """
    return COSTS[kernel, arch in ASYNCHRONOUS, 128 if head_dim > 64 else 64]


def not_deterministic(stock: Stock, arch: int | str, head_dims: tuple[int, int], mask: str) -> Speed | None:
    """The speed of what torch takes for flash attention with deterministic mode off; None where there is no figure."""
    if stock.kernel not in (Kernel.FLASH, Kernel.CUDNN) or stock.implementation or not isinstance(arch, int):
        return None
    figures = NOT_DETERMINISTIC.get(arch, {})
    return next((speed for (most, masked), speed in figures.items() if max(head_dims) <= most and masked == (mask != "full")), None)


@dataclass(frozen=True)
class Published:
    """A measured speed of the deterministic backward of FlashAttention 3 or 4, by our own measurement or by others'.

    arch: 90 for sm_90. head_dim: of query, key and value. length: of a sequence. sizes: batch and heads, or "". tflops: in bf16,
    2.5 times the matmuls of the forward; of our own measurement of the main kernel, tiles that the mask cuts counted whole.
    """

    implementation: str
    arch: int
    gpu: str
    head_dim: int
    mask: str
    length: int
    sizes: str
    tflops: float
    source: str
    versions: str

    @property
    def known(self) -> str:
        """How, in one line."""
        sizes = f"S={self.length} {self.sizes}".rstrip()
        return f"measured ({self.gpu}, head dim {self.head_dim}, {self.mask}, {sizes}; {self.versions}; {self.source})"

    def __str__(self) -> str:
        return f"{self.tflops:.0f} TFLOPS {self.known}"


_PR = "https://github.com/Dao-AILab/flash-attention/pull/"
_H200 = "benchmarks/results/h200/kernel_times.csv", "flash-attn-4 4.0.0b36"
PUBLISHED = (
    Published("FA3", 90, "H100", 128, "causal", 8192, "B=2 H=16", 474.0, f"{_PR}1893", "FA3 with this change"),
    Published("FA3", 90, "Hopper", 64, "full", 8192, "", 450.0, f"{_PR}2207", "FA3 before this change"),
    Published("FA4", 90, "H200", 64, "full", 8192, "B=2 H=32", 599.2, *_H200),
    Published("FA4", 90, "H200", 64, "causal", 8192, "B=2 H=32", 579.3, *_H200),
    Published("FA4", 90, "H200", 128, "full", 8192, "B=2 H=16", 651.7, *_H200),
    Published("FA4", 90, "H200", 128, "causal", 8192, "B=2 H=16", 602.8, *_H200),
    Published("FA4", 100, "B200", 128, "full", 8192, "B=4 H=16", 1166.7, f"{_PR}2280", "FA4 with this change"),
    Published("FA4", 100, "B200", 128, "causal", 8192, "B=4 H=16", 1097.2, f"{_PR}2280", "FA4 with this change"),
)


def published(
    implementation: str | None, arch: int | str, head_dims: tuple[int, int], mask: str, any_mask: bool = False
) -> Published | None:
    """The figure of such an attention; if `any_mask` and there is none, the lowest of other masks, a proxy. None without either.

    >>> published("FA4", 100, (128, 128), "causal").tflops
    1097.2
    """
    asked = implementation, arch, head_dims
    found = [each for each in PUBLISHED if (each.implementation, each.arch, (each.head_dim, each.head_dim)) == asked]
    found.sort(key=lambda each: (each.mask != mask, each.tflops))
    return found[0] if found and (any_mask or found[0].mask == mask) else None
