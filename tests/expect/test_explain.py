"""What explain says of models for a GPU that is not there, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from explained import (
    LENGTH,
    WIDTH,
    Attention,
    Autocast,
    Breaks,
    ByHand,
    Checkpointed,
    Dropped,
    DroppedByPython,
    Dropping,
    Fails,
    Flex,
    OfTorch,
    Reads,
    Rotated,
    Scored,
    Varlen,
    VarlenSinks,
    Written,
    WrittenBetween,
    causal_blocks,
    gpt,
    tokens,
)
from kernels import assert_expected
from torch import nn
from torch._dynamo.device_interface import get_interface_for_device
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dash_inductor
from dash_inductor import config, explain
from dash_inductor.cli.main import main
from dash_inductor.devices import device, target
from dash_inductor.explanation import decisions
from dash_inductor.explanation.gpu_attention import chosen
from dash_inductor.hooks import install
from dash_inductor.hooks.backend import CUSTOM
from dash_inductor.rewrite import sdpa
from dash_inductor.rewrite.varlen import LOGSUMEXP

FLASH, EFFICIENT = (f"aten._scaled_dot_product_{name}_attention_backward.default" for name in ("flash", "efficient"))
OF_A_THREAD = torch.__version__ >= "2.13"  # torch's settings, which torch 2.11 and 2.12 have once in a process
NO_FP32 = "dtype fp32 is not one of bf16, fp16"


def test_text(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    model, inputs = gpt()
    assert_expected(str(explain(model, *inputs, device="h100")), "explain_gpt")


def test_json():
    """Of the command, by all forms of inputs."""
    model, inputs = gpt()
    figures = json.loads(explain(model, *inputs, device="h100").to_json())
    assert figures["all_rewritten"] is True and figures["device"] == "h100" and figures["guarantee"] == "run"
    assert set(figures["versions"]) == {"dash_inductor", "torch", "triton"}
    first, second = figures["attentions"]
    assert second == {**first, "module": "blocks.1"} and figures["all_deterministic"] is True and first["kernel"] == "gluon"
    assert (first["module"], first["op"], first["rewritten"]) == ("blocks.0", FLASH, True)
    assert first["source"].endswith("cli/gpt.py:24") and first["reason"] is first["remedy"] is None
    chosen = next(row for row in first["candidates"] if row["family"] == first["family"])
    assert chosen["predicted_us"] == first["predicted_us"] and chosen["formula_ns"] == first["formula_ns"]
    assert all(row["formula_ns"] and row["predicted_us"] >= first["predicted_us"] for row in first["candidates"])
    assert first["workspace_bytes"] < first["stock_workspace_bytes"]


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        pytest.param(Attention, (tokens(),), [(FLASH, "causal", None)], id="bf16"),
        pytest.param(
            Attention, (tokens(torch.float32),), [(EFFICIENT, "causal", "dtype fp32 is not one of bf16, fp16")], id="fp32"
        ),
        pytest.param(Autocast, (tokens(torch.float32),), [(FLASH, "causal", None)], id="autocast"),
        pytest.param(*(Breaks, (tokens(),), [(FLASH, "causal", None), (EFFICIENT, "block_mask", None)]), id="breaks"),
        pytest.param(Checkpointed, (tokens(),), [(FLASH, "causal", None)], id="checkpointed"),
        pytest.param(OfTorch, (tokens(),), [(FLASH, "full", None)], id="MultiheadAttention"),
        pytest.param(ByHand, (tokens(),), [(FLASH, "full", None)], id="by hand"),
        pytest.param(
            *(Varlen, (tokens()[0], torch.tensor([0, LENGTH], dtype=torch.int32))),
            [("torch_attn._varlen_attn_backward.default", "varlen", None)],
            id="varlen",
        ),
        pytest.param(
            *(VarlenSinks, (tokens()[0], torch.tensor([0, LENGTH], dtype=torch.int32))),
            [("torch_attn._varlen_attn_backward.default", "varlen", LOGSUMEXP[0])],
            id="varlen with sinks",
            marks=pytest.mark.every_case,
        ),
        pytest.param(
            *(Flex, (torch.zeros(64, LENGTH, WIDTH, dtype=torch.bfloat16), causal_blocks())),
            [("flex_attention_backward", "block_mask", None)],
            id="flex",
        ),
    ],
)
def test_attentions(model, inputs, expected):
    """Their op on an H100, their mask and why they stay."""
    model = model() if inputs[0].dtype == torch.float32 else model().bfloat16()
    report = explain(model, *inputs, device="h100")
    assert [(row.op, row.decision.mask, row.reason) for row in report] == expected
    assert report.all_rewritten == all(reason is None for *_, reason in expected)
    assert all((row.remedy is None) == row.rewritten for row in report)
    # torch 2.11 notes no line of attention by hand.
    assert all("explained.py:" in (row.source or "") for row in report if type(model) not in (OfTorch, ByHand))


def test_dropout_of_a_gpu_that_has_said_what_it_drops(monkeypatch):
    """The Gluon kernel takes it."""
    monkeypatch.setattr(sdpa, "why_bits_unknown", lambda *_: None)
    report = explain(Dropping().bfloat16(), torch.zeros(64, LENGTH, WIDTH, dtype=torch.bfloat16), device="h100")
    assert [(row.op, row.decision.kernel, row.decision.dropout, row.reason) for row in report] == [(FLASH, "gluon", 0.1, None)]


@pytest.mark.nightly
def test_what_users_have_to_change():
    """Llama with a mask is rewritten, and T5, which learns its own; GPT-2 drops."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    from benchmarks.models.families import DROPOUT, FAMILIES, PADDED, PLAIN
    from benchmarks.models.measure import model_of

    def report(name: str, case: str) -> Any:
        return explain(model_of(FAMILIES[name], case).bfloat16(), device="h100", **FAMILIES[name].batch(case))

    llama, gpt2, t5 = report("Llama", PADDED), report("GPT-2", DROPOUT), report("T5", PLAIN)
    assert llama.all_rewritten and [row.module for row in llama] == [f"model.layers.{layer}.self_attn" for layer in (0, 1)]
    assert {row.decision.mask for row in llama} == {"block_mask"}
    assert len(gpt2) == 2 and all("dropout_p=0.1" in row.reason and "attn_pdrop" in row.remedy for row in gpt2)
    assert t5.all_rewritten and {row.decision.mask for row in t5} == {"full", "block_mask"}
    assert [row.module.split(".")[-1] for row in t5] == ["SelfAttention"] * 2 + ["SelfAttention", "EncDecAttention"] * 2
    assert all("dropout_p=0.1" in row.reason for row in report("T5", DROPOUT))
    text = " ".join(str(gpt2).split())
    assert text.startswith("0 of 2 attentions rewritten for h100") and "All of them have the same bits in every run." in text
    assert "train with an attention dropout of 0" in text and "the same bits in every run, by PyTorch's kernel" in text
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        warned = report("GPT-2", DROPOUT)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "#1-2 may differ from run to run" in str(warned) and json.loads(warned.to_json())["warn_only"]


