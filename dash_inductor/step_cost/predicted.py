"""A step on a GPU that need not be there: attention by its prices, matmuls at a stated rate, the other operators by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from ..decision import Decision, Kernel, Stock, kernel_of
from ..devices import device as named_device
from ..devices.stock_kernels import Speed, not_deterministic
from ..devices.target import Target
from ..explanation.decisions import modules_of
from ..explanation.explain import traced_for
from ..op import MARK, NOTE
from ..problem import BLOCK_MASK, DTYPES, Problem
from ..resolve import Resolution
from ..resolve.prices import of_stock
from ..rewrite.declined import noted
from ..schedule.costs import FLOP_PER_ELEMENT
from ..templates.tiles import NoTile, two_pass_tile
from . import BACKWARD, FORWARD, MATMULS, OFF, OURS, STRICT, WAYS, Group, StepCost
from .strict_ops import changed, name_of

# TFLOPS of dense matmuls in 16 bits that sum in fp32, by NVIDIA's data sheets and white papers.
PEAK = {"h100": 989.4, "h200": 989.5, "a100": 312, "b200": 2250, "l40s": 362.1, "rtx4090": 165.2, "rtx5090": 209.5}
OF_PEAK = 2 / 3  # that matmuls of a training step get of it: a guess
OF_FORWARD = 2 / 5  # two matmuls in the place of five
TILE = 128  # rows and keys, to which pairs are rounded
MATMUL_OPS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "convolution_backward")
AS_CAUSAL = "masks in blocks are counted as causal ones: what they show is known at run time"


def predicted(model: Any, inputs: Any, kwargs: Any, key: str, matmul_tflops: float | None = None) -> StepCost:
    """The cost of a step of `model(*inputs, **kwargs)` on the GPU of a key such as "h100".

    Raises:
        ValueError: as `explain`.
    """
    traced, _, where, _ = traced_for(model, inputs, kwargs, key)
    gpu = named_device(key.lower())
    target, rate = Target(gpu.key, gpu.arch, gpu.sms), matmul_tflops or OF_PEAK * PEAK[gpu.key]
    graphs = [each.graph for each in traced.found if not isinstance(each, Decision)]
    nodes = [node for graph in graphs for module in modules_of(graph) for node in module.graph.nodes]
    attentions = [_Attention.of(node, target) for node in nodes if MARK in node.meta]
    attentions += [_Attention.declined(each, target) for each in traced.found if isinstance(each, Decision)]
    groups = [_group(FORWARD, (one.forward for one in attentions)), _group(BACKWARD, (one.backward for one in attentions))]
    groups += _matmuls(nodes, rate)
    return StepCost(where, groups, changed(nodes), notes=tuple(_notes(attentions, rate, traced.stopped)))


@dataclass(frozen=True)
class _Attention:
    """problem: with what it would keep in strict mode; None where sizes are not known. resolution: None where it keeps that."""

    problem: Problem | None
    resolution: Resolution | None
    target: Target

    @classmethod
    def of(cls, node: fx.Node, target: Target) -> _Attention:
        """That of a node that the pass left: rewritten, or a note."""
        if node.target is NOTE:
            return cls.declined(noted(node), target)
        mark = node.meta[MARK]
        problem, kernel = mark.resolution.problem, kernel_of(mark.stock)
        stock = problem.stock or (Stock(kernel, strict=True) if kernel else None)
        problem = replace(problem, stock=stock and replace(stock, strict=True))
        return cls(problem, mark.resolution, mark.resolution.target)

    @classmethod
    def declined(cls, decision: Decision, target: Target) -> _Attention:
        """One that keeps its stock kernel."""
        d, kernel = decision, kernel_of(decision.op)
        sizes = d.batch, d.heads, d.kv_heads, d.q_len, d.kv_len
        if not all(isinstance(size, int) for size in sizes) or d.dtype not in DTYPES.values():
            return cls(None, None, target)
        head_dim, _, value_dim = str(d.head_dim).partition("/")
        stock = Stock(kernel, True, d.implementation) if kernel else None
        mask = d.mask if d.mask in ("full", "causal") else BLOCK_MASK
        problem = Problem(mask, *sizes, int(head_dim), d.dtype, value_dim=int(value_dim or head_dim), stock=stock)
        return cls(problem, None, target)

    @property
    def tflop(self) -> float | None:
        """The work of its backward, five matmuls of padded head dims; tiles that a mask cuts count whole."""
        if self.problem is None or not self.problem.is_static:
            return None
        p = self.problem
        rows, keys = (-(-length // TILE) for length in (p.q_len, p.kv_len))
        tiles = rows * keys if p.mask == "full" else rows * keys - min(rows, keys) * (min(rows, keys) - 1) / 2
        try:
            head_dim = two_pass_tile(self.target.arch, p.dtype, *p.head_dims).mean_dim
        except NoTile:
            return None
        return float(FLOP_PER_ELEMENT * p.batch * p.heads * tiles * TILE**2 * head_dim / 1e12)

    @property
    def backward(self) -> tuple[float | None, dict[str, float | None]]:
        """(TFLOP, ms by way)."""
        off = strict = None
        if self.problem and self.problem.stock and self.tflop is not None:
            stock = self.problem.stock
            strict = self._ms(of_stock(self.problem, self.target))
            of = self.target.arch, self.problem.head_dims, self.problem.mask
            off = strict if stock.kernel is Kernel.FLEX else self._ms(not_deterministic(stock, *of))
        ours = self._ms(self.resolution.speed) if self.resolution else strict
        return self.tflop, {OFF: off, STRICT: strict, OURS: ours}

    @property
    def forward(self) -> tuple[float | None, dict[str, float | None]]:
        """The same of its forward, which no mode changes: as fast, by the FLOP, as a backward that is not deterministic."""
        tflop, ms = self.backward
        off = ms[OFF]
        return (
            None if tflop is None else OF_FORWARD * tflop,
            dict.fromkeys(WAYS, None if off is None else OF_FORWARD * off),
        )

    def _ms(self, speed: Speed | None) -> float | None:
        return None if speed is None or self.tflop is None else 1000 * self.tflop / speed.tflops


def _group(name: str, costs: Iterable[tuple[float | None, dict[str, float | None]]]) -> Group:
    """The sum of attentions; of those of which something is not known the sum is not known either."""
    rows = list(costs)
    tflop = sum(of for of, _ in rows if of is not None)
    ms = {way: None if any(times[way] is None for _, times in rows) else sum(times[way] or 0 for _, times in rows) for way in WAYS}
    return Group(name, len(rows), tflop, ms)


def _matmuls(nodes: Iterable[fx.Node], rate: float) -> Iterator[Group]:
    """Those in 16 bits at so many TFLOPS, and the others, of which no rate is stated."""
    found: dict[str, list[float]] = {MATMULS: []}
    for node in nodes:
        if name_of(node) in MATMUL_OPS:
            args, kwargs = tree_map_only(fx.Node, lambda x: x.meta["val"], (node.args, node.kwargs))
            value = node.meta["val"]
            dtype = next(x for x in tree_leaves(value) if isinstance(x, torch.Tensor)).dtype
            name = MATMULS if dtype.itemsize == 2 else f"{MATMULS}, {str(dtype).removeprefix('torch.')}"
            flop = flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=value)  # type: ignore[union-attr]
            found.setdefault(name, []).append(int(flop) / 1e12)
    for name, tflop in found.items():
        ms = 1000 * sum(tflop) / rate if name == MATMULS else None
        yield Group(name, len(tflop), sum(tflop), dict.fromkeys(WAYS, ms))


def _notes(attentions: list[_Attention], rate: float, stopped: str | None) -> Iterator[str]:
    """How figures are known."""
    yield (
        "attention by prices, without launches and the ends of CTAs, which count at short sequences; its forward in all ways "
        f"as fast as a backward that is not deterministic, a guess; matmuls at {rate:.0f} TFLOPS"
    )
    yield "the optimizer and what runs between matmuls have no time here: a whole step takes longer, and percentages are smaller"
    if any(one.problem and one.problem.mask == BLOCK_MASK for one in attentions):
        yield AS_CAUSAL
    if any(one.backward[1][OFF] is None for one in attentions):
        yield "where a time is ?, nothing is known of the speed of an attention's kernel in that way"
    if stopped:
        yield f"the forward ended before its end, and what follows is not counted: {stopped}"
