"""Code and cubins for GPUs that are not there, made once in a process, and the files that hold the code's text."""

import ast
import difflib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expecttest
import torch

from benchmarks.machine_code.flex import flex_backward
from benchmarks.machine_code.gates import figures
from benchmarks.machine_code.generate import Generated, attention_backward, compile_kernel
from benchmarks.machine_code.rules import Rules
from dash_inductor import enabled
from dash_inductor.codegen.flex import FlexAttention
from dash_inductor.devices import device
from dash_inductor.templates.tiles import Template, tile, two_pass_tile

GLUON_OP = "torch.ops.dash.sdpa_backward_gluon.default"
EXPECTED = Path(__file__).parent / "expected"
GAP = "\n\n\n"  # between a kernel and its functions
MAIN, TWO_PASS, TABLE, PREPROCESS = "SEMAPHORES", "KEY_PROGRAMS", "UNREAD", "everywhere"  # a word that only this kernel has
SIZES = {"q_len": 8192, "kv_len": 8192, "batch": 2, "heads": 16, "kv_heads": 16, "head_dim": 128, "mask": "causal"}
FLEX_SIZES = {"length": 8192, "batch": 2, "heads": 16, "kv_heads": 16, "head_dim": 64}

compiled = functools.cache(compile_kernel)


@functools.cache
def _generated(
    backward: Callable[..., Generated], key: str, settings: tuple[tuple[str, Any], ...], sizes: tuple[tuple[str, Any], ...]
) -> Generated:
    with enabled(**({"kernel": "triton"} | dict(settings))):
        return backward(key, **dict(sizes))


def generated(key: str = "h100", settings: dict[str, Any] | None = None, cached: bool = True, **sizes: Any) -> Generated:
    """The code for SIZES, where `sizes` has no others, by Triton kernels unless `settings` has another.

    It is not cached under a patch, which is in no key.
    """
    function = _generated if cached else _generated.__wrapped__
    return function(attention_backward, key, tuple(sorted((settings or {}).items())), tuple(sorted((SIZES | sizes).items())))


def generated_flex(key: str = "h100", settings: dict[str, Any] | None = None, **sizes: Any) -> Generated:
    """The code of a FlexAttention of FLEX_SIZES, where `sizes` has no others, as `generated`."""
    return _generated(_flex_backward, key, tuple(sorted((settings or {}).items())), tuple(sorted((FLEX_SIZES | sizes).items())))


def _flex_backward(key: str, **sizes: Any) -> Generated:
    return flex_backward(key, FlexAttention(**sizes))


def kernel(code: Generated, word: str) -> tuple[str, str]:
    """(name, source) of the only kernel that has the word."""
    ((name, source),) = [(name, source) for name, source in code.kernels.items() if word in source]
    return name, source


def text(code: Generated, word: str) -> str:
    """From the kernel's `def` line down: the same for every torch and Triton that is supported."""
    name, source = kernel(code, word)
    return re.sub(r"\b[sk]s?\d+\b", "size", source[source.index(f"def {name}(") :].replace(name, "kernel")).strip("\n")


def gluon_launches(code: Generated) -> list[dict[str, str]]:
    """The arguments of every launch of the Gluon kernel in a wrapper, by their names in the op's schema."""
    names = [argument.name for argument in torch.ops.dash.sdpa_backward_gluon.default._schema.arguments]
    calls = [node for node in ast.walk(ast.parse(code.source)) if isinstance(node, ast.Call) and ast.unparse(node.func) == GLUON_OP]
    return [dict(zip(names, map(ast.unparse, call.args), strict=True)) for call in calls]


def launch(code: Generated) -> str:
    """The main kernel's launch, its names normalised, without the stream."""
    name, _ = kernel(code, MAIN)
    (line,) = code.launches[name]
    line = re.sub(r"dash_(table|decision)_\w+", r"\1", line).replace(name, "kernel")
    return re.sub(r", stream=\w+", "", re.sub(r"\bs\d+\b", "S", line))


def assert_expected(text: str, name: str, *functions: str, base: str = "") -> None:
    """A kernel's file holds its text, or how that differs from `base`'s (`patch` applies it); functions behind it have files too.

    EXPECTTEST_ACCEPT writes the kernel's file, and the last of the functions'.
    """
    body, _, behind = text.partition(GAP)
    if base:
        lines = difflib.unified_diff(_expected(f"{base}.txt").splitlines(), body.splitlines(), base, name, n=0, lineterm="")
        body = "\n".join(line.rstrip("\n") for line in lines)
    file = f"{name}.diff" if base else f"{name}.txt"
    if expecttest.ACCEPT:
        (EXPECTED / file).write_text(f"{body}\n")
        before = "".join(_expected(f"{function}.txt") + GAP for function in functions[:-1])
        assert behind.startswith(before), f"accept {', '.join(functions[:-1])} first"
        for last in functions[-1:]:
            (EXPECTED / f"{last}.txt").write_text(behind[len(before) :] + "\n")
    assert body == _expected(file)
    assert behind == GAP.join(_expected(f"{function}.txt") for function in functions)


def _expected(file: str) -> str:
    return (EXPECTED / file).read_text().strip("\n")


def broken_gates(
    code: Generated, key: str, name: str, head_dim: int, value_dim: int | None = None, **most: int
) -> tuple[dict[str, Any], list[str]]:
    """The figures of a kernel for bf16, and the gates that it does not pass; `most` is for `Rules`."""
    arch = device(key).arch
    used = (tile if code.templates[name] == Template.ONE_PASS else two_pass_tile)(arch, "bf16", head_dim, value_dim)
    rules = Rules(arch, used, **most)
    row = figures(compiled(code.kernels[name], key), rules)
    return row, rules.violated(row)
