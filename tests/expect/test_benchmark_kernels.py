"""What the benchmarks time is compiled for an H100 as it is meant: variants of our kernel, and the vector additions alone."""

import functools
import importlib
from pathlib import Path

import pytest
import triton
from kernels import MAIN, compiled, generated, kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.machine_code.cubin import CubinReport, inspect
from dash_inductor.qualify.contenders import contenders
from dash_inductor.qualify.variants import VARIANTS, Variant
from dash_inductor.schedule import MASKS

pytestmark = pytest.mark.nightly

BY_NAME = {"as-is": Variant("as-is", "as it is"), **{variant.name: variant for variant in VARIANTS}}


@functools.cache
def variant(name: str, head_dim: int) -> tuple[str, str, CubinReport]:
    """(tile, PTX, cubin report) of a variant's main kernel, causal."""
    with BY_NAME[name].applied():
        code = generated(settings={"template": "one_pass"}, cached=False, head_dim=head_dim)
    binary = compiled(kernel(code, MAIN)[1], "h100")
    (decision,) = code.decisions
    return str(decision.tile), binary.ptx, inspect(binary.cubin, binary.metadata.shared)


OURS = {
    name: who for name, who in contenders().items() if name.startswith("ours-") and name not in ("ours-unordered", "ours-varlen")
}


@pytest.mark.parametrize("name", OURS)
def test_a_contender_of_ours_is_not_declined_for_its_own_settings(name):
    """Some mask of the table gets its kernel."""
    settings = OURS[name].prepare.keywords["settings"]
    assert settings
    settings, sizes = {"guarantee": "run"} | settings, {"q_len": 512, "kv_len": 512, "batch": 1, "heads": 4, "kv_heads": 4}
    decisions = [d for mask in MASKS for d in generated(settings=settings, mask=mask, head_dim=64, **sizes).decisions]
    assert any(decision.rewritten for decision in decisions), decisions[0].reason


@pytest.mark.parametrize(
    ("name", "head_dim", "tile"),
    [
        *((name, 128, "64x128x128") for name in ("unordered", "release-after-s", "release-after-dv", "two-stages", "four-stages")),
        *(("two-per-sm", 128, "32x64x128"), ("half-q", 128, "32x128x128")),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in [(f"{count}-stages", 64, "128x128x64") for count in ("two", "four")] + [("two-per-sm", 64, "64x64x64")]
        ),
    ],
)
def test_variants_are_as_clean_as_the_kernel(name, head_dim, tile):
    """Otherwise a variant would be slower for another reason than the one that it stands for."""
    found, _, report = variant(name, head_dim)
    assert found == tile
    assert (report.local_in_loop, report.hmma, report.atomg) == (0, 0, 0)
    assert report.hgmma > 0 and report.ldgsts > 0 and not report.wgmma_serialised
    rows, _, columns = map(int, tile.split("x"))
    threads = 128 if name == "two-per-sm" else 256
    assert report.red == rows * columns // threads // 4  # vectors of four
    assert report.shared_bytes <= 227 << 10
    if name == "two-per-sm":
        assert 2 * threads * report.registers <= 65_536 and 2 * report.shared_bytes <= 227 << 10


def test_only_the_unordered_kernel_has_no_semaphores():
    for name, head_dim, waits, releases in (("as-is", 128, 1, 2), ("unordered", 128, 0, 0), ("release-after-s", 128, 1, 2)):
        _, ptx, _ = variant(name, head_dim)
        assert (ptx.count("ld.global.acquire.gpu"), ptx.count("red.release.gpu")) == (waits, releases), name


@pytest.mark.parametrize(("kernel", "kind"), [("triton", ASTSource), ("gluon", GluonASTSource)])
def test_a_wait_alone(kernel, kind, tmp_path, monkeypatch):
    """The program by which tests/gpu bounds a wait compiles, and the bound is in it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "gpu"))
    lonely = importlib.import_module("test_wait").lonely
    path = tmp_path / f"lonely_{kernel}.py"
    path.write_text(lonely(kernel).partition("for semaphore in")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    function = importlib.import_module(path.stem).lonely
    signature = {name: "i32" if name in ("high", "low") else "*i32" for name in function.arg_names}
    binary = triton.compile(kind(fn=function, signature=signature, constexprs={}), target=GPUTarget("cuda", 90, 32))
    assert binary.asm["ptx"].count("ld.global.acquire.gpu.b32") == 1 and binary.asm["ptx"].count(str(1 << 25)) == 2
    assert binary.asm["ptx"].count("st.relaxed.sys.global.v4.b32") == 1
