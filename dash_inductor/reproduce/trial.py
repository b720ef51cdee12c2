"""Tries a kind of kernel on a small attention: gradients against float64, and the bits of several launches.

`python -m dash_inductor.reproduce.trial JOB` prints what came out; `first_use/verdict.py` runs it.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

from .. import config, emulation
from ..codegen.flex import OPTIONS, TORCH_DTYPES, FlexAttention
from ..codegen.mode import deterministic
from ..codegen.mods import MASK_MODS
from ..config import Config
from ..dropout import FLASH, Dropout, kept
from ..first_use.kind import Kind, is_small
from ..first_use.known import Verdict
from ..first_use.process import LAUNCHED, STAGE, VERDICT
from ..first_use.verdict import is_trial
from ..hooks.install import installed
from ..lowering.launch.gluon import compiling_launches
from ..op import SDPA_BACKWARD
from ..problem import BLOCK_MASK
from ..reference import LOG2E
from ..resolve import as_if_small
from ..rewrite.stock_ops import EFFICIENT as STOCK_EFFICIENT
from ..rewrite.stock_ops import FLASH as STOCK_FLASH
from ..schedule.packing import as_if_long
from ..text import in_one_line

STARTED, COMPILED = "started", "compiled"  # stages before LAUNCHED
HEADS, KV_HEADS, LAUNCHES = 2, 1, 3
DROPPED, RANDOM = 0.3, (2**40 + 7, 2**33 + 4)  # of a kind with dropout: its p, seed and offset
TILES = 4  # that add to each tile of dQ, at least
ALLOWED = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2**-16}  # errors, over the largest element

Gradients = tuple[Tensor, ...]


def tried(kind: Kind, device: str, settings: Config, stage: Callable[[str], None] = lambda name: None) -> Verdict:
    """What came out, under these settings; nothing of it is recorded. `stage` is told how far it is: COMPILED, and LAUNCHED.

    Before that an error says nothing of the kernel, nor does one of memory that cannot be had.
    """
    reached = [""]

    def at(name: str) -> None:
        reached.append(name)
        stage(name)

    try:
        with config.within(settings), as_tried(kind):
            with deterministic(False):  # float64 has cuBLAS, which strict mode refuses unless a variable is set
                inputs, expected = attention(kind, torch.device(device))
            return verdict_on(_launches(kind, inputs, at), expected, ALLOWED[kind.dtype])
    except torch.OutOfMemoryError as error:
        return Verdict(None, in_one_line(error))
    except Exception as error:  # whatever it is
        return Verdict(False if LAUNCHED in reached else None, in_one_line(error))


@contextmanager
def as_tried(kind: Kind) -> Iterator[None]:
    """Inside, what is compiled is compiled to be tried, and is of the kind whatever its size."""
    values = (is_trial, True), (as_if_long, kind.long_schedule is not None), (as_if_small, is_small(kind))
    tokens = [(variable, variable.set(value)) for variable, value in values]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def verdict_on(launches: Sequence[Gradients], expected: Gradients, allowed: float) -> Verdict:
    """Whether all launches have the same bits, and errors of no more than `allowed`, of the largest element."""
    names = "dq", "dk", "dv"
    first, *others = launches
    if differing := {name for other in others for name, a, b in zip(names, first, other, strict=True) if not torch.equal(a, b)}:
        return Verdict(False, f"{len(launches)} launches differ in {', '.join(sorted(differing))}")
    errors = [((a.double() - e).abs().max() / e.abs().max()).item() for a, e in zip(first, expected, strict=True)]
    said = ", ".join(f"{name} is {error:.1e} off" for name, error in zip(names, errors, strict=True))
    return Verdict(all(error <= allowed for error in errors), f"{said}, of at most {allowed:.1e}")  # a NaN is more


def attention(kind: Kind, device: torch.device) -> tuple[list[Tensor], Gradients]:
    """query, key, value, grad_out, output, logsumexp, and what else the mask takes; and dq, dk, dv in float64."""
    length = TILES * max(kind.block_m, kind.block_n, kind.block or 0) + 3
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, dim: int) -> Tensor:
        x = torch.randn(1, length, heads, dim, generator=generator).to(device, TORCH_DTYPES[kind.dtype])
        return x.transpose(1, 2)

    kv_heads = HEADS if kind.dropout else KV_HEADS  # the memory-efficient op has no groups
    shapes = (HEADS, kind.head_dim), (kv_heads, kind.head_dim), (kv_heads, kind.value_dim), (HEADS, kind.value_dim)
    *tensors, grad_out = (normal(*shape) for shape in shapes)
    positions = torch.arange(length, device=device)
    documents = (positions * 3 // length).int()
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    if kind.mask != "full":
        seen = positions <= positions[:, None]
    if kind.mask == BLOCK_MASK:
        seen = seen & (documents == documents[:, None])
    query, key, value = leaves = [x.double().requires_grad_() for x in tensors]
    scores = (query @ key.mT / math.sqrt(kind.head_dim)).where(seen, -math.inf)
    weights = scores.softmax(-1)
    if kind.dropout:
        dropout = Dropout(DROPPED, kind.dropout)
        dropped = ~kept(dropout, torch.tensor(RANDOM), (1, HEADS, length, length)).to(device)
        weights = (weights * dropout.scale(TORCH_DTYPES[kind.dtype])).masked_fill(dropped, 0.0)
    out = weights @ value
    expected = torch.autograd.grad(out, leaves, grad_out.double())
    logsumexp = scores.logsumexp(-1).float()
    inputs = [*tensors, grad_out, out.detach().to(grad_out.dtype), logsumexp.detach()]
    if kind.dropout:
        bias = torch.zeros(1, HEADS, length, -(-length // 16) * 16, dtype=grad_out.dtype, device=device)[..., :length]
        state = torch.tensor(RANDOM, device=device)
        inputs += [state.view(torch.uint64), state.view(torch.uint64)[1]] if kind.dropout == FLASH else list(state.clone())
        inputs += [bias.masked_fill_(~seen, -math.inf)] if kind.mask == BLOCK_MASK else []
    elif kind.mask == BLOCK_MASK:
        function = functools.partial(MASK_MODS["documents"], documents=documents)
        mask = create_block_mask(function, None, None, length, length, device=str(documents.device), BLOCK_SIZE=kind.block or 1)
        inputs += [torch.zeros(HEADS, device=device), documents, *(x for x in mask.as_tuple() if isinstance(x, Tensor))]
    return inputs, expected


def _launches(kind: Kind, inputs: list[Tensor], stage: Callable[[str], None]) -> list[Gradients]:
    """dq, dk, dv of each launch of the kernel, compiled once."""
    with installed(), deterministic():
        with compiling_launches():
            compiled = compiled_for(kind, inputs)
        stage(COMPILED)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()  # what fails on the GPU until here is none of the kernel's
        stage(LAUNCHED)
        return [tuple(compiled(list(inputs))) for _ in range(LAUNCHES)]


def compiled_for(kind: Kind, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    """The backward of these inputs, by kernels of the kind, where the pass is installed and the mode is deterministic."""
    of_mask = _of_block_mask(kind, inputs) if kind.mask == BLOCK_MASK and not kind.dropout else _dense(kind)
    module = make_fx(_dropping(kind) if kind.dropout else of_mask, tracing_mode="fake")(*inputs)
    joint_graph_passes(module)
    return compile_fx_inner(module, inputs)


def _dense(kind: Kind) -> Callable[..., Gradients]:
    def backward(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        return tuple(SDPA_BACKWARD(grad_out, query, key, value, out, logsumexp, mask=kind.mask))

    return backward


def _dropping(kind: Kind) -> Callable[..., Gradients]:
    """By the stock op, which the pass rewrites."""
    is_causal = kind.mask == "causal"

    def backward(*tensors: Tensor) -> Gradients:
        query, key, value, grad_out, out, logsumexp, *random = tensors
        length = query.shape[2]
        if kind.dropout == FLASH:
            lengths = None, None, length, length
            return tuple(STOCK_FLASH(grad_out, query, key, value, out, logsumexp, *lengths, DROPPED, is_causal, *random))
        random, bias = random[:2], random[2:]
        padded = torch.nn.functional.pad(logsumexp, (0, -length % 32), value=math.inf)
        saved, wanted = (bias[0] if bias else None, out, padded, *random, DROPPED), [True, True, True, False]
        return tuple(STOCK_EFFICIENT(grad_out, query, key, value, *saved, wanted, is_causal)[:3])

    return backward


def _of_block_mask(kind: Kind, inputs: list[Tensor]) -> Callable[..., Gradients]:
    sizes = inputs[0].shape[2], HEADS, KV_HEADS, kind.head_dim
    attention = FlexAttention(*sizes, mask_mod="documents", block=kind.block or 1, dtype=kind.dtype, value_dim=kind.value_dim)
    functions = attention.functions()

    def backward(*tensors: Tensor) -> Gradients:
        query, key, value, grad_out, out, logsumexp, slopes, documents, *lists = tensors
        *gradients, _ = torch.ops.higher_order.flex_attention_backward(
            *(query, key, value, out, logsumexp * LOG2E, grad_out, None, *functions, attention.mask(lists).as_tuple()),
            *(kind.head_dim**-0.5, OPTIONS, (slopes,), (documents,)),
        )
        return tuple(gradients)

    return backward


def main(job: str) -> None:
    """Prints each stage, and the verdict as JSON."""
    said = functools.partial(print, flush=True)
    asked: dict[str, Any] = json.loads(job)
    settings = Config(**asked["settings"])
    if settings.emulate:
        emulation.start(settings.seed, sms=settings.sms)
    said(STAGE + STARTED)
    verdict = tried(Kind(**asked["kind"]), asked["device"], settings, lambda name: said(STAGE + name))
    said(VERDICT + verdict.text())


if __name__ == "__main__":
    main(sys.argv[1])
