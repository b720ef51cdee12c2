"""FlexAttention in one pass, or by stock's kernel, where that is deterministic as well and expected to be faster.

In one pass of Triton's, but where tests say GLUON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dash_inductor.config import Config
from dash_inductor.decision import Declined, Kernel, LeftToStock, Stock
from dash_inductor.devices.target import Target
from dash_inductor.dropout import FLASH, Dropout
from dash_inductor.problem import BLOCK_MASK, Problem
from dash_inductor.resolve import Resolution, resolve
from dash_inductor.templates.tiles import tile

TARGETS = {"a100": Target("a100", 80, 108), "h100": Target("h100", 90, 132), "b200": Target("b200", 100, 148)}
EMULATED = Target("emulated", "emulated", 6)
GLUON: dict[str, Any] = {"gluon_fails": ""}


def problem(mask: str = BLOCK_MASK, **others: Any) -> Problem:
    """Of one kv head, 4096 queries and keys: 32 chains, functions of 5 operations; under warn_only, where stock's is as it is."""
    block_size = (128, 128) if mask == BLOCK_MASK else None
    sizes = (1, 1, 1, 4096, 4096, 64, "bf16")
    return replace(
        Problem(mask, *sizes, block_size=block_size, is_flex=True, function_ops=5, stock=Stock(Kernel.FLEX, strict=False)),
        **{"gluon_fails": "is not there"} | others,
    )


def resolved(device: str = "h100", settings: dict[str, Any] | None = None, mask: str = BLOCK_MASK, **others: Any) -> Resolution:
    return resolve(problem(mask, **others), Config(**(settings or {})), TARGETS[device])


def answer(device: str = "h100", **sizes: Any) -> str | None:
    """The template; None where stock's kernel is left to it."""
    try:
        return resolved(device, **sizes).template.value
    except LeftToStock:
        return None


# With many chains these take one pass. With few an H100 takes two passes under a full mask, where they are faster than stock's by
# price, and else keeps stock's. Of stock's on a B200 there is no figure: it is priced as our own two passes, and keeps them.
FEW: dict[tuple[str, int], dict[str, str]] = {("h100", 64): {"full": "two_pass"}, ("b200", 64): {}}


LONG = 8192  # queries, of which a chain takes longer than launches do


@pytest.mark.parametrize("mask", [BLOCK_MASK, "full", "causal"])
@pytest.mark.parametrize(("device", "head_dim"), FEW)
def test_from_so_many_chains_on(device, head_dim, mask):
    """Whether they are of batch elements, of kv heads or of KV tiles. Fewer get two passes, or stock's kernel."""
    keys = tile(TARGETS[device].arch, "bf16", head_dim).block_n
    sizes = {"device": device, "head_dim": head_dim, "mask": mask, "dtype": "fp16", "q_len": LONG}
    sizes["kv_len"] = LONG if mask == "causal" else keys
    assert answer(**sizes) == FEW[device, head_dim].get(mask)
    ways: list[Callable[[int], dict[str, int]]] = [lambda many: {"batch": many}, lambda many: {"heads": many, "kv_heads": many}]
    if mask != "causal":
        ways.append(lambda many: {"kv_len": keys * many})
    by_way = [[answer(**sizes | way(many)) for many in range(1, 400)] for way in ways]
    assert by_way[0] == by_way[1]
    for answers in by_way:
        least = answers.index("one_pass")
        assert set(answers[:least]) <= {answer(**sizes), "two_pass"} and set(answers[least:]) == {"one_pass"}


def test_the_reason_why_few_chains_are_left():
    with pytest.raises(LeftToStock) as refused:
        resolved("b200", q_len=64, kv_len=64)
    (prices,) = re.findall(r"TFLOPS, ([^;]+); ours", str(refused.value))
    assert prices == "as our own two passes, for want of a figure" and refused.value.remedy.startswith("none needed: ")
    (number,) = map(int, re.findall(r"one pass has work for 1 CTAs, and needs work for (\d+) to be as fast", str(refused.value)))
    assert [answer("b200", q_len=64, kv_len=64, batch=batch) is None for batch in (number - 1, number)] == [True, False]