def test_a_model_on_meta_and_on_the_cpu():
    model, inputs = gpt()
    expected = explain(model, *inputs, device="a100")
    assert explain(model.to("meta"), *(x.to("meta") for x in inputs), device="a100") == expected
    assert explain(model, *inputs, device="a100") == expected  # its inputs are on the CPU
    on_cpu = explain(model, *inputs)
    assert not on_cpu.all_rewritten and {row.reason for row in on_cpu} == {
        "the stock op is already deterministic on the CPU (emulation is off)"
    }
    assert any('device="h100"' in note for note in on_cpu.notes)


def test_warn_only_takes_cudnn():
    """As torch does on an H100 then."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        (row,) = explain(Attention().bfloat16(), tokens(), device="h100")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert row.rewritten and "cudnn" in row.op


@pytest.mark.parametrize(
    ("key", "head_dim", "dropout_p", "trains", "op"),
    [
        *((key, 208, 0.0, True, SDPBackend.EFFICIENT_ATTENTION) for key in ("rtx4090", "rtx5090")),
        ("rtx5090", 208, 0.0, False, SDPBackend.FLASH_ATTENTION),
        ("rtx5090", 256, 0.0, True, SDPBackend.FLASH_ATTENTION),
        ("rtx5090", 256, 0.5, True, SDPBackend.EFFICIENT_ATTENTION),
        ("rtx5090", 192, 0.5, True, SDPBackend.FLASH_ATTENTION),
        ("a100", 208, 0.5, True, SDPBackend.FLASH_ATTENTION),
    ],
)
def test_head_dims_without_flash_attention(key, head_dim, dropout_p, trains, op):
    """On GPUs of 99 KiB it has no backward of 193 to 224 columns, nor of more with dropout."""
    tensor = torch.empty(1, 2, 64, head_dim, dtype=torch.bfloat16, requires_grad=trains)
    assert chosen(device(key), tensor, tensor, tensor, None, dropout_p, False, False) == op


def test_no_attention():
    report = explain(nn.Linear(WIDTH, WIDTH).eval(), tokens(torch.float32), device="h100")
    assert len(report) == 0 and report and not report.all_rewritten
    assert "no attention with a gradient was found in the 1 graph" in str(report) and "model.train()" in str(report)
    assert json.loads(report.to_json())["attentions"] == []


def test_html_is_escaped():
    report = explain(Attention().bfloat16(), tokens(), device="h100")
    (row,) = report
    row = dataclasses.replace(row, decision=dataclasses.replace(row.decision, module="<b>", reason="a < b"))
    html = dataclasses.replace(report, attentions=(row,), notes=("x & y",))._repr_html_()
    assert "&lt;b&gt;" in html and "a &lt; b" in html and "x &amp; y" in html and html.count("<tr>") == 2


def everything(model: nn.Module) -> list[Any]:
    """What explain must leave as it is."""
    return [
        *(x.clone() for x in model.state_dict().values()),
        *(x.grad.clone() for x in model.parameters()),
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        numpy.random.get_state()[2],
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._inductor.config.deterministic,
        torch.is_grad_enabled(),
        install.is_enabled(),
        config.current(),
        dash_inductor.decisions(),
        {name: dict(of) for name, of in counters.items()},
        dict(vars(model)["_modules"]),
        model.training,
    ]


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("device", [None, "h100"])
def test_nothing_is_left_behind(device):
    """Neither after a report nor after an error; calls that were compiled stay compiled, and those to come are not dynamic."""
    torch._dynamo.reset()
    model, frames = Breaks(), CompileCounter()
    compiled = torch.compile(model, backend=frames)
    x = tokens(torch.float32)
    for _ in range(3):  # what is drawn in between is a constant of the first graph
        compiled(x).sum().backward()
    count, before = frames.frame_count, everything(model)
    for length in (LENGTH, LENGTH, 2 * LENGTH):  # the last one does not fit the mask
        try:
            explain(model, torch.zeros(2, length, WIDTH), device=device)
        except Exception:
            assert length != LENGTH
        after = everything(model)
        assert [i for i, same in enumerate(map(equal, before, after)) if not same] == []
    compiled(x)
    assert frames.frame_count == count
    torch._dynamo.reset()
    shapes: list[Any] = []

    def backend(gm: Any, inputs: list[Any]) -> Any:
        shapes.extend(size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape)
        return gm.forward

    explain(Attention(), tokens(torch.float32)[:, :128], device=device)
    torch.compile(Attention(), backend=backend)(x)
    assert shapes and all(type(size) is int for size in shapes)


def attention_backward(query: Any, key: Any, value: Any, grad_out: Any) -> Any:
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, False
    )


@pytest.fixture
def off_and_strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is off, the mode deterministic, and an attention that stays would be an error."""
    was_enabled = install.is_enabled()
    dash_inductor.disable()
    monkeypatch.setattr(config, "_current", config.Config(on_unsupported="error"))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    if was_enabled:
        install.want()


