"""The Gluon kernel behind the op: where it is taken its launch stands in the generated code, else the reason why not."""

import ast
import json
from collections import Counter
from functools import partial

import kernels
import pytest
import torch
import triton
from kernels import GLUON_OP as OP
from kernels import gluon_launches as launches
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily

from benchmarks.machine_code.__main__ import main
from benchmarks.machine_code.generate import generate
from benchmarks.machine_code.replay import replay
from dash_inductor import enabled, problem, templates
from dash_inductor.codegen.flex import OPTIONS, FlexAttention
from dash_inductor.codegen.mode import deterministic
from dash_inductor.hooks.install import installed
from dash_inductor.lowering import table
from dash_inductor.lowering.launch import gluon
from dash_inductor.schedule.parts import LEAST_STEPS, Parts
from dash_inductor.templates.operands import Operands
from dash_inductor.templates.tiles import gluon_tile

WHOLE_HEADS = {"kernel": "gluon", "guarantee": "batch"}
IN_BLOCKS = {"kernel": "gluon", "template": "one_pass"}
in_blocks = partial(kernels.generated_flex, settings=IN_BLOCKS)
generated = partial(kernels.generated, settings=WHOLE_HEADS, q_len=475, kv_len=475, heads=4, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_launch(dynamic):
    code = generated(dynamic=dynamic)
    (decision,) = code.decisions
    assert decision.rewritten
    assert (decision.kernel, decision.launch) == ("gluon", "grouped")
    (launch,) = launches(code)
    expected = {name: f"{name}_1" for name in ("query", "key", "value", "grad_out")} | dict.fromkeys(
        ("steps", "bits", "sums"), "None"
    )
    expected |= {"cooperative": "True", "round_robin": "False", "causal": "True", "q_tiles": "0", "kv_tiles": "0"}
    assert expected.items() <= launch.items()
    assert float(launch["scale"]) == 64**-0.5
    assert int(launch["workers"]) <= 132
    assert code.main_kernel is None  # no other kernel multiplies
    assert "import dash_inductor.lowering.launch.gluon" in code.source
    # dk and dv are returned as the op wrote them; the epilogue reads dq's scratch.
    returns = [ast.unparse(node) for node in ast.walk(ast.parse(code.source)) if isinstance(node, ast.Return)]
    (returned,) = [text for text in returns if f"{launch['dk']}, {launch['dv']}" in text]
    assert launch["dq"] not in returned
    assert f".run({launch['dq']}, " in code.source[code.source.index(OP) :]


def test_a_table_on_a_gpu_that_is_there(monkeypatch):
    """Then the table is a real tensor among fake ones, with which Inductor runs the op once. It is the CPU's here."""

    def constant(ints, device):
        monkeypatch.setattr(V.fake_mode, "allow_non_fake_inputs", False)  # as it is on a GPU
        with unset_fake_temporarily():
            tensor = torch.tensor(ints, dtype=torch.int32)
        return V.graph.add_tensor_constant(tensor, "real_table")

    monkeypatch.setattr(table, "_constant", constant)
    code = generated(cached=False)
    assert launches(code)[0]["table"] == "real_table"


def test_chained_launch():
    code = generated(settings={"kernel": "gluon", "launch": "chained"})
    (launch,) = launches(code)
    assert (int(launch["workers"]), launch["cooperative"]) == (4 * 2 * 2, "False")  # KV tiles, batch, kv heads


AUTO = {"kernel": "auto", "guarantee": "device"}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("changes", "is_gluon"),
    [
        ({}, True),
        ({"head_dim": 128}, True),
        ({"key": "h200"}, True),
        ({"key": "a100"}, False),
        ({"head_dim": 16}, False),  # by price
        ({"head_dim": 24}, True),
        ({"head_dim": 100}, False),  # TMA takes rows of 16 bytes
        ({"head_dim": 256}, True),
        ({"dtype": "fp16"}, True),
        ({"settings": AUTO | {"kernel": "triton"}}, False),
        ({"settings": {"kernel": "auto", "template": "two_pass"}}, False),
    ],
    ids=str,
)
def test_auto_goes_by_architecture_head_dim_and_price(changes, is_gluon):
    """Unless another template is asked for."""
    code = generated(**{"settings": AUTO} | changes)
    assert (OP in code.source) == is_gluon and all(decision.rewritten for decision in code.decisions)


def test_nothing_is_launched_where_two_passes_are():
    """Then no CTA of the Gluon kernel has work: its table, which nobody has written, is not looked at."""
    numbers = {"block_m": 128, "block_n": 128, "causal": True, "scale": 1.0}
    gluon.sdpa_backward_gluon(*Operands(*[None] * 13, [], [], workers=0, cooperative=True, **numbers))


