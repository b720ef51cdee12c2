"""The level `batch`: a sequence has the same gradients, bit for bit, alone, padded, and whatever it is packed with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention import compiled, error, gradients, rewritten
from flash_attn_stand_in import attend as flash_attend
from tensors import BF16, FP16, normal
from test_varlen import ERRORS, FULL, Packed
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import dash_inductor
from dash_inductor import decisions, enabled
from dash_inductor.codegen.mode import deterministic
from dash_inductor.emulation import emulate
from dash_inductor.rewrite import offsets
from dash_inductor.rewrite import varlen as rewriting
from dash_inductor.rewrite.offsets import Moved

pytestmark = pytest.mark.usefixtures("rewriting")

Around = tuple[int, ...]
PACKS: list[tuple[Around, Around, int]] = [((7,), (), 0), ((33, 1, 0), (64,), 5)]  # before it, after it, and tail
SEQUENCES = {
    "causal": Packed((45,)),
    "full, keys longer, GQA": Packed((30,), (70,), window=FULL, heads=4),
    "queries longer, bf16": Packed((61,), (40,), dtype=BF16),
    "window, fp16": Packed((90,), window=(16, 8), dtype=FP16),
    "two passes": Packed((75,), head_dim=160),
    "one token": Packed((1,)),
}
IN_CI = ("two passes",)


def packed(alone: Packed, tensors: Sequence[Tensor], before: Around, after: Around, tail: int) -> tuple[Packed, list[Tensor]]:
    """A sequence among others, which have as many keys as queries, and the tensors of all."""
    (queries, keys) = ((*before, *length, *after) for length in alone.lengths)
    pack = replace(alone, queries=queries, keys=keys, tail=tail)
    first = sum(before)
    return pack, [put(others, x, first) for others, x in zip(pack.tensors(), tensors, strict=True)]


def put(others: Tensor, x: Tensor, first: int) -> Tensor:
    """`others`, in whose place from `first` on `x` stands."""
    return torch.cat([others[:first], x, others[first + len(x) :]])


def backward_of(attention: Packed, tensors: Sequence[Tensor], seed: int = 0) -> tuple[Tensor, ...]:
    with emulate(seed, sms=2 + seed):
        return gradients(compiled(attention.function()), tensors[:3], tensors[3])


def parts(grads: Sequence[Tensor], lengths: tuple[tuple[int, ...], tuple[int, ...]], before: int) -> list[Tensor]:
    """Of dq, dk and dv those of the sequence."""
    (q_len,), (kv_len,) = lengths
    return [x.narrow(0, before, length) for x, length in zip(grads, (q_len, kv_len, kv_len), strict=True)]


def differing(
    alone: Packed, level: str, packs: Sequence[tuple[Around, Around, int]] = PACKS[:1]
) -> list[tuple[Around, Around, int]]:
    """The packs in which a gradient of the sequence has another bit than alone."""
    tensors, seen = alone.tensors(), []
    with enabled(guarantee=level):
        expected = backward_of(alone, tensors)
        assert all(error(a, e) < ERRORS.get(alone.dtype, 2**-9) for a, e in zip(expected, alone.reference(tensors), strict=True))
        for seed, pack in enumerate(packs):
            attention, all_tensors = packed(alone, tensors, *pack)
            grads = backward_of(attention, all_tensors, seed)
            for actual, right in zip(grads, attention.reference(all_tensors), strict=True):
                assert error(actual, right) < ERRORS.get(alone.dtype, 2**-9)
            actual = parts(grads, alone.lengths, sum(pack[0]))
            if not all(torch.equal(*pair) for pair in zip(actual, expected, strict=True)):
                seen.append(pack)
    assert rewritten() == 1 + len(packs)
    return seen


@pytest.mark.parametrize("name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.nightly) for name in SEQUENCES])
def test_alone_and_packed(name):
    assert differing(SEQUENCES[name], "batch", PACKS) == []
    assert decisions()[-1].guarantee == "batch"


def test_other_levels_cut_tiles_from_the_pack():
    """So these inputs would show it."""
    assert differing(SEQUENCES["causal"], "device")


def test_a_tile_cut_at_the_pack_is_seen(monkeypatch):
    monkeypatch.setattr(rewriting, "Moved", lambda cu_seqlens, length, block: offsets.Moved(cu_seqlens, length, 1))
    monkeypatch.setattr(rewriting, "moved_length", lambda length, cu_seqlens, block: length)
    assert differing(SEQUENCES["causal"], "batch")


def test_three_lengths_through_one_graph():
    """With the bits of a graph of each length alone."""
    tensors = SEQUENCES["causal"].tensors()
    with enabled(guarantee="batch"):
        in_one_graph = compiled(SEQUENCES["causal"].attend, dynamic=True)
        expected = backward_of(SEQUENCES["causal"], tensors)
        for before, after in (((7,), (3, 20)), ((33, 1), (64, 0)), ((2,), (9, 9))):
            attention, all_tensors = packed(SEQUENCES["causal"], tensors, before, after, 0)
            cu_q, cu_k = attention.offsets()
            with emulate(), dynamo_config.patch(error_on_recompile=len(before) == 2):
                grads = gradients(lambda *x, cu=(cu_q, cu_k): in_one_graph(*x, *cu, 64, 64), all_tensors[:3], all_tensors[3])
            actual = parts(grads, SEQUENCES["causal"].lengths, sum(before))
            assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    assert not isinstance(decisions()[-1].q_len, int)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_functions_of_scores(causal):
    """Of flash_attn, ALiBi and a soft-cap: a distance is one within the sequence."""
    options = {"causal": causal, "alibi_slopes": torch.tensor([0.5, 0.25]), "softcap": 2.0}
    found = []
    for before, after in (((), ()), ((7,), (3, 20))):
        attention, tensors = packed(SEQUENCES["causal"], SEQUENCES["causal"].tensors(), before, after, 0)
        sequences = (*attention.offsets(), 64, 64)
        with enabled(guarantee="batch"), emulate():
            grads = gradients(
                compiled(lambda *x, sequences=sequences: flash_attend(*x, sequences=sequences, **options)), tensors[:3], tensors[3]
            )
        found.append(parts(grads, SEQUENCES["causal"].lengths, sum(before)))
    assert rewritten() == 2 and all(torch.equal(*pair) for pair in zip(*found, strict=True))


GARBAGE = [[-5, 20, 40], [0, 40, 20, 60], [10, 30, 2**31 - 1], [50, 40, 30], [0, 2**30, -(2**31), 2**31 - 1]]


@pytest.mark.parametrize("offsets", GARBAGE)
def test_offsets_that_lie(offsets):
    """Nothing is read or written out of range, as eager indexing would say; what lies in no sequence is zero."""
    cu_seqlens, x = torch.tensor(offsets, dtype=torch.int32), normal(48, 3)
    moved = Moved(cu_seqlens, 48, 16)
    there = moved.there(x)
    back = moved.back(there)
    assert there.shape == (moved.length, 3) and back.shape == x.shape
    assert ((back == x) | (back == 0)).all()


LEFT = torch.tensor([45, 20, 64])  # tokens of each batch element; the rest is padding


def padded(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    place = torch.arange(query.shape[2])
    seen = (place[:, None] >= place) & (place < lengths[:, None])[:, None, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def test_padding():
    """Of SDPA under a mask, whose tiles are cut from the start of each batch element."""
    whole = [normal(3, 2, 64, 16, seed=seed) for seed in range(4)]
    found = []
    for length, elements in ((64, [0, 1, 2]), (48, [0]), (100, [2, 1, 0])):
        tensors = [F.pad(x, (0, 0, 0, max(0, length - 64)))[elements, :, :length] for x in whole]
        tensors[3] = tensors[3] * (torch.arange(length) < LEFT[elements, None])[:, None, :, None]  # no loss looks at padding
        with enabled(guarantee="batch"), emulate():
            grads = gradients(compiled(lambda *x, e=elements: padded(*x, LEFT[e])), tensors[:3], tensors[3])
        found.append([x[elements.index(0), :, :45] for x in grads])
    assert rewritten() == 3 and all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def document(first: int) -> list[Tensor]:
    """Gradients of one that starts at a token, among others."""
    tensors = [normal(1, 2, 80, 16, seed=seed).roll(first, 2) for seed in range(4)]
    ids = (torch.arange(80) >= first).int() + (torch.arange(80) >= first + 40).int()
    with enabled(guarantee="batch"), emulate():
        mask = create_block_mask(lambda b, h, m, n: (m >= n) & (ids[m] == ids[n]), None, None, 80, 80, device="cpu", BLOCK_SIZE=32)
        grads = gradients(compiled(lambda *x: flex_attention(*x, block_mask=mask)), tensors[:3], tensors[3])
    return [x[:, :, first : first + 40] for x in grads]


@pytest.mark.parametrize(("starts", "equal"), [((0, 32), True), ((0, 20), False)])
def test_documents_of_flex_attention(starts, equal):
    """They have the promise where each starts at a multiple of the block, and elsewhere not."""
    found = [document(first) for first in starts]
    assert rewritten() == 2 and all(torch.equal(*pair) for pair in zip(*found, strict=True)) == equal


def test_the_setting_of_torch_selects_the_level():
    """Where torch has it; torch 2.11 has not, and keeps the level."""
    has_it = hasattr(inductor_config, "batch_invariant")
    level = "batch" if has_it else "run"
    with inductor_config.patch(batch_invariant=True) if has_it else nullcontext():
        assert dash_inductor.config.current().guarantee == level
        assert (differing(SEQUENCES["causal"], "run") == []) == has_it
        assert decisions()[-1].guarantee == level
    assert dash_inductor.config.current().guarantee == "run"


class ByRows(nn.Linear):
    """Each row of x by itself, as the matmuls of the package batch_invariant_ops are."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.weight).sum(-1)


