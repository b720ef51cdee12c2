"""What `qualify` says of kernels, under emulation: each case leads to the kernel that its name says, and what is wrong is seen."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dash_inductor import emulation
from dash_inductor.decision import decisions
from dash_inductor.qualify import contenders, kernels
from dash_inductor.qualify.rows import OK


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulation.emulate(seed=3):
        yield
    torch._dynamo.reset()


def small(case: kernels.Case) -> kernels.Case:
    """Of sizes that an emulation takes quickly."""
    heads = 2 if case.shape.heads != case.shape.kv_heads else 1
    documents = (40, 3, 27) if case.shape.documents else ()
    window = 20 if case.shape.window else None
    sizes = {"batch": 1, "heads": heads, "kv_heads": 1, "length": 70, "head_dim": 16}
    return replace(case, shape=replace(case.shape, **sizes, documents=documents, window=window), launches=2)


ONE = small(kernels.CASES["one pass, causal, d = 64"])


@pytest.mark.parametrize("name", kernels.CASES)
def test_cases(name):
    case = small(kernels.CASES[name])
    found = kernels.check(case, "cpu")
    if case.settings.get("kernel") == "gluon":
        assert found.status == "refused: declined: the Gluon kernel is made for sm_90, not emulated"
        return
    assert (found.status, found.launches, found.is_wrong) == (OK, 2, False)
    assert 0 < max(found.errors.values()) <= found.allowed == kernels.ALLOWED[case.shape.dtype]
    decision = decisions()[-1]
    assert (decision.family == "two_pass") == (case.settings.get("template") == "two_pass")
    assert decision.launch == "chained" or case.settings.get("launch") != "chained"
    assert decision.family == case.settings.get("schedule", decision.family)
    assert decision.op.startswith("flex") == case.shape.flex and decision.dtype == case.shape.dtype


def prepared_with(monkeypatch, change):
    """Ours, whose n-th launch adds change(n) to dq."""
    prepare, count = contenders._prepare_ours, iter(range(100))

    def altered(*arguments, **options):
        prepared = prepare(*arguments, **options)

        def launch():
            dq, dk, dv = prepared.launch()
            return dq + change(next(count)), dk, dv

        return replace(prepared, launch=launch)

    monkeypatch.setattr(contenders, "_prepare_ours", altered)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda n: 1.0, "wrong: dq "),
        (lambda n: torch.nan, "wrong: dq nan off, allowed 1.0e-02"),
        (lambda n: 0.0625 * (n == 1), "not deterministic: launch 2 of 4 has other bits than the first"),
        (lambda n: 0.0625 * (n == 3), "not deterministic: launch 4 of 4, beside other work, has other bits than the first"),
    ],
)
def test_what_is_wrong_is_seen(change, status, monkeypatch):
    prepared_with(monkeypatch, change)
    found = kernels.check(replace(ONE, launches=4), "cpu")
    assert found.status.startswith(status) and found.is_wrong


def test_what_is_declined_and_what_fails():
    wide = replace(ONE, shape=replace(ONE.shape, head_dim=512))
    found = kernels.check(wide, "cpu")
    assert found.status.startswith("refused: declined: head dim 512") and not found.is_wrong
    found = kernels.check(replace(ONE, settings={"schedule": "none"}), "cpu")
    assert found.status.startswith("failed: ValueError: schedule='none' is not one of") and found.is_wrong
