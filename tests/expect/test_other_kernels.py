"""Deterministic kernels of others that are active or asked for, on GPUs that are not there: what explain says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn.attention import _registry, activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dash_inductor import enabled, explain
from dash_inductor.codegen.mode import deterministic
from tests.emulated import flash_attn_stand_in

LENGTH = 512
FLASH, EFFICIENT, CUDNN = (f"aten._scaled_dot_product_{x}_attention_backward.default" for x in ("flash", "efficient", "cudnn"))
FA4 = "FA4, active in torch's registry and deterministic, is faster: 1097 TFLOPS, measured (B200, head dim 128, causal, "


class Model(nn.Module):
    """Attends to a scaled tensor."""

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.attend = nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x * self.scale)


def row(attend: Callable[[Tensor], Tensor], device: str, head_dim: int = 128, said: str = "") -> Any:
    x = torch.zeros(4, 16, LENGTH, head_dim, dtype=torch.bfloat16)
    report = explain(Model(attend), x, device=device)
    (found,) = report
    text = " ".join(str(report).split())
    assert said in text and (found.reason is None or found.reason in text)
    return found


def causal(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def masked(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-100))


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Activates an implementation of a name, which computes nothing."""

    def activate(name: str) -> None:
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda: SimpleNamespace(remove=lambda: None))
        activate_flash_attention_impl(name)

    yield activate
    restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture
def without_cudnn() -> Iterator[None]:
    """Under warn_only torch prefers cuDNN, unless that is switched off."""
    enabled_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled_cudnn)


@pytest.mark.parametrize("warn_only", [False, True], ids=["strict", "warn_only"])
def test_a_faster_one_stays(active, without_cudnn, warn_only):
    """In both modes."""
    with deterministic(warn_only=warn_only):
        assert row(causal, "b200").rewritten
        active("FA4")
        found = row(causal, "b200")
        assert (found.op, found.deterministic, found.decision.left_to) == (FLASH, True, "FA4")
        assert found.reason.startswith(FA4) and "restore_flash_attention_impl()" in found.remedy


REFUSED = {"benchmark_fusion": True}  # so that nothing is rewritten


@pytest.mark.parametrize(
    ("name", "attend", "is_deterministic", "said"),
    [
        ("FA4", causal, True, "the same bits in every run, by FA4's kernel"),
        ("FA3", causal, None, "claimed to be deterministic, and not proven"),
        ("CUDNN", causal, False, "not deterministic"),  # it takes no op of flash attention
        ("MINE", causal, None, "not known"),
    ],
)
def test_what_stays_is_told_by_the_implementation_that_is_active(active, without_cudnn, name, attend, is_deterministic, said):
    active(name)
    with deterministic(warn_only=True), inductor_config.patch(REFUSED):
        found = row(attend, "h100", said=said)
    assert (found.op, found.deterministic) == (FLASH, is_deterministic)


@pytest.mark.parametrize(("attend", "is_deterministic"), [(causal, True), (masked, False)])
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="a provider for torch 2.13 and newer")
def test_cudnn_by_the_provider_of_its_frontend(active, attend, is_deterministic):
    """With a bias that takes PyTorch's own way. What is rewritten without it is so with it."""
    with deterministic(warn_only=True):
        with inductor_config.patch(REFUSED):
            assert row(attend, "h100").deterministic is False
            active("CUDNN")
            found = row(attend, "h100")
        assert (found.op, found.deterministic) == (CUDNN, is_deterministic)
        assert row(attend, "h100").rewritten


def test_what_it_does_not_take_or_is_not_known_to_be_faster_at_is_ours(active):
    active("FA4")
    assert row(masked, "b200").op == EFFICIENT and row(masked, "b200").rewritten
    assert row(causal, "b200", 64).rewritten and row(causal, "h100").rewritten
    for settings in ({"guarantee": "device"}, {"template": "one_pass"}):
        with enabled(**settings):
            assert row(causal, "b200").rewritten
    active("FA3")
    assert row(causal, "h100").rewritten and row(causal, "b200").rewritten


ASKED = "BACKEND='FLASH' is asked for"
OURS = "leave BACKEND out of kernel_options"


