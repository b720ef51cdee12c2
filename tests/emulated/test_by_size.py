"""One graph for any length, which launches one pass or two: the bits are those of the choice for that length alone."""

import pytest
import torch
from attention import OP, compiled, exact
from torch._dynamo import config as dynamo_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import dash_inductor
from dash_inductor import enabled, resolve
from dash_inductor.emulation import emulate
from dash_inductor.lowering import kernels
from dash_inductor.templates import source

pytestmark = pytest.mark.usefixtures("rewriting", "cheap_passes")

FULL, CAUSAL = "full", "causal"
# Of an odd number of Q tiles, where dQ's longer tiles overrun the last; ragged; of one tile.
LENGTHS = (100, 48, 10, 130, 257)


@pytest.fixture
def cheap_passes(monkeypatch):
    """Two passes cost so little that both templates are chosen on the emulated device."""

    def forget():
        resolve._costs.cache_clear()
        resolve._two_pass_costs.cache_clear()

    forget()
    with monkeypatch.context() as patch:
        patch.setattr("dash_inductor.devices.cost_files.two_pass_percent", lambda device, head_dim: (170, True))
        yield
    forget()


@pytest.fixture
def launched(monkeypatch):
    """Which of our kernels with matmuls had at least one CTA, in order."""
    names = []
    stock = CachingAutotuner.run

    def run(self, *args, **kwargs):
        has = {name.removeprefix("arg_") for name in self.fn.arg_names}
        if {"Q", "DELTA"} <= has and args[-3] > 0:
            names.append("one pass" if "TABLE" in has else "two passes")
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "run", run)
    return names


@pytest.mark.parametrize(
    ("settings", "mask", "head_dim", "group"),
    [
        ({}, FULL, 16, 1),
        ({}, CAUSAL, 16, 2),
        ({}, FULL, 128, 2),  # dq transposed
        ({}, CAUSAL, 120, 1),
        ({"launch": "chained"}, FULL, 16, 1),
        ({"launch": "chained"}, CAUSAL, 64, 1),
    ],
)
def test_the_bits_of_each_length(settings, mask, head_dim, group, launched):
    templates = set()
    with enabled(**settings), emulate():
        function = compiled(lambda *args: OP(*args, mask=mask, scale=0.25), dynamic=True)
        for index, length in enumerate(LENGTHS):
            args = exact(1, 3 * group, length, length, head_dim, kv_heads=3, exponent=4)
            with dynamo_config.patch(error_on_recompile=index > 0):
                launched.clear()
                actual = function(*args)
            assert len(launched) == 1
            templates.add(launched[0])
            expected = OP(*args, mask=mask, scale=0.25)  # the specification, under the choice for this length
            assert [torch.equal(a, e) for a, e in zip(actual, expected, strict=True)] == [True] * 3, length
    assert templates == {"one pass", "two passes"}
    assert dash_inductor.decisions()[-1].family == "by_size"


def test_a_graph_of_one_length_holds_what_it_takes(launched):
    taken = {}
    with emulate():
        for length in (10, 130):
            args = exact(1, 3, length, length, 16)
            compiled(lambda *args: OP(*args, mask=FULL), dynamic=False)(*args)
            taken[dash_inductor.decisions()[-1].family] = list(launched)
            launched.clear()
    assert taken.pop("two_pass") == ["two passes"]
    assert list(taken.values()) == [["one pass"]]


@pytest.mark.parametrize("guarantee", ["device", "batch"])
def test_sizes_do_not_decide_under_stronger_guarantees(guarantee, launched):
    """Nor the number of SMs."""
    with enabled(guarantee=guarantee), emulate():
        function = compiled(lambda *args: OP(*args, mask=FULL), dynamic=True)
        for length in LENGTHS:
            function(*exact(1, 3, length, length, 16))
    assert set(launched) == {"one pass"}


# Kernels broken on purpose: the first test must see each of them.


@pytest.mark.parametrize(
    ("name", "before", "after", "head_dim", "wrong"),
    [
        ("not_scaled", "dk = dk*SCALE", "dk = dk*1.0", 16, "dk"),
        ("tiles_in_reverse", "index = i*(Q_ROWS*BLOCK_D)", "index = (ROW_TILES - 1 - i)*(Q_ROWS*BLOCK_D)", 16, "dq"),
        ("not_transposed", "(0, 2, 1)", "(0, 1, 2)", 128, "dq"),
        ("scaled", "part, mask=index", "part*SCALE, mask=index", 16, "dq"),
    ],
)
def test_mutants_are_seen(monkeypatch, name, before, after, head_dim, wrong):
    text = source("two_pass", "functions")
    assert text.count(before) == 1
    template = kernels.Template(f"dash_mutant_by_size_{name}", kernels.programs, text.replace(before, after))
    monkeypatch.setattr(kernels, "TWO_PASS", template)
    with emulate():
        function = compiled(lambda *args: OP(*args, mask=FULL, scale=0.25), dynamic=True)
        args = exact(1, 3, 130, 130, head_dim, exponent=4)
        same = [torch.equal(a, e) for a, e in zip(function(*args), OP(*args, mask=FULL, scale=0.25), strict=True)]
    assert [name for name, is_same in zip(("dq", "dk", "dv"), same, strict=True) if not is_same] == [wrong]
