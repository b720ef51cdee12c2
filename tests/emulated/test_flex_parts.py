"""Chains under a mask cut into parts: the gradients are right, and their bits those of any interleaving."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import FP32_ERROR, TILE, compiled, differing, error, mutate, rewritten
from flex import (
    Attention,
    alibi,
    backward_of,
    causal,
    documents,
    everything,
    ids_of,
    pictures,
    window,
    window_by_head,
    with_blind_rows,
)
from recorded_launches import recording
from tensors import BF16, exact, qkv
from test_flex_mutants import DEADLOCK, WRONG, outcomes
from test_varlen import Packed
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from traces import WAIT

from benchmarks.schedules.explicit import Explicit
from dash_inductor import emulation, enabled
from dash_inductor.codegen.flex import OPTIONS, FlexAttention
from dash_inductor.lowering import listed
from dash_inductor.reference import reference
from dash_inductor.schedule import Geometry, parts
from tests.unit.schedule.walks import Walks, Work

pytestmark = pytest.mark.usefixtures("rewriting")

INTERLEAVINGS = [(0, None), (1, 1), (2, 3)]


@pytest.fixture
def always_banded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few chains are, and however short."""
    monkeypatch.setattr(parts, "LEAST_BANDED", 1)
    monkeypatch.setattr(listed, "LEAST_STEPS", 1)


CASES = {
    "causal": Attention(causal, None, 256, heads=1),
    "in sets": Attention(causal, None, 160, heads=6, kv_heads=2),
    "a set of each head": Attention(causal, alibi(3), 100, heads=3, kv_heads=1, batch=2),
    "window": Attention(window, None, 200, heads=2),
    "everything": Attention(everything, None, 160, heads=2, kv_heads=1),
    "pictures": Attention(pictures((0, 70), (90, 130)), None, 170, heads=2),
    "documents": Attention(documents(90, 30, 50), None, 170, heads=4, kv_heads=2),
    "more keys": Attention(everything, None, 90, kv_len=200, heads=2, kv_heads=1),
    "more queries": Attention(causal, None, 230, kv_len=70, heads=2, kv_heads=1),
    "blocks of several tiles": Attention(causal, None, 250, heads=2, kv_heads=1, block=(32, 64)),
    "blind rows": Attention(with_blind_rows, None, 160, heads=2, kv_heads=1),
    "value's head dim": Attention(causal, None, 160, heads=2, kv_heads=1, head_dim=32, value_dim=16),
    "bf16": Attention(causal, None, 160, heads=2, kv_heads=1, dtype=BF16),
}

RARE = ("causal", "window", "pictures")  # the others have their parts, and test_flex.py the masks


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in RARE)) for name in CASES])
def test_gradients_are_right_in_any_interleaving(name: str, always_banded: None) -> None:
    attention = CASES[name]
    tensors = attention.tensors()
    gradients, expected = backward_of(attention.function(), tensors), attention.reference(tensors)
    first, *others = [gradients(*interleaving) for interleaving in INTERLEAVINGS]
    assert rewritten() == 1
    bound = FP32_ERROR if attention.dtype == torch.float32 else 2**-6
    assert max(error(a, e) for a, e in zip(first, expected, strict=True)) < bound
    assert all(differing(first, other) == [] for other in others)


BY_HEAD = replace(CASES["causal"], mask=window_by_head, mask_sizes=(2, 4), batch=2, heads=4, kv_heads=2)
SEVERAL_TILES = replace(CASES["blocks of several tiles"], mask=window)


