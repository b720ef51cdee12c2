"""PTX that no one here wrote, executed and held against torch: Liger's kernels, Inductor's, and FlexAttention as torch ships it.

An executor that shares a mistake with our kernels may still find the gradients that we expect of them. These kernels know nothing
of ours. All are executed with races.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import decompose
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.machine_code.flex import flex_backward
from benchmarks.machine_code.generate import generate
from dash_inductor.codegen.flex import OPTIONS, FlexAttention
from tests.ptx.cases import unexplained
from tests.ptx.launch import Session, call
from tests.ptx.lower import Program
from tests.ptx.machine import Machine
from tests.ptx.memory import Global
from tests.ptx.parse import Instruction, parse

aten = torch.ops.aten
ARCHES = {"a100": "sm_80", "h100": "sm_90a"}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HALF_ULP = {FP32: 1e-5, BF16: 2**-8, FP16: 2**-11}  # of a dtype's largest number, rounded once; of fp32 rounded often


def normal(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def held(session: Session, device: str, kernels: Sequence[str]) -> None:
    """These kernels were executed, as compiled for this device, and free of races."""
    assert [launch.kernel for launch in session.executed] == list(kernels)
    assert all(f".target {ARCHES[device]}\n" in ptx for ptx in session.programs)
    assert [unexplained(launch.races) for launch in session.executed] == [[]] * len(kernels)


def close(got: Tensor | None, want: Tensor | None, bound: float | None = None) -> None:
    """No element differs by more than this part of the largest."""
    assert got is not None and want is not None and got.shape == want.shape
    assert (got.double() - want).abs().max() <= (HALF_ULP[got.dtype] if bound is None else bound) * want.abs().max()


# ---------------------------------------------------------------- Liger

ANGLES = torch.arange(16)[:, None] * 0.1 ** torch.arange(32)
COS, SIN = (f(ANGLES).repeat(1, 2)[None] for f in (torch.cos, torch.sin))
TARGETS = torch.tensor([3, 999, -100, 0, 512, 7])


def rotated(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * COS.to(x) + torch.cat([-high, low], -1) * SIN.to(x)


# Liger's function, torch's, the inputs, the kernels; 300 columns are no power of two.
LIGER: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], list[Tensor], list[str]]] = {
    "rms_norm": (
        lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        lambda x, w: F.rms_norm(x, (300,), w, 1e-6),
        [normal(6, 300), normal(300)],
        ["_rms_norm_forward_kernel", "_rms_norm_backward_kernel"],
    ),
    "layer_norm": (
        lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (300,), w, b, 1e-5),
        [normal(6, 300), normal(300), normal(300) + 1],
        ["_layer_norm_forward_kernel", "_layer_norm_backward_kernel"],
    ),
    "softmax": (
        LigerSoftmaxFunction.apply,
        lambda x: x.softmax(-1),
        [normal(6, 300)],
        ["_softmax_single_block_forward_kernel", "_softmax_single_block_backward_kernel"],
    ),
    "swiglu": (
        LigerSiLUMulFunction.apply,
        lambda a, b: F.silu(a) * b,
        [normal(6, 300), normal(6, 300) + 1],
        ["_swiglu_forward_kernel", "_swiglu_backward_kernel"],
    ),
    "cross_entropy": (  # whose forward makes the gradient as well
        lambda x: LigerCrossEntropyFunction.apply(x, TARGETS.clone(), None, -100)[0],
        lambda x: F.cross_entropy(x, TARGETS),
        [normal(6, 1000)],
        ["liger_cross_entropy_kernel", "element_mul_kernel"],
    ),
    "rope": (
        lambda q, k: torch.cat(LigerRopeFunction.apply(q, k, COS.clone(), SIN.clone()), 1),
        lambda q, k: torch.cat([rotated(q), rotated(k)], 1),
        [normal(1, 2, 16, 64), normal(1, 1, 16, 64)],
        ["_triton_rope", "_triton_rope"],
    ),
}


@pytest.mark.parametrize("device", ARCHES)
@pytest.mark.parametrize("name", LIGER)
def test_liger(name, device):
    function, reference, inputs, kernels = LIGER[name]
    exact = [x.double().requires_grad_() for x in inputs]
    expected = reference(*exact)
    grad = normal(*expected.shape, 2)[..., 0] if expected.shape else torch.tensor(1.5)
    expected.backward(grad.double())
    session = Session(device)
    with (
        session.running(),
        mock.patch.object(triton.runtime.driver.active, "get_current_device", lambda: list(ARCHES).index(device)),
    ):
        ours = [session.memory.put(x).requires_grad_() for x in inputs]  # kernels are kept by the number of their device
        out = function(*ours)
        out.backward(session.memory.put(grad))
    held(session, device, kernels)
    close(out.detach(), expected)
    for got, want in zip(ours, exact, strict=True):
        close(got.grad, want.grad)


# ---------------------------------------------------------------- Inductor


def executed(
    function: Callable[..., Any], inputs: Sequence[Tensor], device: str, kernels: Sequence[str], **settings: Any
) -> tuple[Tensor, ...]:
    """The results of what Inductor makes of a function."""
    return run(generated(function, inputs, device, **settings), inputs, device, kernels)


def generated(function: Callable[..., Any], inputs: Sequence[Tensor], device: str, **settings: Any) -> str:
    """Inductor's wrapper."""

    def decomposed(*args: Tensor) -> Any:
        with decompose(select_decomp_table()):
            return function(*args)

    def on_device() -> list[Tensor]:
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in inputs]

    with inductor_config.patch(settings):
        return generate(decomposed, on_device, device).source


