"""The code of two passes for GPUs that are not there: launches, the choice, cubins; their texts are in test_generated_code.py."""

import re
from functools import partial
from typing import Any

import pytest
from kernels import PREPROCESS, TWO_PASS, broken_gates, compiled, generated, kernel

from benchmarks.machine_code.cubin import inspect

two_passes = partial(generated, settings={"template": "two_pass"})


@pytest.mark.parametrize("head_dim", [128, 256])
def test_launch(head_dim: int) -> None:
    """A plain one: one CTA or two for each KV tile of a kv head, one for each Q tile of a query head; nothing is zeroed before."""
    code = two_passes(head_dim=head_dim, kv_heads=4)
    name, source = kernel(code, TWO_PASS)
    (line,) = code.launches[name]
    ctas = 2 * 4 * 8192 // 128 * (2 if head_dim > 128 else 1) + 2 * 16 * 8192 // 128
    assert re.search(r"(\d+, \d+, \d+), stream", line)[1] == f"{ctas}, 1, 1"
    assert "'launch_cooperative_grid': False" in source
    assert "'enable_fp_fusion': True" in source
    assert "zero_()" not in code.source and "workspace" not in code.source.lower().replace("workspace_bytes", "")


@pytest.mark.parametrize(
    ("key", "head_dim", "kv_heads", "family", "dynamic_family"),
    [
        ("rtx4090", 128, 16, "descending", "by_size"),
        ("h100", 128, 1, "two_pass", "by_size"),
        ("a100", 64, 16, "two_pass", "by_size"),
        ("h100", 256, 16, "two_pass", "two_pass"),
        ("b200", 192, 16, "two_pass", "two_pass"),
    ],
)
def test_the_choice(key: str, head_dim: int, kv_heads: int, family: str, dynamic_family: str) -> None:
    """By sizes up to a head dim of 128, past it always."""
    templates = {"by_size": ["one_pass", "two_pass"], "two_pass": ["two_pass"], "descending": ["one_pass"]}
    split = head_dim > 128 and key == "h100"
    matmuls = {"one_pass": 5, "two_pass": 8 if split else 7}
    for dynamic, expected in ((False, family), (True, dynamic_family)):
        code = generated(key, q_len=2048, kv_len=2048, batch=1, kv_heads=kv_heads, head_dim=head_dim, dynamic=dynamic)
        (decision,) = code.decisions
        assert decision.family == expected
        assert (decision.predicted_us is None) == dynamic
        assert list(code.templates.values()) == templates[expected]
        for name, template in code.templates.items():
            assert code.kernels[name].count("tl.dot(") == matmuls[template]


FULL, DYNAMIC = {"mask": "full"}, {"kv_heads": 4, "dynamic": True}
RAGGED = {"kv_heads": 4, "q_len": 8159, "kv_len": 8159}


@pytest.mark.parametrize(
    ("key", "head_dim", "sizes"),
    [
        *(("h100", head_dim, sizes) for sizes in (FULL, RAGGED, DYNAMIC) for head_dim in (64, 128, 192, 256)),
        *(("a100", 64, RAGGED), ("a100", 256, RAGGED), ("b200", 256, RAGGED)),
    ],
)
def test_cubin(key: str, head_dim: int, sizes: dict[str, Any]) -> None:
    """Matmuls of the GPU, waited for together; asynchronous loads; nothing spilled or added in memory; an SM holds it."""
    code = two_passes(key, head_dim=head_dim, **sizes)
    row, sentences = broken_gates(code, key, kernel(code, TWO_PASS)[0], head_dim)
    assert sentences == []
    assert row["ldgsts"] > 0


def test_offsets_past_2_gib() -> None:
    """Every index that a stride of a batch element or head is multiplied with has 64 bits."""
    _, source = kernel(two_passes("h200", q_len=16384, kv_len=16384, batch=32, heads=64, kv_heads=64), TWO_PASS)
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in source
    indices = dict(re.findall(r"\b(idx_[zhmn]) = (.*)", source))
    assert len(indices) == 3 and all(index.endswith(".to(INDEX_DTYPE)") for index in indices.values())


def test_the_preprocess_does_not_spill() -> None:
    binary = compiled(kernel(two_passes(head_dim=256, kv_heads=4), PREPROCESS)[1], "h100")
    assert inspect(binary.cubin, binary.metadata.shared).stack_bytes == 0
