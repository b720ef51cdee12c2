"""The same bits, however the CTAs of a launch interleave; and what a launch needs in order to end."""

import pytest
from attention import assert_two_passes, backward, compiled, differing, last_plan
from tensors import CAUSAL, FULL, arguments

from dash_inductor import decisions, emulation, enabled
from dash_inductor.emulation import emulate
from dash_inductor.emulation.deadlock import DeadlockError

pytestmark = pytest.mark.usefixtures("rewriting")

SEEDS = range(5)  # test_interleavings.py has thousands, at night
KERNEL = "sdpa_backward"


def last_launch():
    launch = emulation.launches()[-1]
    assert KERNEL in launch.kernel
    return launch


def at_night(*row: object) -> object:
    return pytest.param(*row, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("settings", "mask", "sizes", "sms", "placed"),
    [
        # sizes: batch, heads, kv heads, S_q, S_k; placed: family, roles, heads in flight, passes
        ({"schedule": "ascending"}, FULL, (1, 2, 2, 64, 96), 4, ("ascending", 2, 2, 2)),
        at_night({"schedule": "descending"}, FULL, (1, 4, 2, 33, 96), 4, ("descending", 2, 2, 2)),
        ({"schedule": "descending"}, CAUSAL, (1, 2, 2, 128, 128), 4, ("descending", 2, 2, 2)),
        ({"schedule": "shift"}, FULL, (2, 1, 1, 48, 130), 6, ("shift", 3, 2, 2)),
        at_night({"schedule": "symmetric"}, CAUSAL, (1, 1, 1, 150, 150), 2, ("symmetric", 2, 1, 2)),
        ({"schedule": "symmetric"}, CAUSAL, (1, 3, 3, 90, 90), 6, ("symmetric", 2, 3, 1)),
        at_night({"schedule": "shift_round_robin"}, FULL, (1, 4, 2, 80, 130), 4, ("shift_round_robin", 4, 1, 2)),
        at_night({"schedule": "symmetric_round_robin"}, CAUSAL, (1, 3, 3, 150, 150), 4, ("symmetric_round_robin", 4, 1, 1)),
        at_night({"launch": "chained", "schedule": "ascending"}, FULL, (1, 2, 2, 64, 96), 6, ("ascending", 3, 2, 1)),
        ({"launch": "chained", "schedule": "descending"}, CAUSAL, (1, 2, 2, 100, 100), 6, ("descending", 4, 2, 1)),
    ],
)
def test_bits_do_not_depend_on_the_interleaving(settings, mask, sizes, sms, placed):
    batch, heads, kv_heads, q_len, kv_len = sizes
    args = arguments(batch, heads, q_len, kv_len, kv_heads=kv_heads)
    results, launches = [], []
    with enabled(**settings):
        function = compiled(backward(mask))
        for seed in SEEDS:
            with emulate(seed=seed, sms=sms):
                results.append(function(*args))
            launches.append(last_launch())
    decision, plan = last_plan(mask, batch * kv_heads, q_len, kv_len)
    assert (decision.family, decision.roles, decision.heads_in_flight, plan.order.passes) == placed
    for seed, result in zip(SEEDS, results, strict=True):
        assert differing(result, results[0]) == [], seed
        assert all(grad.isfinite().all() for grad in result), seed
    # The launches were worth it: no two alike, and CTAs did wait for each other, if in a stall-free schedule not in every one.
    assert len({launch.schedule for launch in launches}) == len(SEEDS)
    assert sum(launch.waits > 0 for launch in launches) >= len(SEEDS) / 2
    assert launches[0].programs == placed[1] * placed[2]


@pytest.mark.parametrize("mask", [FULL, pytest.param(CAUSAL, marks=pytest.mark.nightly)])
def test_chained_ends_with_any_number_of_resident_ctas(mask):
    args = arguments(1, 4, 100, 100, kv_heads=2)
    results = []
    with enabled(launch="chained"):
        function = compiled(backward(mask))
        for resident in (1, 3, None):
            with emulate(seed=1, resident=resident):
                results.append(function(*args))
            launch = last_launch()
            assert launch.programs == 8
            assert (launch.waits == 0) == (resident == 1)
    assert decisions()[-1].predicted_us > 0
    for result in results:
        assert differing(result, results[0]) == []


def test_grouped_needs_all_roles_of_a_head_resident():
    """Descending in two passes: a CTA's second chain must be waited for by the other's first one, which it waits for itself."""
    args = arguments(1, 1, 128, 128)
    with enabled(schedule="descending"):
        function = compiled(backward(CAUSAL))
        with emulate(sms=2):
            expected = function(*args)
        assert last_launch().programs == decisions()[-1].roles == 2
        with emulate(sms=2, resident=2):
            assert differing(function(*args), expected) == []
        with emulate(sms=2, resident=1), pytest.raises(DeadlockError) as error:
            function(*args)
    message = str(error.value)
    assert KERNEL in message
    assert "1 of 2 programs wait, 1 not started (resident=1)" in message
    assert "program 0 waits for semaphore +0: it is 1, wanted 3" in message


def test_semaphores_are_zeroed_at_every_launch():
    """Nothing but the generated code does it: all memory it allocates is full of garbage."""
    args = arguments(1, 2, 64, 96)
    with emulate():
        function = compiled(backward())
        first = function(*args)
        for _ in range(3):
            assert differing(function(*args), first) == []
    assert last_launch().satisfied + last_launch().waits == 2 * 4 * 3


@pytest.mark.parametrize("mask", [pytest.param(FULL, marks=pytest.mark.nightly), CAUSAL])
def test_bits_of_two_passes_depend_on_lengths_and_mask_alone(mask):
    """Not on the interleaving, nor on SMs, nor on the batch: all three guarantees."""
    args = arguments(3, 2, 100, 100)
    with enabled(template="two_pass", guarantee="batch"):
        function = compiled(backward(mask))
        with emulate():
            expected = function(*args)
        for seed in range(3):
            with emulate(seed=seed):
                assert differing(function(*args), expected) == []
        for sms in (1, 13):
            with emulate(sms=sms):
                assert differing(compiled(backward(mask))(*args), expected) == []
        with emulate():
            alone = compiled(backward(mask))(*(x[1:2] for x in args))
    assert differing(alone, [x[1:2] for x in expected]) == []
    assert_two_passes()
