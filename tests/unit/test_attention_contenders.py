"""Who is timed by the attention benchmark: what needs a GPU or a package says so, and what does not runs here."""

import contextlib
import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_results import KNOWN, STOCK, TINY, TINY_FLEX
from torch.nn.attention import flex_attention

from dash_inductor.config import CHOICES
from dash_inductor.qualify import contenders as who
from dash_inductor.qualify.inputs import Reference, random_inputs
from dash_inductor.qualify.measure import Result, attempt
from dash_inductor.qualify.rows import OK
from dash_inductor.qualify.shapes import Shape

pytestmark = pytest.mark.nightly


def tried(name: str, shape: Shape = TINY, **changed) -> Result:
    """The contender on the CPU, as if nothing kept it from running there, against float64."""
    inputs = random_inputs(shape, "cpu", torch.float32)
    contender = replace(STOCK[name], **{"unavailable": lambda device: None, **changed})
    return attempt(contender, shape, inputs, Reference.of(shape, inputs, torch.float64))


def test_every_setting_that_names_a_kernel_is_a_contender():
    for name in ("schedule", "launch", "template", "kernel"):  # the first value is the default
        for value in CHOICES[name][1:]:
            assert f"ours-{value.replace('_', '-')}" in STOCK
    for name in ("ours-run", "ours-batch", "ours-warn", "ours-auto", "ours-grouped"):
        assert name not in STOCK


def test_twins_differ_in_determinism():
    pairs = [(contender, KNOWN[contender.twin]) for contender in KNOWN.values() if contender.twin is not None]
    assert pairs and all(contender.deterministic and not twin.deterministic for contender, twin in pairs)


def test_availability_without_a_gpu():
    for name, contender in STOCK.items():
        reason = contender.unavailable("cpu")
        assert (reason is None) == name.startswith("sdpa-flash"), name
        assert reason is None or "needs a GPU" in reason


@pytest.mark.parametrize("name", ["fa3", "fa4", "fa3-deterministic", "fa4-deterministic"])
def test_packages_that_are_missing(name, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [])
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert "is not importable" in (STOCK[name].unavailable("cuda") or "")


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_package(deterministic, monkeypatch):
    asked = []

    def flash_attn_func(q, k, v, causal=False, deterministic=False):
        asked.append((q.shape, causal, deterministic))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2), "lse"

    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    result = tried("fa3-deterministic" if deterministic else "fa3")
    assert asked == [((2, 37, 4, 16), True, deterministic)]
    assert result.status == OK and result.error < 1e-5


OF_SDPA = {"causal-gqa": TINY, "full": replace(TINY, mask="full", kv_heads=4)}
OF_SDPA |= {name: shape for name, shape in TINY_FLEX.items() if shape.softcap is None and not shape.alibi}


@pytest.mark.parametrize("shape", OF_SDPA.values(), ids=OF_SDPA)
def test_stock_contender(shape):
    """The same call and checks as on a GPU, in PyTorch's flash attention for the CPU, which takes masks."""
    result = tried(who.BASELINE, shape, unavailable=STOCK[who.BASELINE].unavailable)
    assert (result.status, result.same_bits, result.peak_bytes) == (OK, True, None)
    assert result.note == ("a dense mask" if shape.flex else "")
    assert 0 < result.error < 1e-5
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("name", "strict"), [(who.BASELINE, True), ("sdpa-flash", False)])
def test_mode_of_the_backward(name, strict, monkeypatch):
    """Stock ops look at deterministic mode when their backward runs: it is on then, or off, whatever it was."""
    launch = STOCK[name].prepare(TINY, random_inputs(TINY, "cpu", torch.float32)).launch
    seen, grad = [], torch.autograd.grad

    def recorded(*args, **kwargs):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", recorded)
    for before in (False, True):
        with who.deterministic_mode(before):
            launch()
            assert torch.are_deterministic_algorithms_enabled() == before
    assert seen == [strict, strict]


@pytest.mark.parametrize("said", ["No available kernel. Aborting execution.", "No viable backend for scaled_dot_product_attention"])
@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-efficient-strict", "sdpa-cudnn"])
def test_a_shape_that_sdpa_refuses(name, said, monkeypatch):
    """What SDPA warns of is the reason."""

    def refusing(*args, **options):
        warnings.warn("heads of 512\nand more", stacklevel=1)
        raise RuntimeError(said)

    monkeypatch.setattr(F, "scaled_dot_product_attention", refusing)
    result = tried(name)
    assert result.status == "refused: heads of 512" and result.prepared is None


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        (who.BASELINE, TINY_FLEX["soft-cap"], "scaled_dot_product_attention has no soft-cap"),
        (who.BASELINE, TINY_FLEX["alibi"], "scaled_dot_product_attention has no soft-cap and no ALiBi"),
        ("fa4-deterministic", TINY_FLEX["documents"], "flash_attn.cute.flash_attn_func is asked for no window"),
    ],
)
def test_a_shape_that_only_flex_attention_takes(name, shape, reason):
    result = tried(name, shape)
    assert result.status.startswith(f"refused: {reason}") and result.prepared is None


@pytest.mark.parametrize(("name", "kv_heads"), [("sdpa-efficient-strict", 4), ("sdpa-flash", 2), ("sdpa-cudnn", 2)])
def test_heads_are_expanded_where_the_backend_has_no_groups(name, kv_heads, monkeypatch):
    """On the CPU other kernels take the place of these backends."""
    asked, sdpa = [], F.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        asked.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(who, "sdpa_kernel", contextlib.nullcontext)
    result = tried(name)
    assert asked == [(kv_heads, kv_heads, kv_heads == 2)]
    assert (result.status, result.note) == (OK, "K and V expanded" if kv_heads == 4 else "") and result.error < 1e-5


@pytest.mark.parametrize("shape", [TINY, replace(TINY, mask="full"), *TINY_FLEX.values()], ids=["causal", "full", *TINY_FLEX])
def test_flex_attention(shape, monkeypatch):
    """On the CPU FlexAttention trains if nothing forbids it, and neither fuses nor skips a block."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend="eager"))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    result = tried("flex", shape)
    assert result.status == OK and result.error < 1e-5
