"""What stock's backwards cost where they are deterministic, and the published speeds of FlashAttention 3 and 4.

Nobody has measured any of them beside ours: a percentage is our TFLOPS in the cost file, an estimate, over a published figure of
the stock kernel. A GPU takes the figures of the one whose matrix instructions it has.
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
    """A measured speed of a backward that is deterministic in either mode, of an implementation in torch's registry.

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
DETERMINISTIC = tuple(sorted({each.implementation for each in PUBLISHED}))  # under torch.use_deterministic_algorithms(True)


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
