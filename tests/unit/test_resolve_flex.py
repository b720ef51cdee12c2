"""FlexAttention in one pass, or by stock's kernel, where that is deterministic as well and expected to be faster."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dash_inductor.config import Config
from dash_inductor.decision import Declined, Kernel, LeftToStock, Stock
from dash_inductor.devices.target import Target
from dash_inductor.problem import BLOCK_MASK, Problem
from dash_inductor.resolve import Resolution, resolve
from dash_inductor.templates.tiles import tile

TARGETS = {"a100": Target("a100", 80, 108), "h100": Target("h100", 90, 132), "b200": Target("b200", 100, 148)}
EMULATED = Target("emulated", "emulated", 6)


def problem(mask: str = BLOCK_MASK, **others: Any) -> Problem:
    """Of one kv head, 4096 queries and keys: 32 chains, functions of 5 operations; under warn_only, where stock's is as it is."""
    block_size = (128, 128) if mask == BLOCK_MASK else None
    sizes = (1, 1, 1, 4096, 4096, 64, "bf16")
    return replace(Problem(mask, *sizes, block_size=block_size, mods=5, stock=Stock(Kernel.FLEX, strict=False)), **others)


def resolved(device: str = "h100", settings: dict[str, Any] | None = None, mask: str = BLOCK_MASK, **others: Any) -> Resolution:
    return resolve(problem(mask, **others), Config(**(settings or {})), TARGETS[device])


def taken(device: str = "h100", **sizes: Any) -> bool:
    """Whether stock is not expected to be faster."""
    try:
        return resolved(device, **sizes).template == "one_pass"
    except LeftToStock:
        return False


def least(device: str = "h100", **others: Any) -> int:
    """How many times the longest chain the work must be, as the reason says that a single chain gets."""
    with pytest.raises(LeftToStock, match=r"^few KV tiles: all the work is 1 times that of the longest chain") as refused:
        resolved(device, q_len=64, kv_len=64, **others)
    (number,) = re.findall(r"one pass needs (\d+) times to be as fast as stock's two passes, deterministic", str(refused.value))
    return int(number)


