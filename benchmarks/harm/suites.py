"""The suites, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """`cases` names a function of this folder, whose imports take seconds. `emulated`: also as a GPU would run it, by emulation.
    `caches`: torch's are on, and every case is compiled twice."""

    cases: str
    text: str
    emulated: bool = False
    caches: bool = False


SUITES: Mapping[str, Suite] = {
    "SDPA": Suite("opinfo:sdpa", "each sample of `scaled_dot_product_attention` in torch's OpInfo database, in each dtype", True),
    "neighbours": Suite("opinfo:neighbours", "ops around attention: a case has an op's samples of OpInfo in one dtype"),
    "patterns": Suite(
        "patterns:patterns", "attention by hand: the functions of Inductor's `fuse_attention`, with its own examples", True
    ),
    "FlexAttention": Suite("flex:flex", "score_mods, masks, heads, lengths, dtypes, each forward alone and trained", True),
    "caches": Suite(
        "steps:steps", "parts of a model, compiled twice with torch's caches on; hits and misses are compared", caches=True
    ),
}
