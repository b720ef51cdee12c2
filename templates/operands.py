"""What a launch of the Gluon kernel takes; importable without Gluon."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """What the op is given, in its order, and the launch of the kernel under its names.

    query, grad_out [B, H, S_q, D], key, value, dk, dv [B, H_kv, S_k, D] in bf16 or fp16; in segments of the queries dk and dv are
    fp32 [segments * B, ..]; neg_lse = -lse*log2(e) and delta fp32, padded to whole Q tiles with -inf and 0; table int32; dq fp32
    [B * H, Q tiles, elements of a Q tile], each tile in accumulator order, not scaled; block_m queries and block_n keys of a tile.
    cooperative: whether the CTAs must be resident together. shared_row: whether the table has one row for all chains; round_robin:
    whether it may be that of a round robin. Under a mask in blocks the table, `steps` and `bits` are those of `Rows` in
    lowering/block_lists.py, and a block has q_tiles x kv_tiles tiles. Where chains are in parts, in at most `bands` and `sets`,
    sums is fp32 [elements], and bands are for masks whose longest chain has `least_steps`. semaphores: where a launch has a slice
    of the KV tiles, and its bits: that of this number; int32, zeros before the first. functions: the source of a module
    (lowering/gluon_functions.py), for captures and sizes that it reads. drop_scale: what a forward with dropout multiplied with
    what it kept; drop_bits: of templates/dropout_bits.py.jinja. share: what elements add to the gradient of a captured tensor,
    contiguous [B, H, S_q, S_k].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    neg_lse: Tensor
    delta: Tensor
    table: Tensor
    steps: Tensor | None
    bits: Tensor | None
    sums: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    captures: Sequence[Tensor]
    sizes: Sequence[int]
    workers: int
    cooperative: bool
    block_m: int
    block_n: int
    causal: bool
    scale: float
    shared_row: bool = False
    round_robin: bool = False
    q_tiles: int = 0
    kv_tiles: int = 0
    bands: int = 1
    sets: int = 1
    least_steps: int = 0
    number: int = 0
    functions: str = ""
    drop_scale: float | None = None
    semaphores: Tensor | None = None
    drop_bits: Tensor | None = None
    share: Tensor | None = None