@pytest.mark.parametrize("settings", [{"template": "one_pass"}, {"schedule": "descending"}, {"kernel": "triton"}], ids=str)
@pytest.mark.parametrize("device", ["h100", "b200"])
def test_who_asks_for_one_pass_gets_it(settings, device):
    assert answer(device, q_len=64, kv_len=64) != "one_pass"
    assert answer(device, settings=settings, q_len=64, kv_len=64) == "one_pass"


def test_sms_that_are_reserved_are_not_taken_by_two_passes():
    """So that stock's kernel keeps few chains, and what one pass is slower for."""
    target, alibi = replace(TARGETS["h100"], sms=128, reserved_sms=4), problem("full", batch=64, head_dim=128, changes_scores=True)
    assert resolve(alibi, Config(), TARGETS["h100"]).template == "two_pass"
    with pytest.raises(LeftToStock, match=r"^stock's kernel, deterministic too, is faster: 422 TFLOPS, measured on an H200"):
        resolve(alibi, Config(), target)
    with pytest.raises(LeftToStock, match="few KV tiles"):
        resolve(problem(q_len=64, kv_len=64), Config(), target)
    assert resolve(problem(batch=64), Config(), target).template == "one_pass"


@pytest.mark.parametrize(
    ("device", "others", "expected"),
    [
        ("h100", {"head_dim": 128}, "two_pass"),
        ("h100", {"head_dim": 64}, "one_pass"),
        ("h100", {"head_dim": 32}, "one_pass"),
        (
            "h100",
            {"head_dim": 64, "changes_scores": True, "function_ops": 10},
            "two_pass",
        ),  # its tile of one pass is the smaller one
        ("h100", {"head_dim": 128, "segments": 2}, "one_pass"),  # which two passes do not have
        ("a100", {"head_dim": 64}, "two_pass"),
        ("b200", {"head_dim": 64}, "one_pass"),
    ],
)
def test_who_takes_two_passes(device, others, expected):
    """By price, at the level run, whatever the sizes if there are many chains."""
    assert answer(device, batch=64, **others) == expected
    assert answer(device, batch=64, q_len=100_000, stock=None, **others) == expected
    assert answer(device, batch=64, settings={"guarantee": "device"}, **others) == "one_pass"


def test_blocks_that_are_no_tiles_of_two_passes():
    """One pass takes them."""
    assert answer(batch=64, head_dim=128) == "two_pass" and answer(batch=64, head_dim=128, block_size=(64, 128)) == "one_pass"


@pytest.mark.parametrize("mask", [BLOCK_MASK, "full", "causal"])
@pytest.mark.parametrize("batch", [1, 2, 64])
def test_sizes_decide_nothing_under_device_and_batch(mask, batch):
    for guarantee in ("device", "batch"):
        assert resolved(settings={"guarantee": guarantee}, mask=mask, batch=batch).template == "one_pass"


def test_the_emulated_device_takes_one_pass():
    for sms in (1, 6, 132):
        assert resolve(problem(q_len=32, kv_len=32), Config(), replace(EMULATED, sms=sms)).template == "one_pass"


@pytest.mark.parametrize("device", ["h100", "b200"])
def test_a_larger_batch_never_loses_one_pass(device):
    answers = [answer(device, batch=batch) == "one_pass" for batch in range(1, 12)]
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
    """And other head dims above 128, in tiles of as many columns."""
    assert str(resolved(mask=mask, head_dim=136, batch=64, **GLUON).one_pass) == "64x64x256"
    found = resolved(mask=mask, head_dim=256, batch=64, **GLUON)
    assert (found.template, found.kernel, str(found.one_pass)) == ("one_pass", "gluon", "64x64x256")
    with pytest.raises(Declined, match="takes head dims of a multiple of 8, from 16 to 256, not 190"):
        resolved(settings={"kernel": "gluon"}, mask=mask, head_dim=190, **GLUON)


