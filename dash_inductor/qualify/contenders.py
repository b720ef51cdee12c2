"""Who is timed. A contender runs the forward of one shape once, and is then a call that runs its backward alone.

All backwards are timed in the same way, torch.autograd.grad over a graph that is kept, with the same inputs and strides.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from .. import emulation
from ..codegen.mode import deterministic as deterministic_mode
from ..config import CHOICES, GLUON, TRITON, Config, current
from ..decision import Decision, clear_decisions, decisions
from ..devices.target import target_of
from ..hooks.install import enabled
from .inputs import Inputs, random_inputs
from .mods import mask_mod, score_mod
from .shapes import Shape
from .variants import UNORDERED, VARIANTS, Variant

BASELINE, FLEX_BASELINE, TUNED_BASELINE = "sdpa-flash-strict", "flex", "ours"
# Settings of the package that do not say which kernel runs.
NOT_KERNELS = ("on_unsupported", "guarantee")
ONE_PASS_ONLY = {"template": "one_pass", "kernel": TRITON}  # what variants are of
GLUON_ONLY = {**ONE_PASS_ONLY, "kernel": GLUON}
SDPA_REFUSALS = ("No available kernel", "No viable backend")


def baseline_of(shape: Shape) -> str:
    """The stock contender whose bits are the same every time, which figures of a shape are ratios to."""
    return FLEX_BASELINE if shape.flex else BASELINE


class RefusedError(ValueError):
    """The contender does not take the shape, or cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Prepared:
    """`launch` enqueues the backward and returns dq, dk, dv; `decision` is what ours chose."""

    launch: Callable[[], tuple[Tensor, ...]]
    decision: Decision | None = None
    note: str = ""


@dataclass(frozen=True)
class Contender:
    """A backward to be timed.

    Attributes:
        deterministic: whether it promises the same bits.
        prepare: runs the forward; raises RefusedError.
        unavailable: why it cannot run on a device type, whatever the shape, or None.
        twin: the contender that is the same but for determinism.
        valid: whether its gradients are meant to be right.
        compiled: whether preparing it takes a compiler.
    """

    name: str
    deterministic: bool
    prepare: Callable[[Shape, Inputs], Prepared]
    unavailable: Callable[[str], str | None]
    twin: str | None = None
    valid: bool = True
    compiled: bool = False


def first_line(said: object) -> str:
    """What an error or a warning says, in one line."""
    return next((line.strip() for line in str(said).splitlines() if line.strip()), type(said).__name__)


def _backward(out: Tensor, inputs: Inputs, strict: bool) -> Callable[[], tuple[Tensor, ...]]:
    """The backward of `out`, in strict mode or with deterministic mode off: stock ops ask for it when they run."""

    def launch() -> tuple[Tensor, ...]:
        with deterministic_mode(strict):
            return torch.autograd.grad(out, inputs.leaves, inputs.grad_out, retain_graph=True)

    return launch


def _needs_gpu(device: str) -> str | None:
    return None if device == "cuda" else f"needs a GPU, not device {device}"


# --- PyTorch -----------------------------------------------------------------------------------------------------------------


def _sdpa(backend: str, strict: bool, device: str | None = "cuda") -> dict[str, Any]:
    """`prepare` and `unavailable` of an SDPA backend by its name in torch.nn.attention.SDPBackend."""

    def prepare(shape: Shape, inputs: Inputs) -> Prepared:
        if shape.softcap is not None or shape.alibi:
            raise RefusedError("scaled_dot_product_attention has no soft-cap and no ALiBi")
        sees, device = mask_mod(shape, inputs.query.device), inputs.query.device.type
        dense = create_mask(sees, 1, 1, shape.length, shape.length, device=device) if sees and shape.masked else None
        expanded = backend == "EFFICIENT_ATTENTION" and shape.heads != shape.kv_heads  # which has no enable_gqa
        query, key, value = inputs.leaves
        if expanded:
            key, value = (x.repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (key, value))
        gqa = key.shape[1] != shape.heads
        with deterministic_mode(strict), sdpa_kernel(SDPBackend.__members__[backend]), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                causal = shape.causal and dense is None
                out = F.scaled_dot_product_attention(query, key, value, attn_mask=dense, is_causal=causal, enable_gqa=gqa)
            except RuntimeError as error:
                if not any(refusal in str(error) for refusal in SDPA_REFUSALS):
                    raise
                raise RefusedError("; ".join(first_line(w.message) for w in said) or first_line(error)) from None
        notes = ["K and V expanded"] * expanded + ["a dense mask"] * (dense is not None)
        return Prepared(_backward(out, inputs, strict), note="; ".join(notes))

    return {"prepare": prepare, "unavailable": _needs_gpu if device == "cuda" else lambda device: None}


