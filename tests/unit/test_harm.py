"""What `python -m benchmarks.harm` does: verdicts, and a slice of the suites, compiled with the package and without it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import dash_inductor
from benchmarks.harm import __main__ as harm
from benchmarks.harm.case import Case
from benchmarks.harm.compare import DIFFERS, FAILED_THE_SAME, REWRITTEN, SAME, verdicts
from benchmarks.harm.measure import outcomes
from benchmarks.harm.report import lines, page
from benchmarks.harm.settings import SETTINGS
from benchmarks.harm.suites import SUITES
from dash_inductor.hooks.joint_pass import PASS

PASSED = {"case": "x", "outcome": "passed", "bits": ["a"], "code": "b", "counts": {"fuse_attention": 1}}
FAILED = {"case": "x", "outcome": "ValueError"}


@pytest.mark.parametrize(
    ("without", "with_package", "verdict"),
    [
        (PASSED, PASSED, SAME),
        (PASSED, PASSED | {"bits": ["c"]}, DIFFERS),
        (PASSED, PASSED | {"code": "c"}, DIFFERS),
        (PASSED, PASSED | {"counts": {"fuse_attention": 2}}, DIFFERS),
        (PASSED, PASSED | {"bits": ["c"], "rewritten": 1}, REWRITTEN),
        (PASSED, FAILED, DIFFERS),
        (FAILED, PASSED, DIFFERS),
        (FAILED, FAILED, FAILED_THE_SAME),
        (FAILED, FAILED | {"outcome": "TypeError"}, DIFFERS),
    ],
)
def test_verdict(without, with_package, verdict):
    assert verdicts([without], [with_package]) == {"x": verdict}


def test_a_case_that_is_missing_differs():
    assert verdicts([PASSED], []) == verdicts([], [PASSED]) == {"x": DIFFERS}


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def matmuls(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ b @ c


def refused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(a, b[..., :3], c)


def case_of(function: Callable[..., Tensor], *shape: int) -> Case:
    return Case(function.__name__, lambda: (function, tuple(torch.randn(shape, requires_grad=True) for _ in range(3))))


# No C++ kernel is made for these, which takes seconds: the stock lowering has one for the logsumexp of more heads.
CASES = (case_of(sdpa, 1, 1, 8, 8), case_of(matmuls, 8, 8), case_of(refused, 1, 1, 8, 8))


@pytest.fixture
def no_caches(switched_off: None) -> Iterator[None]:
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


def in_this_process(mode: str, *, installed: bool, cases: Iterable[Case] = CASES) -> list[dict[str, Any]]:
    setting = SETTINGS[f"{mode}, {'with' if installed else 'without'}"]
    with dash_inductor.enabled() if installed else contextlib.nullcontext():
        return list(outcomes(cases, setting))


def operands_swapped(graph: fx.Graph) -> None:
    node = next(iter(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)), None)
    if node is not None:
        node.args = (node.args[1], node.args[0])


@pytest.mark.nightly
def test_a_pass_that_corrupts_a_node_differs(no_caches, monkeypatch):
    stock = PASS.apply

    def apply(gm: Any) -> int:
        operands_swapped(gm if isinstance(gm, fx.Graph) else gm.graph)
        return stock(gm)

    without = in_this_process("on", installed=False)
    monkeypatch.setattr(PASS, "apply", apply)
    corrupted = in_this_process("on", installed=True)
    assert verdicts(without, corrupted) == {"sdpa": SAME, "matmuls": DIFFERS, "refused": FAILED_THE_SAME}
    assert lines({"SDPA": {"on, without": without, "on, with": corrupted}})[0][DIFFERS] == 1


def test_the_page_says_what_failed_and_what_differs():
    text = page({"SDPA": {"on, without": [PASSED, FAILED | {"case": "y"}], "on, with": [FAILED, FAILED | {"case": "y"}]}}, every=3)
    assert "| SDPA | deterministic mode on | 1 | 2 | 0 | 0 | 1 |" in text
    assert "| SDPA | ValueError |  | deterministic mode on | y |" in text
    assert "| SDPA | deterministic mode on | x | passed | ValueError |" in text
    assert "one case of 3" in text


@pytest.mark.nightly
@pytest.mark.parametrize("name", SUITES)
def test_suite(name, tmp_path):
    """One case of three, in processes of its own; `python -m benchmarks.harm` has all."""
    file = tmp_path / "outcomes.json"
    assert harm.main([name, "--every", "3", "--json", str(file)]) == 0
    rows = lines(json.loads(file.read_text()))
    assert rows and all(row[SAME] + row[REWRITTEN] > 0 for row in rows)
