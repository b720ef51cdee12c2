"""The code of two passes for GPUs that are not there: the kernels' bodies, their launches, the cubins.

EXPECTTEST_ACCEPT=1 rewrites what is expected.
"""

import functools
import re
from pathlib import Path
from typing import Any

import expecttest
import pytest

from dash_inductor import enabled
from dash_inductor.codegen import Generated, attention_backward, compile_kernel
from dash_inductor.cubin import CubinReport, inspect
from dash_inductor.devices import device

EXPECTED = Path(__file__).parent / "expected"


@functools.cache
def generated(key: str, head_dim: int, mask: str, **sizes: Any) -> Generated:
    sizes = {"q_len": 8192, "kv_len": 8192, "kv_heads": 16} | sizes
    with enabled(template="two_pass"):
        return attention_backward(key, batch=2, heads=16, head_dim=head_dim, mask=mask, **sizes)


def kernel(code: Generated, which: str) -> tuple[str, str]:
    """(name, source) of a kernel, by the gradients that it sums up; of the one before them by "preprocess"."""
    kinds = {"".join(code.gradients(name)) or "preprocess": name for name in code.kernels}
    assert len(kinds) == len(code.kernels)
    return kinds[which], code.kernels[kinds[which]]


def passes(head_dim: int) -> tuple[str, ...]:
    """Of an H100: past 128 registers do not hold dK and dV together."""
    return ("dv", "dk", "dq") if head_dim > 128 else ("dkdv", "dq")


def cubin(key: str, head_dim: int, which: str, mask: str, **sizes: Any) -> tuple[CubinReport, Any]:
    compiled = compile_kernel(kernel(generated(key, head_dim, mask, **sizes), which)[1], key)
    return inspect(compiled.cubin, compiled.metadata.shared), compiled.metadata


@pytest.mark.parametrize(("head_dim", "which"), [(128, "dkdv"), *((256, which) for which in passes(256))])
def test_kernel_body(head_dim: int, which: str) -> None:
    """Without the functions that follow it."""
    name, source = kernel(generated("h100", head_dim, "causal", kv_heads=4), which)
    text = source[source.index(f"def {name}(") : source.index("@triton.jit", source.index(f"def {name}("))].replace(name, "kernel")
    text = re.sub(r"\b[sk]s?\d+\b", "size", text)
    file = EXPECTED / f"two_pass_{which}_causal_gqa_{head_dim}.txt"
    if expecttest.ACCEPT:
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_launches(head_dim: int) -> None:
    """Plain ones, of a CTA for each KV tile of a kv head and for each Q tile of a query head; nothing is zeroed before."""
    code = generated("h100", head_dim, "causal", kv_heads=4)
    grids = {}
    for which in passes(head_dim):
        name, source = kernel(code, which)
        (line,) = code.launches[name]
        grids[which] = re.search(r"(\d+, \d+, \d+), stream", line)[1]
        assert "'launch_cooperative_grid': False" in source
        assert "'enable_fp_fusion': True" in source
    kv, q = f"{2 * 4 * 8192 // 128}, 1, 1", f"{2 * 16 * 8192 // 128}, 1, 1"
    assert grids == {which: q if which == "dq" else kv for which in passes(head_dim)}
    assert "zero_()" not in code.source and "workspace" not in code.source.lower().replace("workspace_bytes", "")


@pytest.mark.parametrize(
    ("key", "head_dim", "kv_heads", "family", "dynamic_family"),
    [
        ("h100", 128, 16, "symmetric", "by size"),
        ("h100", 128, 1, "two_pass", "by size"),
        ("a100", 64, 16, "two_pass", "by size"),
        ("h100", 256, 16, "two_pass", "two_pass"),
        ("b200", 192, 16, "two_pass", "two_pass"),
    ],
)
def test_the_choice(key: str, head_dim: int, kv_heads: int, family: str, dynamic_family: str) -> None:
    """By sizes up to a head dim of 128, past it always."""
    matmuls = {("by size", False): [3, 4, 5], ("two_pass", False): [3, 4], ("two_pass", True): [2, 3, 3], ("symmetric", False): [5]}
    for dynamic, expected in ((False, family), (True, dynamic_family)):
        code = attention_backward(
            key, q_len=2048, kv_len=2048, batch=1, heads=16, kv_heads=kv_heads, head_dim=head_dim, mask="causal", dynamic=dynamic
        )
        (decision,) = code.decisions
        assert decision.family == expected
        assert (decision.predicted_us is None) == dynamic
        assert sorted(code.matmuls.values()) == (matmuls[expected, head_dim > 128 and key == "h100"])


SIZES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("causal", {"kv_heads": 4, "q_len": 8159, "kv_len": 8159}),
    ("causal", {"kv_heads": 4, "dynamic": True}),
]


@pytest.mark.parametrize(("head_dim", "which"), [(d, which) for d in (64, 128, 192, 256) for which in passes(d)])
@pytest.mark.parametrize(("mask", "sizes"), SIZES, ids=["full", "causal-ragged-gqa", "causal-dynamic-gqa"])
def test_cubin(head_dim: int, which: str, mask: str, sizes: dict[str, Any]) -> None:
    found, metadata = cubin("h100", head_dim, which, mask, **sizes)
    assert found.hgmma > 0 and found.hmma == 0, "the matmuls are not HGMMA"
    assert not found.wgmma_serialised, "ptxas put a wait behind every wgmma"
    assert found.ldgsts > 0, "the loads are not asynchronous"
    assert found.local_in_loop == 0, "the main loop spills"
    assert (found.red, found.atomg) == (0, 0), "something is added in memory"
    assert metadata.shared <= device("h100").limits.shared_bytes_per_block_optin


@pytest.mark.parametrize("which", ["dkdv", "dq"])
@pytest.mark.parametrize(("key", "matmul", "head_dim"), [("a100", "hmma", 64), ("a100", "hmma", 256), ("b200", "utcmma", 256)])
def test_cubin_of_other_gpus(key: str, matmul: str, head_dim: int, which: str) -> None:
    found, metadata = cubin(key, head_dim, which, "causal", kv_heads=4, q_len=8159, kv_len=8159)
    assert getattr(found, matmul) > 0
    assert found.ldgsts > 0
    assert found.local_in_loop == 0
    assert metadata.shared <= device(key).limits.shared_bytes_per_block_optin
    assert (getattr(metadata, "tmem_size", 0) or 0) <= 512  # columns; a kernel that needs more compiles to a trap


@pytest.mark.parametrize("which", ["dkdv", "dq"])
def test_offsets_past_2_gib(which: str) -> None:
    """Every index that a stride of a batch element or head is multiplied with has 64 bits."""
    with enabled(template="two_pass"):
        code = attention_backward("h200", q_len=16384, kv_len=16384, batch=32, heads=64, kv_heads=64, head_dim=128, mask="causal")
    _, source = kernel(code, which)
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in source
    indices = dict(re.findall(r"\b(idx_[zhmn]) = (.*)", source))
    assert len(indices) == 3 and all(index.endswith(".to(INDEX_DTYPE)") for index in indices.values())


def test_the_preprocess_does_not_spill() -> None:
    found, _ = cubin("h100", 256, "preprocess", "causal", kv_heads=4)
    assert found.stack_bytes == 0
