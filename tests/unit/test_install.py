"""Switching on and off. Nothing is emulated here: each attention that the pass meets is declined, which shows that it was met."""

from __future__ import annotations

import os
import sys
import warnings

import pytest
import torch
import torch._inductor.cudagraph_trees as cudagraph_trees
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.codegen import common
from torch._inductor.fx_passes import joint_graph

import dash_inductor
from dash_inductor import config, emulation
from dash_inductor.hooks import autoload, backend, install

pytestmark = pytest.mark.usefixtures("switched_off")


def installed() -> tuple[bool, bool]:
    """Whether the pass and the cache key are in Inductor."""
    passes = [p for p in joint_graph.pass_patterns if type(p).__name__ == "DashPass"]
    assert len(passes) <= 1
    return bool(passes), "dash_inductor" in common.custom_backend_passes


def inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3)]


def attend(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)


def met(**options: object) -> int:
    """How many attentions the pass meets while one is compiled and trained."""
    counters.clear()
    torch.compile(attend, **options)(*inputs()).sum().backward()
    return counters["inductor"]["dash_declined"]


def test_enabled_nests_and_restores_settings():
    with dash_inductor.enabled(schedule="ascending", sms=3):
        with dash_inductor.enabled(schedule="descending"):
            assert (config.current().schedule, config.current().sms) == ("descending", 3)
        assert (config.current().schedule, config.current().sms) == ("ascending", 3)
        assert installed() == (True, True)
    assert config.current() == config.Config()
    assert installed() == (False, False)
    with pytest.raises(ZeroDivisionError), dash_inductor.enabled(sms=2):
        _ = 1 / 0
    assert config.current() == config.Config()
    assert installed() == (False, False)

    dash_inductor.enable(sms=5)
    with dash_inductor.enabled():
        pass
    assert installed() == (True, True)
    assert config.current().sms == 5


def test_what_is_compiled_follows_the_switch():
    """On, off and on again; each switch forgets what was compiled, and no cache carries an answer over."""
    assert met() == 0
    dash_inductor.enable()
    assert met() == 1
    dash_inductor.disable()
    assert met() == 0
    with dash_inductor.enabled():
        assert met() == 1
    assert met() == 0


def test_the_backend_meets_it_once():
    assert met(backend="dash") == 1
    assert installed() == (False, False)
    with dash_inductor.enabled():
        assert met(backend="dash") == 1
        assert installed() == (True, True)


def test_the_backend_is_a_backend_of_dynamo():
    assert "dash" in torch._dynamo.list_backends()


def test_switched_off_by_the_setting():
    """What DASH_INDUCTOR=0 says: one warning of the backend, one of each enable()."""
    backend._warn_off.cache_clear()
    config.configure(enabled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert met(backend="dash") == 0
        torch._dynamo.reset()
        assert met(backend="dash") == 0
    assert [str(w.message) for w in caught if "DASH" in str(w.message)] == ['DASH_INDUCTOR=0: backend="dash" is plain Inductor']
    with pytest.warns(UserWarning, match="DASH_INDUCTOR=0: dash_inductor stays off") as warned:
        dash_inductor.enable()
    assert warned[0].filename == __file__
    assert installed() == (False, False)
    assert met() == 0


def test_switching_the_setting_off_stops_an_installed_pass():
    dash_inductor.enable()
    config.configure(enabled=False)
    assert met() == 0
    config.configure(enabled=True)
    assert met() == 1


def with_attention(x):
    return F.scaled_dot_product_attention(x, x.sin(), x.cos()).square().mean().sin()


def without_attention(x):
    x = x.double()  # in fp32 the exponential makes of one rounding, which is another on another CPU, more than is allowed
    return ((x @ x.mT).sin().relu() @ x).exp().mean().sin()


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 16 * 16).reshape(1, 2, 16, 16).requires_grad_()