@pytest.mark.parametrize(("version", "is_gluon"), [("3.9.1", True), ("3.10.0+git", False), ("4.0.0", False)])
def test_auto_takes_the_triton_kernel_by_a_triton_that_was_not_tested(version, is_gluon, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    templates.gluon_is_tested.cache_clear()
    try:
        assert (OP in generated(settings=AUTO, cached=False).source) == is_gluon
    finally:
        templates.gluon_is_tested.cache_clear()


@pytest.mark.parametrize("dynamic", [False, True])
def test_round_robin(dynamic):
    """Under the default guarantee, for heads whose pairs of chains do not fill the SMs."""
    few = {"batch": 1, "kv_heads": 5, "heads": 5, "q_len": 18432, "kv_len": 18432, "dynamic": dynamic}
    code = generated(settings={"kernel": "gluon"}, **few)
    (decision,) = code.decisions
    assert decision.rewritten
    (launch,) = launches(code)
    assert launch["round_robin"] == "True"
    assert dynamic or decision.family == "symmetric_round_robin"


@pytest.mark.parametrize(("head_dim", "block", "q_tiles", "kv_tiles"), [(64, 128, 1, 1), (128, 128, 2, 1), (128, 256, 4, 2)])
def test_masks_in_blocks(head_dim, block, q_tiles, kv_tiles):
    """The mask function is asked by a kernel before the launch, for partial tiles, and not by the launch."""
    code = in_blocks(head_dim=head_dim, block=block, mask_mod="documents")
    (decision,) = code.decisions
    assert (decision.mask, decision.kernel, decision.launch) == ("block_mask", "gluon", "chained")
    (launch,) = launches(code)
    assert (launch["q_tiles"], launch["kv_tiles"], launch["cooperative"]) == (str(q_tiles), str(kv_tiles), "False")
    assert int(launch["workers"]) == 8192 // 128 * 2 * 16  # KV tiles, batch, kv heads
    assert (launch["bands"], launch["sets"], launch["sums"]) == ("1", "1", "None")
    (asking,) = [name for name, source in code.kernels.items() if "BITS" in source]
    assert launch["bits"] in "".join(code.launches[asking])
    parts = 128 // head_dim
    assert f"{launch['bits']} = empty_strided_cuda((1, 1, 64, {128 // parts}, {parts}, 256), " in code.source
    assert code.main_kernel is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"kv_heads": 4}, Parts(bands=4, sets=2)),
        ({"kv_heads": 2}, Parts(bands=4, sets=4)),
        ({"kv_heads": 16}, Parts(bands=4)),
        ({"kv_heads": 4, "settings": IN_BLOCKS | {"guarantee": "batch"}}, Parts()),
        # Query heads of a group with masks of their own are parts, at any level.
        ({"kv_heads": 4, "mask_heads": 16}, Parts(sets=4)),
        ({"kv_heads": 4, "mask_heads": 16, "settings": IN_BLOCKS | {"guarantee": "batch"}}, Parts(sets=4)),
        ({"kv_heads": 16, "mask_heads": 16}, Parts(bands=4)),
    ],
)
def test_chains_in_parts(changes, parts):
    sizes = {"length": 2048, "head_dim": 128, "mask_mod": "causal"} | changes
    code = in_blocks(**sizes)
    assert code.decisions[0].rewritten
    (launch,) = launches(code)
    kv_heads = 2 * sizes["kv_heads"]
    assert (int(launch["bands"]), int(launch["sets"])) == (parts.bands, parts.sets)
    assert int(launch["workers"]) == parts.units(kv_heads, n_kv=16, kv_tiles=1)
    assert (launch["sums"] == "None") == parts.whole
    if not parts.whole:
        assert f"{launch['sums']} = empty_strided_cuda(({kv_heads * 16 * 128 * 2 * 128}, ), (1, ), torch.float32)" in code.source
        assert launch["least_steps"] == str(LEAST_STEPS)


def test_masks_of_one_list_and_two_functions():
    """Each attention reads the bits of its own function, though both have the same blocks. Equal functions are asked once."""

    def of_function(mask_mod):
        attention = FlexAttention(**kernels.FLEX_SIZES, mask_mod=mask_mod)
        functions = attention.functions()

        def gradients(query, key, value, grad_out, out, logsumexp, slopes, documents, *lists):
            *grads, _ = torch.ops.higher_order.flex_attention_backward(
                *(query, key, value, out, logsumexp, grad_out, None, *functions, attention.mask(lists).as_tuple()),
                *(0.125, OPTIONS, (slopes,), (documents,)),
            )
            return grads

        return gradients

    attentions = [of_function(mask_mod) for mask_mod in ("documents", "window", "documents")]

    def backward(*tensors):
        return [grad for attention in attentions for grad in attention(*tensors)]

    with enabled(**IN_BLOCKS), installed(), deterministic(True):
        code = generate(backward, FlexAttention(**kernels.FLEX_SIZES, mask_mod="documents").tensors, "h100")
    assert sorted(Counter(launch["bits"] for launch in launches(code)).values()) == [1, 2]