def test_other_threads_see_nothing_of_it(off_and_strict: None) -> None:
    """They read what they set, ask their own GPUs, and their graphs go through Inductor's passes as ever."""
    graph = make_fx(attention_backward, tracing_mode="fake")(*(torch.ones(1, 1, 8, 8) for _ in range(4)))
    owners = torch._inductor.config, torch._functorch.config, torch._dynamo.config
    names = ("fx_graph_cache", "deterministic", CUSTOM), ("enable_autograd_cache",), ("recompile_limit", "suppress_errors")
    own = (False, False, None), (False,), (3, True)
    ended, seen, readings = threading.Event(), [], Counter[str]()

    def read() -> str:
        passed = compile_fx._recursive_joint_graph_passes(torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)))
        values = [[getattr(owner, name) for name in of] for owner, of in zip(owners, names, strict=True)]
        modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        asked = torch.cuda.device_count(), get_interface_for_device("cuda").is_available(), target.is_there(torch.device("cuda"))
        return repr((config.current(), values if OF_A_THREAD else [], modes, asked, str(passed.graph)))

    def reads() -> None:
        for owner, of, values in zip(owners, names, own, strict=True):
            for name, value in zip(of, values, strict=True) if OF_A_THREAD else ():
                setattr(owner, name, value)
        seen.append(read())
        ready.set()
        while not ended.wait(0.002):
            try:
                readings[read()] += 1
            except BaseException as error:
                readings[repr(error)] += 1

    read()  # Inductor makes its patterns once, in no thread but one
    ready, reader = threading.Event(), threading.Thread(target=reads)
    reader.start()
    ready.wait()
    try:
        reports = [explain(Attention().bfloat16(), tokens(), device=device) for device in ("h100", None)]
    finally:
        ended.set()
        reader.join()
    assert [report.all_rewritten for report in reports] == [True, False]
    assert [*readings] == seen and readings.total() > 20, readings