def twice(function=without_attention, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of two backwards through one compiled graph; they are to be those of eager mode."""
    x = leaf()
    loss = torch.compile(function, **options)(x)
    first, second = torch.autograd.grad(loss, x, retain_graph=True)[0], torch.autograd.grad(loss, x)[0]
    torch.testing.assert_close(first, torch.autograd.grad(function(x), x)[0])
    return first, second


@pytest.mark.parametrize("function", [pytest.param(with_attention, marks=pytest.mark.nightly), without_attention])  # compiled C++
@pytest.mark.parametrize("on", [True, False], ids=["", "DASH_INDUCTOR=0"])
@pytest.mark.filterwarnings("ignore:DASH_INDUCTOR=0")
def test_the_graph_can_be_retained(function, on):
    """As with plain Inductor, which learns of it when it compiles the backward; here that is compiled before."""
    config.configure(enabled=on)
    assert torch.equal(*twice(function, backend="dash"))
    torch._dynamo.reset()
    with dash_inductor.enabled():
        assert torch.equal(*twice(function))


@functorch_config.patch(enable_autograd_cache=False)
def test_a_cached_backward_that_overwrites_is_not_taken():
    """By one that must not: what is donated is in the key."""
    dash_inductor.enable()
    torch.compile(without_attention)(leaf()).backward()
    torch._dynamo.reset()
    counters.clear()
    with dash_inductor.enabled():
        assert torch.equal(*twice())
    assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (2, 0)


def test_reset_drops_cuda_graphs(monkeypatch):
    """As for backend="inductor": recorded CUDA graphs do not outlive torch._dynamo.reset()."""
    resets = []
    monkeypatch.setattr(cudagraph_trees, "reset_cudagraph_trees", lambda: resets.append(1))
    assert met(backend="dash") == 1
    torch._dynamo.reset()
    assert resets


@pytest.mark.parametrize("error", [KeyError, ValueError, RuntimeError])
def test_autoload_never_raises(monkeypatch, caplog, error):
    def fail(**_):
        raise error("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(install, "want", fail)
        autoload.autoload()
    assert "dash_inductor could not be installed" in caplog.text
    assert "no such thing" in caplog.text


def test_an_installation_that_fails(monkeypatch, caplog):
    """Who only has the package installed keeps plain Inductor, and is told; who asked for the pass gets the error."""

    def fail():
        raise KeyError("no such thing")

    monkeypatch.setattr(install, "install", fail)
    autoload.autoload()
    assert "no such thing" in caplog.text
    with pytest.raises(KeyError, match="no such thing"):
        dash_inductor.enable()


def test_wrong_settings_are_raised_by_each_compilation(monkeypatch, caplog):
    """And told in `import torch`, by the variable's name."""
    monkeypatch.setattr(config, "_current", None)
    monkeypatch.setitem(os.environ, "DASH_INDUCTOR_LAUNCH", "later")
    autoload.autoload()
    (message,) = caplog.messages
    assert message.startswith("DASH_INDUCTOR_LAUNCH='later' is not one of grouped, chained. Every torch.compile of this process")
    for _ in range(2):
        with pytest.raises(BackendCompilerFailed, match="DASH_INDUCTOR_LAUNCH='later' is not one of grouped, chained"):
            met()
    monkeypatch.delenv("DASH_INDUCTOR_LAUNCH")
    assert met() == 1


def test_blocks_of_threads_that_overlap():
    """The one that began first ends first; donation is as before when both have ended, and not earlier."""
    from torch._functorch._aot_autograd import graph_compile

    stock = graph_compile.collect_bw_donated_buffer_idxs
    first, second = install.eager_backward(), install.eager_backward()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert graph_compile.collect_bw_donated_buffer_idxs is not stock
    second.__exit__(None, None, None)
    assert graph_compile.collect_bw_donated_buffer_idxs is stock


def test_emulation_names_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(ImportError, match=r"emulation needs greenlet: pip install 'dash-inductor\[emulate\]'"):
        emulation.start()
