"""A training step whose graphs may come out of torch's caches: in the process of a test, or, run as a script, in one of its own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from tensors import normal
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import remote_cache
from torch._inductor.codecache import PyCodeCache
from torch.compiler._cache import CacheArtifactManager

import dash_inductor
from dash_inductor.decision import Graph
from dash_inductor.emulation import emulate

REMOTE = (remote_cache.RemoteFxGraphCache, remote_cache.RemoteAOTAutogradCache)
BIAS = normal(100, 100)


def attend(x: Tensor) -> Tensor:
    """Of three attentions two are rewritten, the second under a bias that the graph is given; one is declined, for its head dim."""
    out = F.scaled_dot_product_attention(x, x, x)
    out = F.scaled_dot_product_attention(out, x, x, attn_mask=BIAS)
    return F.scaled_dot_product_attention(*(y.repeat(1, 1, 1, 17) for y in (out, x, x)))[..., : x.shape[-1]]


def named(name: str) -> Callable[[Tensor], Tensor]:
    """`attend` as another function, which Dynamo compiles anew, to the same graphs."""
    return FunctionType(attend.__code__.replace(co_name=name), attend.__globals__, name)


@dataclass
class Step:
    """What a step gave, and which of its two graphs came out of caches; decisions are without their graph, `graph` is their one."""

    gradient: list[float]
    decisions: list[dict[str, Any]]
    graph: dict[str, Any]
    hits: int
    misses: int
    autograd_hits: int

    @property
    def found(self) -> tuple[int, int, int]:
        """(Hits and misses of the FX graph cache, hits of the AOTAutograd cache)."""
        return self.hits, self.misses, self.autograd_hits

    def same(self, other: Step) -> bool:
        """Whether gradients are equal in every bit, and decisions in every word."""
        return (self.gradient, self.decisions) == (other.gradient, other.decisions)


WARM, COLD = (2, 0, 1), (0, 2, 0)


def step(
    folder: Path | str,
    *,
    sms: int | None = None,
    remote: Path | str | dict[str, bytes] | None = None,
    load: Sequence[Path | str] = (),
    save: Path | str | None = None,
    **settings: Any,
) -> Step:
    """A step as in a new process, with the local caches in `folder`, on an emulated device with `sms` or on that of the process.

    remote: where fake remote caches keep their bytes. load, save: files of `torch.compiler.load_cache_artifacts()`.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    counters.clear()
    dash_inductor.clear_decisions()
    with (
        CacheArtifactManager.with_fresh_cache(),
        contextlib.nullcontext() if remote is None else remote_caches(remote),
        contextlib.nullcontext() if sms is None else emulate(sms=sms),
        dash_inductor.enabled(**settings),
    ):
        for artifacts in load:
            assert torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes()) is not None
        gradient = train(attend)
        if save is not None:
            saved = torch.compiler.save_cache_artifacts()
            assert saved is not None
            Path(save).write_bytes(saved[0])
    return result(gradient, "attend")


def train(function: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a step, where caches may be used."""
    x = normal(1, 4, 100, 16).requires_grad_()
    torch.compile(function)(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def result(gradient: Tensor, name: str) -> Step:
    """With the decisions of the function of that name, and what the caches have counted."""
    found = [decision for decision in dash_inductor.decisions() if decision.graph and decision.graph.compiled == name]
    (graph,) = {decision.graph for decision in found}
    assert isinstance(graph, Graph)
    decisions = [json.loads(replace(decision, graph=None).text()) for decision in found]
    hits, misses = (counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss"))
    autograd_hits = counters["aot_autograd"]["autograd_cache_hit"]
    return Step(gradient.flatten().tolist(), decisions, asdict(graph), hits, misses, autograd_hits)


@contextlib.contextmanager
def remote_caches(store: Path | str | dict[str, bytes]) -> Iterator[None]:
    """torch's remote caches of both kinds are on, and keep their bytes in a dict or a folder."""

    class Backend(remote_cache.RemoteCacheBackend[bytes]):
        def _get(self, key: str) -> bytes | None:
            if isinstance(store, dict):
                return store.get(key)
            path = Path(store) / key.replace(":", "_")
            return path.read_bytes() if path.exists() else None

        def _put(self, key: str, data: bytes) -> None:
            if isinstance(store, dict):
                store[key] = data
            else:
                Path(store).mkdir(exist_ok=True)
                (Path(store) / key.replace(":", "_")).write_bytes(data)

    for cache in REMOTE:
        cache.backend_override_cls = Backend
    try:
        with inductor_config.patch(fx_graph_remote_cache=True), functorch_config.patch(enable_remote_autograd_cache=True):
            yield
    finally:
        for cache in REMOTE:
            cache.backend_override_cls = None


def meet(folder: Path, processes: int) -> None:
    """Returns once so many processes have come here; TimeoutError after two minutes."""
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + 120
    while len(list(folder.iterdir())) < processes:
        if time.monotonic() > end:
            raise TimeoutError(f"{processes} processes did not come to {folder}")
        time.sleep(0.01)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    steps = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        meet(Path(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps([asdict(step(**arguments)) for arguments in steps]))