def test_many_calls_do_not_reach_the_limit_of_recompilation():
    torch._dynamo.reset()
    model, frames = Attention(), CompileCounter()
    compiled = torch.compile(model, backend=frames, dynamic=False)
    compiled(tokens(torch.float32))
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for _ in range(4):
            explain(model, tokens(torch.float32))
        compiled(tokens(torch.float32)[:, :32])
    assert frames.frame_count == 2


def test_settings_of_inductor_are_the_users():
    with torch._inductor.config.patch(pattern_matcher=False):
        (row,) = explain(Attention().bfloat16(), tokens(), device="h100")
    assert row.reason == "torch._inductor.config.pattern_matcher is off" and "= True" in row.remedy
    with dash_inductor.enabled(on_unsupported="error"), torch._inductor.config.patch(cpp_wrapper=True):
        (row,) = explain(Attention().bfloat16(), tokens(), device="h100")
    assert row.reason == "torch._inductor.config.cpp_wrapper is on"


def test_off(monkeypatch):
    monkeypatch.setattr("dash_inductor.config._current", dash_inductor.Config(enabled=False))
    with pytest.raises(ValueError, match="unset it"):
        explain(Attention(), tokens())


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of explain."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    try:
        status = main(["explain", *arguments])
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize("function", ["gpt", "by_keyword", "both_ways"])
def test_command(function, monkeypatch, capsys):
    status, out, err = command(monkeypatch, capsys, f"explained:{function}", "--device", "h100", "--json")
    assert (status, err) == (0, "") and json.loads(out)["all_rewritten"]


def test_command_of_one_that_is_declined(monkeypatch, capsys):
    """As `choose`, and `check` where a bit differs: scripts can ask for the status."""
    status, out, _ = command(monkeypatch, capsys, "explained:in_fp32", "--device", "b200")
    assert status == 1 and "to do" in out and "bf16" in out


