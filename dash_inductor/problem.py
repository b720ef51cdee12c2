"""One attention backward, whatever it is called by, and why some are not taken. Imports no torch."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from .config import AUTO, Config
from .decision import Declined, Stock
from .schedule import TiledProblem
from .schedule.packing import MAX_N_KV, MAX_N_Q
from .templates.tiles import DEFAULTS, HALF, HEAD_DIMS, ONE_PASS_HEAD_DIM, AnyTile, Tile, why_head_dims

MAX_BLOCKS = 2**15  # blocks that an entry of a row can name (templates/block_rows.py.jinja)
MOST_BLOCKS = 2**28  # of all masks of an attention: their lists take 9 bytes each
SCALES = 2.0**-126, 2.0**127  # the least and the most of which fp32 has log2(e) times
MOST_SLICES = 64  # of the keys, each with a launch of the Gluon kernel for the bits of its masks
BLOCK_MASK = "block_mask"  # FlexAttention's, whose lists are known at run time only
# Of all masks of a slice, a bit for each pair of a query and a key: 1 GiB. Set by trials.
most_bits: ContextVar[int] = ContextVar("most_bits", default=2**33)
# Of the heads of a launch whose forward dropped something, a bit for each score in whole blocks: 512 MiB.
most_dropout_bits: ContextVar[int] = ContextVar("most_dropout_bits", default=2**32)
DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


@dataclass(frozen=True)
class GluonFunction:
    """A function of the scores for the Gluon kernel, which compiles with it.

    source: of lowering/gluon_functions.py. captures: dtypes of the tensors that it reads. sizes: how many sizes it reads. local:
    bytes of local memory that a thread takes with it. values: dtypes of what elements add to gradients of captured tensors.
    """

    source: str
    captures: tuple[str, ...]
    sizes: int
    local: int
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """query is [batch, heads, q_len, head_dim], key [batch, kv_heads, kv_len, head_dim]; value, out and grad_out have value_dim in
    the place of head_dim.

    mask: full, causal or block_mask, with `block_size` rows and keys to a block, of which there are `masks`: one for each batch
    element and head that has a mask of its own. dtype: bf16, fp16, fp32, or torch's name of another. scale: of the scores, None for
    1 / sqrt(head_dim). value_dim: None for head_dim. stock: what it would keep; None where that is ruled out. is_flex: whether the
    graph has it as FlexAttention's op. function_ops: how many operations functions and dropout do for an element of the scores.
    dropout: what its forward dropped, a Dropout (dash_inductor/dropout); None where it dropped nothing. segments: of the queries;
    dk and dv are those of each, in fp32; 0 where they are not asked for in segments. changes_scores: whether a function makes
    something of the scores. trains_captures: whether gradients of what they capture are wanted. gluon_function: what
    that is for the Gluon kernel, where it may take it. gluon_fails: why that kernel cannot be had, "" if nothing is known of that.
    Lengths, heads, batch and masks may be torch.SymInt; comparisons of them guard.
    """

    mask: str
    batch: Any
    heads: Any
    kv_heads: Any
    q_len: Any
    kv_len: Any
    head_dim: int
    dtype: str
    scale: float | None = None
    block_size: tuple[int, int] | None = None
    masks: Any = 1
    value_dim: int | None = None
    stock: Stock | None = None
    is_flex: bool = False
    function_ops: int = 0
    dropout: Any = None
    segments: int = 0
    changes_scores: bool = False
    trains_captures: bool = False
    gluon_function: GluonFunction | None = None
    gluon_fails: str = ""

    @classmethod
    def of(cls, query: Any, key: Any, value: Any, *, mask: str, scale: float | None = None, **others: Any) -> Problem:
        """The problem of three tensors, real or fake; Declined where they make no attention that is taken."""
        if not query.dtype == key.dtype == value.dtype:
            dtypes = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
            raise Declined(f"dtypes differ: {dtypes}", "cast query, key and value to one dtype")
        if query.shape[3] != key.shape[3]:
            raise Declined(f"head dims differ: query {query.shape[3]}, key {key.shape[3]}", HEAD_DIMS)
        if key.shape[1] != value.shape[1]:
            raise _uneven(query.shape[1], key.shape[1], value.shape[1])
        (batch, heads, q_len, head_dim), (kv_heads, kv_len) = query.shape, key.shape[1:3]
        others["value_dim"] = int(value.shape[3])
        return cls(mask, batch, heads, kv_heads, q_len, kv_len, int(head_dim), dtype_name(query.dtype), scale, **others)

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dim of query and key, and that of value."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on Q K^T before softmax."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return int(self.heads // self.kv_heads)

    @property
    def is_lowered_as_flex(self) -> bool:
        """Whether it reaches the lowering as FlexAttention's op: the pass writes masks in blocks, functions and dropout so."""
        return self.is_flex or self.mask == BLOCK_MASK or self.changes_scores or self.dropout is not None

    @property
    def kv_heads_total(self) -> Any:
        """kv heads of the whole batch."""
        return self.batch * self.kv_heads

    @property
    def is_static(self) -> bool:
        """Whether all sizes are known."""
        return all(isinstance(size, int) for size in (self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len))

    def tiled(self, tile: AnyTile) -> TiledProblem:
        """The problem in tiles, of known sizes."""
        lengths = self.q_len, self.kv_len, self.kv_heads_total, self.group
        return TiledProblem(*lengths, tile.mean_dim, tile.block_m, tile.block_n, self.mask)

    def why_not_taken(self) -> Declined | None:
        """The reason that lies in the attention itself, whatever the device and the settings; None if there is none."""
        if self.dtype not in DTYPES.values():
            return Declined(f"dtype {self.dtype} is not one of {', '.join(DTYPES.values())}", HALF)
        if reason := why_head_dims(*self.head_dims):
            return Declined(reason, HEAD_DIMS)
        if not SCALES[0] <= self.softmax_scale <= SCALES[1]:  # a NaN neither
            # Forwards of torch mask with -inf before they scale, so that a hidden key is seen, or a NaN.
            not_positive = f"scale={self.softmax_scale} is not a positive number in the range of fp32"
            return Declined(not_positive, "multiply the query by it, and pass scale=1.0")
        if any(size == 0 for size in (self.batch, self.heads, self.q_len, self.kv_heads, self.kv_len)):
            return Declined("an empty tensor", "none needed: there is nothing to compute")
        if self.heads % self.kv_heads != 0:
            return _uneven(self.heads, self.kv_heads, self.kv_heads)
        if self.mask == "causal" and self.q_len != self.kv_len:
            as_mask = "give the mask as a boolean tensor made inside the compiled function, or use flex_attention"
            return Declined(f"causal with S_q={self.q_len} and S_k={self.kv_len}", as_mask)
        return None

    def chains_of_work(self, tile: Tile) -> Any:
        """The work of a kv head, in chains as long as its longest one, rounded up.

        Under a full mask all chains are as long. Any other is taken to be causal, as most are: its chains have half that length on
        average. What the mask of a FlexAttention or of packed sequences shows is known at run time only.
        """
        kv_tiles = (self.kv_len + tile.block_n - 1) // tile.block_n
        return kv_tiles if self.mask == "full" else (kv_tiles + 2) // 2

    def why_no_blocks(self, tile: AnyTile) -> Declined | None:
        """Why tiles do not fit the blocks of the mask; None if they do."""
        assert self.block_size
        (rows, keys), (most_rows, most_keys) = self.block_size, tile.largest
        if rows % most_rows or keys % most_keys:
            whole = "make the BlockMask with BLOCK_SIZE=(128, 128)"
            return Declined(f"BLOCK_SIZE ({rows}, {keys}) is no multiple of the tile's {most_rows} x {most_keys}", whole)
        most = MAX_N_KV * tile.block_n if isinstance(tile, Tile) else MAX_BLOCKS * keys
        if self.q_len > MAX_BLOCKS * rows or self.kv_len > most:
            return self._too_long("blocks or tiles")
        blocks = self.masks * ((self.q_len + rows - 1) // rows) * ((self.kv_len + keys - 1) // keys)
        if blocks > MOST_BLOCKS:
            of_all = f"{self.masks} masks of batch elements and heads have {blocks} blocks of {rows} x {keys} in all"
            larger = "make the BlockMask with a larger BLOCK_SIZE"
            remedy = f"use a mask that does not depend on the head or the batch element, or {larger}"
            return Declined(f"{of_all}, more than {MOST_BLOCKS}", remedy)
        return None

    @property
    def pairs(self) -> Any:
        """How many pairs of a query and a key whole blocks have: bits of a mask, or of the dropout of a head."""
        return ((self.q_len + 127) // 128) * ((self.kv_len + 127) // 128) * 128**2

    @property
    def scores(self) -> Any:
        """Those of all query heads, in whole blocks."""
        return self.batch * self.heads * self.pairs

    @property
    def slices(self) -> int:
        """Into how many the Gluon kernel cuts the keys, so that the bits of masks have room for one: a power of two."""
        slices, bits, most = 1, self.masks * self.pairs, most_bits.get()
        while self.mask == BLOCK_MASK and bits > slices * most:
            slices *= 2
        return slices

    @property
    def turn(self) -> Problem:
        """What one launch of the Gluon kernel has: as many batch elements as the bits of dropout have room for, or kv heads of one.

        All launches have as many. The problem itself where one launch has all, or where sizes are symbols.
        """
        if self.dropout is None or not self.is_static:
            return self
        most = most_dropout_bits.get() // (self.group * self.pairs)
        batches, kv_heads = ([n for n in range(1, size + 1) if size % n == 0] for size in (self.batch, self.kv_heads))
        heads = max(n for n in [*kv_heads, *(n * self.kv_heads for n in batches)] if n <= max(1, most))
        if heads == self.kv_heads_total:
            return self
        of_one = min(heads, self.kv_heads)
        return replace(self, batch=heads // of_one, heads=of_one * self.group, kv_heads=of_one)

    def why_no_gluon(self, settings: Config) -> Declined | None:
        """Why the Gluon kernel does not take the attention, on a GPU and of a head dim for which there is one; None if it does."""
        if self.gluon_fails:
            return Declined(f"the Gluon kernel {self.gluon_fails}", DEFAULTS)
        drops, most, dropped = self.dropout is not None, MOST_SLICES * most_bits.get(), most_dropout_bits.get()
        is_cut, of = self.turn is not self, "of a kv head" if self.is_static else "with sizes that are symbols"
        # Under `batch` the batch size may not decide, in segments the number of ranks: that of the segments which one has.
        by_batch = settings.guarantee == "batch"
        pairs = (1 if by_batch else self.masks) * self.pairs // max(1, self.segments)
        trained = "gradient of a captured tensor"
        is_wide = max(self.head_dims) > ONE_PASS_HEAD_DIM
        reasons = {
            f"{trained} unless kernel='gluon' asks for it: no GPU has timed both": self.trains_captures and settings.kernel == AUTO,
            # What a step's elements add to it takes 8 KiB in 16 bits. There 230,588 of 232,448 bytes are taken.
            f"{trained} at head dims above {ONE_PASS_HEAD_DIM}, where no shared memory is left": self.trains_captures and is_wide,
            # TMA stores it in rows of whole 16 bytes.
            f"{trained} with S_k={self.kv_len}, which is no multiple of 8": self.trains_captures and self.kv_len % 8 != 0,
            "dropout beside a function of the scores": drops and self.changes_scores,
            "dropout at guarantee='batch': its bits take memory by the batch": drops and by_batch,
            f"dropout of more than {dropped} scores {of}": drops and self.turn.scores > dropped,
            f"dropout of more than {dropped} scores under masks of heads or batch elements": is_cut and self.masks != 1,
            # There dK and dV of a batch element are one row for each segment, which no view has.
            f"dropout of more than {dropped} scores in segments": is_cut and self.segments > 0,
            f"masks of more than {most} pairs of a query and a key": self.mask == BLOCK_MASK and pairs > most,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        return Declined(f"the Gluon kernel takes no {reason}", DEFAULTS) if reason else None

    def why_no_table(self, tile: Tile) -> Declined | None:
        """Why no table of one pass holds the tiles; None if one does."""
        if self.q_len > MAX_N_Q * tile.block_m or self.kv_len > MAX_N_KV * tile.block_n:
            return self._too_long("tiles")
        return None

    def _too_long(self, parts: str) -> Declined:
        lengths = f"lengths S_q={self.q_len}, S_k={self.kv_len}"
        return Declined(f"{lengths} have too many {parts} for a table entry", "use shorter sequences")


def dtype_name(dtype: object) -> str:
    """bf16, fp16 or fp32 for a torch.dtype; of another one torch's name."""
    return DTYPES.get(str(dtype), str(dtype))


def _uneven(heads: Any, key_heads: Any, value_heads: Any) -> Declined:
    return Declined(
        f"kv heads ({key_heads}, {value_heads}) do not divide the query heads ({heads})",
        "use as many kv heads as query heads, or a number that divides it, the same of key and value",
    )
