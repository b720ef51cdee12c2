"""The Gluon kernel behind the op: off by default; asked for, its launch stands in the generated code, or the reason why not."""

import ast
import json
from functools import partial

import kernels
import pytest

from dash_inductor import enabled
from dash_inductor.cli.main import main
from dash_inductor.sass.replay import replay
from dash_inductor.templates import tiles
from dash_inductor.templates.tiles import gluon_tile

WHOLE_HEADS = {"kernel": "gluon", "guarantee": "batch"}
OP = "torch.ops.dash.sdpa_backward_gluon.default"
generated = partial(kernels.generated, settings=WHOLE_HEADS, q_len=475, kv_len=475, heads=4, kv_heads=2, head_dim=64)


def calls(source, name):
    """The arguments of every call of `name` in a wrapper."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [[ast.unparse(argument) for argument in node.args] for node in nodes if ast.unparse(node.func) == name]


def test_off_by_default():
    code = generated(settings={})
    assert "gluon" not in code.source.lower()
    assert code.main_kernel is not None


@pytest.mark.parametrize("dynamic", [False, True])
def test_launch(dynamic):
    code = generated(dynamic=dynamic)
    (decision,) = code.decisions
    assert decision.rewritten
    assert decision.launch == "grouped, Gluon"
    ((*tensors, dq, dk, dv, workers, cooperative, round_robin, causal, scale),) = calls(code.source, OP)
    assert tensors[:4] == ["query_1", "key_1", "value_1", "grad_out_1"]
    assert len(tensors) == 7
    assert (cooperative, round_robin, causal, float(scale)) == ("True", "False", "True", 64**-0.5)
    assert int(workers) <= 132
    assert code.main_kernel is None  # no other kernel multiplies
    assert "import dash_inductor.lowering.gluon" in code.source
    # dk and dv are returned as the op wrote them; the epilogue reads dq's scratch.
    returns = [ast.unparse(node) for node in ast.walk(ast.parse(code.source)) if isinstance(node, ast.Return)]
    (returned,) = [text for text in returns if f"{dk}, {dv}" in text]
    assert dq not in returned
    assert f".run({dq}, " in code.source[code.source.index(OP) :]


def test_chained_launch():
    code = generated(settings={"kernel": "gluon", "launch": "chained"})
    ((*_, workers, cooperative, _, _, _),) = calls(code.source, OP)
    assert (int(workers), cooperative) == (4 * 2 * 2, "False")  # KV tiles, batch, kv heads


def test_auto_goes_by_architecture_dtype_and_head_dim(monkeypatch):
    """And takes the Triton kernel where the Gluon kernel cannot run, or another template is asked for."""
    auto = {"guarantee": "device"}
    assert OP not in generated(settings=auto).source
    monkeypatch.setattr(tiles, "GLUON_BY_DEFAULT", frozenset({(90, "bf16", 64)}))
    assert OP in generated(settings=auto, cached=False).source
    others = {"key": "a100"}, {"head_dim": 128}, {"dtype": "fp16"}, {"settings": auto | {"kernel": "triton"}}
    for changes in (*others, {"settings": {"template": "two_pass"}}):
        code = generated(**{"settings": auto, "cached": False} | changes)
        assert OP not in code.source and all(decision.rewritten for decision in code.decisions)


@pytest.mark.parametrize("dynamic", [False, True])
def test_round_robin(dynamic):
    """Under the default guarantee, for sizes for which the Triton kernel takes one too."""
    few = {"batch": 1, "kv_heads": 1, "heads": 1, "q_len": 32768, "kv_len": 32768, "dynamic": dynamic}
    code = generated(settings={"kernel": "gluon"}, **few)
    (decision,) = code.decisions
    assert decision.rewritten
    ((*_, round_robin, _, _),) = calls(code.source, OP)
    assert round_robin == "True"
    assert dynamic or decision.family == "symmetric_round_robin"


def test_scratch_of_whole_q_tiles():
    assert "empty_strided_cuda((8, 4, 8192)," in generated().source  # query heads, Q tiles, elements of a tile


@pytest.mark.parametrize(("head_dim", "expected"), [(64, "128x128x64"), (128, "64x128x128")])
def test_tiles(head_dim, expected):
    """A function of architecture, dtype and head dim alone, and what a decision reports."""
    found = gluon_tile(90, "bf16", head_dim)
    assert str(found) == expected
    assert found.accumulator.warps_m * 16 == found.block_m
    assert (8 // found.accumulator.warps_m) * found.accumulator.instr_n == head_dim
    (decision,) = generated(head_dim=head_dim).decisions
    assert decision.tile == expected


def test_tiles_that_there_are_not():
    with pytest.raises(ValueError, match="made for sm_90, not emulated"):
        gluon_tile("emulated", "bf16", 64)
    with pytest.raises(ValueError, match="dtype fp32 is not one of bf16, fp16"):
        gluon_tile(90, "fp32", 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": "a100"}, "is made for sm_90, not sm_80"),
        ({"head_dim": 96}, "takes head dim 64 or 128, not 96"),
    ],
)
def test_declined(changes, reason):
    (decision,) = generated(**changes).decisions
    assert not decision.rewritten
    assert decision.reason.startswith(f"the Gluon kernel {reason}")


def test_codegen_shows_it(tmp_path, capsys):
    """Its own source, its launch, and what eight of its warps do in the main loop."""
    sizes = ["--batch", "1", "--q-len", "2048", "--kv-len", "2048", "--heads", "8", "--head-dim", "128", "--mask", "causal"]
    with enabled(kernel="gluon"):
        assert main(["codegen", "--device", "h100", *sizes, "--json", "--cubin", str(tmp_path / "kernel.cubin")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["gates"], shown["others"], shown["num_warps"]) == ([], [], 12)
    assert "def sdpa_backward" in shown["source"]
    (launch,) = shown["launch"]
    assert launch.startswith(f"{shown['kernel']}(")
    (loop,) = shown["predicted_cycles"]
    assert loop["flop"] == 10 * 64 * 128 * 128
    assert loop["notes"] == ["what other warps load is taken to be there"]
    (again,) = replay((tmp_path / "kernel.cubin").read_bytes(), tma_bytes=64 * (8 * 128 + 8))
    assert loop["cycles"] == pytest.approx(again.cycles, abs=0.1)