def test_command_of_one_that_is_deterministic(monkeypatch, capsys):
    """As stock has it, in fp32."""
    status, out, _ = command(monkeypatch, capsys, "explained:in_fp32", "--device", "b200", "--deterministic", "--json")
    assert status == 0 and json.loads(out)["all_deterministic"] and not json.loads(out)["all_rewritten"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explained:raises"], "explained:raises() raised KeyError: 'weights'; it must return (model, inputs)"),
        (["explained:model_alone"], "must return (model, inputs), where inputs are a tuple"),
        (["explained:tensor_as_inputs"], "not (GPT, Tensor)"),
        (["explained:nothing"], "no function 'nothing'"),
        (["no_such_module:f"], "no module 'no_such_module'"),
        (["explained:gpt", "--device", "h900"], "the known ones are a100, b200, h100, h200, l40s, rtx4090, rtx5090"),
        (["explained:wrong_shape", "--device", "h100"], "a and b must have same reduction dim, but got [512, 3] X [64, 192]"),
    ],
)
def test_bad_input(arguments, words, monkeypatch, capsys):
    """One line, with the remedy."""
    status, out, err = command(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1 and words in err, err


def test_values_between_graphs():
    """Of tensors that have values the forward goes on with these; buffers stay as they are."""
    model, (x,) = Reads().bfloat16(), (tokens(),)
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, inputs: module.calls.add_(1) and None)
    report = explain(model, x, device="h100")
    assert [row.decision.q_len for row in report] == [LENGTH, LENGTH // 2] and report.all_rewritten and report.stopped is None
    assert model.calls == 0
    emptied = explain(Reads().bfloat16().to("meta"), x.to("meta"), device="h100")
    assert [row.decision.q_len for row in emptied] == [LENGTH] and not emptied.all_rewritten
    assert "explained.py:" in emptied.stopped and "reads the value of a tensor between two graphs" in emptied.stopped


def test_what_was_found_before_an_error(monkeypatch, capsys):
    status, out, _ = command(monkeypatch, capsys, "explained:fails", "--device", "h100", "--json")
    figures = json.loads(out)
    assert status == 1 and len(figures["attentions"]) == 1 and not figures["all_rewritten"]
    assert "explained.py:" in figures["stopped"] and "Error: " in figures["stopped"]
    report = explain(Fails().bfloat16(), tokens(), device="h100")
    assert "Stopped, so that what follows is not known: " in " ".join(str(report).split()) and "Stopped" in report._repr_html_()


@pytest.mark.parametrize("model", [Written, WrittenBetween, Rotated])
def test_it_goes_on_past(model):
    """Writes to what a graph has returned; a graph part of which has no gradient has no attentions beside its own."""
    report = explain(model().bfloat16(), tokens(), device="h100")
    assert report.stopped is None and report.all_rewritten and len(report) == (1 if model is Rotated else 2), report


@pytest.mark.parametrize("model", [Dropped, DroppedByPython])
def test_layers_that_share_a_graph(model):
    """Each call has a row of its own module, with or without values between graphs; equal lines of the table are one."""
    report = explain(model().bfloat16(), tokens(), device="h100")
    assert [row.module for row in report] == [f"layers.{layer}" for layer in range(4)] and report.all_rewritten
    shared = explain(DroppedByPython(30, layers=1).bfloat16(), tokens(), device="h100")
    assert [row.module for row in shared] == ["layers.0"] * 30
    (line,) = (line for line in str(shared).splitlines() if "layers.0" in line)
    assert line.startswith("1-30 ")


OF_FLEX = torch.zeros(1, 32, 2048, 64, dtype=torch.bfloat16)
TILES = {
    "forward": {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    "backward": {"BLOCK_M1": 64, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 64},
}
TIMED = [
    (False, False, {}, None),
    (True, False, {}, "forward"),
    (True, False, TILES["forward"], None),
    (True, True, {}, "forward and backward"),
    (True, True, TILES["forward"], "backward"),
    (True, True, TILES["forward"] | TILES["backward"], None),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("debug_mode", "declined", "options", "expected"), TIMED)
def test_what_inductor_chooses_by_timing(debug_mode, declined, options, expected):
    """FlexAttention under max_autotune, in a mode that leaves Inductor's own off. Of what is rewritten it is the forward alone."""
    before = torch.get_deterministic_debug_mode()
    try:
        if debug_mode:
            torch.set_deterministic_debug_mode("error")
        with torch._inductor.config.patch(max_autotune=True, deterministic=False):
            model, x = Scored(kernel_options=options, block_mask=causal_blocks(2048)), OF_FLEX
            report = explain(model.float(), x.float(), device="h100") if declined else explain(model, x, device="h100")
    finally:
        torch.set_deterministic_debug_mode(before)
    (row,) = report
    assert (row.rewritten, row.decision.chosen_by_timing) == (not declined, expected), report
    assert row.deterministic is report.all_deterministic is (expected is None)
    figures = json.loads(report.to_json())
    assert figures["all_deterministic"] is (expected is None) and figures["attentions"][0]["chosen_by_timing"] == expected
    text = " ".join(str(report).split())
    assert "by timing" in text and ("#1 may differ from run to run" in text) == (expected is not None)
    assert (f"Inductor chooses its {expected} by timing" in text) == (expected is not None) == ("by timing" in str(row.decision))


class Held:
    """Has neither a slope nor a window."""


HELD = Held()


def sloping(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * HELD.slope


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < HELD.window


class Hides(nn.Module):
    def forward(self, x: Any) -> Any:
        return flex_attention(x, x, x, block_mask=create_block_mask(near, None, None, 2048, 2048, device="cpu"))


@pytest.mark.parametrize("model", [Scored(score_mod=sloping), Hides()])
def test_errors_inside_functions_of_flex(model):
    """The line is the user's own."""
    try:
        text = str(explain(model, OF_FLEX.clone().requires_grad_(), device="h100"))
    except ValueError as error:
        text = str(error)
    function, name = (sloping, "slope") if isinstance(model, Scored) else (near, "window")
    line = function.__code__.co_firstlineno + 1
    assert f"test_explain.py:{line}: AttributeError: 'Held' object has no attribute '{name}'" in " ".join(text.split())


def test_equal_attentions_are_lowered_once(monkeypatch):
    """A decision has its own place all the same."""
    lowered = []
    stock = decisions._lowered
    monkeypatch.setattr(decisions, "_lowered", lambda module: lowered.append(module) or stock(module))
    layers = nn.Sequential(Attention(), Attention(), Checkpointed(), Attention()).bfloat16()
    report = explain(layers, tokens(), device="h100")
    assert [row.module for row in report] == ["0", "1", "2", "3"] and len(lowered) == 1


def test_a_function_is_no_model():
    with pytest.raises(ValueError, match="pass the model itself"):
        explain(lambda x: x, tokens())
