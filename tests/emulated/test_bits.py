"""The same bits, however the CTAs of a launch interleave; and what a launch needs in order to end."""

import pytest
import torch
from attention import OP, TILE, compiled, normal

import dash_inductor
from dash_inductor import emulation, enabled
from dash_inductor.emulation import emulate
from dash_inductor.emulation.deadlock import DeadlockError
from dash_inductor.schedule import Geometry, place_heads

pytestmark = pytest.mark.usefixtures("rewriting")

SEEDS = range(20)
KERNEL = "sdpa_backward"
FULL, CAUSAL = "full", "causal"


def arguments(batch, heads, q_len, kv_len, head_dim=16, kv_heads=None):
    """Inputs of the op with a consistent out and lse."""
    kv_heads = kv_heads or heads
    grad_out, query = (normal(batch, heads, q_len, head_dim, seed=seed) for seed in (0, 1))
    key, value = (normal(batch, kv_heads, kv_len, head_dim, seed=seed) for seed in (2, 3))
    return [grad_out, query, key, value, normal(batch, heads, q_len, head_dim, seed=4), normal(batch, heads, q_len, seed=5) + 5]


def last_launch():
    launch = emulation.launches()[-1]
    assert KERNEL in launch.kernel
    return launch


@pytest.mark.parametrize(
    ("settings", "mask", "sizes", "sms", "placed"),
    [
        # sizes: batch, heads, kv heads, S_q, S_k; placed: family, roles, heads in flight, passes
        ({"schedule": "ascending"}, FULL, (1, 2, 2, 64, 96), 4, ("ascending", 2, 2, 2)),
        ({"schedule": "descending"}, FULL, (1, 4, 2, 33, 96), 4, ("descending", 2, 2, 2)),
        ({"schedule": "descending"}, CAUSAL, (1, 2, 2, 128, 128), 4, ("descending", 2, 2, 2)),
        ({"schedule": "shift"}, FULL, (2, 1, 1, 48, 130), 6, ("shift", 3, 2, 2)),
        ({"schedule": "symmetric"}, CAUSAL, (1, 1, 1, 150, 150), 2, ("symmetric", 2, 1, 2)),
        ({"schedule": "symmetric"}, CAUSAL, (1, 3, 3, 90, 90), 6, ("symmetric", 2, 3, 1)),
        ({"schedule": "shift_round_robin"}, FULL, (1, 4, 2, 80, 130), 4, ("shift_round_robin", 4, 1, 2)),
        ({"schedule": "symmetric_round_robin"}, CAUSAL, (1, 3, 3, 150, 150), 4, ("symmetric_round_robin", 4, 1, 1)),
        ({"schedule": "searched"}, FULL, (1, 4, 2, 53, 130), 3, ("searched", 3, 1, 2)),
        ({"schedule": "searched"}, CAUSAL, (1, 3, 3, 130, 130), 6, ("searched", 2, 3, 3)),
        ({"launch": "chained", "schedule": "ascending"}, FULL, (1, 2, 2, 64, 96), 6, ("ascending", 3, 2, 1)),
        ({"launch": "chained", "schedule": "descending"}, CAUSAL, (1, 2, 2, 100, 100), 6, ("descending", 4, 2, 1)),
    ],
)
def test_bits_do_not_depend_on_the_interleaving(settings, mask, sizes, sms, placed):
    batch, heads, kv_heads, q_len, kv_len = sizes
    args = arguments(batch, heads, q_len, kv_len, kv_heads=kv_heads)
    results, launches = [], []
    with enabled(**settings):
        function = compiled(lambda *args: OP(*args, mask=mask))
        for seed in SEEDS:
            with emulate(seed=seed, sms=sms):
                results.append(function(*args))
            launches.append(last_launch())
    decision = dash_inductor.decisions()[-1]
    geometry = Geometry(q_len, kv_len, TILE.block_m, TILE.block_n, mask)
    heads_in_flight = decision.heads_in_flight
    passes = place_heads(
        decision.family, geometry, decision.roles, heads=batch * kv_heads, heads_in_flight=heads_in_flight
    ).order.passes
    assert (decision.family, decision.roles, decision.heads_in_flight, passes) == placed
    for seed, result in zip(SEEDS, results, strict=True):
        for name, grad, first in zip(("dq", "dk", "dv"), result, results[0], strict=True):
            assert torch.equal(grad, first), f"{name} of seed {seed}"
            assert grad.isfinite().all()
    # The launches were worth it: no two alike, and CTAs did wait for each other, if in a stall-free schedule not in every one.
    assert len({launch.schedule for launch in launches}) == len(SEEDS)
    assert sum(launch.waits > 0 for launch in launches) >= len(SEEDS) / 2
    assert launches[0].programs == placed[1] * placed[2]


@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_chained_ends_with_any_number_of_resident_ctas(mask):
    args = arguments(1, 4, 100, 100, kv_heads=2)
    results = []
    with enabled(launch="chained"):
        function = compiled(lambda *args: OP(*args, mask=mask))
        for resident in (1, 2, 3, 5, None):
            with emulate(seed=1, resident=resident):
                results.append(function(*args))
            launch = last_launch()
            assert launch.programs == 8
            assert (launch.waits == 0) == (resident == 1)
    assert dash_inductor.decisions()[-1].predicted_us > 0
    for result in results:
        assert all(torch.equal(grad, first) for grad, first in zip(result, results[0], strict=True))


def test_grouped_needs_all_roles_of_a_head_resident():
    """Descending in two passes: a CTA's second chain must be waited for by the other's first one, which it waits for itself."""
    args = arguments(1, 1, 128, 128)
    with enabled(schedule="descending"):
        function = compiled(lambda *args: OP(*args, mask=CAUSAL))
        with emulate(sms=2):
            expected = function(*args)
        assert last_launch().programs == dash_inductor.decisions()[-1].roles == 2
        with emulate(sms=2, resident=2):
            assert all(torch.equal(grad, first) for grad, first in zip(function(*args), expected, strict=True))
        with emulate(sms=2, resident=1), pytest.raises(DeadlockError) as error:
            function(*args)
    message = str(error.value)
    assert KERNEL in message
    assert "1 of 2 programs wait, 1 not started (resident=1)" in message
    assert "program 0 waits for semaphore +0: it is 1, wanted 3; program 1 would release it (not started)" in message


def test_semaphores_are_zeroed_at_every_launch():
    """Nothing but the generated code does it: all memory it allocates is full of garbage."""
    args = arguments(1, 2, 64, 96)
    with emulate():
        function = compiled(lambda *args: OP(*args, mask=FULL))
        first = function(*args)
        for _ in range(3):
            assert all(torch.equal(grad, same) for grad, same in zip(function(*args), first, strict=True))
    assert last_launch().satisfied + last_launch().waits == 2 * 4 * 3
