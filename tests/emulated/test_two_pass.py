"""Two passes: gradients, bits against the eager reference, and that nothing waits, is added twice or depends on the device."""

import pytest
import torch
from attention import OP, attention, check_gradients, compiled, exact, gradients, in_eighths, normal, qkv
from test_declined import backward, declined
from test_op import Backward, equal
from torch._dynamo import config as dynamo_config

import dash_inductor
from dash_inductor import emulation, enabled
from dash_inductor.emulation import emulate
from dash_inductor.lowering import kernels
from dash_inductor.reference import reference
from dash_inductor.schedule import Geometry, make_order
from dash_inductor.templates import source
from dash_inductor.templates.tiles import two_pass_tile

pytestmark = pytest.mark.usefixtures("rewriting")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FULL, CAUSAL = "full", "causal"
TILE = two_pass_tile("emulated", "fp32", 16)


def template_for(head_dim):
    """Forced up to a head dim of 128; past it the choice is none."""
    return "two_pass" if head_dim <= 128 else "auto"


def assert_two_passes():
    decision = dash_inductor.decisions()[-1]
    assert (decision.family, decision.launch) == ("two_pass", "plain")
    assert emulation.launches() == []  # those of kernels with atomics


@pytest.mark.parametrize(
    ("dtype", "causal", "batch", "heads", "q_len", "kv_len", "head_dim"),
    [
        (FP32, False, 2, 2, 64, 64, 16),
        (FP32, True, 1, 2, 130, 130, 24),
        (FP32, False, 1, 1, 53, 130, 40),
        (FP32, False, 1, 1, 130, 53, 64),
        (BF16, True, 1, 1, 70, 70, 96),
        (FP16, True, 1, 1, 64, 64, 128),
        (BF16, False, 1, 2, 1, 70, 16),
        (FP32, False, 1, 2, 70, 1, 16),
        (FP32, True, 2, 3, 1, 1, 16),
        (FP32, True, 1, 1, 70, 70, 192),
        (BF16, False, 1, 1, 33, 64, 192),
        (BF16, True, 1, 1, 64, 64, 256),
        (FP32, False, 1, 1, 1, 40, 256),
    ],
)
def test_gradients(dtype, causal, batch, heads, q_len, kv_len, head_dim):
    *inputs, grad_out = qkv(batch, heads, q_len, kv_len, head_dim, dtype=dtype)
    with enabled(template=template_for(head_dim)):
        check_gradients(attention(causal=causal), inputs, grad_out)
    assert_two_passes()


def test_keys_past_the_end_where_all_scores_are_far_below_0():
    """There exp(0 - logsumexp) is infinite, which times 0 would be NaN."""
    query, key, value, grad_out = qkv(1, 1, 40, 70, 16)
    with enabled(template="two_pass"):
        check_gradients(attention(), [in_eighths(query) + 8, in_eighths(key) - 8, value], grad_out)
    assert_two_passes()


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        # batch, heads, kv heads, S_q, S_k, D
        (FULL, (1, 2, 2, 64, 160, 16)),
        (FULL, (2, 6, 2, 53, 130, 24)),
        (CAUSAL, (1, 2, 2, 128, 128, 16)),
        (CAUSAL, (1, 4, 2, 150, 150, 40)),
        (CAUSAL, (1, 3, 1, 130, 130, 16)),
        (CAUSAL, (1, 2, 1, 100, 100, 96)),
        (FULL, (1, 1, 1, 40, 100, 192)),
        (CAUSAL, (1, 2, 1, 100, 100, 256)),
    ],
)
def test_bits_are_those_of_the_reference(mask, sizes):
    batch, heads, kv_heads, q_len, kv_len, head_dim = sizes
    args = exact(batch, heads, q_len, kv_len, head_dim, kv_heads=kv_heads)
    kwargs = {"mask": mask, "scale": 0.25}
    with enabled(template=template_for(head_dim)), emulate(seed=q_len):
        actual = compiled(lambda *args: OP(*args, **kwargs))(*args)
        expected = OP(*args, **kwargs)
    assert_two_passes()
    assert equal(actual, expected) == [True] * 3

    # Sharp: the reversed sums have other bits.
    geometry = Geometry(q_len, kv_len, TILE.block_m, TILE.block_n, mask)
    assert equal(reference(*args, Backward(make_order("ascending", geometry, 1)), 0.25), expected) == [False] * 3


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 100), (100, 1), (1, 1)])
def test_bits_of_short_sequences(q_len, kv_len):
    args = exact(2, 2, q_len, kv_len, 16)
    with enabled(template="two_pass"), emulate():
        actual = compiled(lambda *args: OP(*args, mask=FULL, scale=0.25))(*args)
        assert equal(actual, OP(*args, mask=FULL, scale=0.25)) == [True] * 3
    assert_two_passes()


