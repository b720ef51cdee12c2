"""The grid of one attention head: which Q tiles each KV tile may see.

Q tile i holds rows [i * block_m, (i + 1) * block_m), KV tile j columns [j * block_n, (j + 1) * block_n). Every mask
here is a staircase: KV tile j sees the Q tiles lo(j) <= i < hi(j), and lo never decreases with j.
"""

from __future__ import annotations

from dataclasses import dataclass

MASKS = ("full", "causal_top_left", "causal_bottom_right")


@dataclass(frozen=True)
class Geometry:
    """Tiles of one head. Lengths and blocks in rows; ValueError names the parameter that is wrong.

    Three KV tiles, six Q tiles, causal, two Q tiles per KV tile:

    >>> g = Geometry(q_len=6, kv_len=6, block_m=1, block_n=2, mask="causal_top_left")
    >>> [(g.lo(j), g.hi(j)) for j in range(g.n_kv)]
    [(0, 6), (2, 6), (4, 6)]
    >>> [list(g.contributors(i)) for i in range(g.n_q)]
    [[0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    """

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    mask: str

    def __post_init__(self) -> None:
        for name in ("q_len", "kv_len", "block_m", "block_n"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if self.mask not in MASKS:
            raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {self.mask!r}")

    @property
    def n_q(self) -> int:
        """Number of Q tiles."""
        return -(-self.q_len // self.block_m)

    @property
    def n_kv(self) -> int:
        """Number of KV tiles, each of them one chain."""
        return -(-self.kv_len // self.block_n)

    @property
    def ratio(self) -> int:
        """k of the design, the Q tiles that a KV tile covers along the diagonal (at least 1)."""
        return max(1, self.block_n // self.block_m)

    @property
    def offset(self) -> int:
        """Row r sees column c <= r + offset under a causal mask."""
        return self.kv_len - self.q_len if self.mask == "causal_bottom_right" else 0

    @property
    def is_triangle(self) -> bool:
        """Whether lo(j) = ratio * j and every chain has a step: the causal closed forms need both."""
        return (
            self.mask != "full"
            and self.block_n % self.block_m == 0
            and self.offset == 0
            and self.n_q > self.ratio * (self.n_kv - 1)
        )

    def lo(self, j: int) -> int:
        """First Q tile that KV tile j may see; can lie at or past hi(j), the chain is then empty."""
        if self.mask == "full":
            return 0
        return max(0, j * self.block_n - self.offset) // self.block_m

    def hi(self, j: int) -> int:
        """One past the last Q tile that KV tile j may see."""
        return self.n_q

    def steps(self, j: int) -> int:
        """Length of chain j."""
        return max(0, self.hi(j) - self.lo(j))

    def contributors(self, i: int) -> range:
        """KV tiles that add to dq of Q tile i, ascending: always a prefix, because lo never decreases."""
        if self.mask == "full":
            return range(self.n_kv)
        # lo(j) <= i  <=>  j * block_n - offset < (i + 1) * block_m
        count = -(-((i + 1) * self.block_m + self.offset) // self.block_n)
        return range(min(self.n_kv, max(0, count)))