@pytest.mark.parametrize(("trained", "kernel"), [(False, "gluon"), (True, "triton")])
def test_auto_leaves_gradients_of_captured_tensors_to_triton(trained: bool, kernel: str) -> None:
    """Unless the Gluon kernel is asked for."""
    found = {asked: resolved(settings={"kernel": asked}, batch=64, trains_captures=trained, **GLUON) for asked in ("auto", "gluon")}
    assert {asked: each.kernel for asked, each in found.items()} == {"auto": kernel, "gluon": "gluon"}
    assert found["gluon"].row_copies == 4 + trained  # each partition has rows of its own


@pytest.mark.parametrize(
    ("settings", "few", "many"),
    [
        ({"guarantee": "batch"}, {"masks": 1}, {"masks": 2**13}),
        ({"segment": 2**17}, {"q_len": 2**17, "segments": 1}, {"q_len": 2**20, "segments": 8}),
    ],
)
def test_neither_the_batch_nor_ranks_decide_the_kernel(settings: dict[str, Any], few: Any, many: Any) -> None:
    """Of masks whose bits have no room at once; without the promise the many would take the Triton kernel."""
    sizes = {"head_dim": 64, "kv_len": 2**20, **GLUON}
    one, other = (resolved(settings=settings, **sizes | {"q_len": 1} | each) for each in (few, many))
    assert one.kernel == other.kernel == "gluon" and other.slices > one.slices
    without = {name: value for name, value in many.items() if name != "segments"}
    assert resolved(**sizes | {"q_len": 1} | without).kernel == "triton"


def test_an_sdpa_of_few_chains_is_never_left():
    """Without a mask: ours may have two passes."""
    assert resolved(mask="full", is_flex=False, function_ops=0, stock=None).template in ("one_pass", "two_pass")


