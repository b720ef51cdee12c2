"""Where the registry's implementation cannot be activated. Nothing runs here."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, list_flash_attention_impls

from dash_inductor import config
from dash_inductor.decision import Declined
from dash_inductor.hooks import eager, install

pytestmark = pytest.mark.usefixtures("switched_off")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install.offer_eager()
    assert "DASH" in list_flash_attention_impls()


def test_without_a_device():
    with pytest.raises(RuntimeError) as raised:
        activate_flash_attention_impl("DASH")
    assert str(raised.value) == (
        'activate_flash_attention_impl("DASH"): no CUDA GPU is available; '
        "DASH_INDUCTOR_EMULATE=1, set when Python starts, emulates one on the CPU"
    )
    assert current_flash_attention_impl() is None


def test_on_a_gpu_without_kernels(monkeypatch):
    def target_of(device, settings):
        raise Declined("no cost file for it", "")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(eager, "target_of", target_of)
    with pytest.raises(
        RuntimeError, match=r'^activate_flash_attention_impl\("DASH"\): no cost file for it; DASH_INDUCTOR_EMULATE=1'
    ):
        activate_flash_attention_impl("DASH")


def test_switched_off():
    """A script that activates it runs on, as one that compiles with our backend does."""
    config.configure(enabled=False)
    with pytest.warns(UserWarning, match="^DASH_INDUCTOR=0: .* leaves the stock backward$") as caught:
        activate_flash_attention_impl("DASH")
    assert caught[0].filename == __file__
    assert current_flash_attention_impl() is None


def test_wrong_settings(monkeypatch):
    monkeypatch.setattr(config, "_current", None)
    monkeypatch.setenv("DASH_INDUCTOR_LAUNCH", "later")
    with pytest.raises(ValueError, match="DASH_INDUCTOR_LAUNCH='later' is not one of grouped, chained"):
        activate_flash_attention_impl("DASH")
