"""The code for an H100, on a machine without one: the graph after the pass, the kernels' texts, the launch."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import stock_ops
import torch
from jinja2 import TemplateSyntaxError
from kernels import MAIN, PREPROCESS, TABLE, TWO_PASS, assert_expected, generated, kernel, launch, text
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.virtualized import V

import dash_inductor
from benchmarks.machine_code.generate import generate
from dash_inductor.codegen.mode import deterministic
from dash_inductor.lowering import kernels as templates
from dash_inductor.lowering import table
from dash_inductor.lowering.load_check import Checked


def test_graph_and_launches() -> None:
    code, dynamic = generated(settings=ONE_PASS, kv_heads=4), generated(head_dim=64, dynamic=True)
    graph = code.graph[code.graph.index("sdpa_backward") :]
    assert_expected("\n".join((graph, launch(code), launch(dynamic))), "graph_and_launches")


GQA, DYNAMIC, FULL = {"kv_heads": 4}, {"head_dim": 64, "dynamic": True}, {"head_dim": 64, "mask": "full"}
ONE_PASS, TWO_PASSES = {"template": "one_pass"}, {"template": "two_pass"}
LONG = GQA | {"q_len": 2**18, "kv_len": 2**18}
SPLIT = {"kv_heads": 4, "head_dim": 256}  # dK apart from dV, for registers
# The kernel's file: the kernel, of which code, the files of the functions behind it, and the kernel from which its file differs.
KERNELS: dict[str, tuple[str, dict[str, str], dict[str, Any], list[str], str]] = {
    "causal_gqa_128": (MAIN, ONE_PASS, GQA, ["functions"], ""),
    "causal_gqa_long_128": (MAIN, ONE_PASS, LONG, ["functions"], "causal_gqa_128"),
    "full_64": (MAIN, {}, FULL, ["functions"], "causal_gqa_128"),
    "causal_dynamic_64": (MAIN, {}, DYNAMIC, ["functions", "positions", "round_robin"], "causal_gqa_128"),
    "two_pass_causal_gqa_128": (TWO_PASS, TWO_PASSES, GQA, ["functions"], ""),
    "two_pass_causal_gqa_256": (TWO_PASS, TWO_PASSES, SPLIT, ["functions"], "two_pass_causal_gqa_128"),
    "table_causal": (TABLE, {}, DYNAMIC, ["positions"], ""),
    "table_full": (TABLE, {}, DYNAMIC | {"mask": "full"}, ["positions"], "table_causal"),
    "preprocess_64": (PREPROCESS, {}, FULL, [], ""),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    word, settings, sizes, functions, base = KERNELS[name]
    assert_expected(text(generated(settings=settings, **sizes), word), name, *functions, base=base)


def test_semaphores_are_zeroed_by_every_call() -> None:
    code = generated(settings=ONE_PASS)
    name, _ = kernel(code, MAIN)
    (launch,) = code.launches[name]
    (workspace,) = re.findall(r"workspace_\d+", launch)
    before = code.source[: code.source.index(launch)]
    assert f"{workspace}.zero_()" in before[before.rindex(f"{workspace} = ") :]


def test_launch_is_cooperative_and_fusion_is_set() -> None:
    code = generated(settings=ONE_PASS)
    assert "'launch_cooperative_grid': True" in kernel(code, MAIN)[1]
    for word in (MAIN, PREPROCESS):
        assert "'enable_fp_fusion': True" in kernel(code, word)[1]


def test_indices_are_64_bits_wide_where_a_gradient_has_more_elements_than_32_count() -> None:
    """Whatever is multiplied by a stride of the batch, a head or a row is widened before."""
    source = kernel(generated(settings=ONE_PASS, batch=128), MAIN)[1]  # 2**31 elements
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in source
    for index in ("z", "h", "n"):
        (line,) = re.findall(rf" idx_{index} = .*", source)
        assert ".to(INDEX_DTYPE)" in line
    assert "*idx_z" in source and "*idx_h" in source  # what the store's address is made of


def test_occupancy_is_checked_at_load() -> None:
    """The kernel whose CTAs wait for each other has the check, by a line that Inductor's own decorator stands under."""
    code = generated(settings=ONE_PASS)
    source = kernel(code, MAIN)[1]
    assert "from dash_inductor.lowering.load_check import expect\n\n@expect(1)\n" in source
    assert "@expect(1)\n# dash_inductor template: one_pass\n@triton_heuristics.template(\n" in source
    assert code.source.count("@expect(") == 1
    loaded = {type(value) for value in vars(PyCodeCache.load(source)).values()}
    assert Checked in loaded