@pytest.mark.parametrize("mask", [BLOCK_MASK, "full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("device", TARGETS)
def test_from_so_many_chains_on(device, head_dim, mask):
    """Whether they are batch elements, kv heads or KV tiles, of which causal ones are half as long as the longest on average."""
    number, keys = least(device, head_dim=head_dim, mask=mask), tile(TARGETS[device].arch, "bf16", head_dim).block_n
    for chains in (number - 1, number, 10 * number):
        length = keys * (chains if mask == "full" else 2 * chains - 1)
        for many in ({"batch": chains}, {"heads": chains, "kv_heads": chains}, {"q_len": length, "kv_len": length}):
            sizes = {"q_len": keys, "kv_len": keys, "head_dim": head_dim, "mask": mask} | many
            if chains >= number:
                assert resolved(device, **sizes).template == "one_pass"
                continue
            with pytest.raises(LeftToStock, match=f" is {chains} times .* one pass needs {number} times"):
                resolved(device, **sizes)


@pytest.mark.parametrize("settings", [{"template": "one_pass"}, {"schedule": "descending"}], ids=str)
def test_who_asks_for_one_pass_gets_it(settings):
    assert not taken(q_len=64, kv_len=64)
    assert taken(settings=settings, q_len=64, kv_len=64)


@pytest.mark.parametrize("device", TARGETS)
def test_dearer_functions_need_fewer_chains(device):
    """Stock calls them twice for an element; one pass can do with half the CTAs, and no fewer."""
    numbers = [least(device, mods=mods) for mods in (0, 5, 20, 100, 10**6)]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == len(numbers)
    assert TARGETS[device].sms / 2 <= numbers[-1] <= TARGETS[device].sms / 2 + 1 and numbers[0] > TARGETS[device].sms / 2 + 1


@pytest.mark.parametrize("mask", [BLOCK_MASK, "full", "causal"])
@pytest.mark.parametrize("batch", [1, 2, 64])
def test_sizes_decide_nothing_under_device_and_batch(mask, batch):
    for guarantee in ("device", "batch"):
        assert resolved(settings={"guarantee": guarantee}, mask=mask, batch=batch).template == "one_pass"


def test_the_emulated_device_takes_one_pass():
    for sms in (1, 6, 132):
        assert resolve(problem(q_len=32, kv_len=32), Config(), replace(EMULATED, sms=sms)).template == "one_pass"


def test_a_larger_batch_never_loses_one_pass():
    answers = [taken(batch=batch) for batch in range(1, 9)]
    assert answers == sorted(answers) and set(answers) == {False, True}


@pytest.mark.parametrize("dims", [{"head_dim": 129}, {"value_dim": 256}])
@pytest.mark.parametrize("mask", [BLOCK_MASK, "causal"])
def test_large_head_dims_take_two_passes_whatever_the_sizes(dims: dict[str, int], mask: str) -> None:
    """As stock does, so that few of them are no reason to leave them."""
    for batch in (1, 64):
        for guarantee in ("run", "device", "batch"):
            assert resolved(settings={"guarantee": guarantee}, mask=mask, batch=batch, **dims).template == "two_pass"
    assert resolved(settings={"template": "two_pass"}, mask=mask).template == "two_pass"


@pytest.mark.parametrize("mask", [BLOCK_MASK, "causal"])
def test_the_gluon_kernel_takes_256_in_one_pass(mask: str) -> None:
    """But no other head dim above 128, which two passes have."""
    found = resolved(settings={"kernel": "gluon"}, mask=mask, head_dim=256, batch=64)
    assert (found.template, str(found.one_pass)) == ("one_pass", "64x64x256")
    with pytest.raises(Declined, match="takes head dim 64, 128 or 256, not 192"):
        resolved(settings={"kernel": "gluon"}, mask=mask, head_dim=192)


def test_an_sdpa_of_few_chains_is_never_left():
    """Without a mask: ours may have two passes."""
    assert resolved(mask="full", mods=None, stock=None).template in ("one_pass", "two_pass")


@pytest.mark.parametrize("length", [1000, 4096, 15_000, 16_384, 100_000])
def test_dynamic_shapes_guard(length):
    """A graph keeps the answer for the lengths that have the same one; others compile anew."""
    environment = ShapeEnv()
    tensor = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(1, length), static_shapes=False)
    answer = taken(q_len=tensor.shape[1], kv_len=tensor.shape[1])
    assert answer == taken(q_len=length, kv_len=length)
    (symbol,) = tensor.shape[1].node.expr.free_symbols
    last_of_stock = (2 * least() - 3) * 128  # the chains of a causal head are half as long on average
    assert taken(q_len=last_of_stock + 1, kv_len=last_of_stock + 1) and not taken(q_len=last_of_stock, kv_len=last_of_stock)
    for other in (129, 1000, 5000, 16_000, last_of_stock, last_of_stock + 1, 200_000):
        holds = all(bool(guard.expr.subs(symbol, other)) for guard in environment.guards)
        assert holds == (taken(q_len=other, kv_len=other) == answer)


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        ({"kernel": "gluon"}, {"changes_scores": True}, "the Gluon kernel takes no function of the scores"),
        (
            {"kernel": "gluon"},
            {"q_len": 1, "kv_len": 2**20, "masks": 2**7},
            "the Gluon kernel takes no mask of more than 8589934592",
        ),
        ({"schedule": "shift"}, {}, "schedule='shift' takes no BlockMask: its KV tiles are added in descending order"),
        (
            {"template": "one_pass"},
            {"head_dim": 129},
            "head dim 129 is more than the 128 of one pass, which template='one_pass' asks",
        ),
        ({"schedule": "descending"}, {"value_dim": 129}, "head dim 64/129 is more than the 128 of one pass, which schedule='desc"),
        ({}, {"head_dim": 257}, "head dim 257 is outside 1..256"),
        ({}, {"dtype": "fp32"}, "dtype fp32 is not one of bf16, fp16"),
        ({}, {"block_size": (128, 64)}, r"BLOCK_SIZE \(128, 64\) is no multiple of the tile's 128 x 128"),
        ({}, {"block_size": (32, 128)}, r"BLOCK_SIZE \(32, 128\) is no multiple of the tile's 64 x 128"),
        ({"template": "two_pass"}, {"block_size": (64, 128)}, r"BLOCK_SIZE \(64, 128\) is no multiple of the tile's 128 x 128"),
        ({"template": "two_pass"}, {"kv_len": 2**22 + 1}, "lengths S_q=4096, S_k=4194305 have too many blocks or tiles for a"),
        ({}, {"block_size": (64, 128), "q_len": 2**21 + 1}, "lengths S_q=2097153, S_k=4096 have too many blocks or tiles for a"),
        (
            {},
            {"masks": 1024, "q_len": 2**16 + 1, "kv_len": 2**16},
            "1024 masks of batch elements and heads have 268959744 blocks of 128",
        ),
        ({"schedule": "symmetric"}, {"mask": "full"}, "family 'symmetric' serves causal masks only"),
    ],
)
def test_refusals(settings, others, message):
    """They are no LeftToStock, which is nothing to warn of."""
    with pytest.raises(ValueError, match=message) as refused:
        resolved(settings=settings, batch=64, **others)
    assert not isinstance(refused.value, LeftToStock)


def test_as_many_blocks_as_may_be():
    """Of all masks: one for each of 64 batch elements and 16 heads."""
    assert resolved(batch=64, masks=1024, q_len=2**16, kv_len=2**16).template == "one_pass"
