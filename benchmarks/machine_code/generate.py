"""What Inductor generates for a named GPU: the graph after the joint-graph passes, the wrapper, its kernels, cubins.

No GPU is needed, and nothing runs: inputs are fake tensors on "cuda".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.codegen.flex import TORCH_DTYPES
from dash_inductor.codegen.mode import deterministic
from dash_inductor.decision import Decision, decisions_in
from dash_inductor.hooks.hook import around_here
from dash_inductor.hooks.install import installed
from dash_inductor.op import SDPA_BACKWARD
from dash_inductor.schedule import MASKS
from dash_inductor.templates.tiles import HALF_DTYPES, Template

from .graph_text import graph_text

TEMPLATE = re.compile(r"^# dash_inductor template: (\w+)$", re.MULTILINE)  # as lowering/kernels.py writes it
MULTIPLY = {"one_pass": Template.ONE_PASS, "block_mask": Template.ONE_PASS, "two_pass": Template.TWO_PASS}  # of them by name


@dataclass(frozen=True)
class Generated:
    """What Inductor made of one graph. Kernels stand in the order of the wrapper."""

    graph: str  # one line per node of the FX graph after the joint-graph passes
    source: str  # the whole wrapper
    kernels: dict[str, str]  # kernel name -> the module that Inductor would compile for it
    launches: dict[str, tuple[str, ...]]  # kernel name -> the wrapper's lines that launch it
    decisions: tuple[Decision, ...]  # what became of each attention in it

    @property
    def templates(self) -> dict[str, Template]:
        """The template of each of our kernels that multiply: that of one pass first."""
        named = {name: TEMPLATE.search(source) for name, source in self.kernels.items()}
        by_name = {name: MULTIPLY.get(match[1]) for name, match in named.items() if match}
        return {name: template for template in Template for name in by_name if by_name[name] == template}

    @property
    def main_kernel(self) -> str | None:
        """The first of those, None when there is none."""
        return next(iter(self.templates), None)


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel compiled by Triton, with Triton's metadata (`shared` in bytes, `num_warps`, ...)."""

    ptx: str
    cubin: bytes
    metadata: Any


def generate(
    fn: Callable[..., Any], make_args: Callable[[], Sequence[torch.Tensor]], device: str, *, dynamic_dims: Sequence[int] = ()
) -> Generated:
    """Trace `fn`, run Inductor's joint-graph passes and code generation, and keep what comes out.

    `fn` calls ATen ops (autograd cannot run on fake CUDA tensors) and returns a tuple. `make_args`, called under a fake
    mode, returns its tensors on "cuda"; the dimensions in `dynamic_dims` become symbolic in each that has them.
    Deterministic mode and Inductor's settings are those of the caller.
    """
    settings = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "cpp_wrapper": False, "compile_threads": 1}
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if dynamic_dims else None)
    with fake_gpu(device), inductor_config.patch(settings), _stop_at_wrapper(), mode, V.set_fake_mode(mode):
        args = list(make_args())
        if dynamic_dims:
            args = [_symbolic(tensor, tuple(dynamic_dims), mode) for tensor in args]
        module = make_fx(fn, tracing_mode="symbolic" if dynamic_dims else "fake")(*args)
        joint_graph_passes(module)
        graph = graph_text(module.graph)
        try:
            compile_fx_inner(module, args)
        except _WrapperReady as ready:
            (wrapper,) = ready.args
    return _read_wrapper(graph, wrapper)