def by_flash(mask: Callable[..., Any] | None = None, **options: Any) -> Callable[[Tensor], Tensor]:
    blocks = mask and create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu", **options)
    return lambda x: flex_attention(x, x, x, block_mask=blocks, kernel_options={"BACKEND": "FLASH"})


def below(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return m >= n


@pytest.mark.parametrize(
    ("attend", "device", "left", "said"),
    [
        (by_flash(), "h100", True, ", FlashAttention 4, which is deterministic here: 652 TFLOPS measured (H200, head dim 128,"),
        (
            by_flash(),
            "b200",
            True,
            ", FlashAttention 4, which is deterministic here: 1167 TFLOPS measured (B200, head dim 128, full,",
        ),
        (by_flash(), "a100", False, ""),
        (by_flash(below), "h100", False, ""),
        (by_flash(below), "b200", False, ""),
    ],
)
def test_flash_that_is_asked_for_in_flex_attention(attend, device, left, said):
    """It stays; where it is deterministic, nobody is told of a fallback."""
    with enabled(on_unsupported="fallback"):
        found = row(attend, device)
    assert found.reason.startswith(f"{ASKED}{said}") and found.deterministic == left
    order = ", or make the BlockMask by create_block_mask(..., compute_dq_write_order=True)" if device == "b200" else ""
    assert found.remedy == (f"none needed: for ours, {OURS}" if left else f"{OURS}{order}")


@pytest.mark.skipif("compute_dq_write_order" not in signature(create_block_mask).parameters, reason="torch 2.11 has none")
@pytest.mark.parametrize(("device", "left"), [("b200", True), ("h100", False)])
def test_an_order_of_the_sums_in_the_block_mask(device, left):
    assert row(by_flash(below, compute_dq_write_order=True), device).deterministic == left


def test_settings_that_ask_for_ours_are_told_that_they_are_not_met():
    for settings in ({"guarantee": "batch"}, {"template": "one_pass"}, {"schedule": "descending"}):
        with enabled(**settings):
            found = row(by_flash(), "b200")
        assert (found.reason, found.remedy) == (f"{ASKED}, with settings that ask for our kernels", OURS)


@pytest.mark.parametrize(
    ("function", "options", "claims", "said"),
    [
        (
            flash_attn_stand_in.attend_3,
            {"window": (100, 0), "softcap": 20.0, "namespace": flash_attn_stand_in.HUB_3},
            True,
            "its kernel is faster: 474 TFLOPS, measured (H100, head dim 128, causal, ",
        ),
        (
            flash_attn_stand_in.attend_3,
            {"window": (100, 0), "namespace": flash_attn_stand_in.HUB_3, "deterministic": False},
            False,
            None,
        ),
        (flash_attn_stand_in.attend_3, {"causal": True}, False, None),
        (flash_attn_stand_in.attend, {"window": (100, 0)}, False, None),
        (flash_attn_stand_in.attend, {"dropout_p": 0.1}, False, "dropout"),
        (flash_attn_stand_in.attend_3, {"forwards": {"attention_chunk": 8}}, True, "attention_chunk of flash_attn"),
    ],
)
def test_one_that_is_called_deterministic(
    function: Any, options: dict[str, Any], claims: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left to itself where it is faster on an H100, here than our Triton kernel. FlashAttention 3's claim is told, and no
    promise."""
    if said and "faster" in said:
        monkeypatch.setattr("dash_inductor.resolve.gluon_is_tested", lambda: False)

    def attend(x: Tensor) -> Tensor:
        return function(x, x + 1, x + 2, **{"deterministic": True, **options})

    torch._dynamo.reset()
    report = explain(Model(attend), torch.ones(2, LENGTH, 8, 128, dtype=torch.bfloat16), device="h100")
    (found,) = report
    assert (found.rewritten, found.deterministic) == (said is None, None if claims else True)
    assert said is None or (said in str(found.reason) and "deterministic=True" in str(found.reason))
    assert bool(found.claim) == ("flash-attention/issues/2244" in str(report)) == claims
    assert ("#1 may differ from run to run" in " ".join(str(report).split())) == claims
