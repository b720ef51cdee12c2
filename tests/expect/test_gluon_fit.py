"""What the pass finds of a function of the scores in the Gluon kernel, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError

from benchmarks.machine_code.flex import flex_backward
from dash_inductor import enabled
from dash_inductor.codegen.flex import FlexAttention
from dash_inductor.decision import Decision
from dash_inductor.first_use.verdict import FAILED
from dash_inductor.hooks import failures
from dash_inductor.lowering import gluon_fit
from dash_inductor.rewrite import resolved

FUNCTION = ("source", ("torch.float32",), 0, "bf16", (64, 64))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache's, with nothing in it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    gluon_fit._found.cache_clear()
    yield tmp_path / "dash_inductor" / "functions"
    gluon_fit._found.cache_clear()


def decision(trained: bool = False, **settings: Any) -> Decision:
    attention = FlexAttention(4096, 16, 16, 64, batch=4, score_mod="alibi", trained=trained)
    with enabled(**settings):
        (made,) = flex_backward("h100", attention).decisions
    return made


def compiling(monkeypatch: pytest.MonkeyPatch, *raised: Exception) -> list[int]:
    """Each compilation raises the next of these; how many there were."""
    calls, left = [], list(raised)

    class Launch:
        def compile(self) -> None:
            calls.append(len(calls))
            raise left.pop(0)

    monkeypatch.setattr(gluon_fit, "launch_of", lambda *_: Launch())
    return calls


def test_a_function_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The attention takes a Triton kernel, and another process need not compile it."""
    error = CompilationError("f(x)", None, None)
    error.__cause__ = TypeError("no such layout")
    calls = compiling(monkeypatch, error)
    monkeypatch.setattr(failures, "keep_out_of_caches", lambda: pytest.fail("every process would compile the graph anew"))
    assert decision().kernel == "triton"
    gluon_fit._found.cache_clear()
    made = decision(kernel="gluon")
    assert made.reason == "the Gluon kernel does not compile with its function of the scores: TypeError: no such layout"
    assert calls == [0] and len([*folder.iterdir()]) == 1


def test_functions_whose_captures_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for `auto`, nor for more than one value of an element."""
    calls = compiling(monkeypatch)
    assert decision(trained=True).kernel == "triton"
    stock = gluon_fit.functions_before_lowering

    def of_two_values(*arguments: Any, **options: Any) -> Any:
        found = stock(*arguments, **options)
        assert found.values == [torch.float32]
        return replace(found, values=[*found.values] * 2)

    monkeypatch.setattr(gluon_fit, "functions_before_lowering", of_two_values)
    made = decision(trained=True, kernel="gluon")
    assert made.reason == "the Gluon kernel takes one number that an element adds to gradients of captured tensors, not 2"
    assert not calls


def test_a_kernel_that_failed_its_trial_keeps_its_graph_out_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(failures, "keep_out_of_caches", lambda: asked.append(True))
    assert decision().kernel == "gluon" and not asked
    stock = resolved.resolve
    monkeypatch.setattr(resolved, "resolve", lambda problem, *others: stock(replace(problem, gluon_fails=FAILED), *others))
    assert decision().kernel == "triton" and asked


def test_what_says_nothing_of_the_function_is_not_kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """It would decide bits."""
    compiling(monkeypatch, MemoryError(), OSError("no space left"))
    for error in (MemoryError, OSError):
        with pytest.raises(error):
            gluon_fit._found(*FUNCTION)
    assert not folder.exists()


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 2, "fit": true, "said": "much"}', '{"version": 2, "fit": null, "said": ""}']
)
def test_a_damaged_file_is_none(text: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    found = gluon_fit.Verdict(True, "24")
    calls: list[Any] = []
    monkeypatch.setattr(gluon_fit, "_compiled", lambda *asked: calls.append(asked) or found)
    assert gluon_fit._found(*FUNCTION) == found
    (file,) = folder.iterdir()
    file.write_text(text)
    for _ in range(2):
        gluon_fit._found.cache_clear()
        assert gluon_fit._found(*FUNCTION) == found
    assert len(calls) == 2