class Policy(nn.Module):
    """A layer over packed tokens: embedded, [tokens, 32], to log-probabilities of those that follow, [tokens - 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = ByRows(32, 96, bias=False), ByRows(32, 64, bias=False)

    def forward(self, x: Tensor, tokens: Tensor, offsets: Tensor, longest: int) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(1)
        attended = varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=(-1, 0))
        logits = self.head(x + attended.flatten(1))
        return logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)


def of_all(policy: nn.Module, embedded: Sequence[Tensor], tokens: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities of packed sequences, and what they are of."""
    leaves = [x.clone().requires_grad_() for x in embedded]
    lengths = [len(x) for x in leaves]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    found = policy(torch.cat(leaves), torch.cat(list(tokens)), offsets, max(lengths))
    return [each[: length - 1] for each, length in zip(found.tensor_split(offsets[1:-1].tolist()), lengths, strict=True)], leaves


@pytest.mark.nightly
@pytest.mark.parametrize("warn_only", [False, True])
def test_a_trainer_and_a_sampler(warn_only):
    """A step of GRPO, as torchtitan and verl (warn_only) configure it: the sampler has each sequence alone, the trainer a pack.

    Ratios are 1 exactly. With torch's flag each sequence's gradients are those that it has alone, and without it they are not.
    """
    torch.manual_seed(0)
    has_it = hasattr(inductor_config, "batch_invariant")
    invariant = inductor_config.patch(batch_invariant=True) if has_it else enabled(guarantee="batch")
    tokens = [torch.randint(64, (length,)) for length in (20, 45, 70)]
    embedded, policy = [torch.randn(len(x), 32) for x in tokens], Policy()
    equal = []
    for context in (invariant, nullcontext()):
        dash_inductor.clear_decisions()
        with context, deterministic(warn_only=warn_only), emulate():
            trained = compiled(policy, dynamic=True)
            with torch.no_grad():
                sampled = [of_all(trained, [x], [y])[0][0] for x, y in zip(embedded, tokens, strict=True)]
            found, leaves = of_all(trained, embedded, tokens)
            ratios = [(new - old).exp() for new, old in zip(found, sampled, strict=True)]
            assert all(bool((ratio == 1).all()) for ratio in ratios)
            advantages = (0.5, -1.0, 2.0)
            sum((advantage * ratio).sum() for advantage, ratio in zip(advantages, ratios, strict=True)).backward()
            alone = []
            for x, y, old, advantage in zip(embedded, tokens, sampled, advantages, strict=True):
                (new,), (leaf,) = of_all(trained, [x], [y])
                (advantage * (new - old).exp()).sum().backward()
                alone.append(leaf.grad)
        equal.append(all(torch.equal(leaf.grad, other) for leaf, other in zip(leaves, alone, strict=True)))
        assert {decision.guarantee for decision in decisions() if decision.rewritten} == {"batch" if len(equal) == 1 else "run"}
    assert equal == [True, False]