def run(wrapper: str, inputs: Sequence[Tensor], device: str, kernels: Sequence[str]) -> tuple[Tensor, ...]:
    session = Session(device)
    with session.running():
        results = call(wrapper, [session.memory.put(x) for x in inputs], {})
    held(session, device, kernels)
    return tuple(x.clone() for x in results)


@pytest.mark.parametrize("device", ARCHES)
@pytest.mark.parametrize(("columns", "kernel"), [(300, "per"), (5000, "red")])
def test_softmax(columns, kernel, device):
    x = normal(4, columns, dtype=BF16)
    x[1, : columns * 3 // 4], x[2, ::2], x[3, 1::2] = -torch.inf, -torch.inf, -torch.inf
    name = f"triton_{kernel}_fused_exp_prepare_softmax_online_sub_0"
    (got,) = executed(lambda x: (aten._softmax(x, -1, False),), [x], device, [name])
    close(got, x.double().softmax(-1))


@pytest.mark.parametrize("device", ARCHES)
def test_layer_norm(device):
    x, grad, weight, bias = normal(16, 100), normal(16, 100) + 1, normal(100), normal(100) + 1
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    expected = F.layer_norm(exact[0], (100,), *exact[1:])
    expected.backward(grad.double())

    def forward(*args: Tensor) -> tuple[Tensor, ...]:
        return tuple(aten.native_layer_norm(args[0], [100], *args[1:], 1e-5))

    def backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(aten.native_layer_norm_backward(grad, x, [100], mean, rstd, *parameters, [True] * 3))

    out, mean, rstd = executed(forward, [x, weight, bias], device, ["triton_per_fused_0"])
    close(out, expected)
    given = [grad, x, mean, rstd, weight, bias]
    grads = executed(backward, given, device, ["triton_per_fused_0", "triton_per_fused_1"])
    for got, want in zip(grads, exact, strict=True):
        close(got, want.grad)


# Of the tiles that Inductor tries, one, with which nothing is timed.
MM = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "shape_padding": False}
TILE = "test_configs.autotune_choice_desc_regex"


