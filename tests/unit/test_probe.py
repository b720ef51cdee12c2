"""The probe, of ops that are right and of ones that are off; of the real ones tests/emulated and tests/gpu ask."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dash_inductor.devices import target
from dash_inductor.rewrite import probe
from dash_inductor.rewrite.probe import CAUSAL, FULL, KINDS, MASKED, TOP_LEFT

CPU = torch.device("cpu")
EFFICIENT, CUDNN, *_ = probe.FORWARDS
INF, NAN = math.inf, math.nan


def op(
    *,
    multiple=32,
    base=math.e,
    bottom_right=False,
    extra=0,
    off=0.0,
    without_keys=(0.0, 0.0),
    ignores_mask=False,
    dtype=torch.float32,
):
    """A forward by its definition. multiple: of which the length of logsumexp is, None for [B, H, S_q, 1]; extra: keys that its
    causal mask shows too many; off: of logsumexp; without_keys: its logsumexp and out there."""

    def forward(query, key, value, bias, compute_log_sumexp, dropout_p, is_causal):
        assert compute_log_sumexp and dropout_p == 0
        scores = query.double() @ key.double().mT / math.sqrt(query.shape[3])
        q_len, kv_len = scores.shape[2:]
        if is_causal:
            diagonal = extra + (kv_len - q_len if bottom_right else 0)
            scores.masked_fill_(~torch.ones(q_len, kv_len, dtype=torch.bool).tril(diagonal), -INF)
        if bias is not None and not ignores_mask:
            scores += bias.double()
        rows = (scores != -INF).any(-1)
        lse = (scores.logsumexp(-1) / math.log(base) + off).where(rows, without_keys[0])
        out = (scores.softmax(-1) @ value.double()).where(rows[..., None], without_keys[1])
        lse = lse[..., None] if multiple is None else torch.nn.functional.pad(lse, (0, -q_len % multiple), value=INF)
        return out.to(query.dtype), lse.to(dtype), None

    return forward


def asked(forward, kind, dtype=torch.bfloat16, *, padded=True):
    return probe.probe(forward, kind, dtype, CPU, padded=padded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_ops_that_are_right(kind, dtype):
    assert asked(op(), kind, dtype) is None
    assert asked(op(multiple=None), kind, dtype, padded=False) is None


BASE, BOTTOM_RIGHT = "logsumexp is in base 2", "the causal mask is aligned to the bottom right"
SHAPE = "logsumexp is torch.float32 {}, not torch.float32 {}".format


@pytest.mark.parametrize(
    ("forward", "kind", "seen"),
    [
        *((op(base=2), kind, BASE) for kind in KINDS),
        *((op(off=0.02), kind, "logsumexp is off by 0.02") for kind in KINDS),
        *((op(multiple=1), kind, SHAPE([1, 2, 40], [1, 2, 64])) for kind in (FULL, TOP_LEFT, MASKED)),
        (op(multiple=16), CAUSAL, SHAPE([1, 2, 80], [1, 2, 96])),
        (op(multiple=None), FULL, SHAPE([1, 2, 40, 1], [1, 2, 64])),
        (op(dtype=torch.bfloat16), FULL, "logsumexp is torch.bfloat16 [1, 2, 64], not torch.float32 [1, 2, 64]"),
        (op(bottom_right=True), TOP_LEFT, BOTTOM_RIGHT),
        (op(bottom_right=True), CAUSAL, None),
        *((op(extra=n), kind, "logsumexp is off by ") for kind in (CAUSAL, TOP_LEFT) for n in (-1, 1)),
        (op(ignores_mask=True), MASKED, "logsumexp is off by "),
        (op(off=NAN), FULL, "logsumexp is off by nan"),
        # Rows that see no key
        *((op(without_keys=(value, 0.0)), MASKED, None) for value in (-INF, INF, NAN, -1e38)),
        *((op(without_keys=(0.0, value)), MASKED, "out is not finite") for value in (NAN, INF)),
    ],
)
def test_what_is_seen(forward, kind, seen):
    answer = asked(forward, kind)
    assert answer is None if seen is None else (answer or "").startswith(seen)


def test_an_op_that_raises():
    def refusing(*args):
        raise RuntimeError("no such engine\nand a trace")

    def full(*args):
        raise torch.OutOfMemoryError("not now")

    assert asked(refusing, TOP_LEFT) == "a top_left attention raises RuntimeError: no such engine"
    with pytest.raises(torch.OutOfMemoryError):
        asked(full, FULL)


@pytest.fixture
def here(monkeypatch):
    """The device is there, and its ops are off; returns how often they were asked."""
    counts = dict.fromkeys((EFFICIENT, CUDNN), 0)

    def counting(name, forward):
        def counted(*args):
            assert not torch.is_grad_enabled() and type(args[0]) is torch.Tensor
            counts[name] += 1
            torch.rand(3)
            return forward(*args)

        return counted

    forwards = {EFFICIENT: op(base=2), CUDNN: op(multiple=None)}
    monkeypatch.setattr(probe, "FORWARDS", {name: counting(name, forward) for name, forward in forwards.items()})
    monkeypatch.setattr(target, "is_there", lambda device: True)
    probe._probed_once.cache_clear()
    yield counts
    probe._probed_once.cache_clear()


def test_each_kind_is_asked_once(here):
    """Of real tensors, while others are fake; the user's random numbers stay."""
    state = torch.get_rng_state()
    with FakeTensorMode():
        for kind in (FULL, CAUSAL, FULL, FULL):
            probe.require(CUDNN, kind, "bfloat16", "cpu")
    assert here == {EFFICIENT: 0, CUDNN: 2}
    assert torch.equal(torch.get_rng_state(), state)


def test_generated_code_is_refused(here, monkeypatch):
    """Unless the device is not there."""
    with pytest.raises(RuntimeError, match=rf"in the place of {EFFICIENT}, whose forward here is another: {BASE} \(seen of "):
        probe.require(EFFICIENT, FULL, "float16", "cpu")
    monkeypatch.setattr(target, "is_there", lambda device: False)
    probe.require(EFFICIENT, FULL, "float16", "cpu")
    assert here[EFFICIENT] == 1


def test_the_kind_of_an_attention():
    def attention(q_len, kv_len, *, is_causal=False, **others):
        nodes = (SimpleNamespace(meta={"val": torch.empty(1, 2, n, 16, device="meta")}) for n in (q_len, kv_len))
        query, key = nodes
        given = {"attn_mask": None, "scores": None, "window": None, **others}
        return SimpleNamespace(query=query, key=key, is_causal=is_causal, **given)

    assert probe.kind_of(attention(3, 4)) == FULL
    assert probe.kind_of(attention(4, 4, is_causal=True)) == CAUSAL
    assert probe.kind_of(attention(3, 4, is_causal=True)) == TOP_LEFT
    assert probe.kind_of(attention(3, 3, attn_mask="a node")) == MASKED
    assert probe.kind_of(attention(4, 4, is_causal=True, window="a function")) == FULL
    assert probe.kind_of(attention(4, 4, scores=SimpleNamespace(kind="soft-cap"))) == "soft-cap"
