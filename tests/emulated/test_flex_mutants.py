"""FlexAttention's kernels broken on purpose: deadlocks, wrong gradients and differing bits must be seen."""

from collections import Counter

import pytest
from attention import FP32_ERROR, WAIT, error, mutate, rewritten
from flex import Attention, backward_of, causal, everything, not_finite_where_hidden, window_by_head, with_blind_rows

from dash_inductor.emulation.deadlock import DeadlockError

pytestmark = pytest.mark.usefixtures("rewriting")

EVERYTHING = Attention(everything, None, 96, heads=1)  # all chains begin with the same Q tile
CAUSAL = Attention(causal, None, 96, heads=1)
BLOCKS_OF_TWO_TILES = Attention(causal, None, 96, heads=1, block=(32, 64))
NOT_FINITE = Attention(causal, not_finite_where_hidden, 75, heads=1)
BLIND = Attention(with_blind_rows, None, 96, heads=1)
BY_HEAD = Attention(window_by_head, None, 96, heads=4, kv_heads=2, mask_sizes=(None, 4))

ONE_RESIDENT = (0, 1)
INTERLEAVINGS = [ONE_RESIDENT, (1, 2), (2, None), (3, None)]
DEADLOCK, WRONG = "deadlock", "wrong"


def outcomes(attention, until=frozenset(), interleavings=INTERLEAVINGS):
    """What each interleaving comes to: a deadlock, wrong gradients, or the bits of right ones. Ends with the first of `until`."""
    tensors = attention.tensors()
    expected, gradients = attention.reference(tensors), backward_of(attention.function(), tensors)
    seen = Counter()
    for interleaving in interleavings:
        try:
            actual = gradients(*interleaving)
        except DeadlockError:
            seen[DEADLOCK] += 1
        else:
            right = all(error(a, e) < FP32_ERROR for a, e in zip(actual, expected, strict=True))
            seen[b"".join(x.numpy().tobytes() for x in actual) if right else WRONG] += 1
        if until & set(seen):
            break
    assert rewritten() == 1
    return seen


@pytest.mark.parametrize("attention", [EVERYTHING, CAUSAL, BLOCKS_OF_TWO_TILES, NOT_FINITE, BLIND, BY_HEAD])
def test_nothing_is_found_where_nothing_is_broken(attention):
    (bits,) = outcomes(attention)
    assert isinstance(bits, bytes)


KERNEL = "BLOCK_MASK_ONE_PASS"
STORES = "tl.store(ptrs, part, mask=tl.full(ptrs.shape, 1, tl.int1) & (rank == 0))"
SEEN = "tiles = tl.where(seen, "
MUTANTS = {
    "no wait": (EVERYTHING, KERNEL, {WAIT: "pass"}, {WRONG}),
    "tickets upwards, ranks downwards": (CAUSAL, KERNEL, {"j = NKV - 1 - ticket": "j = ticket"}, {DEADLOCK}),
    "tiles of a block upwards": (
        BLOCKS_OF_TWO_TILES,
        KERNEL,
        {"- 1 - j % KV_TILES": "- 1 - (KV_TILES - 1 - j % KV_TILES)"},
        {DEADLOCK},
    ),
    "ranks that forget a tile": (CAUSAL, "BLOCK_RANKS", {SEEN: "tiles = tl.where(seen & (jb != 1), "}, {DEADLOCK}),
    "rows that forget a tile": (
        CAUSAL,
        "BLOCK_ROWS",
        {"tl.where(kind != 0, ": "tl.where((kind != 0) & (block + program != 3), "},
        {DEADLOCK},
    ),
    "steps that forget the last": (
        CAUSAL,
        "BLOCK_ROWS",
        {"tl.store(STEPS + program, steps)": "tl.store(STEPS + program, steps - 1)"},
        {WRONG},
    ),
    "a first contributor that adds": (CAUSAL, KERNEL, {STORES: STORES.replace("tl.store", "tl.atomic_add")}, {WRONG}),
    "every block full": (CAUSAL, "BLOCK_ROWS", {"kind == 2": "kind != 0"}, {WRONG}),
    "a NaN of the derivative": (NOT_FINITE, KERNEL, {"tl.where({{p}} == 0.0, 0.0, grad_pre_mod)": "grad_pre_mod"}, {WRONG}),
    "a NaN of rows that are not there": (
        NOT_FINITE,
        KERNEL,
        {"(offs_m[None, :] < Q_LEN)": "(offs_m[None, :] >= 0)"},
        {WRONG},
    ),
    "dq of what nobody visits": (BLIND, "BLOCK_RANKS", {"(before > 0)": "(before >= 0)"}, {WRONG}),
    "the mask of one head for all": (BY_HEAD, KERNEL, {" + (h*GROUP + head_of_group) % MASK_H": ""}, {WRONG}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_seen(name, monkeypatch):
    attention, template, changes, symptoms = MUTANTS[name]
    mutate(monkeypatch, template, name.replace(" ", "_").replace(",", ""), changes)
    seen = outcomes(attention, symptoms)
    assert symptoms <= set(seen), {symptom if isinstance(symptom, str) else "right": n for symptom, n in seen.items()}