@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_bits_depend_on_lengths_and_mask_alone(mask):
    """Not on the interleaving, nor on SMs, nor on the batch: all three guarantees."""
    *inputs, lse = [normal(3, 2, 100, 16, seed=seed) for seed in range(5)] + [normal(3, 2, 100, seed=5) + 5]
    args = [*inputs, lse]
    with enabled(template="two_pass", guarantee="batch"):
        function = compiled(lambda *args: OP(*args, mask=mask))
        with emulate():
            expected = function(*args)
        for seed in range(5):
            with emulate(seed=seed):
                assert equal(function(*args), expected) == [True] * 3
        for sms in (1, 13):
            with emulate(sms=sms):
                assert equal(compiled(lambda *args: OP(*args, mask=mask))(*args), expected) == [True] * 3
        with emulate():
            alone = compiled(lambda *args: OP(*args, mask=mask))(*(x[1:2] for x in args))
    assert equal(alone, [x[1:2] for x in expected]) == [True] * 3
    assert_two_passes()


@pytest.mark.parametrize(("mask", "head_dim"), [(FULL, 16), (CAUSAL, 16), (CAUSAL, 192)])
def test_lengths_known_at_run_time(mask, head_dim):
    """Four lengths through one graph, each with the bits of a graph of its own."""
    lengths = [53, 130, 2, 64]
    function = attention(causal=mask == CAUSAL)

    def inputs(length):
        return qkv(1, 2, length, length if mask == CAUSAL else length + 30, head_dim)

    with enabled(template=template_for(head_dim)), emulate():
        static = {length: gradients(compiled(function), inputs(length)[:3], inputs(length)[3]) for length in lengths}
        dynamic = compiled(function, dynamic=True)
        gradients(dynamic, inputs(70)[:3], inputs(70)[3])
        with dynamo_config.patch(error_on_recompile=True):
            for length in lengths:
                actual = gradients(dynamic, inputs(length)[:3], inputs(length)[3])
                assert equal(actual, static[length]) == [True] * 3, length
    assert_two_passes()


def scaled_by_the_others(dq, dk, dv):
    """Fused with a kernel, which reads what it or the other one writes at the place of its output."""
    return dq * 2 + dk, dk * dv, dv.relu()


def cast(dq, dk, dv):
    return dq.half(), dk.bfloat16(), dv.half()


def at_another_place(dq, dk, dv):
    return dq + dq[:, :, :1], dk + dk.flip(2), dv - dv[:, :, -1:]


def in_place(dq, dk, dv):
    return dq.mul_(0.5).add_(dk), dk.mul_(0.5).add_(dv), dv.add_(1.0)


@pytest.mark.parametrize("epilogue", [scaled_by_the_others, cast, at_another_place, in_place])
def test_what_follows_the_gradients(epilogue):
    args = exact(1, 2, 96, 96, 16, exponent=4)
    with enabled(template="two_pass"), emulate():
        actual = compiled(lambda *args: epilogue(*OP(*args, mask=FULL, scale=0.25)))(*args)
        expected = epilogue(*OP(*args, mask=FULL, scale=0.25))
    assert equal(actual, expected) == [True] * 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_report(dynamic):
    *inputs, grad_out = qkv(2, 3, 70, 70, 16)
    with enabled(template="two_pass"), emulate():
        gradients(compiled(attention(causal=True), dynamic=dynamic), inputs, grad_out)
    decision = dash_inductor.decisions()[-1]
    assert "-> two_pass (deterministic by construction), tile 16x64x16 and 32x32x16, guarantee run" in str(decision)
    assert (decision.roles, decision.heads_in_flight) == (None, None)
    assert (decision.predicted_us is None) == dynamic
    if not dynamic:
        assert decision.workspace_bytes == 2 * 4 * 2 * 3 * 80  # delta and lse, fp32, of 70 rows padded to Q tiles of 16


