"""Compiles a Llama for an H100 that is not there, and prints how long that took: the child process of `compilation`.

python -m benchmarks.times.compile_once LAYERS
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator

import torch


class Stopwatch:
    """Runs from when it is made: seconds on the clock, and CPU seconds of this process and its children."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        usage = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in usage)

    def seconds(self) -> dict[str, float]:
        """`wall` and `cpu`, without what was left out."""
        return {name: end - begin for name, begin, end in zip(("wall", "cpu"), self._begin, self._now(), strict=True)}

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """What happens inside does not count."""
        wall, cpu = self._now()
        try:
            yield
        finally:
            now = self._now()
            self._begin = self._begin[0] + now[0] - wall, self._begin[1] + now[1] - cpu


WATCH = Stopwatch()  # before Inductor, for the package is installed when that is imported, and imports what it needs
import torch._inductor.compile_fx  # noqa: E402
import torch._inductor.select_algorithm  # noqa: E402

with WATCH.left_out():
    import json

    from torch import Tensor, nn
    from torch._dynamo.utils import counters
    from torch.nn import functional as F

    from dash_inductor.codegen.mode import deterministic
    from dash_inductor.explanation.compiled import CompiledError, compiling_for

# As Llama 3 8B, without its embedding and with a smaller vocabulary; nothing has memory.
LENGTH, DIM, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 8192, 4096, 32, 8, 14336, 32000
HEAD_DIM = DIM // HEADS


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = Norm(), Norm()
        sizes = (DIM, DIM), (DIM, KV_HEADS * HEAD_DIM), (DIM, KV_HEADS * HEAD_DIM), (DIM, DIM), *[(DIM, HIDDEN)] * 2, (HIDDEN, DIM)
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (nn.Linear(*x, bias=False) for x in sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.before_attention(x)
        query, key, value = (
            linear(y).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        query, key = (z * cos + _rotated(z) * sin for z in (query, key))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Llama(nn.Module):
    """From embedded tokens [B, S, DIM] and the next tokens [B, S] to the loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = Norm(), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        powers = torch.arange(0, HEAD_DIM, 2, device=x.device) / -HEAD_DIM
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * 500000**powers
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def compiled(layers: int) -> None:
    """Compiles forward and backward of so many layers, in strict deterministic mode."""
    with deterministic(), compiling_for("h100", moving=WATCH.left_out):
        with WATCH.left_out():
            torch.set_default_dtype(torch.bfloat16)
            model = Llama(layers)
            torch.set_default_dtype(torch.float32)
            x, targets = torch.empty(1, LENGTH, DIM, dtype=torch.bfloat16), torch.empty(1, LENGTH, dtype=torch.int64)
        with contextlib.suppress(CompiledError):
            torch.compile(model)(x, targets)


def main() -> None:
    compiled(int(sys.argv[1]))
    found = {"rewritten": counters["inductor"]["dash_rewritten"], "from_cache": counters["aot_autograd"]["autograd_cache_hit"]}
    print(json.dumps(WATCH.seconds() | found))


if __name__ == "__main__":
    main()