def test_scratch_of_whole_q_tiles():
    assert "empty_strided_cuda((8, 4, 8192)," in generated().source  # query heads, Q tiles, elements of a tile


@pytest.mark.parametrize(("head_dim", "expected"), [(64, "128x128x64"), (128, "64x128x128"), (256, "64x64x256")])
def test_tiles(head_dim, expected):
    """A function of architecture, dtype and head dim alone, and what a decision reports."""
    found = gluon_tile(90, "bf16", head_dim)
    assert str(found) == expected
    assert found.accumulator.warps_m * 16 == found.block_m
    assert (8 // found.accumulator.warps_m) * found.accumulator.instr_n * found.accumulator.parts == head_dim
    (decision,) = generated(head_dim=head_dim).decisions
    assert decision.tile == expected


def test_bits_that_have_no_room_at_once():
    """Of two slices of the keys, in one buffer of 1 GiB."""
    code = in_blocks(mask_mod="documents", mask_heads=16, length=32768)
    first, second = launches(code)
    assert first["bits"] == second["bits"] and f"{first['bits']} = empty_strided_cuda((1, 16, 128, 256, 2, 256)," in code.source
    assert (first["number"], second["number"]) == ("0", "1") and first["semaphores"] == second["semaphores"]


def test_gradients_of_captured_tensors():
    """The kernel writes what elements add, zeros where no tile is visited, and kernels of their own add it up."""
    sizes = {"score_mod": "alibi", "trained": True, "length": 2048}
    for mask_mod, is_zeroed in (("causal", True), ("none", False)):
        code = in_blocks(mask_mod=mask_mod, **sizes)
        (launch,) = launches(code)
        assert code.decisions[0].kernel == "gluon" and launch["share"] != "None"
        before, after = code.source.split(f"{OP}(")
        assert (f".run({launch['share']}, " in before) == is_zeroed and f".run({launch['share']}, " in after
    (decision,) = in_blocks(**sizes | {"length": 2044}).decisions
    assert decision.reason == "the Gluon kernel takes no gradient of a captured tensor with S_k=2044, which is no multiple of 8"


def test_masks_that_are_too_many():
    token = problem.most_bits.set(2**20)
    (decision,) = in_blocks(mask_mod="documents", mask_heads=16, length=4096).decisions
    problem.most_bits.reset(token)
    assert decision.reason.startswith("the Gluon kernel takes no masks of more than 67108864 pairs of a query and a key")


@pytest.mark.parametrize(
    ("functions", "is_gluon"),
    [
        ({"mask_mod": "none"}, True),
        ({"mask_mod": "documents"}, True),
        ({"score_mod": "alibi"}, True),
        ({"score_mod": "alibi", "trained": True, "length": 2048}, False),
    ],
)
def test_what_auto_takes_of_flex_attention(functions, is_gluon):
    """Any mask, and functions that train nothing."""
    code = kernels.generated_flex(settings={"kernel": "auto"}, **functions)
    assert (OP in code.source) == is_gluon and code.decisions[0].rewritten


def test_codegen_shows_two_passes_behind_it(tmp_path, capsys):
    """Where lengths decide, in a file of their own."""
    asked = "codegen --device h100 --batch 1 --q-len 2048 --kv-len 2048 --heads 8 --head-dim 64 --mask causal --dynamic --json"
    assert main([*asked.split(), "--cubin", str(tmp_path / "kernel.cubin")]) == 0
    shown = json.loads(capsys.readouterr().out)
    (two_pass,) = shown["others"]
    assert shown["kernel"] == OP and two_pass["source"].count("tl.dot(") == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel.cubin", f"kernel.{two_pass['kernel']}.cubin"]
    assert two_pass["gates"] == shown["gates"] == []


@pytest.mark.nightly  # of a command of benchmarks
def test_codegen_shows_functions_and_head_dims(capsys):
    """Those that it is asked for, in the kernel that the attention takes."""
    asked = "codegen --device h100 --batch 2 --q-len 2048 --kv-len 2048 --heads 32 --mask-mod documents --json --head-dim"
    loops = []
    with enabled(kernel="gluon"):
        for others in ("128", "128 --score-mod alibi", "64 --value-dim 128"):
            assert main([*asked.split(), *others.split()]) == 0
            shown = json.loads(capsys.readouterr().out)
            assert (shown["kernel"], shown["gates"]) == (OP, [])
            loops.append((shown["instructions_in_loop"], shown["predicted_cycles"][0]["flop"]))
    (without, flop), (alibi, _), of_64_and_128 = loops
    assert alibi > without and of_64_and_128 == (without, flop)


def test_codegen_shows_it(tmp_path, capsys):
    """The command has its own source, its launch, and what eight of its warps do in the main loop."""
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