MORE = "is more than the 128 of one pass, which"


@pytest.mark.parametrize(
    ("settings", "head_dim", "reason"),
    [
        ({}, 256, None),
        ({"launch": "chained"}, 192, None),
        ({"guarantee": "batch"}, 256, None),
        (
            {"template": "one_pass"},
            192,
            f"head dim 192 {MORE} template='one_pass' asks for: with template='auto' it takes two passes",
        ),
        (
            {"schedule": "ascending"},
            256,
            f"head dim 256 {MORE} schedule='ascending' asks for: with schedule='auto' it takes two passes",
        ),
        ({"template": "two_pass"}, 264, "head dim 264 is outside 16..256"),
    ],
)
def test_what_is_declined(settings, head_dim, reason):
    node = backward(like=dict.fromkeys(("query", "key", "value"), (1, 2, 40, head_dim)))
    with enabled(**settings), emulate():
        assert declined(node) == reason


def test_a_table_mask_is_refused():
    args = exact(1, 1, 32, 64, 16)
    with enabled(template="two_pass"), emulate(), pytest.raises(ValueError, match="template='two_pass' takes no mask='blocks'"):
        OP(*args, mask="blocks", blocks=torch.ones(2, 2, dtype=torch.bool))


# Kernels broken on purpose: the checks above must see each of them.


@pytest.mark.parametrize(
    ("name", "before", "after", "mask", "wrong"),
    [
        ("order_of_keys", "cols = j*BLOCK_N", "j = visible - 1 - j\n            cols = j*BLOCK_N", FULL, {"dq"}),
        ("order_of_rows", "i = step // GROUP", "i = NQ - 1 - step // GROUP + first", CAUSAL, {"dk", "dv"}),
        ("diagonal_of_dq", "cols[None, :] <= rows[:, None]", "cols[None, :] < rows[:, None]", CAUSAL, {"dq"}),
        ("diagonal", "j*KV_ROWS - i*BLOCK_M", "j*KV_ROWS - i*BLOCK_M + 1", CAUSAL, {"dk", "dv"}),
        ("last_key_tile", "tl.cdiv((i + 1)*Q_ROWS, BLOCK_N)", "tl.cdiv(i*Q_ROWS, BLOCK_N)", CAUSAL, {"dq"}),
        ("first_row_tile", "first = j*KV_ROWS // BLOCK_M", "first = j*KV_ROWS // BLOCK_M + 1", CAUSAL, {"dk", "dv"}),
        ("rows_of_delta", "DELTA + zh*PADDED + rows", "DELTA + zh*ROW_TILES*Q_ROWS + rows", FULL, {"dq"}),
        ("delta", "DELTA + zh*PADDED + offs_m", "DELTA + zh*PADDED + offs_m // 2", FULL, {"dk"}),
        ("kv_head", "h = hq // GROUP", "h = hq // (GROUP + 1)", FULL, {"dq"}),
        ("query_head", "hq = h*GROUP + step % GROUP", "hq = h*GROUP", FULL, {"dk", "dv"}),
        ("scale", "(dq*SCALE).to", "dq.to", FULL, {"dq"}),
    ],
)
def test_mutants_are_seen(monkeypatch, name, before, after, mask, wrong):
    text = source("two_pass", "functions")
    assert text.count(before) == 1
    mutant = kernels.Template(f"dash_mutant_two_pass_{name}", kernels.programs, text.replace(before, after))
    monkeypatch.setattr(kernels, "TWO_PASS", mutant)
    args = exact(1, 4, 100, 100, 16, kv_heads=2)
    with enabled(template="two_pass"), emulate():
        actual = compiled(lambda *args: OP(*args, mask=mask, scale=0.25))(*args)
        expected = OP(*args, mask=mask, scale=0.25)
    same = dict(zip(("dq", "dk", "dv"), equal(actual, expected), strict=True))
    assert {name for name, is_same in same.items() if not is_same} == wrong
