"""Why an attention keeps its stock kernel because of its sizes: the pass and `choose` say the same. Imports no torch."""

from __future__ import annotations

from typing import Any

from .schedule.table import MAX_N_KV, MAX_N_Q
from .templates.tiles import Tile


def sizes_decline(
    tile: Tile | None, *, is_causal: bool, heads: Any, key_heads: Any, value_heads: Any, q_len: Any, kv_len: Any
) -> str | None:
    """The reason, or None. Sizes may be symbolic, and comparisons guard then; `tile` is that of one pass, if it may be taken."""
    if key_heads != value_heads or heads % key_heads != 0:
        return f"kv heads ({key_heads}, {value_heads}) do not divide the query heads ({heads})"
    if is_causal and q_len != kv_len:
        return f"causal with S_q={q_len} and S_k={kv_len}"
    if tile and (q_len > MAX_N_Q * tile.block_m or kv_len > MAX_N_KV * tile.block_n):
        return f"lengths S_q={q_len}, S_k={kv_len} have too many tiles for a table entry"
    return None
