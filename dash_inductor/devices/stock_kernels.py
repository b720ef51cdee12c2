"""What stock's backwards cost where they are deterministic, and the published speeds of FlashAttention 3 and 4.

Few have been measured beside ours: a percentage is our TFLOPS in the cost file, an estimate, over a published figure of the stock
kernel, unless its comment has another source. A GPU takes the figures of the one whose matrix instructions it has.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..decision import Kernel


@dataclass(frozen=True)
class StockCost:
    """Times in percent of what one pass takes for the same elements of the scores.

    shared: where all SMs are kept busy as the kernel can. chain: of one CTA, which takes a KV tile of one query head at least.
    """

    shared: int
    chain: int


# By kernel, whether the GPU has the asynchronous matrix instructions of an H100, which ours takes, and padded head dim up to.
COSTS = {
    # A CTA takes every so many-th KV tile of a query head; there are one to two for each SM (flash_bwd_launch_template.h).
    # shared, H100: at d = 128 measured 166 TFLOPS (flash-attention PR 1893); at d = 64 predicted (docs/alternatives.md).
    # chain: 322 and 291 TFLOPS, of the kernel that is not deterministic (FlashAttention-3's paper).
    (Kernel.FLASH, True, 64): StockCost(shared=229, chain=129),
    (Kernel.FLASH, True, 128): StockCost(shared=298, chain=154),
    # A100: 63 % of 312 TFLOPS (FlashAttention-2's paper, not deterministic), and the H100's ratios beside it: proxies.
    (Kernel.FLASH, False, 64): StockCost(shared=96, chain=62),
    (Kernel.FLASH, False, 128): StockCost(shared=137, chain=71),
    # A CTA takes a whole query head: num_splits_key is 1 (attention_backward.cu). A100, d = 64: 4.085 ms with split keys, 23.958 ms
    # with 25 CTAs of whole heads (pytorch PR 101847, without the GPU's name). At d = 128 and of an SM of an H100 as much: proxies.
    (Kernel.EFFICIENT, True, 64): StockCost(shared=467, chain=635),
    (Kernel.EFFICIENT, True, 128): StockCost(shared=616, chain=838),
    (Kernel.EFFICIENT, False, 64): StockCost(shared=167, chain=227),
    (Kernel.EFFICIENT, False, 128): StockCost(shared=212, chain=287),
}


def stock_cost(kernel: Kernel, arch: int | str, head_dim: int) -> StockCost:
    """The cost of flash or memory-efficient attention in strict mode, for a padded head dim.

    >>> stock_cost(Kernel.FLASH, 90, 128)
    StockCost(shared=298, chain=154)
    """
    return COSTS[kernel, arch in (90, 100, 103), 128 if head_dim > 64 else 64]


@dataclass(frozen=True)
class Published:
    """A measured speed of the backward of an implementation in torch's registry, in the way that is to be deterministic.

    arch: 90 for sm_90. head_dim: of query, key and value. length: of a sequence. batch_heads: as published, or "". tflops: in
    bf16, 2.5 times the matmuls of the forward. read: when the source was.
    """

    implementation: str
    arch: int
    gpu: str
    head_dim: int
    mask: str
    length: int
    batch_heads: str
    tflops: float
    source: str
    read: str
    versions: str

    def __str__(self) -> str:
        """In one line."""
        sizes = f"S={self.length} {self.batch_heads}".rstrip()
        shape = f"{self.gpu}, head dim {self.head_dim}, {self.mask}, {sizes}"
        return f"{self.tflops:.0f} TFLOPS measured ({shape}; {self.versions}; {self.source}, read on {self.read})"


_READ = "2026-11-23"
_PR = "https://github.com/Dao-AILab/flash-attention/pull/"
PUBLISHED = (
    Published("FA3", 90, "H100", 128, "causal", 8192, "B=2 H=16", 474.0, f"{_PR}1893", _READ, "FA3 with this change"),
    Published("FA3", 90, "Hopper", 64, "full", 4096, "", 394.4, f"{_PR}2207", _READ, "FA3 before this change"),
    Published("FA3", 90, "Hopper", 64, "full", 8192, "", 450.0, f"{_PR}2207", _READ, "FA3 before this change"),
    Published("FA3", 90, "Hopper", 64, "full", 16384, "", 507.0, f"{_PR}2207", _READ, "FA3 before this change"),
    Published("FA4", 100, "B200", 128, "full", 8192, "B=4 H=16", 1166.7, f"{_PR}2280", _READ, "FA4 with this change"),
    Published("FA4", 100, "B200", 128, "causal", 8192, "B=4 H=16", 1097.2, f"{_PR}2280", _READ, "FA4 with this change"),
)
# FlashAttention 3's time in percent of what our Triton kernel takes, by architecture and head dim: what that did on an H200, whose
# processor is the H100's (docs/performance.md: at d = 128, causal, 364 TFLOPS; at d = 64, full, 370, of the main kernel), over the
# figure above for the same mask and 8,192 positions. Other masks, and functions of scores: a proxy, which nobody has measured.
FA3_PERCENT: dict[tuple[int | str, int], int] = {(90, 64): 82, (90, 128): 77}


def percent_as_called(implementation: str | None, arch: int | str, head_dims: tuple[int, int]) -> int | None:
    """The time of the op of a package, called with deterministic=True, in percent of what our Triton kernel takes in one pass; None
    where nothing is known of it.

    >>> percent_as_called("FA3", 90, (128, 128)), percent_as_called("FA2", 90, (128, 128)), percent_as_called("FA3", 90, (128, 64))
    (77, 298, None)
    """
    head_dim, value_dim = head_dims
    if implementation == "FA3" and head_dim == value_dim:
        return FA3_PERCENT.get((arch, head_dim))
    return stock_cost(Kernel.FLASH, arch, head_dim).shared if implementation == "FA2" and max(head_dims) <= 128 else None


def published(
    implementation: str, arch: int | str, head_dims: tuple[int, int], mask: str, length: int | None = None
) -> Published | None:
    """The lowest figure of such an attention, of any length or of one; None where nobody has published one.

    >>> published("FA4", 100, (128, 128), "causal").tflops
    1097.2
    """
    asked = implementation, arch, head_dims, mask
    found = [each for each in PUBLISHED if (each.implementation, each.arch, (each.head_dim, each.head_dim), each.mask) == asked]
    found = [each for each in found if length in (None, each.length)]
    return min(found, key=lambda each: each.tflops, default=None)
