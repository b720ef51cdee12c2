"""The kernels at the tiles of GPUs: other layouts, ways of adding and orders of statements than the emulated device's."""

import pytest
from attention import backward, compiled, differing
from tensors import CAUSAL, FULL, exact

from dash_inductor import decisions, emulation, enabled
from dash_inductor.emulation import emulate
from dash_inductor.templates import tiles

pytestmark = pytest.mark.usefixtures("rewriting")

SEEDS = {"one_pass": range(3), "two_pass": range(1)}  # where nobody waits, one interleaving is as good as many
TILES = [
    *((arch, CAUSAL) for arch in (90, 100)),
    *(
        pytest.param(arch, mask, marks=pytest.mark.nightly)
        for arch, mask in [(80, CAUSAL), (80, FULL), (90, FULL), (100, FULL), (120, CAUSAL)]
    ),
]
LENGTH = 270  # ragged; three KV tiles of 128 rows


def check(template, tile, mask, head_dim, monkeypatch, value_dim=None):
    """The bits of the specification, in some interleavings."""
    find = "tile" if template == "one_pass" else "two_pass_tile"
    monkeypatch.setattr(f"dash_inductor.templates.tiles.{find}", lambda *_, **__: tile)
    args = exact(1, 2, LENGTH, LENGTH, head_dim, kv_heads=1, exponent=4, blocks=(tile.block_m, tile.block_n), value_dim=value_dim)
    waits = 0
    with enabled(template=template):
        specification = backward(mask, scale=0.25)
        function = compiled(specification)
        with emulate():
            expected = specification(*args)
        for seed in SEEDS[template]:
            with emulate(seed=seed):
                assert differing(function(*args), expected) == []
            waits += sum(launch.waits for launch in emulation.launches())
    assert decisions()[-1].tile == str(tile)
    assert (waits > 0) == (template == "one_pass")


@pytest.mark.parametrize(("arch", "mask"), TILES)
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.nightly), 128])
def test_one_pass(arch, head_dim, mask, monkeypatch):
    check("one_pass", tiles.tile(arch, "bf16", head_dim), mask, head_dim, monkeypatch)


@pytest.mark.parametrize(
    ("arch", "dims"), [(90, (64, 128)), *(pytest.param(arch, (128, 64), marks=pytest.mark.nightly) for arch in (80, 90, 100))]
)
def test_one_pass_of_other_values(arch, dims, monkeypatch):
    check("one_pass", tiles.tile(arch, "bf16", *dims), CAUSAL, dims[0], monkeypatch, dims[1])


@pytest.mark.nightly
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("dims", [(192, 128), (128, 256)])
def test_two_passes_of_other_values(arch, dims, monkeypatch):
    check("two_pass", tiles.two_pass_tile(arch, "bf16", *dims), CAUSAL, dims[0], monkeypatch, dims[1])


@pytest.mark.parametrize("release_after", [0, *(pytest.param(after, marks=pytest.mark.nightly) for after in (1, 3))])
def test_where_a_step_is_released(release_after, monkeypatch):
    monkeypatch.setattr(tiles, "RELEASE_AFTER", release_after)
    check("one_pass", tiles.tile(90, "bf16", 64), CAUSAL, 64, monkeypatch)


@pytest.mark.parametrize(("arch", "mask"), TILES)
@pytest.mark.parametrize(
    "head_dim", [pytest.param(64, marks=pytest.mark.nightly), 128, pytest.param(256, marks=pytest.mark.nightly)]
)
def test_two_passes(arch, head_dim, mask, monkeypatch):
    check("two_pass", tiles.two_pass_tile(arch, "bf16", head_dim), mask, head_dim, monkeypatch)
