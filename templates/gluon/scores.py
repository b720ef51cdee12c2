"""What the Gluon kernel makes of scores by functions of the user's, and their derivatives: lowering/gluon_functions.py writes them.

    BEFORE(z, hq, n, captures) -> kept                                       what is loaded for all queries
    SCORES(pre_mod, z, hq, m, n, captures, kept) -> scores                   of Q K^T * SCALE
    DERIVATIVE(pre_mod, grad_scores, z, hq, m, n, captures, kept) -> that of pre_mod

They are called for tiles: pre_mod [keys, queries], m [1, queries], n [keys, 1]. A derivative is linear in grad_scores. So with P^T
in its place, it is what dP^T - DELTA is multiplied with. That is computed beside P^T, and no score is kept until dP^T is there.
With SHARE (shares.py) both are computed then, of the gradient itself: registers hold P^T alone, where neither reads pre_mod.
"""

# Gluon compiles these functions from their source, in which an `if` on a constexpr is no condition.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .barriers import WARPGROUP


@gluon.jit
def own_place(BLOCK_N: gl.constexpr):
    # The first key and the first query of a tile of S^T that the thread has. By a shuffle: else ptxas reads the thread's number
    # anew in the loop, and takes the warps for diverged.
    thread = gl.inline_asm_elementwise(
        """
        {
            .reg .b32 lane;
            mov.u32 lane, %laneid;
            mov.u32 $0, %tid.x;
            shfl.sync.idx.b32 $0, $0, lane, 31, 0xffffffff;
        }
        """,
        "=r,r",
        [0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    n = (thread // 32 % (BLOCK_N // 16)) * 16 + thread % 32 // 4
    m = thread % 4 * 2
    if BLOCK_N == 64:  # two warpgroups share the queries
        m += thread // WARPGROUP * 32
    return n, m


# As in `mask_edge`: some bits of a key's or query's number count registers, the others threads. So no register is kept for each.


@gluon.jit
def keys_of(first, own, KEYS: gl.constexpr, attention, LAYOUT: gl.constexpr):
    # [KEYS, 1], none of them past the last.
    n = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT)), 1) & 8
    n = gl.full(n.shape, own[0] + first, gl.int32, LAYOUT) + n
    if not attention.EVEN_N:
        n = gl.minimum(n, attention.kv_len - 1)
    return n


@gluon.jit
def queries_of(first, own, KEYS: gl.constexpr, QUERIES: gl.constexpr, attention, LAYOUT: gl.constexpr):
    # [1, QUERIES], none of them past the last.
    THREADS: gl.constexpr = 38 if KEYS == 64 else 6
    m = gl.expand_dims(gl.arange(0, QUERIES, layout=gl.SliceLayout(0, LAYOUT)), 0) & ~THREADS
    m = gl.full(m.shape, own[1] + first, gl.int32, LAYOUT) + m
    if not attention.EVEN_M:
        m = gl.minimum(m, attention.q_len - 1)
    return m


@gluon.jit
def kept_of(z, hq, j, own, BLOCK_N: gl.constexpr, attention, LAYOUT: gl.constexpr):
    # What BEFORE keeps for KV tile j and query head hq of batch element z.
    kept = ()
    if attention.FUNCTIONS:
        kept = attention.BEFORE(z, hq, keys_of(j * BLOCK_N, own, BLOCK_N, attention, LAYOUT), attention.captures)
    return kept


@gluon.jit
def scores(pre_mod, first_key, first_row, place, attention, LAYOUT: gl.constexpr):
    z, hq, own, kept = place
    KEYS: gl.constexpr = pre_mod.shape[0]
    QUERIES: gl.constexpr = pre_mod.shape[1]
    n = keys_of(first_key, own, KEYS, attention, LAYOUT)
    m = queries_of(first_row, own, KEYS, QUERIES, attention, LAYOUT)
    return attention.SCORES(pre_mod, z, hq, m, n, attention.captures, kept).to(gl.float32)


@gluon.jit
def derivative_of(pre_mod, grad_scores, p_t, first_key, first_row, place, attention, LAYOUT: gl.constexpr):
    factor = grad_scores
    if attention.DERIVATIVE is not None:
        factor = _linear(attention.DERIVATIVE, pre_mod, grad_scores, p_t, first_key, first_row, place, attention, LAYOUT)
    return factor


@gluon.jit
def share_of(pre_mod, grad_scores, p_t, first_key, first_row, place, attention, LAYOUT: gl.constexpr):
    return _linear(attention.SHARE, pre_mod, grad_scores, p_t, first_key, first_row, place, attention, LAYOUT)


@gluon.jit
def _linear(FUNCTION: gl.constexpr, pre_mod, grad_scores, p_t, first_key, first_row, place, attention, LAYOUT: gl.constexpr):
    z, hq, own, kept = place
    KEYS: gl.constexpr = pre_mod.shape[0]
    QUERIES: gl.constexpr = pre_mod.shape[1]
    n = keys_of(first_key, own, KEYS, attention, LAYOUT)
    m = queries_of(first_row, own, KEYS, QUERIES, attention, LAYOUT)
    found = FUNCTION(pre_mod, grad_scores, z, hq, m, n, attention.captures, kept).to(gl.float32)
    return gl.where(p_t == 0.0, 0.0, found)  # of what is hidden the derivative need not be a number
