"""The code for an H100, on a machine without one: the graph after the pass, the kernels' bodies, the launch.

The kernels' bodies are compared from their `def` line down, which is the same text for every torch and Triton that is supported.
EXPECTTEST_ACCEPT=1 rewrites what is expected.
"""

import functools
import re
from pathlib import Path

import expecttest
import pytest
from torch._inductor.codecache import PyCodeCache

from dash_inductor import enabled
from dash_inductor.devices.load_check import Checked
from dash_inductor.inspection.generate import Generated, attention_backward

EXPECTED = Path(__file__).parent / "expected"
MAIN, SEARCHED, PREPROCESS = "SEMAPHORES", "UNREAD", "everywhere"  # a word that only this kernel has


@functools.cache
def generated(
    head_dim: int,
    mask: str,
    kv_heads: int = 16,
    dynamic: bool = False,
    q_len: int = 8192,
    kv_len: int = 8192,
    device: str = "h100",
    batch: int = 2,
) -> Generated:
    return attention_backward(
        device,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=16,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mask=mask,
        dynamic=dynamic,
    )


def kernel(code: Generated, word: str) -> tuple[str, str]:
    """(name, source) of the only kernel that has the word."""
    ((name, source),) = [(name, source) for name, source in code.kernels.items() if word in source]
    return name, source


def body(code: Generated, word: str) -> str:
    name, source = kernel(code, word)
    start = source.index(f"def {name}(")
    return re.sub(r"\b[sk]s?\d+\b", "size", source[start:].replace(name, "kernel"))


def launch(code: Generated) -> str:
    """The main kernel's launch, its names normalised, without the stream."""
    name, _ = kernel(code, MAIN)
    (line,) = code.launches[name]
    line = re.sub(r"dash_(table|decision)_\w+", r"\1", line).replace(name, "kernel")
    return re.sub(r", stream=\w+", "", re.sub(r"\bs\d+\b", "S", line))


class GraphTest(expecttest.TestCase):
    def test_graph_after_the_pass(self) -> None:
        graph = generated(128, "causal", kv_heads=4).graph
        self.assertExpectedInline(
            graph[graph.index("sdpa_backward") :],
            """\
sdpa_backward_default = dash.sdpa_backward.default(grad_out_1, query_1, key_1, value_1, getitem, getitem_1, mask=causal, scale=None)
getitem_9: bfloat16[2, 16, 8192, 128] = getitem(sdpa_backward_default, 0)
getitem_10: bfloat16[2, 4, 8192, 128] = getitem(sdpa_backward_default, 1)
getitem_11: bfloat16[2, 4, 8192, 128] = getitem(sdpa_backward_default, 2)
return [getitem, getitem_9, getitem_10, getitem_11]""",
        )

    def test_launch(self) -> None:
        self.assertExpectedInline(
            launch(generated(128, "causal", kv_heads=4)),
            """kernel.run(query_1, key_1, value_1, grad_out_1, buf7, buf6, table, buf9, buf10, buf11, workspace_1, 132, 1, 1)""",
        )

    def test_launch_with_a_dynamic_length(self) -> None:
        self.assertExpectedInline(
            launch(generated(64, "causal", dynamic=True)),
            """kernel.run(query_1, key_1, value_1, grad_out_1, buf7, buf6, buf9, buf10, buf11, buf12, S, workspace_1, 132 + ((-132)*dash_choice_b6a7066b100c7b27(4, S, S, 32)), 1, 1)""",  # noqa: E501
        )


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("full_64", {"head_dim": 64, "mask": "full"}, MAIN),
        ("causal_gqa_128", {"head_dim": 128, "mask": "causal", "kv_heads": 4}, MAIN),
        ("causal_dynamic_64", {"head_dim": 64, "mask": "causal", "dynamic": True}, MAIN),
        ("table_causal", {"head_dim": 64, "mask": "causal", "dynamic": True}, SEARCHED),
        ("table_full", {"head_dim": 64, "mask": "full", "dynamic": True}, SEARCHED),
        ("preprocess_64", {"head_dim": 64, "mask": "full"}, PREPROCESS),
    ],
)
def test_kernel_body(name: str, arguments: dict, word: str) -> None:
    text = body(generated(**arguments), word)
    file = EXPECTED / f"{name}.txt"
    if expecttest.ACCEPT:
        EXPECTED.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_semaphores_are_zeroed_by_every_call() -> None:
    code = generated(128, "causal")
    name, _ = kernel(code, MAIN)
    (launch,) = code.launches[name]
    (workspace,) = re.findall(r"workspace_\d+", launch)
    before = code.source[: code.source.index(launch)]
    assert f"{workspace}.zero_()" in before[before.rindex(f"{workspace} = ") :]


def test_launch_is_cooperative_and_fusion_is_set() -> None:
    source = kernel(generated(128, "causal"), MAIN)[1]
    assert "'launch_cooperative_grid': True" in source
    for word in (MAIN, PREPROCESS):
        assert "'enable_fp_fusion': True" in kernel(generated(128, "causal"), word)[1]


def test_indices_are_64_bits_wide_where_a_gradient_has_more_elements_than_32_count() -> None:
    """Whatever is multiplied by a stride of the batch, a head or a row is widened before."""
    source = kernel(generated(128, "causal", batch=128), MAIN)[1]  # 2**31 elements
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in source
    for index in ("z", "h", "n"):
        (line,) = re.findall(rf" idx_{index} = .*", source)
        assert ".to(INDEX_DTYPE)" in line
    assert "*idx_z" in source and "*idx_h" in source  # what the store's address is made of


def test_occupancy_is_checked_at_load() -> None:
    """Of the kernel whose CTAs wait for each other; by a line that Inductor's own decorator stands under."""
    code = generated(128, "causal")
    source = kernel(code, MAIN)[1]
    assert "from dash_inductor.devices.load_check import expect\n\n@expect(1)\n" in source
    assert "@expect(1)\n# dash_inductor template: one_pass\n@triton_heuristics.template(\n" in source
    assert code.source.count("@expect(") == 1
    loaded = {type(value) for value in vars(PyCodeCache.load(source)).values()}
    assert Checked in loaded


def test_a_table_is_a_schedule_of_the_same_kernel() -> None:
    """Forced families differ in the constant that the kernel reads, and in how many CTAs are launched."""
    codes = {}
    for family in ("searched", "descending"):
        with enabled(schedule=family):
            codes[family] = generated.__wrapped__(128, "causal", kv_heads=4)
        (decision,) = codes[family].decisions
        assert decision.family == family
        assert launch(codes[family]).endswith(f", {decision.roles * decision.heads_in_flight}, 1, 1)")
    assert body(codes["searched"], MAIN) == body(codes["descending"], MAIN)
    with enabled(schedule="searched"):
        (decision,) = generated.__wrapped__(128, "causal", dynamic=True).decisions
    assert decision.reason.startswith("family 'searched' is made for static shapes (dynamic=False), not for B=2, H=16/16, S_q=")
