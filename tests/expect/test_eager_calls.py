"""What eager training decides about calls of the CUDA op, on a GPU that is not there: nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dash_inductor import clear_decisions, decisions
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.hooks import eager
from dash_inductor.hooks.cache_key import settings_key
from dash_inductor.rewrite.stock_ops import FLASH

CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def on_an_h100() -> Iterator[None]:
    clear_decisions()
    torch.use_deterministic_algorithms(True)
    eager.program_for.cache_clear()
    with fake_gpu("h100"):
        yield
    torch.use_deterministic_algorithms(False)
    eager.program_for.cache_clear()


def call(length: int, *, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, dropout_p: float = 0.0) -> eager.Call:
    """As autograd makes it: rows of [B, S, H, D] in memory, no tensors of cumulated lengths, a seed."""
    x = eager.TensorLike((2, 8, length, head_dim), (length * 8 * head_dim, head_dim, 8 * head_dim, 1), dtype, CUDA)
    lse = eager.TensorLike((2, 8, length), (8 * length, length, 1), torch.float32, CUDA)
    seed = eager.TensorLike((2,), (1,), torch.uint64, CUDA)
    args = (x, x, x, x, x, lse, None, None, length, length, dropout_p, True, seed, eager.TensorLike((), (), torch.uint64, CUDA))
    return eager.Call(settings_key(), FLASH, args, (("scale", 0.125),))


def test_one_program_for_all_lengths():
    """And gradients with the strides of stock's."""
    programs: list[Any] = [eager.program_for(call(length)) for length in (512, 1000)]
    assert programs[0].func is programs[1].func
    assert programs[1].args[0] == [call(1000).args[0].stride] * 3
    assert eager.program_for(call(512, head_dim=64)).func is not programs[0].func
    assert decisions() == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"dtype": torch.float32}, "dtype fp32 is not one of bf16, fp16"),
        ({"head_dim": 264}, "head dim 264 is outside 1..256"),
    ],
)
def test_what_goes_to_stock(options, reason):
    assert eager.program_for(call(512, **options)) is None
    (decided,) = decisions()
    assert decided.op == str(FLASH) and reason in decided.reason