@pytest.mark.parametrize(
    ("attention", "cut"),
    [
        (replace(CASES["in sets"], mask=documents(90, 30, 40)), True),
        (CASES["more keys"], True),
        (SEVERAL_TILES, True),
        pytest.param(SEVERAL_TILES, False, marks=pytest.mark.quick),
        pytest.param(BY_HEAD, False, marks=pytest.mark.quick),
    ],
    ids=["sets of heads", "more keys", "blocks of several tiles", "whole", "masks by head"],
)
def test_who_walks_which_steps(attention: Attention, cut: bool, always_banded: None) -> None:
    """By ticket: the semaphores and ranks that are waited for. tests/unit/test_gluon_walk.py has the Gluon kernel's walk."""
    block_mask = attention.block_mask()
    assert block_mask is not None
    q_block, kv_block = block_mask.BLOCK_SIZE
    with enabled(guarantee="run" if cut else "batch"), recording() as recorder:
        backward_of(attention.function(block_mask), attention.tensors())()
    heads, kv_heads = attention.heads, attention.kv_heads or attention.heads
    n_q, n_kv = -(-attention.q_len // TILE.block_m), -(-(attention.kv_len or attention.q_len) // TILE.block_n)
    in_parts = parts.parts_for(attention.batch * kv_heads, heads // kv_heads, n_kv) if cut else parts.WHOLE
    walks = Walks(
        block_mask.to_dense().mT.bool().tolist(),
        *(attention.batch, kv_heads, heads // kv_heads, n_q, n_kv, q_block // TILE.block_m, kv_block // TILE.block_n),
        *(in_parts, 1, in_parts.whole),
    )
    chains = attention.batch * heads * n_q
    expected = [waits_of(work, n_q, n_kv, chains) for work in walks.works()]
    (launch,) = recorder.launches
    found = [[(op.place - 2, op.rank) for op in program if op.kind == WAIT] for program in launch.programs]
    assert found == expected


def waits_of(work: Work | None, n_q: int, n_kv: int, chains: int) -> list[tuple[int, int]]:
    """(Semaphore, rank) of each; the semaphores of chains, `chains` and those after it, order the parts of one."""
    if work is None:
        return []
    of_parts = [(chains + work.head * n_kv + work.j, work.place)] if work.parts > 1 else []
    return [(head * n_q + i, rank) for head, i, rank in work.steps] + of_parts


def compiled_backward(args: list[Tensor], scale: float) -> Any:
    """The op of a causal FlexAttention, of grad_out, query, key, value, output and logsumexp."""
    _, query, key, *_ = args
    length, heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    attention = FlexAttention(length, heads, kv_heads, 16, mask_mod="causal", block=32, dtype="fp32")
    functions = attention.functions()
    lists = [
        x
        for x in create_block_mask(causal, None, None, length, length, device="cpu", BLOCK_SIZE=32).as_tuple()
        if isinstance(x, Tensor)
    ]

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *others: Tensor
    ) -> Any:
        slopes, documents_, *lists = others
        *gradients, _ = torch.ops.higher_order.flex_attention_backward(
            *(query, key, value, out, logsumexp, grad_out, None, *functions, attention.mask(lists).as_tuple()),
            *(scale, OPTIONS, (slopes,), (documents_,)),
        )
        return tuple(gradients)

    inputs = [*args, torch.zeros(heads), torch.zeros(length, dtype=torch.int32), *lists]
    module = make_fx(backward, tracing_mode="fake")(*inputs)
    joint_graph_passes(module)
    compiled_module = compile_fx_inner(module, inputs)
    return lambda: tuple(compiled_module(list(inputs)))


@pytest.mark.parametrize(("heads", "kv_heads", "cut"), [(1, 1, True), (4, 2, True), (6, 2, True), (4, 2, False)])
def test_bits_are_those_of_the_reference(heads: int, kv_heads: int, cut: bool, always_banded: None) -> None:
    """Part by part, in the order of bands, and of sets in a band; under the guarantee `batch` chains are whole."""
    length = 224
    args = exact(1, heads, length, length, 16, kv_heads=kv_heads)
    with enabled(guarantee="run" if cut else "batch"), emulation.emulate():
        actual = compiled_backward(args, 0.25)()
    g = Geometry(length, length, 16, 32, "causal")
    last_first = Explicit(
        g, (tuple(range(g.n_kv)),), tuple(tuple((i, (g.n_kv - j) * g.n_q + i) for i in g.tiles(j)) for j in range(g.n_kv))
    )
    assert [last_first.rank(g.n_q - 1, j) for j in (g.n_kv - 1, 0)] == [0, g.n_kv - 1]
    in_parts = parts.parts_for(kv_heads, heads // kv_heads, g.n_kv)
    assert (in_parts.bands, in_parts.sets) == (4, heads // kv_heads)

    def part_of(i: int, j: int, head: int) -> int:
        return in_parts.band(i // 2, j, g.n_q // 2, g.n_kv) * in_parts.sets + head * in_parts.sets // (heads // kv_heads)

    whole = reference(*args, last_first, 0.25)
    expected = reference(*args, last_first, 0.25, part_of)
    assert differing(actual, expected if cut else whole) == []
    # Sharp: another order of the same parts, and whole chains, have other bits.
    assert differing(reference(*args, last_first, 0.25, lambda *step: -part_of(*step)), expected) == ["dk", "dv"]
    assert differing(whole, expected) == ["dk", "dv"]


MUTANT_CASE = Attention(causal, None, 192, heads=3, kv_heads=1)
INTERLEAVINGS_OF_MUTANTS = [*INTERLEAVINGS, (3, None), (4, 2)]
WAITS = 'wait(SEMAPHORES, chain, place, -NQ, {{failed_wait("high")}}, {{failed_wait("low")}}, INTERPRET)'
MUTANTS = {
    "no part waits": ({WAITS: "pass"}, {WRONG}),
    "no part is released": ({"    release(SEMAPHORES + chain, INTERPRET)\n": ""}, {DEADLOCK}),
    "the last band first": ({"own = tl.where(banded, band,": "own = tl.where(banded, BANDS - 1 - band,"}, {DEADLOCK}),
    "the last part too few": ({"if place == parts - 1:": "if place == parts - 2:"}, {WRONG}),
    "the first part adds": ({"dk_ptrs.shape, 1, tl.int1) & (place > 0)": "dk_ptrs.shape, 1, tl.int1) & (place >= 0)"}, {WRONG}),
    "a set of others' heads": ({"of_set*HEADS + step % HEADS": "(sets - 1)*HEADS + step % HEADS"}, {WRONG, DEADLOCK}),
    "tickets upwards": ({"kv_tiles - 1 - unit // (sets*HKV*Z)": "unit // (sets*HKV*Z)"}, {DEADLOCK}),
}


def test_nothing_is_found_where_nothing_is_broken(always_banded: None) -> None:
    (bits,) = outcomes(MUTANT_CASE, interleavings=INTERLEAVINGS_OF_MUTANTS)
    assert isinstance(bits, bytes)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, always_banded: None) -> None:
    changes, symptoms = MUTANTS[name]
    mutate(monkeypatch, "BLOCK_MASK_ONE_PASS", name.replace(" ", "_").replace("'", ""), changes)
    seen = outcomes(MUTANT_CASE, symptoms, INTERLEAVINGS_OF_MUTANTS)
    assert symptoms & set(seen), {symptom if isinstance(symptom, str) else "right": n for symptom, n in seen.items()}


def of_documents_made_in_the_graph(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    lengths = query.shape[2], key.shape[2]
    mask = create_block_mask(lambda b, h, m, n: (m >= n) & (ids[m] == ids[n]), None, None, *lengths, device="cpu", BLOCK_SIZE=32)
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


@pytest.mark.nightly
def test_one_graph_cuts_as_a_graph_of_each_length_does(always_banded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that are few, and, of the longest sequence, whole ones."""
    for module in (parts, listed):
        monkeypatch.setattr(module, "FEW_CHAINS", 8)
    in_one_graph = compiled(of_documents_made_in_the_graph, dynamic=True)
    for index, length in enumerate((100, 150)):
        tensors, ids = qkv(1, 4, length, length, 16, kv_heads=2), ids_of(length - 30, 30)
        assert parts.parts_for(2, 2, -(-length // 32)).whole == (length == 150)
        actual, alone = [], []
        for function, found in ((in_one_graph, actual), (compiled(of_documents_made_in_the_graph, dynamic=False), alone)):
            with dynamo_config.patch(error_on_recompile=function is in_one_graph and index > 0), emulation.emulate(index):
                *inputs, grad_out = tensors
                leaves = [x.detach().requires_grad_() for x in inputs]
                found += torch.autograd.grad(function(*leaves, ids), leaves, grad_out)
        assert differing(actual, alone) == []
        attention = Attention(documents(length - 30, 30), None, length, heads=4, kv_heads=2)
        assert max(error(a, e) for a, e in zip(actual, attention.reference(tensors), strict=True)) < FP32_ERROR


PACKED = Packed((96, 32, 64), heads=4)  # whole blocks: at level `batch` they stay where they are, with room for more behind them
PADDED = torch.ones(1, 170, dtype=torch.bool)
PADDED[:, 150:] = False


def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows = torch.arange(query.shape[2])
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=(rows[:, None] >= rows) & PADDED[:, None, None], enable_gqa=True
    )


@pytest.mark.parametrize(
    ("function", "tensors", "kv_tiles"),
    [(PACKED.function(), PACKED.tensors(), 8), (masked, qkv(1, 4, 170, 170, 16, kv_heads=2), 6)],
    ids=["varlen_attn", "SDPA under a mask"],
)
def test_other_attentions_under_masks(function: Any, tensors: list[Tensor], kv_tiles: int, always_banded: None) -> None:
    """dQ has the bits of whole chains, which the guarantee `batch` takes; dK and dV are right too."""
    found = {}
    for level in ("run", "device", "batch"):
        with enabled(guarantee=level):
            gradients = backward_of(function, tensors)
            found[level] = gradients()
            programs = emulation.launches()[-1].programs
            assert all(differing(found[level], gradients(*interleaving)) == [] for interleaving in INTERLEAVINGS[1:])
        n_kv = 6
        assert programs == (2 * kv_tiles if level == "batch" else 2 * 2 * sum(parts.Parts(4).kv_tiles_of_bands(n_kv, 1)))
    assert differing(found["run"], found["device"]) == []
    assert "dq" not in differing(found["run"], found["batch"])
    assert max(error(a, e.double()) for a, e in zip(found["run"], found["batch"], strict=True)) < FP32_ERROR
