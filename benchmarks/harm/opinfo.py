"""Samples of torch's operator database: of SDPA each is a case, of an op that stands around attention those of a dtype are."""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from .case import Case

SDPA = "nn.functional.scaled_dot_product_attention"
# What attention by hand is made of, and what stands before and behind it: a pass that matches too much would meet these.
NEIGHBOURS = (
    *("matmul", "bmm", "mm", "baddbmm", "addmm", "einsum", "mul", "div", "add", "sub", "neg", "exp", "log", "rsqrt"),
    *("softmax", "log_softmax", "_softmax_backward_data", "logsumexp", "sum", "mean", "amax", "cumsum", "var", "std"),
    *("nn.functional.layer_norm", "nn.functional.rms_norm", "nn.functional.gelu", "nn.functional.silu"),
    *("nn.functional.linear", "nn.functional.cross_entropy", "nn.functional.dropout", "nn.functional.embedding"),
    *("where", "masked_fill", "tril", "triu", "expand", "repeat", "repeat_interleave", "gather", "scatter_add"),
    *("index_select", "index_add", "index_put", "transpose", "permute", "reshape", "view", "cat", "stack", "chunk"),
    *("split", "squeeze", "unsqueeze", "flip", "roll", "nn.functional.pad", "clone", "contiguous", "tanh", "sigmoid"),
)
NEIGHBOURS_DTYPES = (torch.float32, torch.bfloat16)
SAMPLES = 6  # of a neighbour, at most, in a graph


def sdpa() -> Iterator[Case]:
    """Each sample of SDPA in each dtype that the database has, forward and backward."""
    (op,) = (op for op in op_db if op.name == SDPA)
    for dtype in sorted(op.dtypes, key=str):
        for index in range(len(list(op.sample_inputs("cpu", dtype, requires_grad=True)))):
            yield Case(f"{_short(dtype)} {index}", partial(_of_samples, op, dtype, slice(index, index + 1)))


def neighbours() -> Iterator[Case]:
    """The ops that stand around attention, forward and backward."""
    for op, dtype in itertools.product(op_db, NEIGHBOURS_DTYPES):
        if op.name in NEIGHBOURS and not op.variant_test_name and dtype in op.dtypes:
            yield Case(f"{op.name} {_short(dtype)}", partial(_of_samples, op, dtype, slice(SAMPLES)))


def _of_samples(op: Any, dtype: torch.dtype, which: slice) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function that calls the op on each of the samples, and their tensors and other arguments."""
    differentiable = dtype in op.supported_backward_dtypes("cpu")
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))[which]
    calls = tuple((sample.input, sample.args, sample.kwargs) for sample in samples)

    # The database calls some by way of a function that sets a seed, which Dynamo does not trace.
    function = pkgutil.resolve_name(f"torch.{op.name}") if op.name.startswith("nn.functional.") else op.op

    def call_all(*calls: Any) -> list[Any]:
        return [function(first, *args, **kwargs) for first, args, kwargs in calls]

    return call_all, calls


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
