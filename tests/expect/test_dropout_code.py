"""What is generated for an attention that drops, on a GPU that has said what it drops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import product
from unittest import mock

import pytest
import stock_ops
import torch
import triton
from kernels import GLUON_OP, MAIN, TWO_PASS, broken_gates, gluon_launches, kernel
from torch import Tensor

from benchmarks.machine_code.generate import Generated, generate
from dash_inductor import enabled
from dash_inductor.codegen.mode import deterministic
from dash_inductor.first_use.kind import Kind
from dash_inductor.hooks.install import installed
from dash_inductor.reproduce import trial
from dash_inductor.rewrite import sdpa

FORWARDS = {"efficient": partial(stock_ops.efficient, dropout_p=0.1), "flash": stock_ops.dropping}
# As one of Triton's kernels has it, and the kernel of the bits, which adds what makes a byte that is too large carry.
THRESHOLDS = {"efficient": "chosen(words, position & 3) >= 429496752", "flash": "byte <= 229"}
OF_BITS = {"efficient": "(word >= 429496752)", "flash": f"+ {(255 - 229) * 0x00800080}"}
# The most LDL and STL of a main loop, which a kernel without dropout has none of, by Triton; all of head dim 128 on sm_90.
SPILLED = {"3.6": 75, "3.7": 16, "3.9": 33}
both = pytest.mark.parametrize("generator", FORWARDS)


def tensors(head_dim: int) -> Sequence[Tensor]:
    return [torch.empty(2, 2048, 16, head_dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(4)]


def code(generator: str, *, key: str = "h100", template: str = "one_pass", head_dim: int = 64, kernel: str = "triton") -> Generated:
    asked = mock.patch.object(sdpa, "why_bits_unknown", lambda *_: None)
    with asked, enabled(template=template, kernel=kernel), installed(), deterministic():
        return generate(FORWARDS[generator], partial(tensors, head_dim), key)


@both
@pytest.mark.parametrize("template", ["one_pass", "two_pass"])
def test_code(template, generator):
    """It asks again when it is loaded, and reads seed and offset where the forward left them."""
    generated = code(generator, template=template)
    (decision,) = generated.decisions
    assert decision.rewritten and decision.op.startswith(f"aten._scaled_dot_product_{generator}")
    question = generator, 0.1, (False, False), "bfloat16", (64, 64), "cuda:0"
    assert f"_require_bits{question}" in generated.source
    assert generated.source.count("torch.ops.dash.random_state.default(") == 1
    assert re.search(rf"dash_dropout\W+0\.1, \W?{generator}", generated.graph), generated.graph  # by which caches know it
    _, source = kernel(generated, MAIN if template == "one_pass" else TWO_PASS)
    assert THRESHOLDS[generator] in source and source.count("RANDOM + 1") == (1 if template == "one_pass" else 2)


@pytest.mark.every_case
@both
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_gluon_kernel_has_bits(head_dim, generator):
    """They are written before its launch, by a kernel that reads seed and offset; on an H100 nothing asks for it."""
    generated = code(generator, head_dim=head_dim, kernel="auto")
    (decision,), (launch,) = generated.decisions, gluon_launches(generated)
    assert decision.rewritten and (decision.kernel, decision.dropout) == ("gluon", 0.1)
    assert float(launch["drop_scale"]) == (pytest.approx(1 / 0.9) if generator == "flash" else 1.109375)
    name, source = kernel(generated, "philox_at")
    assert OF_BITS[generator] in source and source.count("RANDOM + 1") == 1
    *_, written = re.findall(rf"{name}\.run\((.*?), stream", generated.source)
    assert launch["drop_bits"] in written.split(", ")
    assert generated.source.index(f"{name}.run(") < generated.source.index(GLUON_OP)
    with enabled(kernel="gluon"), installed(), deterministic():
        (without,) = generate(stock_ops.flash, partial(tensors, head_dim), "h100").decisions
    more = decision.workspace_bytes - without.workspace_bytes
    assert more == pytest.approx(2 * 16 * 2048 * 2048 // 8, rel=0.01)  # schedules may differ


KERNELS = list(product((64, 128), ("one_pass", "two_pass"), ("a100", "h100"), FORWARDS))


@pytest.mark.parametrize(("head_dim", "template", "key", "generator"), KERNELS)
def test_compiled_kernels(head_dim, template, key, generator):
    """Gates hold but for spills: an SM holds as many CTAs, and matmuls stay asynchronous."""
    generated = code(generator, key=key, template=template, head_dim=head_dim)
    name, _ = kernel(generated, MAIN if template == "one_pass" else TWO_PASS)
    row, broken = broken_gates(generated, key, name, head_dim)
    assert row["local_in_loop"] <= SPILLED.get(triton.__version__[:3], max(SPILLED.values())), row
    assert [gate for gate in broken if "spills" not in gate] == []


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_trial_of_flash_attention(mask):
    """Which the CPU has no op for: the graph that is tried on a GPU."""
    kind = Kind("one_pass", "triton", "grouped", 90, "bf16", 64, 64, mask, 64, 128, dropout="flash")

    def inputs() -> Sequence[Tensor]:
        *three, grad_out = tensors(64)
        random = torch.empty(2, dtype=torch.uint64, device="cuda"), torch.empty((), dtype=torch.uint64, device="cuda")
        return [*three, grad_out, torch.empty_like(grad_out), torch.empty(2, 16, 2048, device="cuda"), *random]

    asked = mock.patch.object(sdpa, "why_bits_unknown", lambda *_: None)
    with asked, enabled(template="one_pass", kernel="triton"), installed(), deterministic():
        generated = generate(trial._dropping(kind), inputs, "h100")
    (decision,) = generated.decisions
    assert decision.rewritten and decision.mask == mask and "dash.random_state" in generated.graph
