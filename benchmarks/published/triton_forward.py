"""A forward kernel of attention in the form of Triton's tutorial 06, compiled for an H100 that is not there.

It is the form whose speed others published: block pointers, an online softmax in base 2, no mask, fp16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

STAGES = 3
HALF, FLOAT = "*fp16", "*fp32"


@triton.jit
def forward(Q, K, V, OUT, LSE, LENGTH, SCALE_LOG2, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Tensors are [heads, LENGTH, D]; a program has ROWS queries of a head. SCALE_LOG2 is the softmax scale in base 2.
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    start = head.to(tl.int64) * LENGTH * D
    keys = tl.make_block_ptr(K + start, (D, LENGTH), (1, D), (0, 0), (D, COLUMNS), (0, 1))
    values = tl.make_block_ptr(V + start, (LENGTH, D), (D, 1), (0, 0), (COLUMNS, D), (1, 0))
    q = tl.load(tl.make_block_ptr(Q + start, (LENGTH, D), (D, 1), (first, 0), (ROWS, D), (1, 0)))
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 1.0, tl.float32)
    out = tl.zeros([ROWS, D], tl.float32)
    for _ in range(0, LENGTH, COLUMNS):
        scores = tl.dot(q, tl.load(keys))
        above = tl.maximum(largest, tl.max(scores, 1) * SCALE_LOG2)
        p = tl.math.exp2(scores * SCALE_LOG2 - above[:, None])
        rescaled = tl.math.exp2(largest - above)
        total = total * rescaled + tl.sum(p, 1)
        out = tl.dot(p.to(tl.float16), tl.load(values), out * rescaled[:, None])
        largest = above
        keys = tl.advance(keys, (0, COLUMNS))
        values = tl.advance(values, (COLUMNS, 0))
    tl.store(LSE + head * LENGTH + first + tl.arange(0, ROWS), largest + tl.math.log2(total))
    block = tl.make_block_ptr(OUT + start, (LENGTH, D), (D, 1), (first, 0), (ROWS, D), (1, 0))
    tl.store(block, (out / total[:, None]).to(tl.float16))


def compiled(head_dim: int, rows: int, columns: int, warps: int) -> bytes:
    """Its cubin for sm_90."""
    signature = {"Q": HALF, "K": HALF, "V": HALF, "OUT": HALF, "LSE": FLOAT, "LENGTH": "i32", "SCALE_LOG2": "fp32"}
    constants = {"D": head_dim, "ROWS": rows, "COLUMNS": columns}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(signature) if name != "SCALE_LOG2"}
    source = ASTSource(forward, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": STAGES})
    cubin: bytes = kernel.asm["cubin"]
    return cubin