@pytest.mark.parametrize("device", ARCHES)
@pytest.mark.parametrize(
    ("dtype", "sizes", "tile"),
    [
        (BF16, (128, 96, 160), "BLOCK_K=32, BLOCK_M=64, BLOCK_N=64"),
        (FP16, (104, 200, 136), "BLOCK_K=64, BLOCK_M=64, BLOCK_N=128"),
        pytest.param(
            *(FP32, (64, 512, 512), "ALLOW_TF32=True.*BLOCK_K=32, BLOCK_M=64, BLOCK_N=64.*num_stages=2"), marks=pytest.mark.nightly
        ),
    ],
)
def test_mm(dtype, sizes, tile, device):
    """mma.sync on sm_80 and wgmma on sm_90; tf32's inputs are numbers that tf32 has."""
    m, k, n = sizes
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    if dtype == FP32:
        a, b = a.bfloat16().float(), b.bfloat16().float()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        (got,) = executed(lambda a, b: (aten.mm(a, b),), [a, b], device, ["triton_tem_fused_0"], **MM, **{TILE: tile})
    finally:
        torch.set_float32_matmul_precision(precision)
    close(got, a.double() @ b.double())


SYNCHRONISES = re.compile(r"bar\.sync|cp\.async\.(wait|commit)_group|wgmma\.(fence|commit_group|wait_group)\..*|fence\.proxy\..*")


@pytest.mark.nightly
@pytest.mark.parametrize("device", ARCHES)
@pytest.mark.parametrize("name", ["layer_norm", "mm"])
def test_each_synchronisation_that_is_deleted_is_seen(name, device):
    """sentryward 0.1.1, a static verifier, says the same of each on sm_80; it knows no wgmma.

    Of two cp.async.commit_group before one wait for both, the first may go: its copies join the second group.
    """
    if name == "mm":
        inputs = [normal(128, 96, dtype=BF16), normal(96, 160, dtype=BF16)]
        settings = MM | {TILE: "BLOCK_K=32, BLOCK_M=64, BLOCK_N=64"}
        wrapper = generated(lambda a, b: (aten.mm(a, b),), inputs, device, **settings)
    else:
        inputs = [normal(16, 300), normal(300), normal(300) + 1]
        wrapper = generated(lambda x, *parameters: aten.native_layer_norm(x, [300], *parameters, 1e-5), inputs, device)

    def launched(programs: dict[str, Program]) -> Session:
        session = Session(device, programs=programs)
        with session.running():
            call(wrapper, [session.memory.put(x) for x in inputs], {})
        return session

    unbroken = launched({})
    assert unbroken.executed[0].races == []
    (ptx,) = unbroken.programs
    opcodes = [instruction.opcode for instruction in parse(ptx).instructions]
    numbers = [number for number, opcode in enumerate(opcodes) if SYNCHRONISES.fullmatch(opcode)]
    silent = []
    for number in numbers:
        kernel = parse(ptx)
        kernel.instructions[number] = Instruction("nanosleep.u32", ["0"])
        if not launched({ptx: Program(kernel)}).executed[0].races:
            silent.append(opcodes[number])
    assert len(numbers) >= 5
    assert silent == ["cp.async.commit_group"] * (2 if name == "mm" else 0)


RARE = """.visible .entry rare(
.param .u64 .ptr .global .align 1 rare_param_0
)
.reqntid 32
{
.reg .pred %p<3>;
.reg .b32 %r<9>;
.reg .b64 %rd<4>;
ld.param.b64 %rd1, [rare_param_0];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd2, %r1, 32, %rd1;
ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd2];
fma.rm.ftz.f32 %r6, %r2, %r3, %r4;
cvt.ftz.sat.f32.f32 %r7, %r2;
setp.eq.bf16x2 %p1|%p2, %r2, %r5;
selp.b32 %r8, 1, 0, %p1;
selp.b32 %r1, 1, 0, %p2;
st.global.v4.b32 [%rd2 + 16], {%r6, %r7, %r8, %r1};
ret;
}
"""


