"""Code of varlen_attn's backward for an H100 that is not there."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from kernels import broken_gates
from torch import Tensor

from benchmarks.machine_code.generate import TEMPLATE, Generated, generate
from dash_inductor import enabled
from dash_inductor.codegen.mode import deterministic
from dash_inductor.hooks.install import install, is_enabled, uninstall
from dash_inductor.rewrite.stock_ops import VARLEN

TOKENS, SEQUENCES, HEADS, KV_HEADS, HEAD_DIM = 16384, 16, 8, 2, 64
WINDOW = [200, 0]
ONE_PASS = {"template": "one_pass", "kernel": "triton"}


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    was_enabled = is_enabled()
    install()
    yield
    if not was_enabled:
        uninstall()


def attention(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    of_sequences = offsets, offsets, TOKENS, TOKENS
    out, lse, rng_state = torch.ops.torch_attn._varlen_attn(query, key, value, *of_sequences, False, None, WINDOW)
    return VARLEN(grad_out, query, key, value, out, lse, *of_sequences, False, rng_state, None, WINDOW)


def arguments() -> list[Tensor]:
    shapes = [(TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    return [*tensors, torch.empty(SEQUENCES + 1, dtype=torch.int32, device="cuda")]


def generated(*, dynamic: bool = False, key: str = "h100", warn_only: bool = False) -> Generated:
    with deterministic(warn_only=warn_only):
        return generate(attention, arguments, key, dynamic_dims=(0,) if dynamic else ())


def templates(code: Generated) -> list[str]:
    return [match[1] for source in code.kernels.values() if (match := TEMPLATE.search(source))]


def test_the_mask_in_one_kernel() -> None:
    """Sequences are looked up, intervals made and bounded in one reduction; nothing of tokens times tokens is allocated."""
    with enabled(**ONE_PASS):
        code = generated()
    assert templates(code) == ["preprocess", "block_ranks", "block_rows", "block_mask"]
    assert sum("bucketize_binary_search" in source for source in code.kernels.values()) == 1
    assert re.findall(r"torch\.ops\.[\w.]+\(", code.source) == ["torch.ops.torch_attn._varlen_attn.default("]
    sizes = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", code.source)
    elements = [math.prod(int(x) for x in size.split(",") if x.strip()) for size in sizes]
    assert (TOKENS // 128) ** 2 in elements and max(elements) == TOKENS * HEADS * HEAD_DIM < TOKENS**2 / 4
    (decision,) = code.decisions
    assert (decision.op, decision.mask, decision.shape) == (str(VARLEN), "varlen", "B=1 H=8/2 S=16384 D=64 bf16")


def test_lengths_known_at_run_time_only() -> None:
    with enabled(**ONE_PASS):
        code = generated(dynamic=True)
    assert templates(code) == ["preprocess", "block_ranks", "block_rows", "block_mask"]
    (decision,) = code.decisions
    assert decision.mask == "varlen" and not isinstance(decision.q_len, int)


@pytest.mark.parametrize("warn_only", [False, True], ids=["strict", "warn_only"])
def test_few_tiles_take_two_passes(monkeypatch: pytest.MonkeyPatch, warn_only: bool) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 2048)
    code = generated(warn_only=warn_only)
    (decision,) = code.decisions
    assert templates(code) == ["preprocess", "block_rows", "block_rows", "two_pass"] and decision.template == "two_pass"


@pytest.mark.parametrize("warn_only", [False, True], ids=["strict", "warn_only"])
def test_few_tiles_stay_where_the_mode_makes_stock_deterministic(monkeypatch: pytest.MonkeyPatch, warn_only: bool) -> None:
    """And where two passes would take SMs that are reserved."""
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 2048)
    monkeypatch.setattr("dash_inductor.resolve.gluon_is_tested", lambda: False)
    with enabled(sm_reserve=4):
        code = generated(warn_only=warn_only)
    (decision,) = code.decisions
    assert templates(code) == (["preprocess", "block_ranks", "block_rows", "block_mask"] if warn_only else [])
    few = "few KV tiles: one pass has work for 18 CTAs, and needs work for 110 to be as fast as stock's"
    assert decision.reason is None if warn_only else decision.reason.startswith(f"{few} kernel, deterministic too: 305 TFLOPS")
    assert code.source.count("torch.ops.torch_attn._varlen_attn_backward.default(") == (not warn_only)


@pytest.mark.nightly
@pytest.mark.parametrize("key", ["rtx4090", "rtx5090"])
def test_gates_of_consumer_gpus(key: str) -> None:
    """The rules of the other kernels hold there, too. In strict mode, so few chains are left to stock there."""
    code = generated(key=key, warn_only=True)
    (name,) = code.templates
    _, sentences = broken_gates(code, key, name, HEAD_DIM)
    assert not sentences


@pytest.mark.parametrize("dynamic", [False, True])
def test_sequences_that_are_moved(dynamic: bool) -> None:
    """At the level `batch`: by gathers that Inductor generates, into at most a block more for each sequence."""
    with enabled(guarantee="batch", kernel="triton"):
        code = generated(dynamic=dynamic)
    (decision,) = code.decisions
    assert decision.rewritten and templates(code) == ["preprocess", "block_ranks", "block_rows", "block_mask"]
    assert re.findall(r"torch\.ops\.[\w.]+\(", code.source) == ["torch.ops.torch_attn._varlen_attn.default("]
    if not dynamic:
        assert decision.q_len == decision.kv_len == (TOKENS + SEQUENCES * 127) // 128 * 128