@pytest.mark.parametrize("device", ["h100", "b200"])
@pytest.mark.parametrize("length", [1000, 4096, 15_000, 18_000, 100_000])
def test_dynamic_shapes_guard(device, length):
    """A graph keeps the answer for the lengths that have the same one; others compile anew."""
    environment = ShapeEnv()
    tensor = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(1, length), static_shapes=False)
    found = answer(device, q_len=tensor.shape[1], kv_len=tensor.shape[1])
    assert found == answer(device, q_len=length, kv_len=length)
    (symbol,) = tensor.shape[1].node.expr.free_symbols
    last = max(tiles * 128 for tiles in range(1, 400) if answer(device, q_len=tiles * 128, kv_len=tiles * 128) != "one_pass")
    assert answer(device, q_len=last + 1, kv_len=last + 1) == "one_pass" != answer(device, q_len=last, kv_len=last)
    for other in (129, 1000, 5000, 16_000, last, last + 1, 200_000):
        holds = all(bool(guard.expr.subs(symbol, other)) for guard in environment.guards)
        assert holds == (answer(device, q_len=other, kv_len=other) == found)


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        (
            {"kernel": "gluon"},
            {"trains_captures": True, "head_dim": 136, **GLUON},
            "takes no gradient of a captured tensor at head dims above 128, where no shared memory is left",
        ),
        (
            {"kernel": "gluon"},
            {"trains_captures": True, "kv_len": 4100, **GLUON},
            "takes no gradient of a captured tensor with S_k=4100, which is no multiple of 8",
        ),
        ({"kernel": "gluon"}, {}, "the Gluon kernel is not there"),
        (
            {"kernel": "gluon"},
            {"q_len": 1, "kv_len": 2**20, "masks": 2**13, **GLUON},
            "the Gluon kernel takes no masks of more than 549755813888",
        ),
        (
            {"kernel": "gluon"},
            {"dropout": Dropout(0.1, FLASH), "changes_scores": True, **GLUON},
            "the Gluon kernel takes no dropout beside a function of the scores",
        ),
        (
            {"kernel": "gluon"},
            {"dropout": Dropout(0.1, FLASH), "mask": "full", "q_len": 2**16 + 1, "kv_len": 2**16, **GLUON},
            "the Gluon kernel takes no dropout of more than 4294967296 scores of a kv head",
        ),
        (
            {"kernel": "gluon"},
            {"dropout": Dropout(0.1, FLASH), "masks": 64, "q_len": 2**13 + 1, "kv_len": 2**13, **GLUON},
            "the Gluon kernel takes no dropout of more than 4294967296 scores under masks of heads or batch elements",
        ),
        (
            {"kernel": "gluon"},
            {"dropout": Dropout(0.1, FLASH), "segments": 2, "q_len": 2**13 + 1, "kv_len": 2**13, **GLUON},
            "the Gluon kernel takes no dropout of more than 4294967296 scores in segments",
        ),
        (
            {"kernel": "gluon", "guarantee": "batch"},
            {"dropout": Dropout(0.1, FLASH), "mask": "full", **GLUON},
            "the Gluon kernel takes no dropout at guarantee='batch'",
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


DROPS: dict[str, Any] = {"dropout": Dropout(0.1, FLASH), "mask": "full", "is_flex": False, "stock": None, **GLUON}


@pytest.mark.parametrize(
    ("guarantee", "q_len", "kernel", "turns"),
    [("run", 2**13, "gluon", 1), ("run", 2**13 + 1, "gluon", 2), ("batch", 2**13, "triton", 1)],
)
def test_as_many_bits_of_dropout_as_may_be(guarantee, q_len, kernel, turns):
    """Of all heads of a launch, so no batch size decides at the level that has the same bits for each."""
    found = resolved(settings={"guarantee": guarantee}, batch=64, q_len=q_len, kv_len=2**13, **DROPS)
    assert (found.kernel, found.turns) == (kernel, turns)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "turn"),
    [
        (64, 4, 2, 2**13, (16, 4, 2)),
        (7, 32, 32, 2**13, (1, 32, 32)),  # there is room for two, but seven is a prime number
        (2, 12, 6, 2**14, (1, 12, 6)),
        (2, 12, 6, 2**15, (1, 4, 2)),
        (1, 12, 4, 2**15, (1, 3, 1)),
    ],
)
def test_turns_are_of_batch_elements_or_of_kv_heads_of_one(batch, heads, kv_heads, length, turn):
    """A launch is planned for one of them, and the time is that of all."""
    found = resolved(batch=batch, heads=heads, kv_heads=kv_heads, q_len=length, kv_len=length, **DROPS)
    assert (found.kernel, (found.turn.batch, found.turn.heads, found.turn.kv_heads)) == ("gluon", turn)
    assert found.turns == batch * heads // (found.turn.batch * found.turn.heads) > 1
    of_one = resolve(found.turn, found.settings, found.target)
    assert found.schedule == (of_one.schedule[0], found.turns * of_one.schedule[1])


def test_turns_that_leave_half_of_the_sms_idle_are_not_taken():
    """Each would have 64 chains. Under `device` the number of SMs does not decide."""
    sizes = {"heads": 28, "kv_heads": 4, "q_len": 2**16, "kv_len": 2**13}
    assert resolved(**sizes, **DROPS).kernel == "triton"
    for settings in ({"kernel": "gluon"}, {"guarantee": "device"}):
        assert resolved(settings=settings, **sizes, **DROPS).turns == 4


def test_sizes_that_are_symbols_take_no_turns():
    tensor = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(64, 2), static_shapes=False)
    reason = problem(batch=tensor.shape[0], q_len=2**13 + 1, kv_len=2**13, **DROPS).why_no_gluon(Config())
    assert reason and "no dropout of more than 4294967296 scores with sizes that are symbols" in str(reason)
