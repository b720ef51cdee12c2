"""Masked SDPA and packed sequences of few KV tiles: in one pass, or by stock's kernel where strict mode makes it deterministic."""

from __future__ import annotations

from typing import Any

import pytest

from dash_inductor.config import Config
from dash_inductor.decision import Kernel, LeftToStock, Stock
from dash_inductor.devices.stock_kernels import COSTS
from dash_inductor.devices.target import Target
from dash_inductor.problem import BLOCK_MASK, Problem
from dash_inductor.resolve import resolve

TARGETS = {"a100": Target("a100", 80, 108), "h100": Target("h100", 90, 132), "b200": Target("b200", 100, 148)}
EMULATED = Target("emulated", "emulated", 6)


def left(
    kernel: Kernel,
    sizes: tuple[int, int, int, int],
    *,
    head_dim: int = 128,
    strict: bool = True,
    target: Target = TARGETS["h100"],
    **settings: Any,
) -> str | None:
    """Why stock's kernel is taken of (batch, query heads, kv heads, length); None where ours is."""
    batch, heads, kv_heads, length = sizes
    lengths, stock = (length, length, head_dim, "bf16"), Stock(kernel, strict)
    problem = Problem(BLOCK_MASK, batch, heads, kv_heads, *lengths, block_size=(128, 128), stock=stock)
    try:
        assert resolve(problem, Config(**settings), target).template == "one_pass"
    except LeftToStock as reason:
        assert reason.remedy == "none needed: template='one_pass' or guarantee='device' takes ours all the same"
        return str(reason)
    return None


OF_7B = (1, 32, 4, 2048)


@pytest.mark.parametrize(
    ("kernel", "sizes", "head_dim", "times"),
    [
        # Flash attention's strict kernel keeps all SMs busy. A head of 16 KV tiles is 9 of its longest chain, rounded up.
        (Kernel.FLASH, OF_7B, 128, (36, 45)),
        (Kernel.FLASH, (1, 32, 4, 512), 128, (12, 45)),
        (Kernel.FLASH, (1, 32, 8, 2048), 128, None),
        (Kernel.FLASH, (1, 32, 8, 2048), 64, None),
        (Kernel.FLASH, (2, 32, 4, 2048), 128, None),
        (Kernel.FLASH, (1, 4, 4, 2048), 128, None),  # its shortest CTA takes longer than our longest chain
        (Kernel.FLASH, (1, 8, 4, 2048), 128, (36, 45)),
        (Kernel.FLASH, (1, 4, 4, 2048), 64, None),
        # The memory-efficient one has a CTA for each query head, which is rarely enough.
        (Kernel.EFFICIENT, OF_7B, 128, None),
        (Kernel.EFFICIENT, (1, 32, 4, 512), 128, None),
        (Kernel.EFFICIENT, (1, 71, 1, 2048), 64, (9, 29)),  # Falcon-7B
        (Kernel.EFFICIENT, (1, 71, 1, 4096), 64, None),
        (Kernel.EFFICIENT, (4, 71, 1, 2048), 64, None),
        (Kernel.EFFICIENT, (1, 32, 1, 512), 64, (3, 29)),
    ],
)
def test_in_strict_mode(kernel, sizes, head_dim, times):
    said = left(kernel, sizes, head_dim=head_dim)
    assert said == (
        times
        and f"few KV tiles: all the work is {times[0]} times that of the longest chain, and one pass needs {times[1]} times to be "
        "as fast as stock's kernel in strict mode, deterministic too"
    )


STOCKS = [(Kernel.FLASH, OF_7B), (Kernel.EFFICIENT, (1, 71, 1, 1024)), (Kernel.FLEX, OF_7B)]


@pytest.mark.parametrize(("kernel", "sizes"), STOCKS)
@pytest.mark.parametrize("device", ["a100", "h100"])
def test_speed_leaves_nothing_to_a_kernel_that_is_not_deterministic(kernel, sizes, device):
    """Under warn_only FlexAttention's alone is."""
    assert left(kernel, sizes, head_dim=64, target=TARGETS[device])
    assert bool(left(kernel, sizes, head_dim=64, target=TARGETS[device], strict=False)) == (kernel == Kernel.FLEX)


@pytest.mark.parametrize(("kernel", "sizes"), STOCKS)
@pytest.mark.parametrize(
    "settings", [{"guarantee": "device"}, {"guarantee": "batch"}, {"template": "one_pass"}, {"schedule": "descending"}], ids=str
)
def test_who_asks_for_ours_gets_it(kernel, sizes, settings):
    assert left(kernel, sizes, head_dim=64) and left(kernel, sizes, head_dim=64, **settings) is None


@pytest.mark.parametrize(("kernel", "sizes"), STOCKS)
def test_the_emulated_device_takes_ours(kernel, sizes):
    assert left(kernel, sizes, target=EMULATED) is None


@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("device", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_of_it_never_loses_ours(kernel, device, head_dim):
    """Batch elements, and keys."""
    for many in ([(b, 16, 1, 1024) for b in range(1, 65)], [(1, 64, 2, 128 * tiles) for tiles in range(1, 302, 4)]):
        taken = [left(kernel, sizes, head_dim=head_dim, target=TARGETS[device]) is None for sizes in many]
        assert taken == sorted(taken) and taken[-1]


def test_one_ctas_worth_of_a_head_is_no_faster_than_its_share():
    """Of the memory-efficient kernel; of flash attention's, whose CTAs share a head, `shared` has their imbalance in it."""
    for (kernel, *_), cost in COSTS.items():
        assert (cost.chain >= cost.shared) == (kernel == Kernel.EFFICIENT) and cost.shared > 90
