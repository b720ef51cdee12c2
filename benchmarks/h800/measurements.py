"""The measured rows, and the cells (all that decides a time) that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd

SCHEDULES = ("ascending", "descending", "descending_persistent", "shift_persistent", "shift")
HEAD_DIMS = (64, 128)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)  # of the predictions; the file has three of them
TOKENS = 16384
HIDDEN = 2048
FILE = Path(__file__).with_name("h800_fa3_backward.csv")


@dataclass(frozen=True)
class Cell:
    """One backward: 16,384 tokens in sequences of `seqlen`, 2,048 / head_dim heads each."""

    schedule: str
    head_dim: int
    causal: bool
    seqlen: int

    @property
    def heads(self) -> int:
        """Heads of the whole batch."""
        return HIDDEN // self.head_dim * (TOKENS // self.seqlen)

    @property
    def flop(self) -> int:
        """FLOP of the five matmuls; of a causal mask half, as the file counts them."""
        return 10 * TOKENS * self.seqlen * HIDDEN // (2 if self.causal else 1)


def load() -> pd.DataFrame:
    """The file: schedule, head_dim, causal, seqlen, `ms` of one backward and tflops; and in the column `cell` the row's Cell."""
    table = pd.read_csv(FILE)
    keys = table[["schedule", "head_dim", "causal", "seqlen"]].itertuples(index=False)
    table["cell"] = pd.Series([Cell(*key) for key in keys], dtype=object)
    return table


def cells(lengths: tuple[int, ...] = LENGTHS) -> list[Cell]:
    """Every schedule, head dim and mask at these lengths."""
    return [Cell(*key) for key in product(SCHEDULES, HEAD_DIMS, (False, True), lengths)]
