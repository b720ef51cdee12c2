"""A training step of one layer, in the ways that users compile: as it is, by CUDA graphs, and for lengths that vary.

The layer has the sizes of Llama 3 8B's. A step is a forward and a backward; beside its time stand who attends, the time of its
compilation, and whether two steps had the same bits. The seconds that a kernel's trial takes at its first use are there too.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import config
from ..codegen.mode import deterministic
from ..config import GLUON, TRITON, Config
from ..devices.target import target_of
from ..first_use import kind
from ..first_use.process import tried_by_another
from ..first_use.verdict import SECONDS
from ..hooks.install import enabled
from ..problem import Problem
from ..reproduce.bits import same_bits
from ..resolve import resolve
from .clock import Clock, flushed
from .contenders import first_line, importable
from .rows import write

FILE = "training.csv"
ROUNDS = 10
LENGTHS = 8192, 7000, 5000  # of one sequence, in turns where lengths vary; else the first alone
FIRST_USE, TRIAL = "first use", "trial"
MODES: dict[str, dict[str, Any]] = {
    "default": {"dynamic": False},
    "reduce-overhead": {"dynamic": False, "mode": "reduce-overhead"},
    "dynamic": {"dynamic": True},
}
WAYS = ("ours", "strict", "not deterministic", "FlashAttention 4, deterministic")


@dataclass(frozen=True)
class Sizes:
    """Those of Llama 3 8B by default."""

    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14_336
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Step:
    """Median, least and most ms of a step on the GPU, and the seconds that compilation took, or a kind's trial."""

    way: str
    mode: str
    length: int | None
    status: str
    median_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    same_bits: bool | None = None
    seconds: float | None = None


class Layer(nn.Module):
    """A layer of Llama: RMS norms, rotary positions, causal attention with shared keys, and a gated MLP, both residual."""

    def __init__(self, sizes: Sizes, attend: Callable[..., Tensor], device: str) -> None:
        super().__init__()
        self.attend = attend
        head_dim = sizes.width // sizes.heads
        linear = functools.partial(nn.Linear, bias=False, dtype=sizes.dtype, device=device)
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(sizes.width, dtype=sizes.dtype, device=device) for _ in range(2))
        self.query = linear(sizes.width, sizes.width)
        self.key, self.value = (linear(sizes.width, sizes.kv_heads * head_dim) for _ in range(2))
        self.project = linear(sizes.width, sizes.width)
        self.gate, self.up = linear(sizes.width, sizes.inner), linear(sizes.width, sizes.inner)
        self.down = linear(sizes.inner, sizes.width)
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] to [B, S, width]."""
        normed = self.attention_norm(x)
        query, key, value = (
            heads(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for heads in (self.query, self.key, self.value)
        )
        rates = 500_000.0 ** (-torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates.repeat(2)
        query, key = (_turned(each, angles.cos().to(x.dtype), angles.sin().to(x.dtype)) for each in (query, key))
        x = x + self.project(self.attend(query, key, value).transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


def _fa4(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_func

    found = flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), causal=True, deterministic=True)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)


def run(folder: Path, seconds: float) -> int:
    """Writes FILE as it goes, and begins nothing after so many seconds; 1 if a step of ours fails, or has other bits."""
    found = write(folder / FILE, Step, _measured(time.monotonic() + seconds))
    return int(any(step.way == "ours" and (step.status != "ok" or step.same_bits is False) for step in found))


def _measured(deadline: float) -> Iterator[Step]:
    """Trials, then steps."""
    measurements = [functools.partial(tried, kernel) for kernel in (GLUON, TRITON)]
    measurements += [functools.partial(steps, way, mode) for mode in MODES for way in WAYS]
    for measurement in measurements:
        if time.monotonic() >= deadline:
            print("the time limit: what is left of the training steps was not run")
            return
        for step in measurement():
            print(f"  {step}")
            yield step


def tried(kernel: str) -> list[Step]:
    """The kind of a causal attention in one pass, tried by a process of its own, as at its first use."""
    settings = Config(kernel=kernel, template="one_pass")
    problem = Problem("causal", 1, 32, 8, LENGTHS[0], LENGTHS[0], 128, "bf16")
    (one,) = kind.kinds_of(resolve(problem, settings, target_of(torch.device("cuda"), settings)))
    start = time.monotonic()
    job = {"kind": asdict(one), "device": "cuda:0", "settings": asdict(kind.settings_for(one, settings))}
    said = tried_by_another(json.dumps(job), SECONDS[0])
    status = "ok" if said.fit else said.said
    return [Step(f"{FIRST_USE} of {one}", TRIAL, None, status, seconds=time.monotonic() - start)]


def steps(way: str, mode: str, sizes: Sizes = Sizes(), lengths: tuple[int, ...] = LENGTHS, device: str = "cuda") -> list[Step]:
    """One step for each length."""
    lengths = lengths if mode == "dynamic" else lengths[:1]
    if way.startswith("FlashAttention") and not importable("flash_attn.cute"):
        return [Step(way, mode, None, "flash_attn.cute is not importable")]
    torch._dynamo.reset()
    torch.manual_seed(0)
    sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    layer = Layer(sizes, _fa4 if way.startswith("FlashAttention") else sdpa, device)
    compiled = torch.compile(layer, **MODES[mode])
    inputs = {length: torch.randn(1, length, sizes.width, device=device, dtype=sizes.dtype) for length in lengths}

    def step(x: Tensor) -> list[Tensor]:
        layer.zero_grad(set_to_none=True)
        compiled(x).sum().backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    clock = Clock(flushed()) if device == "cuda" else None
    found = []
    with ExitStack() as stack:
        stack.enter_context(deterministic(way in ("ours", "strict")))
        # An installation is on by itself where the mode is deterministic.
        off = config.within(replace(config.current(), enabled=False))
        stack.enter_context(enabled(on_unsupported="error") if way == "ours" else off)
        for length, x in inputs.items():
            try:
                start = time.monotonic()
                first = [each.clone() for each in step(x)]
                compilation = time.monotonic() - start
                equal = all(same_bits(a, b) for a, b in zip(step(x), first, strict=True))
                times = [clock.milliseconds(functools.partial(step, x)) for _ in range(ROUNDS)] if clock else []
            except Exception as error:  # whatever it is, the others go on
                found.append(Step(way, mode, length, f"failed: {type(error).__name__}: {first_line(error)}"))
                continue
            taken = {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)} if times else {}
            found.append(Step(way, mode, length, "ok", **taken, same_bits=equal, seconds=compilation))
    return found
