"""Masked SDPA and packed sequences of few KV tiles: in one pass, in two, or by stock's kernel where that is deterministic.

Without the Gluon kernel, where tests say nothing else.
"""

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


def taken(
    kernel: Kernel,
    sizes: tuple[int, int, int, int],
    *,
    head_dim: int = 128,
    strict: bool = True,
    target: Target = TARGETS["h100"],
    gluon_fails: str = "is not there",
    **settings: Any,
) -> str:
    """The template of (batch, query heads, kv heads, length), or why it is left to stock's kernel."""
    batch, heads, kv_heads, length = sizes
    lengths, stock = (length, length, head_dim, "bf16"), Stock(kernel, strict)
    sizes = batch, heads, kv_heads, *lengths
    problem = Problem(BLOCK_MASK, *sizes, block_size=(128, 128), stock=stock, gluon_fails=gluon_fails)
    try:
        return resolve(problem, Config(**settings), target).template.value
    except LeftToStock as reason:
        assert reason.remedy == "none needed: template='one_pass' or guarantee='device' takes ours all the same"
        return str(reason)


OF_7B = (1, 32, 4, 2048)
FALCON = (1, 71, 1, 2048)


@pytest.mark.parametrize(
    ("kernel", "sizes", "head_dim", "expected"),
    [
        # Two passes are faster than one at head dim 128, by price.
        (Kernel.FLASH, OF_7B, 128, "two_pass"),
        (Kernel.FLASH, (8, 32, 32, 8192), 128, "two_pass"),
        (Kernel.EFFICIENT, OF_7B, 128, "two_pass"),
        # At 64 they are if chains are few: a head of 16 KV tiles is 9 of its longest chain, rounded up.
        (Kernel.FLASH, OF_7B, 64, "two_pass"),
        (Kernel.FLASH, (4, 32, 4, 2048), 64, "one_pass"),
        (Kernel.EFFICIENT, FALCON, 64, "two_pass"),
        (Kernel.EFFICIENT, (16, 71, 1, 2048), 64, "one_pass"),
    ],
)
def test_in_strict_mode(kernel, sizes, head_dim, expected):
    assert taken(kernel, sizes, head_dim=head_dim) == expected


RESERVED = Target("h100", 90, 128, reserved_sms=4)  # which two passes would take


@pytest.mark.parametrize(
    ("kernel", "sizes", "head_dim", "times"),
    [
        # Flash attention's strict kernel keeps all SMs busy.
        (Kernel.FLASH, OF_7B, 128, (36, 63)),
        (Kernel.FLASH, (1, 32, 4, 512), 128, (12, 63)),
        (Kernel.FLASH, (1, 32, 8, 2048), 128, None),
        (Kernel.FLASH, (2, 32, 4, 2048), 128, None),
        (Kernel.FLASH, (1, 4, 4, 2048), 128, None),  # its shortest CTA takes longer than our longest chain
        (Kernel.FLASH, (1, 8, 4, 2048), 128, (36, 63)),
        (Kernel.FLASH, (1, 4, 4, 2048), 64, None),
        # The memory-efficient one has a CTA for each query head, which is rarely enough.
        (Kernel.EFFICIENT, OF_7B, 128, None),
        (Kernel.EFFICIENT, (1, 32, 4, 512), 128, None),
        (Kernel.EFFICIENT, FALCON, 64, (9, 34)),  # Falcon-7B
        (Kernel.EFFICIENT, (1, 71, 1, 8192), 64, None),
        (Kernel.EFFICIENT, (4, 71, 1, 2048), 64, None),
        (Kernel.EFFICIENT, (1, 32, 1, 512), 64, (3, 34)),
    ],
)
def test_where_two_passes_may_not_be_taken(kernel, sizes, head_dim, times):
    said = taken(kernel, sizes, head_dim=head_dim, target=RESERVED)
    if times is None:
        assert said == "one_pass"
        return
    few = f"few KV tiles: one pass has work for {times[0]} CTAs, and needs work for {times[1]} to be as fast as stock's kernel, "
    assert said.startswith(f"{few}deterministic too: ")


def test_the_gluon_kernel_needs_as_much_work_beside_fewer_kernels():
    """111 chains of 132 SMs, by prices: 3 batch elements have 108, and 4 have 144."""
    assert [taken(Kernel.FLASH, (b, 32, 4, 2048), gluon_fails="") for b in (3, 4)] == ["two_pass", "one_pass"]
    assert taken(Kernel.FLASH, (1, 32, 4, 512), target=RESERVED, gluon_fails="").startswith(
        "few KV tiles: one pass has work for 12 CTAs"
    )


@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_few_chains_of_short_sequences_stay_with_gluon(length):
    """Of 20 heads: two passes share their work better, and begin and end more CTAs. Of 4 heads they are faster."""
    assert taken(Kernel.FLASH, (1, 20, 20, length), gluon_fails="") == "one_pass"
    assert taken(Kernel.FLASH, (1, 4, 4, length), gluon_fails="") == "two_pass"


STOCKS = [(Kernel.FLASH, OF_7B), (Kernel.EFFICIENT, (1, 71, 1, 1024)), (Kernel.FLEX, OF_7B)]


@pytest.mark.parametrize(("kernel", "sizes"), STOCKS)
def test_speed_leaves_nothing_to_a_kernel_that_is_not_deterministic(kernel, sizes):
    """Under warn_only FlexAttention's alone is."""
    assert "deterministic too" in taken(kernel, sizes, head_dim=64, target=RESERVED)
    said = taken(kernel, sizes, head_dim=64, target=RESERVED, strict=False)
    assert "deterministic too" in said if kernel == Kernel.FLEX else said == "one_pass"


@pytest.mark.parametrize(("kernel", "sizes"), STOCKS)
@pytest.mark.parametrize(
    "settings", [{"guarantee": "device"}, {"guarantee": "batch"}, {"template": "one_pass"}, {"schedule": "descending"}], ids=str
)
def test_who_asks_for_ours_gets_it(kernel, sizes, settings):
    for target in (TARGETS["h100"], RESERVED):
        assert taken(kernel, sizes, head_dim=64, target=target) != "one_pass"
        assert taken(kernel, sizes, head_dim=64, target=target, **settings) == "one_pass"


@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("device", [*TARGETS, "reserved"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_of_it_never_loses_one_pass(kernel, device, head_dim):
    """Batch elements, and keys."""
    target = TARGETS.get(device, RESERVED)
    for many in ([(b, 16, 1, 1024) for b in range(1, 65)], [(1, 64, 2, 128 * tiles) for tiles in range(1, 302, 4)]):
        answers = [taken(kernel, sizes, head_dim=head_dim, target=target) for sizes in many]
        ones = [answer == "one_pass" for answer in answers]
        others = "two_pass", "stock's kernel, deterministic too, is faster"
        assert ones == sorted(ones) and (ones[-1] or answers[-1].startswith(others))


def test_one_ctas_worth_of_a_head_is_no_faster_than_its_share():
    """Of the memory-efficient kernel; of flash attention's, whose CTAs share a head, `shared` has their imbalance in it."""
    for (kernel, *_), cost in COSTS.items():
        assert (cost.chain >= cost.shared) == (kernel == Kernel.EFFICIENT) and cost.shared > 90
