"""What acts in one thread alone, and the list of what a process has once."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dash_inductor import config
from dash_inductor.codegen.mode import deterministic
from dash_inductor.explanation.no_trace import leaving_no_trace
from dash_inductor.hooks.hook import around_here
from tests.unit.test_layers import ROOT, SOURCES

# What replaces attributes, or sets what torch, Python or the operating system have once in a process.
CALLS = re.compile(
    r"mock\.patch\.\w+|(set|del)attr|warnings\.(catch_warnings|simplefilter|filterwarnings)|logging\.disable|signal\.signal"
    r"|random\.(setstate|seed)|numpy\.random\.set_state|counters\.(clear|update)|os\.(environ\.(setdefault|update)|chdir|dup2)"
    r"|sys\.meta_path\.insert|convert_frame\.register_\w+|torch\.(use_deterministic_algorithms|set_\w+|manual_seed|random\.fork_rng"
    r"|autograd\.set_detect_anomaly|_dynamo\.reset)|\w+(\.\w+)*\.cache_clear"
)
TARGETS = re.compile(r"(os\.environ|sys\.(modules|path|argv))\b.*|torch\..*")
OWN = ("spare", "context", "module")  # objects of one graph, whose attributes are set


def changes(tree: ast.AST) -> Iterator[str]:
    """The calls and assignments of a module that change something for every thread."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            if CALLS.fullmatch(function) and not (function in ("setattr", "delattr") and first in OWN):
                yield function
            if function == "torch.library.Library" and not first.startswith("'dash'"):
                yield function
        elif isinstance(node, ast.Assign):
            names = [x for target in node.targets for x in (target.elts if isinstance(target, ast.Tuple) else [target])]
            yield from (name for name in map(ast.unparse, names) if TARGETS.fullmatch(name))


def test_the_list_is_whole():
    """Each module stands on the page that changes something, and no other."""
    rows = (ROOT / "docs/contributing.md").read_text().partition("## Other threads")[2].partition("\n## ")[0].splitlines()
    listed = [name for row in rows if row.startswith("| `") for name in re.findall(r"`([\w/]+\.py)`", row.split(" | ")[0])]
    found = {
        str(path.relative_to(ROOT)).removeprefix("dash_inductor/") for path in SOURCES if [*changes(ast.parse(path.read_text()))]
    }
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("with mock.patch.object(torch, 'a', 1): pass", True),
        ("setattr(torch.cuda, name, value)", True),
        ("setattr(spare, name, value)", False),
        ("torch.library.Library('aten', 'IMPL')", True),
        ("torch.library.Library('dash', 'DEF')", False),
        ("sys.path[:], x = [], 1", True),
        ("torch.cuda.device_count = f", True),
        ("config.within(settings)", False),
    ],
)
def test_what_counts(text, found):
    assert bool([*changes(ast.parse(text))]) == found


class Base:
    @property
    def width(self) -> int:
        return 1

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def of(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x


class Derived(Base):
    def method(self, x: int) -> int:
        return x + self.width


def in_a_thread(function: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def called() -> tuple[Any, ...]:
    return Derived().method(1), Derived.static(1), Derived.of(1), Derived().width


def test_one_thread_alone():
    """Own and inherited, of every kind; inner ones in the place of outer ones; afterwards all is as it was."""
    stock, attributes = called(), (dict(vars(Base)), dict(vars(Derived)))

    def ten_more(stock: Any, *args: Any) -> Any:
        found = stock(*args)
        return (*found[:-1], found[-1] + 10) if isinstance(found, tuple) else found + 10

    with around_here(Derived, "method", ten_more), around_here(Derived, "static", ten_more):
        with around_here(Derived, "of", ten_more), around_here(Base, "width", ten_more):
            assert called() == (22, 11, ("Derived", 11), 11) and in_a_thread(called) == stock
        with around_here(Derived, "method", lambda *_: 0):
            assert called()[:2] == (0, 11)
        assert called()[:2] == (12, 11)
    assert called() == stock and (dict(vars(Base)), dict(vars(Derived))) == attributes


def test_blocks_that_overlap():
    """The first of two threads to begin ends first; somebody else stands around both, and is not thrown out."""
    owner: Any = ModuleType("owner")
    owner.f = lambda: "stock"
    first, second = (around_here(owner, "f", lambda stock, name=name: f"{name} {stock()}") for name in ("first", "second"))
    stock = owner.f
    first.__enter__()

    def other() -> str:
        second.__enter__()
        within = owner.f
        owner.f = lambda: f"around {within()}"
        first_ended.wait()
        found = owner.f()
        second.__exit__(None, None, None)
        return f"{found}, {owner.f()}"

    first_ended, found = threading.Event(), list[str]()
    thread = threading.Thread(target=lambda: found.append(other()))
    thread.start()
    assert owner.f() in ("first stock", "around first stock")
    first.__exit__(None, None, None)
    first_ended.set()
    thread.join()
    assert found == ["around second stock, around stock"] and owner.f() == "around stock" and owner.f is not stock
    with around_here(owner, "f", lambda stock: f"third {stock()}"):
        assert owner.f() == "third around stock"


def test_a_mode_that_is_on_is_left_alone(monkeypatch):
    """Deterministic mode is the process's: what is as it should be is not set again."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "use_deterministic_algorithms", None)
            with deterministic(warn_only=True):
                pass
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_another_thread_compiles_stays():
    frames = CompileCounter()
    f, x = torch.compile(lambda x: x + 1, backend=frames), torch.ones(2)
    with leaving_no_trace():
        in_a_thread(lambda: f(x))
    f(x)
    assert frames.frame_count == 1


def test_settings_within_are_a_thread_s_own():
    before = config.current()
    with config.within(config.Config(sms=99)):
        assert config.current().sms == 99 and in_a_thread(config.current) == before
