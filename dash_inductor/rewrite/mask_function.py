"""The function of a mask: of (b, h, m, n), batch element, query head, query and key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .proofs import computed, constant, is_causal

aten = torch.ops.aten
NAMES = ("b", "h", "m", "n")
LARGEST = 2**26  # of a number in the function, whose positions are 32-bit integers
MOST_PROVEN = 2**28  # elements of a mask that is evaluated for a proof
CHUNK = 2**22  # of them at a time


@dataclass(frozen=True)
class MaskFunction:
    """module(b, h, m, n, *captures) -> bool, whether query m sees key n; captures are nodes of the graph that has the mask."""

    module: fx.GraphModule
    captures: tuple[fx.Node, ...]

    def kind(self, q_len: Any, kv_len: Any) -> str | None:
        """full or causal, where the function shows it; else None. Lengths may be symbolic."""
        visible = next(n for n in self.module.graph.nodes if n.op == "output").args[0]
        if visible is True:
            return "full"
        if is_causal(self.module):
            return "causal"
        return self._evaluated(q_len, kv_len)

    def masks(self, batch: Any, heads: Any) -> Any:
        """How many there are: one for each batch element and head, where it depends on them."""
        b, h, *_ = self.module.graph.nodes
        return (batch if b.users else 1) * (heads if h.users else 1)

    @unset_fake_temporarily()
    def _evaluated(self, q_len: Any, kv_len: Any) -> str | None:
        b, h, *_, output = self.module.graph.nodes
        if b.users or h.users or not (isinstance(q_len, int) and isinstance(kv_len, int)):
            return None
        arguments = self.module.graph.find_nodes(op="placeholder")
        values = [constant(node) for node in self.captures]
        if q_len * kv_len > MOST_PROVEN or any(value is None for value in values):
            return None
        kinds, zero, n = {"full", "causal"}, torch.zeros((), dtype=torch.int64), torch.arange(kv_len)
        rows = max(1, CHUNK // kv_len)
        for m in torch.arange(q_len)[:, None].split(rows):
            known = dict(zip(arguments, (zero, zero, m, n, *values), strict=True))
            visible = computed(output.args[0], known).bool().expand(len(m), kv_len)
            expected = {"full": torch.ones_like(visible), "causal": m >= n}
            kinds &= {kind for kind in kinds if torch.equal(visible, expected[kind])}
            if not kinds:
                return None
        return "full" if "full" in kinds else "causal"


def in_window(before: int | None, behind: int | None, offset: int) -> MaskFunction:
    """Whether n is at most `before` before m + offset, and at most `behind` behind it; None: without such a bound."""
    graph = fx.Graph()
    *_, m, n = (graph.placeholder(name) for name in NAMES)
    place = graph.call_function(aten.add.Tensor, (m, offset))
    bounds = [
        graph.call_function(comparison, (n, graph.call_function(aten.add.Tensor, (place, distance))))
        for comparison, distance in ((aten.ge.Tensor, before and -before), (aten.le.Tensor, behind))
        if distance is not None
    ]
    seen = graph.call_function(aten.bitwise_and.Tensor, tuple(bounds)) if len(bounds) == 2 else bounds[0]
    graph.output(seen)
    return MaskFunction(fx.GraphModule(torch.nn.Module(), graph), ())
