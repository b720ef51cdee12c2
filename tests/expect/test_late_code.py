"""A backward for an H100 that is not there, given back to stock's flash attention after it was rewritten."""

import re
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import stock_ops
from kernels import assert_expected
from torch import Tensor, fx
from torch._inductor import config as inductor_config

import dash_inductor
from benchmarks.machine_code.generate import Generated, generate
from dash_inductor.codegen.mode import deterministic
from dash_inductor.config import Config
from dash_inductor.decision import Declined
from dash_inductor.rewrite.back_to_stock import give_back

FLASH = "torch.ops.aten._scaled_dot_product_flash_attention_backward.default("
BACK = partial(give_back, declined=Declined("a test", "a remedy"), settings=Config())


def code(attention: Callable[..., Sequence[Tensor]], after: Callable[[fx.Graph], object], dynamic: bool = False) -> Generated:
    with deterministic(), dash_inductor.enabled(), inductor_config.patch(joint_custom_post_pass=after):
        return generate(attention, stock_ops.tensors, "h100", dynamic_dims=(2,) if dynamic else ())


def test_flash_attention() -> None:
    """The calls, static and dynamic; random bits that nobody reads are zeros."""
    lines = []
    for attention, dynamic in ((stock_ops.flash, False), (stock_ops.causal, True)):
        generated = code(attention, BACK, dynamic)
        assert [(d.rewritten, d.reason) for d in generated.decisions] == [(False, "a test")]
        lines += [line.strip() for line in generated.source.splitlines() if FLASH in line]
        lines += [line for line in generated.graph.splitlines() if line.startswith("full")]
    assert_expected(re.sub(r"\bs\d+\b", "S", "\n".join(lines)), "late_flash")


@pytest.mark.nightly
@pytest.mark.parametrize("attention", [stock_ops.cudnn, stock_ops.efficient])
def test_others_stay(attention) -> None:
    """Their ops take what is not in the graph any more."""
    given_back = []
    generated = code(attention, lambda graph: given_back.append(BACK(graph)))
    assert given_back == [False] and [d.rewritten for d in generated.decisions] == [True]
