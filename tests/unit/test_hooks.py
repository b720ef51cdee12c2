"""Every place of torch that the package fills: found, filled, and afterwards what it was."""

from __future__ import annotations

import json
import logging
import sys
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings
from torch._ops import OpOverloadPacket

import dash_inductor
from dash_inductor.cli.main import main
from dash_inductor.hooks import install, joint_pass
from dash_inductor.hooks.backend import CUSTOM
from dash_inductor.hooks.hook import Hook
from dash_inductor.hooks.table import HOOKS, LIMIT, OFF

pytestmark = pytest.mark.usefixtures("switched_off")
KEEPING = (list, dict, OpOverloadPacket)  # what has ours inside
PATCHED = [hook for hook in HOOKS if hook.put and hook not in OFF]
SEVERAL = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 and 2.12 take one custom pass")


def train(*, cached: bool = False, **options: Any) -> int:
    """Compiles an attention, by caches or without, and trains it; returns how many were declined, as each is on a CPU."""
    torch._dynamo.reset()
    counters.clear()
    leaves = [torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3)]
    with inductor_config.patch(fx_graph_cache=cached), functorch_config.patch(enable_autograd_cache=cached):
        torch.compile(F.scaled_dot_product_attention, **options)(*leaves).sum().backward()
    return counters["inductor"]["dash_declined"]


def contents(hook: Hook) -> Any:
    value = getattr(hook.found_owner(), hook.name)
    if isinstance(value, OpOverloadPacket):
        return torch._C._dispatch_dump(value.default.name())
    return list(value) if isinstance(value, list) else list(value.items()) if isinstance(value, dict) else value


def ours_in_torch() -> set[str]:
    """Functions and classes of ours that are attributes of modules of torch and Triton, or of classes there.

    Not of the modules that Inductor generates: those of our kernels import what they need.
    """
    found = set()
    modules = {name: module for name, module in sys.modules.items() if name.startswith(("torch", "triton")) and module}
    for name, module in modules.items():
        if name.startswith("torch._inductor.runtime.compile_tasks."):
            continue
        classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == name]
        for owner in (module, *classes):
            for attribute, value in vars(owner).items():
                function = type(value) in (FunctionType, type)
                if function and ("dash_inductor" in vars(value) or str(value.__module__).startswith("dash_inductor")):
                    found.add(f"{name}.{'' if owner is module else f'{owner.__name__}.'}{attribute}")
    return found


def test_disable_restores_every_place():
    """And what is filled is what the table says. Enable, disable, enable is enable."""
    with dash_inductor.enabled():
        train()  # so that Inductor, and we, have registered all that is registered once
    before, stock = [contents(hook) for hook in PATCHED], dict(lowerings)
    assert ours_in_torch() == set()
    for _ in range(2):
        with dash_inductor.enabled(on_unsupported="warn"), pytest.warns(UserWarning, match="dash_inductor leaves"):
            assert train() == 1
            assert all(contents(hook) != was for hook, was in zip(PATCHED, before, strict=True))
            inside = {hook.place for hook in PATCHED if isinstance(getattr(hook.found_owner(), hook.name), KEEPING)}
            assert ours_in_torch() == {hook.place for hook in PATCHED} - inside and len(inside) == 8
        assert [contents(hook) for hook in PATCHED] == before and ours_in_torch() == set()
        assert lowerings == stock
    with_backend = train(backend="dash")
    assert ours_in_torch() == {hook.place for hook in LIMIT}  # for as long as Dynamo keeps the graph
    torch._dynamo.reset()
    assert (with_backend, ours_in_torch(), [contents(hook) for hook in PATCHED]) == (1, set(), before)


def test_where_the_package_is_off_a_job_is_told():
    """Nothing else is filled."""
    assert ours_in_torch() == set()
    install.tell_ranks_off()
    try:
        assert ours_in_torch() == {hook.place for hook in OFF}
    finally:
        install._off.ask_if(False)
    assert ours_in_torch() == set()


@pytest.mark.parametrize("way", ["enable", "dash"])
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_a_place_that_torch_has_lost(hook, way, monkeypatch, caplog, capsys):
    """A line in the log, in `env` and in its JSON. Attention is declined by that name, or as ever: never silently neither."""
    monkeypatch.setitem(vars(hook), "name", f"{hook.name}_moved")
    caplog.set_level(logging.WARNING, "dash_inductor")
    joint_pass.warn_of_torch.cache_clear()
    dash_inductor.clear_decisions()
    if way == "enable":
        dash_inductor.enable()
    assert train(**({"backend": way} if way == "dash" else {})) == 1
    assert f"torch has lost {hook.place}, by which dash_inductor {hook.purpose}" in caplog.text
    reason = f"torch {torch.__version__} has lost {hook.place}"
    recorded = [decision.reason for decision in dash_inductor.decisions()]
    expected = [reason if hook.needed else "the stock op is already deterministic on the CPU (emulation is off)"]
    assert recorded == ([] if hook.name == "post_compile_moved" else expected)
    main(["env", "--json"])
    report = json.loads(capsys.readouterr().out)
    places = report["places_of_torch_that_are_filled"]
    assert [place for place, figures in places.items() if figures["value"] == "missing"] == [hook.place]
    assert any(problem.startswith(reason) for problem in report["problems"])


class Counting(CustomGraphPass):
    def __init__(self, uuid: Any) -> None:
        self.uuid_given, self.calls = uuid, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> Any:
        return self.uuid_given


def bare(graph: torch.fx.Graph) -> None:
    bare.calls += 1


bare.calls = 0


@pytest.mark.parametrize("given", ["options", "config"])
@pytest.mark.parametrize(
    "passes",
    [Counting("a"), Counting(None), bare, pytest.param([Counting("a"), Counting("b")], marks=SEVERAL)],
    ids=["with a key", "without a key", "a function", "several"],
)
def test_a_users_own_pass_runs_too(passes, given):
    """By backend="dash"; it is in the key of the caches, or keeps the graph out of them, as it does alone."""
    each = passes if isinstance(passes, list) else [passes]
    before = [x.calls for x in each]
    with inductor_config.patch({CUSTOM: passes} if given == "config" else {}):
        for _ in range(2):
            assert train(cached=True, backend="dash", **({"options": {CUSTOM: passes}} if given == "options" else {})) == 1
    kept = all(getattr(x, "uuid_given", None) for x in each)
    assert [x.calls - was for x, was in zip(each, before, strict=True)] == [1 if kept else 2] * len(each)


def test_a_torch_that_was_not_tested(monkeypatch, caplog):
    """One warning, and everything is as ever."""
    for version, warned in (("2.16.0.dev1", 1), ("2.15.1+cu130", 0), ("2.10.0", 1)):
        joint_pass.warn_of_torch.cache_clear()
        caplog.clear()
        with monkeypatch.context() as patch, dash_inductor.enabled():
            patch.setattr(torch, "__version__", version)
            assert train() == train() == 1
        assert caplog.text.count(f"torch {version} is not one of those that dash_inductor is tested with, 2.11 to 2.15") == warned
    joint_pass.warn_of_torch.cache_clear()
