"""Dropout in the Gluon kernel, by bits that a small kernel wrote before: templates/dropout_bits.py.jinja.

The forward dropped some elements of P, and multiplied the others with DROP_SCALE. Here they are zero in P for DV, and in dP for dS.
dP is multiplied with DROP_SCALE as it comes, DV at the end of its chain.

Words are loaded a step before they are needed.
"""

# Gluon compiles these functions from their source, in which an `if` on a constexpr is no condition.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .barriers import THREADS, WARPGROUP
from .functions import DROP, DROP_OF_64, load_16_bits, load_bits, select, thread


@gluon.jit
def own_drop_bits(attention, BLOCK_N: gl.constexpr):
    # Where the thread's words begin.
    own = ()
    if attention.DROP_SCALE is not None:
        if BLOCK_N == 64:  # a word has 16 bits of a thread in each warpgroup
            halves = attention.drop_bits.to(gl.pointer_type(gl.int16), bitcast=True)
            own = halves + (2 * (thread() % WARPGROUP) + thread() // WARPGROUP)
        else:
            own = attention.drop_bits + thread()
    return own


@gluon.jit
def drop_words(own, zh, j, i, attention, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    # The thread's word of each part of Q tile i and KV tile j, for query head zh of all batches.
    words = ()
    if attention.DROP_SCALE is not None:
        tile = (zh * gl.cdiv(attention.kv_len, BLOCK_N) + j) * attention.nq + (i & 0xFFFF)
        words = words_of(own, tile, BLOCK_M, BLOCK_N)
    return words


@gluon.jit
def words_of(own, tile, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    if BLOCK_N == 64:
        first = load_16_bits(own + tile * (BLOCK_M * BLOCK_N // 16))
    else:
        first = load_bits(own + tile * (BLOCK_M * BLOCK_N // 32))
    second = first
    if BLOCK_M == 128:
        second = load_bits(own + (tile * (2 * THREADS) + THREADS))
    return first, second


@gluon.jit
def drop(x, words, PART: gl.constexpr, attention, LAYOUT: gl.constexpr):
    # x, 0 where the forward dropped the element.
    if attention.DROP_SCALE is not None:
        x = select(x, words[PART], DROP, DROP_OF_64, LAYOUT)
    return x


@gluon.jit
def drop_and_scale(dp_t, words, PART: gl.constexpr, attention, LAYOUT: gl.constexpr):
    if attention.DROP_SCALE is not None:
        dp_t = drop(dp_t, words, PART, attention, LAYOUT) * attention.DROP_SCALE
    return dp_t