def test_a_table_is_a_schedule_of_the_same_kernel() -> None:
    """Forced families differ in the constant that the kernel reads, and in how many CTAs are launched."""
    codes = {}
    for family in ("symmetric", "descending"):
        codes[family] = generated(settings={"schedule": family}, kv_heads=4)
        (decision,) = codes[family].decisions
        assert decision.family == family
        assert launch(codes[family]).endswith(f", {decision.roles * decision.heads_in_flight}, 1, 1)")
    assert text(codes["symmetric"], MAIN) == text(codes["descending"], MAIN)


@pytest.mark.parametrize("lengths", [(64, 64), (64, 200)])
def test_equal_attentions_share_table_and_kernels(lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them was given serves the others of its graph, and no other attention."""
    packed: list[Any] = []
    monkeypatch.setattr(table, "pack_plan", lambda plan, stock=table.pack_plan: packed.append(plan) or stock(plan))

    def three(*inputs: Tensor) -> tuple[Tensor, ...]:
        first, second = inputs[:4], inputs[4:]
        return *stock_ops.flash(*first), *stock_ops.flash(first[0], *second[1:3], first[3]), *stock_ops.flash(*second)

    def inputs() -> list[Tensor]:
        return [x for length in lengths for x in stock_ops.tensors(kv_len=length)]

    with deterministic(), dash_inductor.enabled(template="one_pass", kernel="triton"):
        code = generate(three, inputs, "h100")
    assert len(code.decisions) == 3 and all(decision.rewritten for decision in code.decisions)
    different = len(set(lengths))
    assert len(packed) == different
    launches = [len(lines) for name, lines in code.launches.items() if MAIN in code.kernels[name]]
    assert sorted(launches) == ([3] if different == 1 else [1, 2])


@pytest.mark.parametrize(
    ("family", "mask"), [("descending", "causal"), ("ascending", "full"), ("shift", "full"), ("symmetric", "causal")]
)
def test_a_long_sequence_has_no_large_constant(family: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row serves all chains of a monotone order; the table of another is written before the launch."""
    made: list[int] = []
    stock = table._constant
    monkeypatch.setattr(table, "_constant", lambda ints, device: made.append(len(ints)) or stock(ints, device))
    code = generated(settings={"schedule": family}, cached=False, q_len=2**18, kv_len=2**18, mask=mask)
    (decision,) = code.decisions
    is_written = family in ("shift", "symmetric")
    assert decision.family == family and any(TABLE in source for source in code.kernels.values()) == is_written
    assert made == [] if is_written else sum(made) < 3 * (2**18 // 64)
    assert ("SHARED_ROW : tl.constexpr = True" in kernel(code, MAIN)[1]) != is_written


def test_each_device_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have tables of their own even of one schedule: a kernel reads the memory of its own GPU."""
    graph = SimpleNamespace(
        constants={}, add_tensor_constant=lambda tensor, name: SimpleNamespace(get_name=lambda: tensor.device.type)
    )
    with V.set_graph_handler(graph):
        first, again, other = (table._constant([1, 2, 3], torch.device(name)) for name in ("cpu", "cpu", "meta"))
    assert first is again and {name: tensor.device.type for name, tensor in graph.constants.items()} == {
        "cpu": "cpu",
        "meta": "meta",
    }
    assert other is not first


def test_a_template_is_compiled_when_it_is_rendered() -> None:
    """So that a process which finds its graphs in a cache compiles none."""
    wrong = templates.LazySource("{{ 1 ")
    with pytest.raises(TemplateSyntaxError):
        wrong.render()
    assert isinstance(templates.ONE_PASS.template, templates.LazySource)
