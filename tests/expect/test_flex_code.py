"""The code of FlexAttention's backward for an H100, on a machine without one: the kernels' texts, and what the wrapper launches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kernels import FLEX_SIZES, MAIN, PREPROCESS, TWO_PASS, assert_expected, generated, generated_flex, kernel, text

from benchmarks.machine_code import flex
from benchmarks.machine_code.cubin import disassemble, main_loops, parse
from benchmarks.machine_code.generate import TEMPLATE, Generated, compile_kernel, generate
from dash_inductor import enabled

MATRIX, RANKS, ROWS = (f"template: block_{name}\n" for name in ("matrix", "ranks", "rows"))
ALIBI = {"mask_mod": "documents", "score_mod": "alibi"}
WINDOW = {"mask_mod": "window", "score_mod": "soft-cap", "head_dim": 128}
# The kernel's file: the kernel, of which code, and the kernel from which its file differs.
KERNELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "flex_documents_alibi_64": (MAIN, ALIBI, ""),
    "flex_window_soft_cap_128": (MAIN, WINDOW, "flex_documents_alibi_64"),
    "flex_ragged_64": (MAIN, ALIBI | {"length": 8100}, "flex_documents_alibi_64"),
    "flex_gqa_64": (MAIN, ALIBI | {"kv_heads": 4, "batch": 8}, "flex_documents_alibi_64"),
    "flex_in_parts_64": (MAIN, ALIBI | {"kv_heads": 4}, ""),
    "flex_gqa_mask_by_head_64": (MAIN, ALIBI | {"kv_heads": 4, "mask_heads": 16}, "flex_documents_alibi_64"),
    "flex_documents_alibi_256": (TWO_PASS, ALIBI | {"head_dim": 256}, "two_pass_causal_gqa_128"),
    "block_matrix": (MATRIX, ALIBI, ""),
    "block_ranks": (RANKS, ALIBI, ""),
    "block_rows": (ROWS, ALIBI, ""),
    "block_rows_in_bands": (ROWS, ALIBI | {"kv_heads": 4}, "block_rows"),
    "flex_preprocess_64": (PREPROCESS, ALIBI, "preprocess_64"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    word, sizes, base = KERNELS[name]
    functions = ["functions"] * (word in (MAIN, TWO_PASS)) + ["functions_of_parts"] * (name == "flex_in_parts_64")
    assert_expected(text(generated_flex(**sizes), word), name, *functions, base=base)


def without_constants(text: str) -> list[str]:
    return [line for line in text.splitlines() if ": tl.constexpr = " not in line]


def test_a_flex_attention_without_functions_and_mask_has_the_dense_kernel() -> None:
    sizes = {name: FLEX_SIZES[name] for name in ("batch", "heads", "kv_heads", "head_dim")}
    dense = generated(mask="full", q_len=FLEX_SIZES["length"], kv_len=FLEX_SIZES["length"], **sizes)
    own = generated_flex(mask_mod="none")
    assert without_constants(text(own, MAIN)) == without_constants(text(dense, MAIN))
    assert [own.decisions[0].family, own.decisions[0].roles] == [dense.decisions[0].family, dense.decisions[0].roles]


def wrapper(code: Generated) -> str:
    """The wrapper's lines about kernels and workspaces, kernels by their templates' names, without the stream."""
    body = code.source[code.source.index("def call(") :]
    lines = [line.strip() for line in body.splitlines() if re.search(r"\.run\(|^ *(del )?workspace_", line)]
    names = {name: match[1] if (match := TEMPLATE.search(source)) else "pointwise" for name, source in code.kernels.items()}
    return re.sub(r", stream=\w+|\b(triton_\w+)(?=\.run)", lambda match: names.get(match[1], ""), "\n".join(lines))


def test_launches() -> None:
    """Matrix, ranks and rows before the kernel that walks them, one after the other, of a mask of one head or of each."""
    by_head = generated_flex(**KERNELS["flex_gqa_mask_by_head_64"][1])
    assert_expected("\n".join((wrapper(generated_flex(**ALIBI)), "", wrapper(by_head))), "flex_launches")


def test_a_launch_that_ends_with_any_number_of_resident_ctas() -> None:
    """A CTA for each KV tile of each kv head, or each part of it; the launch is not cooperative, and the occupancy is checked."""
    whole = generated_flex(**ALIBI)
    assert f", {2 * 16 * 8192 // 128}, 1, 1" in whole.launches[kernel(whole, MAIN)[0]][0]
    code = generated_flex(**ALIBI, kv_heads=4)
    name, source = kernel(code, MAIN)
    (line,) = code.launches[name]
    assert f", {2 * 4 * 2 * (64 + 32 + 16 + 8)}, 1, 1" in line  # two sets of query heads, four bands
    assert "'launch_cooperative_grid': False" in source
    assert source.count("@expect(1)\n# dash_inductor template: block_mask\n") == code.source.count("@expect(") == 1
    assert all("'enable_fp_fusion': True" in source for source in code.kernels.values() if TEMPLATE.search(source))


def test_attentions_of_one_mask_share_rows_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, and read by the main kernel of each."""

    def twice(backward: Callable[..., tuple[Any, ...]], arguments: Callable[[], Sequence[Any]], device: str) -> Generated:
        def both(query: Any, *others: Any) -> tuple[Any, ...]:
            dq, *gradients = backward(query, *others)
            return *gradients, *backward(dq, *others)

        return generate(both, arguments, device)

    monkeypatch.setattr("benchmarks.machine_code.flex.generate", twice)
    with enabled(template="one_pass", kernel="triton"):
        code = flex.flex_backward("h100", flex.FlexAttention(**FLEX_SIZES, **ALIBI))
    launched = {}
    for name, source in code.kernels.items():
        if match := TEMPLATE.search(source):
            launched[match[1]] = launched.get(match[1], ()) + code.launches[name]
    once = dict.fromkeys(("block_matrix", "block_ranks", "block_rows"), 1)
    assert {name: len(lines) for name, lines in launched.items()} == {"preprocess": 2, "block_mask": 2, **once}
    (rows,) = launched["block_rows"]
    read = [re.findall(r"buf\d+|arg\d+_1", line)[6:8] for line in launched["block_mask"]]
    assert read == 2 * [re.findall(r"buf\d+", rows)[2:4]]


def branches(key: str, score_mod: str) -> int:
    """Branches in the main loop of one pass."""
    code = generated_flex(key, score_mod=score_mod, mask_mod="none", head_dim=128)
    (loop,) = main_loops(parse(disassemble(compile_kernel(kernel(code, MAIN)[1], key).cubin)))
    return sum(instruction.base in ("BRA", "BSSY", "CALL") for instruction in loop)


@pytest.mark.parametrize("key", ["h100", *(pytest.param(key, marks=pytest.mark.nightly) for key in ("a100", "b200"))])
def test_a_soft_cap_compiles_to_no_branches(key: str) -> None:
    """libdevice's tanh has one for each element of a thread: with it there were 54, 81 and 111 in all on an A100, B200 and H100."""
    assert branches(key, "soft-cap") <= branches(key, "none")