def test_opcodes_whose_values_softmax_hides():
    """fma towards minus infinity, saturation to [0, 1], and halves that are compared."""
    a = np.array([1, -1, 3, -2, np.nan, 0.25] + [0] * 26, np.float32)
    c = np.array([2.0**-25, -(2.0**-25), -(2.0**-25)] + [0] * 29, np.float32)
    words = np.zeros((32, 8), np.uint32)
    words[:, :3] = np.stack([a, np.ones_like(a), c], 1).view(np.uint32)
    words[:, 3] = words[:, 0] ^ np.array([0, 1, 1 << 16, 1 << 16 | 1] + [0] * 28)
    memory = Global(1 << 16)
    tensor = memory.put(torch.from_numpy(words.view(np.int32)))
    Machine(Program(parse(RARE)), memory, [tensor.data_ptr()], (1, 1, 1), shared_bytes=0).run()
    got = tensor.numpy()
    down = [1, np.nextafter(np.float32(-1), np.float32(-2)), np.nextafter(np.float32(3), np.float32(0)), -2]
    assert got[:4, 4].copy().view(np.float32).tolist() == down
    assert got[:6, 5].copy().view(np.float32).tolist() == [1, 0, 1, 0, 0, 0.25]
    assert got[:6, 6].tolist() == [1, 0, 1, 0, 1, 1]  # the lower halves
    assert got[:6, 7].tolist() == [1, 1, 0, 0, 0, 1]  # the upper ones; a NaN equals nothing


# ---------------------------------------------------------------- FlexAttention


@pytest.mark.nightly
@pytest.mark.parametrize("device", ARCHES)
@pytest.mark.parametrize(("kv_heads", "score_mod"), [(2, "none"), (1, "alibi")])
def test_flex_attention(kv_heads, score_mod, device):
    """torch's own templates, forward and backward: causal, with a ragged end."""
    length, heads, dim = 200, 2, 64
    attention = FlexAttention(length, heads, kv_heads, dim, score_mod=score_mod, mask_mod="causal")
    functions = attention.functions()
    mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, length, length, device="cpu", BLOCK_SIZE=attention.block)
    lists = mask.as_tuple()[2:10]  # behind the lengths
    query, grad, key, value = (
        torch.randn(1, length, n, dim, generator=torch.Generator().manual_seed(seed)).bfloat16().transpose(1, 2)
        for seed, n in enumerate((heads, heads, kv_heads, kv_heads))
    )
    slopes, documents = torch.tensor([0.1, 0.02]), torch.zeros(length, dtype=torch.int32)

    exact = [x.double().requires_grad_() for x in (query, key, value)]
    q, k, v = exact[0], *(x.repeat_interleave(heads // kv_heads, 1) for x in exact[1:])
    at = torch.arange(length)
    scores = q @ k.mT * dim**-0.5
    if score_mod == "alibi":
        scores = scores + slopes.double()[:, None, None] * (at[None, :] - at[:, None])
    scores = scores.masked_fill(at[:, None] < at[None, :], -torch.inf)
    expected = scores.softmax(-1) @ v
    expected.backward(grad.double())

    def forward(*args: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _, _, slopes, documents, *lists = args
        blocks = attention.mask(lists).as_tuple()
        given = (functions[0], blocks, dim**-0.5, OPTIONS, (slopes,), (documents,))
        return torch.ops.higher_order.flex_attention(query, key, value, *given)[:2]

    inputs = [query, key, value, grad, torch.zeros_like(query), torch.zeros(1, heads, length), slopes, documents, *lists]
    wrapper = generate(forward, attention.tensors, device).source
    inputs[4], inputs[5] = run(wrapper, inputs, device, ["triton_tem_fused_0"])
    close(inputs[4], expected, 2**-7)  # probabilities are bf16 as well
    wrapper = flex_backward(device, attention, rewrite=False).source
    grads = run(wrapper, inputs, device, ["triton_per_fused_0", "triton_tem_fused_1"])
    for got, want in zip(grads, exact, strict=True):
        close(got, want.grad, 2**-7)
