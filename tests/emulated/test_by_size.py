"""One graph for any length, which launches one pass or two: the bits are those of the choice for that length alone."""

from dataclasses import replace

import pytest
from attention import backward, compiled, differing
from tensors import CAUSAL, FULL, exact
from torch._dynamo import config as dynamo_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from dash_inductor import decisions, enabled
from dash_inductor.emulation import emulate
from dash_inductor.templates import tiles

pytestmark = pytest.mark.usefixtures("rewriting", "cheap_passes")

# Of an odd number of Q tiles, where dQ's longer tiles overrun the last; ragged; of one tile.
LENGTHS = (100, 48, 10, 130, 257)


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
        pytest.param({}, FULL, 128, 2, marks=pytest.mark.nightly),  # dq transposed
        pytest.param({}, CAUSAL, 120, 1, marks=pytest.mark.nightly),
        pytest.param({"launch": "chained"}, FULL, 16, 1, marks=pytest.mark.nightly),
        ({"launch": "chained"}, CAUSAL, 64, 1),
        pytest.param({}, CAUSAL, (128, 8), 1, marks=pytest.mark.nightly),
        pytest.param({}, CAUSAL, (8, 40), 2, marks=pytest.mark.nightly),
    ],
)
def test_the_bits_of_each_length(settings, mask, head_dim, group, launched):
    assert_bits_of_each_length(settings, mask, head_dim, group, launched)


@pytest.mark.parametrize("head_dim", [16, pytest.param(128, marks=pytest.mark.nightly)])
def test_one_pass_has_longer_tiles(head_dim, launched, monkeypatch):
    """As on an H100 at head dim 64: delta, logsumexp and dq are those of its tiles, which two passes fill as well."""
    tile = replace(tiles.tile(tiles.EMULATED, "fp32", head_dim), block_m=32)
    assert tile.block_m == 2 * tiles.two_pass_tile(tiles.EMULATED, "fp32", head_dim).block_m
    with monkeypatch.context() as patch:  # undone before `cheap_passes` is
        patch.setattr(tiles, "tile", lambda *_, **__: tile)
        patch.setattr("dash_inductor.devices.cost_files.two_pass_percent", lambda *_: (105, True))  # of longer steps
        assert_bits_of_each_length({}, FULL, head_dim, 1, launched)


def assert_bits_of_each_length(settings, mask, head_dim, group, launched):
    templates = set()
    specification = backward(mask, scale=0.25)
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)  # of query, of value
    with enabled(**settings), emulate():
        function = compiled(specification, dynamic=True)
        for index, length in enumerate(LENGTHS):
            args = exact(1, 3 * group, length, length, dims[0], kv_heads=3, exponent=4, value_dim=dims[1])
            with dynamo_config.patch(error_on_recompile=index > 0):
                launched.clear()
                actual = function(*args)
            assert len(launched) == 1
            templates.add(launched[0])
            assert differing(actual, specification(*args)) == [], length  # under the choice for this length
    assert templates == {"one pass", "two passes"}
    assert decisions()[-1].family == "by_size"


def test_a_graph_of_one_length_holds_what_it_takes(launched):
    taken = {}
    with emulate():
        for length in (10, 130):
            compiled(backward(), dynamic=False)(*exact(1, 3, length, length, 16))
            taken[decisions()[-1].family] = list(launched)
            launched.clear()
    assert taken.pop("two_pass") == ["two passes"]
    assert list(taken.values()) == [["one pass"]]


@pytest.mark.parametrize("guarantee", ["device", pytest.param("batch", marks=pytest.mark.nightly)])
def test_sizes_do_not_decide_under_stronger_guarantees(guarantee, launched):
    """Nor the number of SMs."""
    with enabled(guarantee=guarantee), emulate():
        function = compiled(backward(), dynamic=True)
        for length in LENGTHS:
            function(*exact(1, 3, length, length, 16))
    assert set(launched) == {"one pass"}
