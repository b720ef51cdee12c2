"""The attentions of `beside`: sizes, mask, and what a GPU has to do for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from dash_inductor.codegen.mods import WINDOW

from .kernels import KERNELS
from .model import Figure

if TYPE_CHECKING:
    import numpy as np

BLOCK = 128  # rows of Q and keys of a block of the mask
DOCUMENT = 2048  # positions of each document
TITLES = {"window": f"window of {WINDOW}", "documents": f"documents of {DOCUMENT}"}  # the masks that have no kernel of their own
NONE, CUT, WHOLE = range(3)  # what is visible of a block


@cache
def blocks_of(mask: str, length: int) -> np.ndarray:
    """NONE, CUT or WHOLE of each block of Q (rows) and of keys (columns).

    >>> blocks_of("causal", 512).tolist()
    [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    >>> blocks_of("window", 1280)[-1].tolist()  # a row sees 1,024 keys, its own among them
    [0, 1, 2, 2, 2, 2, 2, 2, 2, 1]
    """
    import numpy as np

    i, j = np.ogrid[: length // BLOCK, : length // BLOCK]
    if mask == "full":
        return np.full(np.broadcast_shapes(i.shape, j.shape), WHOLE)
    seen = np.where(i > j, WHOLE, np.where(i == j, CUT, NONE))
    if mask == "window":
        back = i - j - WINDOW // BLOCK
        seen = np.where(back > 0, NONE, np.where(back == 0, CUT, seen))
    if mask == "documents":
        seen = np.where(i // (DOCUMENT // BLOCK) == j // (DOCUMENT // BLOCK), seen, NONE)
    return seen


@dataclass(frozen=True)
class Attention:
    """A self-attention in bf16; `mask` is full, causal, window or documents, and the last two are causal as well."""

    batch: int
    heads: int
    length: int
    head_dim: int
    mask: str
    group: int = 1  # query heads of a kv head

    @property
    def kv_heads(self) -> int:
        """Of a batch element."""
        return self.heads // self.group

    @property
    def title(self) -> str:
        """What tables call the mask and the heads."""
        return TITLES.get(self.mask, self.mask) + (f", {self.group} heads a kv head" if self.group > 1 else "")

    @property
    def blocks(self) -> np.ndarray:
        """NONE, CUT or WHOLE of each block of Q (rows) and of keys (columns)."""
        return blocks_of(self.mask, self.length)

    @property
    def flop(self) -> float:
        """Of the visible elements, as all of the sources count them: half of a cut block on the diagonal is visible."""
        whole, cut = ((self.blocks == kind).sum() for kind in (WHOLE, CUT))
        return float(10 * self.batch * self.heads * self.head_dim * BLOCK**2 * (whole + cut / 2))

    def figure(self, name: str, *, deterministic: bool = False) -> Figure:
        """Of a published kernel that has this mask, with as many kv heads as query heads."""
        kernel = KERNELS[f"{name} backward d{self.head_dim} {self.mask}"]
        return Figure(kernel, self.batch, self.heads, self.length, 1.0, "", deterministic)
