"""Tries a kind of kernel on an attention of two chains for each SM: gradients against float64, and the bits of many launches.

`python -m dash_inductor.reproduce.trial JOB` prints what came out; `first_use/verdict.py` runs it.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

from .. import config, emulation
from ..codegen.flex import OPTIONS, TORCH_DTYPES, FlexAttention
from ..codegen.mode import deterministic
from ..codegen.mods import MASK_MODS
from ..config import Config
from ..devices.target import target_of
from ..dropout import FLASH, Dropout, kept
from ..first_use.kind import Kind, is_small
from ..first_use.known import Verdict
from ..first_use.process import LAUNCHED, STAGE, VERDICT
from ..first_use.verdict import is_trial
from ..hooks.install import installed
from ..lowering.gluon_functions import in_trial
from ..lowering.launch.gluon import compiling_launches
from ..op import SDPA_BACKWARD
from ..problem import BLOCK_MASK, GluonFunction, most_bits
from ..reference import LOG2E
from ..resolve import as_if_small
from ..rewrite.stock_ops import EFFICIENT as STOCK_EFFICIENT
from ..rewrite.stock_ops import FLASH as STOCK_FLASH
from ..schedule.packing import as_if_long
from ..schedule.parts import BANDS, LEAST_STEPS, Parts, as_if_parts
from ..text import in_one_line
from . import score_source
from .bits import same_bits

STARTED, COMPILED = "started", "compiled"  # stages before LAUNCHED
LAUNCHES, EMULATED_LAUNCHES = 20, 3  # on a GPU, half of them beside other work; under emulation
CHAINS_PER_SM, TILES = 2, 4  # chains, at least; KV tiles of a sequence, at least
GROUP = 2  # query heads of a kv head
DOCUMENTS = 13 / 16, 15 / 16  # of a mask in blocks: where the second and the third begin
DROPPED, RANDOM = 0.3, (2**40 + 7, 2**33 + 4)  # of a kind with dropout: its p, seed and offset
NEIGHBOUR = 1 << 24  # fp32 elements of a tensor that other work goes through
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
    except score_source.Unknown as unknown:  # whoever tries it finds the same: its kernel is not used
        return Verdict(False, in_one_line(unknown))
    except Exception as error:  # whatever it is
        return Verdict(False if LAUNCHED in reached else None, in_one_line(error))


@contextmanager
def as_tried(kind: Kind) -> Iterator[None]:
    """Inside, what is compiled is compiled to be tried, and is of the kind whatever its size."""
    parts = Parts(BANDS if kind.bands else 1, GROUP if kind.sets else 1)
    values: Any = (
        (is_trial, True),
        (as_if_long, kind.long_schedule is not None),
        (as_if_small, is_small(kind)),
        (as_if_parts, parts),
        (most_bits, _length(kind) ** 2 // 2 if kind.sliced else most_bits.get()),
    )
    tokens = [(variable, variable.set(value)) for variable, value in values]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def verdict_on(launches: Iterable[Gradients], expected: Gradients, allowed: float) -> Verdict:
    """Whether all launches have the same bits, and errors of no more than `allowed`, of the largest element.

    Where what is expected are no numbers, as a function may have it of the trial's inputs, bits alone are held against each other.
    """
    names, differing, count = ("dq", "dk", "dv"), set[str](), 1
    others = iter(launches)
    first = next(others)
    for other in others:
        count += 1
        differing |= {name for name, a, b in zip(names, first, other, strict=True) if not same_bits(a, b)}
    if differing:
        return Verdict(False, f"{count} launches differ in {', '.join(sorted(differing))}")
    if not all(e.isfinite().all() for e in expected):
        return Verdict(True, f"{count} launches have the same bits")
    errors = [((a.double() - e).abs().max() / e.abs().max()).item() for a, e in zip(first, expected, strict=True)]
    said = ", ".join(f"{name} is {error:.1e} off" for name, error in zip(names, errors, strict=True))
    return Verdict(all(error <= allowed for error in errors), f"{said}, of at most {allowed:.1e}")  # a NaN is more


def attention(kind: Kind, device: torch.device) -> tuple[list[Tensor], Gradients]:
    """query, key, value, grad_out, output, logsumexp, and what else the mask takes; and dq, dk, dv in float64."""
    length = _length(kind)
    kv_heads = -(-CHAINS_PER_SM * _sms(device) // (length // kind.block_n))
    heads, positions = GROUP * kv_heads, torch.arange(length, device=device)
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, dim: int) -> Tensor:
        x = torch.randn(1, length, heads, dim, generator=generator, device=device).to(TORCH_DTYPES[kind.dtype])
        return x.transpose(1, 2)

    shapes = (heads, kind.head_dim), (kv_heads, kind.head_dim), (kv_heads, kind.value_dim), (heads, kind.value_dim)
    query, key, value, grad_out = (normal(*shape) for shape in shapes)
    second, third = ((positions >= int(begin * length)).int() for begin in DOCUMENTS)
    documents = second + third
    seen = positions <= positions[:, None] if kind.mask != "full" else torch.ones_like(positions == positions[:, None])
    if kind.mask == BLOCK_MASK:
        seen = seen & (documents == documents[:, None])
    factors: Tensor | None = None
    if kind.dropout:
        dropout = Dropout(DROPPED, kind.dropout)
        with device:
            factors = kept(dropout, torch.tensor(RANDOM), (1, heads, length, length)) * dropout.scale(TORCH_DTYPES[kind.dtype])
    captures = score_source.captured(kind.function, heads, length, device) if kind.function else [torch.zeros(heads, device=device)]
    found: list[Gradients] = []
    for head in range(kv_heads):  # one at a time, since float64 takes memory
        own = slice(head * GROUP, (head + 1) * GROUP)
        of_head = query[:, own], key[:, head, None], value[:, head, None], grad_out[:, own]
        function = functools.partial(_scores, kind.function, captures, head * GROUP) if kind.function else None
        found.append(_in_float64(*of_head, seen, factors if factors is None else factors[:, own], function))
    out, logsumexp, *expected = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    inputs = [query, key, value, grad_out, out.to(grad_out.dtype), logsumexp.float()]
    if kind.dropout:
        state = torch.tensor(RANDOM, device=device)
        inputs += [state.view(torch.uint64), state.view(torch.uint64)[1]] if kind.dropout == FLASH else list(state.clone())
        inputs += [seen[None, None]] if kind.mask == BLOCK_MASK else []
    elif kind.is_flex:
        inputs += [documents, *captures]
        if kind.mask != "full":
            sees = functools.partial(MASK_MODS[_mask_mod(kind)], documents=documents)
            mask = create_block_mask(sees, None, None, length, length, device=str(device), BLOCK_SIZE=kind.block or 128)
            inputs += [x for x in mask.as_tuple() if isinstance(x, Tensor)]
    return inputs, tuple(expected)


def _length(kind: Kind) -> int:
    """A sequence's: of TILES, and for chains in bands as long as the first document's has to be for them."""
    tiles_of = max(kind.block_m, kind.block_n, kind.block or 0)
    steps = LEAST_STEPS * kind.block_m * (GROUP if kind.sets else 1) / (GROUP * DOCUMENTS[0]) if kind.bands else 0
    return max(TILES, math.ceil(steps / tiles_of) + 1) * tiles_of + 3


def _sms(device: torch.device) -> int:
    return target_of(device, config.current()).sms


def _mask_mod(kind: Kind) -> str:
    """The name in MASK_MODS."""
    return {"full": "none", "causal": "causal", BLOCK_MASK: "documents"}[kind.mask]


def _scores(function: GluonFunction, captures: list[Tensor], first: int, pre_mod: Tensor) -> Tensor:
    """What a function makes of the scores [1, H, S, S] of query heads from `first` on."""
    length, device = pre_mod.shape[3], pre_mod.device
    positions, read = torch.arange(length, device=device), score_source.reading(captures, function, length)
    with device:
        of_heads = [
            score_source.scores(function, read, pre_mod[0, k], first + k, positions[:, None], positions)
            for k in range(pre_mod.shape[1])
        ]
    return torch.stack(of_heads)[None]


def _in_float64(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    seen: Tensor,
    factors: Tensor | None,
    function: Callable[[Tensor], Tensor] | None,
) -> Gradients:
    """The output, its logsumexp, dq, dk and dv. factors: of the weights, where some are dropped. function: of the scores."""
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    scores = leaves[0] @ leaves[1].mT / math.sqrt(query.shape[3])
    scores = (scores if function is None else function(scores)).where(seen, -math.inf)
    weights = scores.softmax(-1)
    out = (weights if factors is None else weights * factors) @ leaves[2]
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, grad_out.double())


def _launches(kind: Kind, inputs: list[Tensor], stage: Callable[[str], None]) -> Iterator[Gradients]:
    """dq, dk, dv of each launch of the kernel, compiled once, where the buffers that it writes hold NaN before."""
    is_gpu = inputs[0].is_cuda
    with installed(), deterministic():
        with compiling_launches():
            compiled = compiled_for(kind, inputs)
        _fill_what_is_allocated(compiled)
        neighbour, stream = (torch.zeros(NEIGHBOUR, device=inputs[0].device), torch.cuda.Stream()) if is_gpu else (None, None)
        stage(COMPILED)
        if is_gpu:
            torch.cuda.synchronize()  # what fails on the GPU until here is none of the kernel's
        stage(LAUNCHED)
        for launch in range(LAUNCHES if is_gpu else EMULATED_LAUNCHES):
            if neighbour is not None and launch % 2:
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        neighbour.sin_()
            yield tuple(compiled(list(inputs)))


def _fill_what_is_allocated(compiled: Any) -> None:
    """From now on generated code gets NaN in the place of memory that holds anything."""
    names = compiled.current_callable.__globals__

    def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def full(*arguments: Any) -> Tensor:
            made = allocate(*arguments)
            return made.fill_(math.nan) if made.is_floating_point() else made

        return full

    for name in ("empty_strided_cuda", "empty_strided_cpu"):
        names[name] = filled(names[name])


def compiled_for(kind: Kind, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    """The backward of these inputs, by kernels of the kind, where the pass is installed and the mode is deterministic."""
    module = make_fx(backward_of(kind, inputs), tracing_mode="fake")(*inputs)
    token = in_trial.set(kind.function)
    try:
        joint_graph_passes(module)
        return compile_fx_inner(module, inputs)
    finally:
        in_trial.reset(token)


def backward_of(kind: Kind, inputs: list[Tensor]) -> Callable[..., Gradients]:
    """The function of `inputs` that is traced."""
    return _dropping(kind) if kind.dropout else _of_flex(kind, inputs) if kind.is_flex else _dense(kind)


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
        random, masks = random[:2], random[2:]
        bias = None
        if masks:
            zero, hidden = (torch.full([], x, dtype=query.dtype, device=query.device) for x in (0.0, -math.inf))
            bias = torch.where(masks[0], zero, hidden).expand(*query.shape[:3], length)
        padded = torch.nn.functional.pad(logsumexp, (0, -length % 32), value=math.inf)
        saved, wanted = (bias, out, padded, *random, DROPPED), [True, True, True, False]
        dq, *grads, _ = STOCK_EFFICIENT(grad_out, query, _repeated(key), _repeated(value), *saved, wanted, is_causal)
        return dq, *(x.view(1, -1, GROUP, *x.shape[2:]).sum(2) for x in grads)

    return backward


def _repeated(x: Tensor) -> Tensor:
    """Heads of keys or values, one for each query head: the memory-efficient op has no groups. The pass takes them back."""
    each = x.unsqueeze(2).expand(-1, -1, GROUP, -1, -1).clone(memory_format=torch.contiguous_format)
    return each.view(1, -1, *x.shape[2:])


def _of_flex(kind: Kind, inputs: list[Tensor]) -> Callable[..., Gradients]:
    """With a function of the scores that reads all captures, if the kind has one; `in_trial` has the code of that."""
    sizes = inputs[0].shape[2], inputs[0].shape[1], inputs[1].shape[1], kind.head_dim
    options: dict[str, Any] = {"block": kind.block or 128, "dtype": kind.dtype, "value_dim": kind.value_dim}
    attention = FlexAttention(*sizes, mask_mod=_mask_mod(kind), **options)
    count = len(kind.function.captures) if kind.function else 1
    read = _reading(kind, inputs[7 : 7 + count]) if kind.function else attention.functions()

    def backward(*tensors: Tensor) -> Gradients:
        query, key, value, grad_out, out, logsumexp, documents, *others = tensors
        *gradients, _ = torch.ops.higher_order.flex_attention_backward(
            *(query, key, value, out, logsumexp * LOG2E, grad_out, None, *read, attention.mask(others[count:]).as_tuple()),
            *(kind.head_dim**-0.5, OPTIONS, tuple(others[:count]), (documents,)),
        )
        return tuple(gradients)

    return backward


def _reading(kind: Kind, captures: list[Tensor]) -> tuple[Any, Any]:
    """The graphs of a function of the scores that reads these tensors, and of its derivative."""

    def function(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *read: Tensor) -> Tensor:
        with TransformGetItemToIndex():
            return sum((x[b] for x in read), score * 2)

    score = torch.zeros((), dtype=TORCH_DTYPES[kind.dtype], requires_grad=True)
    arguments: Any = (score, *(torch.zeros((), dtype=torch.int32) for _ in range(4)))
    read = tuple(torch.zeros(1, dtype=x.dtype) for x in captures)
    forward, joint = create_fw_bw_graph(function, arguments, read)
    joint = make_fx(joint, decomposition_table=select_decomp_table())(score.detach(), *arguments[1:], score.detach(), *read)
    return forward, joint


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
