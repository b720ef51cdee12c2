"""Two passes: nothing waits, is added twice or depends on the device. Their gradients and bits stand beside those of one pass."""

import pytest
from attention import assert_two_passes, attention, backward, check_gradients, compiled, differing, gradients
from tensors import CAUSAL, FULL, arguments, in_eighths, qkv
from torch._dynamo import config as dynamo_config

from dash_inductor import decisions, enabled
from dash_inductor.emulation import emulate

pytestmark = pytest.mark.usefixtures("rewriting")


def test_keys_past_the_end_where_all_scores_are_far_below_0():
    """There exp(0 - logsumexp) is infinite, which times 0 would be NaN."""
    query, key, value, grad_out = qkv(1, 1, 40, 70, 16)
    with enabled(template="two_pass"):
        check_gradients(attention(), [in_eighths(query) + 8, in_eighths(key) - 8, value], grad_out)
    assert_two_passes()


@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_bits_depend_on_lengths_and_mask_alone(mask):
    """Not on the interleaving, nor on SMs, nor on the batch: all three guarantees."""
    args = arguments(3, 2, 100, 100)
    with enabled(template="two_pass", guarantee="batch"):
        function = compiled(backward(mask))
        with emulate():
            expected = function(*args)
        for seed in range(5):
            with emulate(seed=seed):
                assert differing(function(*args), expected) == []
        for sms in (1, 13):
            with emulate(sms=sms):
                assert differing(compiled(backward(mask))(*args), expected) == []
        with emulate():
            alone = compiled(backward(mask))(*(x[1:2] for x in args))
    assert differing(alone, [x[1:2] for x in expected]) == []
    assert_two_passes()


@pytest.mark.parametrize(("mask", "head_dim"), [(FULL, 16), (CAUSAL, 16), (CAUSAL, 192)])
def test_lengths_known_at_run_time(mask, head_dim):
    """Four lengths through one graph, each with the bits of a graph of its own."""
    lengths = [53, 130, 2, 64]
    function = attention(causal=mask == CAUSAL)

    def step(compiled_function, length):
        *inputs, grad_out = qkv(1, 2, length, length if mask == CAUSAL else length + 30, head_dim)
        return gradients(compiled_function, inputs, grad_out)

    with enabled(template="two_pass" if head_dim <= 128 else "auto"), emulate():
        static = {length: step(compiled(function), length) for length in lengths}
        dynamic = compiled(function, dynamic=True)
        step(dynamic, 70)
        with dynamo_config.patch(error_on_recompile=True):
            for length in lengths:
                assert differing(step(dynamic, length), static[length]) == [], length
    assert_two_passes()


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_report(dynamic):
    *inputs, grad_out = qkv(2, 3, 70, 70, 16)
    with enabled(template="two_pass"), emulate():
        gradients(compiled(attention(causal=True), dynamic=dynamic), inputs, grad_out)
    decision = decisions()[-1]
    assert "-> two_pass (deterministic by construction), tile 16x64x16 and 32x32x16, guarantee run" in str(decision)
    assert (decision.roles, decision.heads_in_flight) == (None, None)
    assert (decision.predicted_us is None) == dynamic
    if not dynamic:
        assert decision.workspace_bytes == 2 * 4 * 2 * 3 * 80  # delta and lse, fp32, of 70 rows padded to Q tiles of 16
