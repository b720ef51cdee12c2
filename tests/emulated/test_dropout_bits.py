"""The bits that the Gluon kernel reads of what a forward dropped, against the definition, element by element."""

import sys
from types import SimpleNamespace

import pytest
import sympy
import torch
from attention import GARBAGE
from torch._inductor.lowering import register_lowering

from dash_inductor.dropout import EFFICIENT, FLASH, ROUNDS, Dropout, kept
from dash_inductor.emulation import emulate
from dash_inductor.lowering import dropout_bits
from dash_inductor.lowering.buffers import in_memory
from dash_inductor.lowering.mods import Mods
from dash_inductor.templates.tiles import gluon_tile

pytestmark = pytest.mark.usefixtures("rewriting")

LIBRARY = torch.library.Library("dash_tests", "FRAGMENT")
LIBRARY.define(
    "dropout_bits(Tensor query, Tensor key, Tensor state, Tensor? blocks, str of, bool causal, int dim, int first) -> Tensor"
)
P = 0.3
BLOCK = 128  # queries and keys of a block of a mask
OP = torch.ops.dash_tests.dropout_bits.default


def size_of(query, key, head_dim):
    tile = gluon_tile(90, "bf16", head_dim)
    n_q, n_kv = -(-query.shape[2] // tile.block_m), -(-key.shape[2] // tile.block_n)
    return [*query.shape[:2], n_kv, n_q, tile.block_m // 64, 2 * tile.block_n]


@torch.library.register_fake(OP.name(), lib=LIBRARY)
def fake(query, key, state, blocks, generator, causal, head_dim, first):
    return query.new_empty(size_of(query, key, head_dim), dtype=torch.int32)


@register_lowering(OP, type_promotion_kind=None)
def lower(query, key, state, blocks, generator, causal, head_dim, first):
    tile, dropout = gluon_tile(90, "bf16", head_dim), Dropout(P, generator)
    problem = SimpleNamespace(mask="causal" if causal else "full")
    q_len, kv_len = (sympy.sympify(x.get_size()[2]) for x in (query, key))
    sizes = {"q_len": q_len, "kv_len": kv_len, "n_q": -(-q_len // tile.block_m), "device": query.get_device()}
    batch, heads = map(int, query.get_size()[:2])
    resolution = SimpleNamespace(problem=problem, turn=SimpleNamespace(batch=batch, heads=heads), turns=2 if first else 1)
    inputs = SimpleNamespace(query=in_memory(query), resolution=resolution, **sizes)
    constants = {"OF_FLASH": generator == FLASH, "ROUNDS": ROUNDS[generator], "THRESHOLD": dropout.threshold}
    tiles = {"q_tiles": BLOCK // tile.block_m, "kv_tiles": BLOCK // tile.block_n}
    rows = None if blocks is None else SimpleNamespace(matrix=in_memory(blocks), **tiles)
    mods = dropout_bits.with_bits(inputs, tile, Mods(of_dropout=constants, random_state=in_memory(state)), rows)
    if first:
        dropout_bits.write(inputs, tile, mods, rows, first)
    return mods.drop_bits


def elements(words, q_len, kv_len):
    """bool [B, H, S_q, S_k]: registers and threads as the layouts of wgmma's accumulator have them."""
    *_, threads = words.shape
    keys = threads // 2
    parts = words.permute(0, 1, 3, 4, 2, 5).flatten(2, 3)  # [B, H, part, j, thread]
    m, n = torch.arange(parts.shape[2] * 64)[:, None], torch.arange(parts.shape[3] * keys)
    thread = n % keys // 16 * 32 + n % 8 * 4 + m % 8 // 2
    register = m % 64 // 8 * 4 + n % 16 // 8 * 2 + m % 2
    return (parts[:, :, m // 64, n // keys, thread] >> register & 1).bool()[:, :, :q_len, :kv_len]


SEED = 2**41 + 9
CASES = [
    # generator, head dim, heads, S_q, S_k, offset
    (FLASH, 128, (2, 3), 70, 165, 2**33 + 4),
    (FLASH, 64, (1, 2), 300, 130, 2**32 - 40),
    (FLASH, 256, (1, 2), 200, 200, -(2**33) - 3),
    (EFFICIENT, 128, (2, 2), 70, 164, 2**33 + 4),
    (EFFICIENT, 64, (1, 2), 130, 132, 2**32 - 40),
    (EFFICIENT, 256, (1, 2), 200, 200, 2**34 - 4),
    (EFFICIENT, 128, (2, 2), 70, 165, 2**32 - 1001),
    (EFFICIENT, 64, (1, 2), 130, 131, 2**33 + 4),
    (EFFICIENT, 256, (1, 2), 70, 100, -3),
    (EFFICIENT, 128, (1, 1), 64, 128, 2**34 - 10),
]


def bits_of(generator, head_dim, heads, q_len, kv_len, offset, *, causal=False, blocks=None, first=0):
    query, key = (torch.empty(*heads, length, 8) for length in (q_len, kv_len))
    state = torch.tensor([SEED, offset])
    with emulate():
        return torch.compile(OP)(query, key, state, blocks, generator, causal, head_dim, first), state


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_element(case):
    generator, _, heads, q_len, kv_len, _ = case
    words, state = bits_of(*case)
    right = kept(Dropout(P, generator), state, (*heads, q_len, kv_len))
    assert torch.equal(elements(words, q_len, kv_len), right)


@pytest.mark.every_case
@pytest.mark.parametrize("generator", [FLASH, EFFICIENT])
def test_a_turn_has_those_of_its_heads(generator):
    words, state = bits_of(generator, 128, (1, 2), 70, 132, 8, first=3)
    right = kept(Dropout(P, generator), state, (1, 5, 70, 132))
    assert torch.equal(elements(words, 70, 132), right[:, 3:])


@pytest.mark.every_case
@pytest.mark.parametrize("generator", [FLASH, EFFICIENT])
@pytest.mark.parametrize("p", [1e-9, 0.004, 0.5, 0.998])
def test_each_probability(p, generator, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "P", p)
    words, state = bits_of(generator, 128, (1, 1), 128, 128, 4)
    right = kept(Dropout(p, generator), state, (1, 1, 128, 128))
    assert torch.equal(elements(words, 128, 128), right)


@pytest.mark.every_case
@pytest.mark.parametrize("generator", [FLASH, EFFICIENT])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_a_causal_mask_leaves(head_dim, generator):
    words, state = bits_of(generator, head_dim, (1, 2), 300, 300, 8, causal=True)
    right = kept(Dropout(P, generator), state, (1, 2, 300, 300))
    seen = torch.ones(300, 300, dtype=torch.bool).tril()
    assert torch.equal(elements(words, 300, 300) & seen, right & seen)
    assert (words == GARBAGE).any()  # nobody has written there


@pytest.mark.every_case
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_a_mask_in_blocks_leaves(head_dim):
    """Of each batch element another, and of each head; keys past the last block are hidden."""
    blocks = (torch.rand(2, 2, 2, 3, generator=torch.Generator().manual_seed(0)) > 0.5).to(torch.int8) * 2
    words, state = bits_of(FLASH, head_dim, (2, 2), 300, 300, 8, blocks=blocks)
    right = kept(Dropout(P, FLASH), state, (2, 2, 300, 300))
    places = torch.arange(300) // BLOCK
    seen = torch.nn.functional.pad(blocks, (0, 0, 0, 1))[:, :, places][:, :, :, places].mT > 0
    assert torch.equal(elements(words, 300, 300) & seen, right & seen)
    assert (words == GARBAGE).double().mean() > 0.2