def _flex(shape: Shape, inputs: Inputs) -> Prepared:
    """The kernel is the same in deterministic mode."""
    attend = _flex_attention(shape, inputs.query.device)
    torch._dynamo.reset()
    with deterministic_mode(False):
        out = _compiled(attend, inputs)
    return Prepared(_backward(out, inputs, strict=False))


def _compiled(attend: Callable[..., Any], inputs: Inputs) -> Tensor:
    """The output [B, H, S, D] of a compiled attention, whose graph ends with it as [B, S, H, D], as models' do: autograd takes an
    output's gradient to be contiguous, and copies it where it is not."""

    def attend_and_transpose(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return attend(query, key, value).transpose(1, 2).contiguous()

    return torch.compile(attend_and_transpose, fullgraph=True, dynamic=False)(*inputs.leaves).transpose(1, 2)


def _flex_attention(shape: Shape, device: torch.device) -> Callable[..., Any]:
    """The attention of query, key and value, its BlockMask made outside of it, as models do."""
    sees, length = mask_mod(shape, device), shape.length
    blocks = create_block_mask(sees, None, None, length, length, device=device.type) if sees else None
    gqa = shape.heads != shape.kv_heads
    return functools.partial(flex_attention, score_mod=score_mod(shape, device), block_mask=blocks, enable_gqa=gqa)


# --- FlashAttention ----------------------------------------------------------------------------------------------------------


def _flash_attention(module: str, deterministic: bool) -> dict[str, Any]:
    """`prepare` and `unavailable` of a package's `flash_attn_func`, on [B, S, H, D]."""

    def prepare(shape: Shape, inputs: Inputs) -> Prepared:
        if shape.flex:
            raise RefusedError(f"{module}.flash_attn_func is asked for no window, documents, soft-cap or ALiBi here")
        function = importlib.import_module(module).flash_attn_func
        options: dict[str, Any] = {"causal": shape.causal}
        if "deterministic" in inspect.signature(function).parameters:
            options["deterministic"] = deterministic
        elif deterministic:
            raise RefusedError(f"{module}.flash_attn_func of this version takes no deterministic=True")
        result = function(*(x.transpose(1, 2) for x in inputs.leaves), **options)
        out = result[0] if isinstance(result, tuple) else result
        return Prepared(_backward(out.transpose(1, 2), inputs, strict=False))

    def unavailable(device: str) -> str | None:
        return _needs_gpu(device) or (None if importable(module) else f"{module} is not importable")

    return {"prepare": prepare, "unavailable": unavailable}


def importable(module: str) -> bool:
    """Whether a module, perhaps inside a package that is not there, can be found."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


# --- packed sequences --------------------------------------------------------------------------------------------------------


def _packed(shape: Shape, device: torch.device, attend: Callable[..., Any]) -> Callable[..., Any]:
    """The attention of [B, H, S, D] by one of all tokens [B * S, H, D], the ends of documents, int32, and their longest."""
    if not shape.documents or shape.window is not None or shape.softcap is not None or shape.alibi:
        raise RefusedError("it is asked for documents alone, without a window, a soft-cap or ALiBi")
    ends = torch.tensor((0, *shape.documents * shape.batch), device=device).cumsum(0).int()

    def attend_packed(*tensors: Tensor) -> Any:
        out = attend(*(x.transpose(1, 2).flatten(0, 1) for x in tensors), ends, ends, max(shape.documents), max(shape.documents))
        return (out[0] if isinstance(out, tuple) else out).unflatten(0, (shape.batch, shape.length)).transpose(1, 2)

    return attend_packed


def _torch_varlen(shape: Shape) -> Callable[..., Any]:
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return functools.partial(varlen_attn, window_size=(-1, 0 if shape.causal else -1), **grouped)


def _varlen(strict: bool) -> dict[str, Any]:
    """`prepare` and `unavailable` of torch's attention of packed sequences."""

    def prepare(shape: Shape, inputs: Inputs) -> Prepared:
        attend = _packed(shape, inputs.query.device, _torch_varlen(shape))
        with deterministic_mode(strict):
            return Prepared(_backward(attend(*inputs.leaves), inputs, strict))

    return {"prepare": prepare, "unavailable": _needs_gpu}


def _fa4_varlen(shape: Shape, inputs: Inputs) -> Prepared:
    attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    packed = _packed(shape, inputs.query.device, functools.partial(attend, causal=shape.causal, deterministic=True))
    return Prepared(_backward(packed(*inputs.leaves), inputs, strict=False))


# --- ours --------------------------------------------------------------------------------------------------------------------


def ours(
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    variant: Variant | None = None,
    twin: str | None = None,
    packed: bool = False,
) -> Contender:
    """The package's kernel under some of its settings, perhaps changed for the measurement; variants are of one pass.

    packed: of documents as torch's attention of packed sequences has them.
    """
    valid = variant is None or variant.valid
    chosen = (settings or {}) if variant is None else ONE_PASS_ONLY
    prepare = functools.partial(_prepare_ours, settings=chosen, variant=variant, packed=packed)
    return Contender(name, valid, prepare, _compiled_unavailable, twin, valid, compiled=True)


def _prepare_ours(shape: Shape, inputs: Inputs, *, settings: Mapping[str, Any], variant: Variant | None, packed: bool) -> Prepared:
    device = inputs.query.device
    if packed:
        attend = _packed(shape, device, _torch_varlen(shape))
    elif shape.flex:
        attend = _flex_attention(shape, device)
    else:
        gqa = shape.heads != shape.kv_heads
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=shape.causal, enable_gqa=gqa)
    # For a GPU that is not there (prepare.py) inputs are on the CPU.
    is_there = device.type == "cuda" or emulation.active()
    arch = target_of(device if is_there else torch.device("cuda"), current()).arch
    if variant is not None and not variant.changes(arch, shape.head_dim):
        raise RefusedError(f"{variant.name} changes nothing at head dim {shape.head_dim} on {arch}")
    torch._dynamo.reset()
    clear_decisions()
    with (
        deterministic_mode(True),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        variant.applied() if variant else nullcontext(),
        enabled(**{"on_unsupported": "fallback", "guarantee": "run", **settings}),
    ):
        out = _compiled(attend, inputs)
    decided = decisions()
    if len(decided) != 1:
        raise RefusedError(f"{len(decided)} attentions were decided on, not one")
    if not decided[0].rewritten:
        raise RefusedError(f"declined: {decided[0].reason}")
    return Prepared(_backward(out, inputs, strict=True), decided[0], variant.says if variant else "")


