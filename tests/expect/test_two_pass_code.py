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
from dash_inductor.devices import device
from dash_inductor.inspection.cubin import CubinReport, inspect
from dash_inductor.inspection.generate import Generated, attention_backward, compile_kernel
from dash_inductor.templates.tiles import two_pass_tile

EXPECTED = Path(__file__).parent / "expected"


@functools.cache
def generated(key: str, head_dim: int, mask: str, **sizes: Any) -> Generated:
    sizes = {"q_len": 8192, "kv_len": 8192, "kv_heads": 16} | sizes
    with enabled(template="two_pass"):
        return attention_backward(key, batch=2, heads=16, head_dim=head_dim, mask=mask, **sizes)


def kernel(code: Generated) -> tuple[str, str]:
    """(name, source) of the main kernel."""
    (name,) = code.templates
    return name, code.kernels[name]


@pytest.mark.parametrize("head_dim", [128, 256])
def test_kernel_body(head_dim: int) -> None:
    """Without the functions that follow it. Past a head dim of 128 registers do not hold dK and dV together."""
    name, source = kernel(generated("h100", head_dim, "causal", kv_heads=4))
    text = source[source.index(f"def {name}(") : source.index("@triton.jit", source.index(f"def {name}("))].replace(name, "kernel")
    text = re.sub(r"\b[sk]s?\d+\b", "size", text)
    file = EXPECTED / f"two_pass_causal_gqa_{head_dim}.txt"
    if expecttest.ACCEPT:
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_launch(head_dim: int) -> None:
    """A plain one: one CTA or two for each KV tile of a kv head, one for each Q tile of a query head; nothing is zeroed before."""
    code = generated("h100", head_dim, "causal", kv_heads=4)
    name, source = kernel(code)
    (line,) = code.launches[name]
    ctas = 2 * 4 * 8192 // 128 * (2 if head_dim > 128 else 1) + 2 * 16 * 8192 // 128
    assert re.search(r"(\d+, \d+, \d+), stream", line)[1] == f"{ctas}, 1, 1"
    assert "'launch_cooperative_grid': False" in source
    assert "'enable_fp_fusion': True" in source
    assert "zero_()" not in code.source and "workspace" not in code.source.lower().replace("workspace_bytes", "")


@pytest.mark.parametrize(
    ("key", "head_dim", "kv_heads", "family", "dynamic_family"),
    [
        ("h100", 128, 16, "symmetric_round_robin", "by_size"),
        ("h100", 128, 1, "two_pass", "by_size"),
        ("a100", 64, 16, "two_pass", "by_size"),
        ("h100", 256, 16, "two_pass", "two_pass"),
        ("b200", 192, 16, "two_pass", "two_pass"),
    ],
)
def test_the_choice(key: str, head_dim: int, kv_heads: int, family: str, dynamic_family: str) -> None:
    """By sizes up to a head dim of 128, past it always."""
    templates = {"by_size": ["one_pass", "two_pass"], "two_pass": ["two_pass"], "symmetric_round_robin": ["one_pass"]}
    split = head_dim > 128 and key == "h100"
    matmuls = {"one_pass": 5, "two_pass": 8 if split else 7}
    for dynamic, expected in ((False, family), (True, dynamic_family)):
        code = attention_backward(
            key, q_len=2048, kv_len=2048, batch=1, heads=16, kv_heads=kv_heads, head_dim=head_dim, mask="causal", dynamic=dynamic
        )
        (decision,) = code.decisions
        assert decision.family == expected
        assert (decision.predicted_us is None) == dynamic
        assert list(code.templates.values()) == templates[expected]
        for name, template in code.templates.items():
            assert code.kernels[name].count("tl.dot(") == matmuls[template]


SIZES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("causal", {"kv_heads": 4, "q_len": 8159, "kv_len": 8159}),
    ("causal", {"kv_heads": 4, "dynamic": True}),
]


def cubin(key: str, head_dim: int, mask: str, **sizes: Any) -> tuple[CubinReport, Any]:
    compiled = compile_kernel(kernel(generated(key, head_dim, mask, **sizes))[1], key)
    tile = two_pass_tile(device(key).arch, "bf16", head_dim)
    return inspect(compiled.cubin, compiled.metadata.shared, tile.kinds), compiled.metadata


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("mask", "sizes"), SIZES, ids=["full", "causal-ragged-gqa", "causal-dynamic-gqa"])
def test_cubin(head_dim: int, mask: str, sizes: dict[str, Any]) -> None:
    found, metadata = cubin("h100", head_dim, mask, **sizes)
    assert found.hgmma > 0 and found.hmma == 0, "the matmuls are not HGMMA"
    assert not found.wgmma_serialised, "ptxas put a wait behind every wgmma"
    assert found.ldgsts > 0, "the loads are not asynchronous"
    assert found.local_in_loop == 0, "the main loop spills"
    assert (found.red, found.atomg) == (0, 0), "something is added in memory"
    assert metadata.shared <= device("h100").limits.shared_bytes_per_block_optin


@pytest.mark.parametrize(("key", "matmul", "head_dim"), [("a100", "hmma", 64), ("a100", "hmma", 256), ("b200", "utcmma", 256)])
def test_cubin_of_other_gpus(key: str, matmul: str, head_dim: int) -> None:
    found, metadata = cubin(key, head_dim, "causal", kv_heads=4, q_len=8159, kv_len=8159)
    assert getattr(found, matmul) > 0
    assert found.ldgsts > 0
    assert found.local_in_loop == 0
    assert metadata.shared <= device(key).limits.shared_bytes_per_block_optin
    assert (getattr(metadata, "tmem_size", 0) or 0) <= 512  # columns; a kernel that needs more compiles to a trap


def test_offsets_past_2_gib() -> None:
    """Every index that a stride of a batch element or head is multiplied with has 64 bits."""
    with enabled(template="two_pass"):
        code = attention_backward("h200", q_len=16384, kv_len=16384, batch=32, heads=64, kv_heads=64, head_dim=128, mask="causal")
    _, source = kernel(code)
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in source
    indices = dict(re.findall(r"\b(idx_[zhmn]) = (.*)", source))
    assert len(indices) == 3 and all(index.endswith(".to(INDEX_DTYPE)") for index in indices.values())


def test_the_preprocess_does_not_spill() -> None:
    code = generated("h100", 256, "causal", kv_heads=4)
    (source,) = [source for name, source in code.kernels.items() if "everywhere" in source]
    compiled = compile_kernel(source, "h100")
    assert inspect(compiled.cubin, compiled.metadata.shared).stack_bytes == 0