def attention_backward(
    device: str,
    *,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mask: str,
    value_dim: int | None = None,
    dtype: str = "bf16",
    dynamic: bool = False,
) -> Generated:
    """The code for one SDPA forward and backward in deterministic mode, with the project's pass installed.

    Inputs are [B, H, S, D] views of [B, S, H, D] tensors, as models have them. `mask` is "full" or "causal", `dtype`
    "bf16" or "fp16"; `dynamic` makes the sequence lengths symbolic. With a `value_dim` other than head_dim, which the flash op
    does not take, the backward alone, by `dash::sdpa_backward`. Raises ValueError for sizes that no attention has.
    """
    value_dim = head_dim if value_dim is None else value_dim
    require_sizes([q_len, kv_len, value_dim], batch, heads, kv_heads, head_dim, dtype)
    if mask not in MASKS:
        raise ValueError(f"unknown mask {mask!r}: the known ones are {', '.join(MASKS)}")

    aten = torch.ops.aten
    causal = mask == "causal"

    def attention(query: Any, key: Any, value: Any, grad_out: Any) -> tuple[Any, ...]:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal
        )
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset
        )
        return (out, *grads)

    def backward(query: Any, key: Any, value: Any, grad_out: Any, out: Any, logsumexp: Any) -> tuple[Any, ...]:
        return tuple(SDPA_BACKWARD(grad_out, query, key, value, out, logsumexp, mask=mask))

    def make_args() -> list[torch.Tensor]:
        def tensor(length: int, heads: int, dim: int) -> torch.Tensor:
            shape = (batch, length, heads, dim)
            return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cuda").transpose(1, 2)

        query, key = tensor(q_len, heads, head_dim), tensor(kv_len, kv_heads, head_dim)
        value, grad_out = tensor(kv_len, kv_heads, value_dim), tensor(q_len, heads, value_dim)
        if value_dim == head_dim:
            return [query, key, value, grad_out]
        logsumexp = torch.empty(batch, heads, q_len, device="cuda")
        return [query, key, value, grad_out, torch.empty_like(grad_out), logsumexp]

    with installed(), deterministic():
        function = attention if value_dim == head_dim else backward
        return generate(function, make_args, device, dynamic_dims=(2,) if dynamic else ())


def require_sizes(lengths: Sequence[int], batch: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
    """Raises ValueError for sizes, or a dtype, that no attention has."""
    if min(*lengths, batch, heads, kv_heads, head_dim) < 1:
        raise ValueError("lengths, batch, heads and head_dim must be at least 1")
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads, and {kv_heads} does not divide {heads}")
    if dtype not in HALF_DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: the known ones are {', '.join(HALF_DTYPES)}")


def compile_kernel(kernel_source: str, device: str) -> CompiledKernel:
    """Compile one of `Generated.kernels` as Inductor would on that GPU; the first configuration if it has several."""
    with fake_gpu(device), inductor_config.patch(use_static_triton_launcher=False):
        module = PyCodeCache.load(kernel_source)
        kernel = next(value for value in vars(module).values() if hasattr(value, "precompile"))
        kernel.precompile(warm_cache_only=True)
        binary = kernel.compile_results[0].kernel
    return CompiledKernel(binary.asm["ptx"], binary.asm["cubin"], binary.metadata)


class _WrapperReady(BaseException):
    """Carries a generated wrapper out of Inductor, past the handlers that would report it as a failed compilation."""


@contextmanager
def _stop_at_wrapper() -> Iterator[None]:
    """Make Inductor raise `_WrapperReady(source)` where it would import the wrapper and compile its kernels."""

    def stop(_: Any, lowering: GraphLowering) -> Any:
        wrapper, _ = lowering.codegen()
        raise _WrapperReady(wrapper.value)

    with around_here(GraphLowering, "compile_to_module", stop):
        yield


def _symbolic(tensor: torch.Tensor, dims: tuple[int, ...], mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor like `tensor` with symbolic sizes in `dims`; equal sizes share a symbol."""
    with unset_fake_temporarily():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    sizes = [DimDynamic.DUCK if dim in dims else DimDynamic.STATIC for dim in range(tensor.dim())]
    fake = mode.from_tensor(meta, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    return torch.empty_strided(fake.shape, fake.stride(), dtype=tensor.dtype, device=tensor.device)


def _read_wrapper(graph: str, wrapper: str) -> Generated:
    """Take a wrapper apart."""
    calls = [node for node in ast.walk(ast.parse(wrapper)) if isinstance(node, ast.Call)]
    kernels: dict[str, str] = {}
    launches: dict[str, tuple[str, ...]] = {}
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        called = ast.unparse(call.func)
        owner, _, method = called.rpartition(".")
        if called == "async_compile.triton":
            name, source = (ast.literal_eval(argument) for argument in call.args[:2])
            kernels[name] = source
            launches[name] = ()
        elif owner in kernels and method == "run":
            launches[owner] += (ast.get_source_segment(wrapper, call) or "",)
    return Generated(graph, wrapper, kernels, launches, tuple(decisions_in(wrapper)))
