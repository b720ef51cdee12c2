"""Kernels whose value has another head dim than query, and of head dims below 16, for GPUs that are not there."""

import pytest
import triton
from kernels import MAIN, PREPROCESS, TWO_PASS, broken_gates, generated, generated_flex, kernel

from benchmarks.machine_code.generate import Generated

nightly = pytest.mark.nightly
FULL, DYNAMIC = {"mask": "full"}, {"kv_heads": 4, "dynamic": True}
RAGGED = {"kv_heads": 4, "q_len": 8159, "kv_len": 8159}


def assert_no_broken_gate(code: Generated, key: str, word: str, dims: tuple[int, int]) -> None:
    most_local = 8 if max(dims) > 128 and triton.__version__.startswith("3.9") else 0  # as benchmarks/machine_code/gates.py lists
    row, sentences = broken_gates(code, key, kernel(code, word)[0], *dims, most_local=most_local)
    assert sentences == []
    assert row["ldgsts"] > 0


@pytest.mark.parametrize(
    ("key", "template", "dims", "sizes"),
    [
        ("h100", "two_pass", (192, 128), RAGGED),
        ("h100", "one_pass", (96, 64), RAGGED),
        ("h100", "one_pass", (64, 128), FULL),
        *(
            pytest.param(key, template, dims, sizes, marks=nightly)
            for key in ("a100", "b200", "h100", "rtx4090", "rtx5090")
            for template, pairs in {
                "one_pass": ((128, 64), (64, 128), (64, 16), (16, 64), (8, 8)),
                "two_pass": ((192, 128), (128, 256), (256, 64), (128, 64), (64, 128), (8, 8)),
            }.items()
            for dims in pairs
            for sizes in (FULL, DYNAMIC)
        ),
    ],
)
def test_cubin(key: str, template: str, dims: tuple[int, int], sizes: dict[str, object]) -> None:
    """Matmuls of the GPU alone, nothing spilled, asynchronous loads, as many CTAs as the cost model counts on."""
    code = generated(key, {"template": template}, head_dim=dims[0], value_dim=dims[1], **sizes)
    assert_no_broken_gate(code, key, MAIN if template == "one_pass" else TWO_PASS, dims)


def test_cubin_of_a_flex_attention() -> None:
    code = generated_flex(head_dim=128, value_dim=64, mask_mod="documents", score_mod="alibi")
    assert_no_broken_gate(code, "h100", MAIN, (128, 64))


def test_columns_and_matmuls_of_mla() -> None:
    """192 columns are padded to 256, value's 128 are not; dK and dV share CTAs, which 256 columns of both do not."""
    mla, wide = generated(head_dim=192, value_dim=128), generated(head_dim=192)
    (_, source), (_, before) = kernel(mla, TWO_PASS), kernel(mla, PREPROCESS)
    for line in ("BLOCK_D : tl.constexpr = 256", "HEAD_DIM : tl.constexpr = 192", "BLOCK_DV : tl.constexpr = 128", "EVEN_DV"):
        assert line in source
    for line in ("BLOCK_D : tl.constexpr = 128", "HEAD_DIM : tl.constexpr = 128"):  # of out and its gradient
        assert line in before
    assert [kernel(code, TWO_PASS)[1].count("tl.dot(") for code in (mla, wide)] == [7, 8]
    (decision,) = mla.decisions
    assert (decision.head_dim, decision.family, decision.reason) == ("192/128", "two_pass", None)
    assert " D=192/128 bf16" in str(decision) and decision.tile == "32x128x256/128 and 128x32x256/128"
    assert decision.predicted_us < wide.decisions[0].predicted_us
