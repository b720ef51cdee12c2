"""What the CTAs of one pass do, and in which order: by a table of the schedule, or by the lists of a mask in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy
from torch._inductor.ir import TensorBox
from torch._inductor.utils import sympy_product

from .block_lists import Rows


@dataclass(frozen=True)
class Parts:
    """Chains that are cut, where sizes at run time say so; `bands`, `sets` and `units` as in `RunTimeParts`.

    chains: those that may be cut. sums: fp32 [elements], dK and dV of each of them. least_steps: of the longest chain of a mask
    whose chains are in bands.
    """

    bands: sympy.Expr
    sets: sympy.Expr
    units: sympy.Expr
    chains: sympy.Expr
    sums: TensorBox
    least_steps: int

    @property
    def ints(self) -> sympy.Expr:
        """Ints of memory: sums, and a semaphore for each chain."""
        return self.chains + sympy_product(self.sums.get_size())


@dataclass(frozen=True)
class Walk:
    """What both kernels of one pass are launched with: `from_table` (table.py) or `from_lists` (listed.py) makes it.

    Attributes:
        tensors: int32, what says which tiles a CTA takes: the table, or rows and steps of `blocks`.
        workers: CTAs that are launched.
        ints: ints of memory that it takes in all.
        record: what a `Decision` says of it.
        own_ints: ints that CTAs write: rows of a round robin, or semaphores of chains in parts.
        shared_row: whether the table has one row for all chains.
        round_robin: whether the table may be that of a round robin, whose rows CTAs write themselves.
        is_two_pass: 1 for sizes that take two passes instead, else 0; then `workers` is 0, and the table means nothing.
        blocks: the lists of a mask in blocks; None for a table.
        parts: how chains are cut; None where they are whole.
    """

    tensors: Sequence[TensorBox]
    workers: sympy.Expr | int
    ints: sympy.Expr | int
    record: dict[str, object] = field(default_factory=dict)
    own_ints: sympy.Expr | int = 0
    shared_row: bool = False
    round_robin: bool = False
    is_two_pass: sympy.Expr | int = 0
    blocks: Rows | None = None
    parts: Parts | None = None