def _compiled_unavailable(device: str) -> str | None:
    return None if device == "cpu" and emulation.active() else _needs_gpu(device)


def _forced() -> list[Contender]:
    """One for every value of a setting that names another kernel, schedule or launch than the default; kernels in one pass."""
    defaults = Config()
    return [
        ours(
            f"ours-{value.replace('_', '-')}",
            {"template": "one_pass"} | {setting: value} if setting == "kernel" else {setting: value},
        )
        for setting, values in CHOICES.items()
        if setting not in NOT_KERNELS
        for value in values
        if value != getattr(defaults, setting)
    ]


def contenders() -> dict[str, Contender]:
    """All, by name, in the order of the table; those that figures are ratios to come first."""
    stock = [
        Contender(BASELINE, True, **_sdpa("FLASH_ATTENTION", True, device=None), twin="sdpa-flash"),
        Contender("sdpa-flash", False, **_sdpa("FLASH_ATTENTION", False, device=None)),
        Contender(FLEX_BASELINE, True, _flex, _compiled_unavailable, compiled=True),
        ours("ours", twin="ours-unordered"),
        ours("ours-unordered", variant=UNORDERED),
    ]
    others = [
        Contender("sdpa-efficient-strict", True, **_sdpa("EFFICIENT_ATTENTION", True), twin="sdpa-efficient"),
        Contender("sdpa-efficient", False, **_sdpa("EFFICIENT_ATTENTION", False)),
        Contender("sdpa-cudnn", False, **_sdpa("CUDNN_ATTENTION", False)),
        Contender("fa4-deterministic", True, **_flash_attention("flash_attn.cute", True), twin="fa4"),
        Contender("fa4", False, **_flash_attention("flash_attn.cute", False)),
        Contender("varlen-strict", True, **_varlen(True), twin="varlen"),
        Contender("varlen", False, **_varlen(False)),
        ours("ours-varlen", packed=True),
        Contender("fa4-varlen-deterministic", True, _fa4_varlen, _flash_attention("flash_attn.cute", True)["unavailable"]),
        Contender("fa3-deterministic", True, **_flash_attention("flash_attn_interface", True), twin="fa3"),
        Contender("fa3", False, **_flash_attention("flash_attn_interface", False)),
    ]
    return {c.name: c for c in (*stock, *_forced(), *others)}


def prepared(name: str, shape: Shape, device: str) -> Prepared:
    """The one that is called so, ready; RefusedError where it cannot run or does not take the shape."""
    found = contenders()[name]
    if why := found.unavailable(device):
        raise RefusedError(why)
    return found.prepare(shape, random_inputs(shape, device))


def tuned() -> dict[str, Contender]:
    """Our one-pass kernel of Triton as it is, every variant of it, and the Gluon kernel."""
    changed = [ours(f"ours-{v.name}", variant=v) for v in VARIANTS]
    gluon = ours("ours-gluon", GLUON_ONLY)
    return {c.name: c for c in (ours("ours", ONE_PASS_ONLY, twin="ours-unordered"), *changed, gluon)}
