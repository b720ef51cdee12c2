"""Undo GQA expansion: read the unexpanded K and V.

Models that do without `enable_gqa`, and SDPA for ops that do not know it, repeat kv heads in the graph, and sum the gradients of
the copies. Our kernels read one kv head for a group and return its gradient, so that the backward needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from .nodes import VIEWS, aten, call_of, outputs_of


@dataclass(frozen=True)
class Repeated:
    """A tensor [B, H_kv, S, D], and the sums of the gradients of its copies, [B, H_kv, S, D] or [B, H_kv, 1, S, D]."""

    source: fx.Node
    sums: tuple[fx.Node, ...]

    @property
    def gradient(self) -> Tensor:
        """A fake one, strided as the nodes after it were traced."""
        value = self.sums[0].meta["val"] if self.sums else self.source.meta["val"]
        return value.squeeze(2) if value.dim() == 5 else value


def repeated(backward: fx.Node, x: fx.Node, output: int) -> Repeated | None:
    """What `x` repeats, the key or value of an SDPA backward whose `output` is its gradient; None where that is not seen."""
    if (source := _source(x)) is None:
        return None
    shape = x.meta["val"].shape
    copies = (shape[0], source.meta["val"].shape[1], shape[1] // source.meta["val"].shape[1], *shape[2:])
    sums: list[fx.Node] = []
    for gradient in outputs_of(backward, output):
        for view in gradient.users:
            if view.target not in VIEWS or tuple(view.meta["val"].shape) != copies:
                return None
            sums += view.users
    if any(node.target is not aten.sum.dim_IntList or tuple(call_of(node)[1][1]) != (2,) or node.kwargs for node in sums):
        return None
    return Repeated(source, tuple(sums))


def _source(x: fx.Node) -> fx.Node | None:
    """The source of x = view(clone(expand(unsqueeze(source, 2)))), [B, H_kv, S, D] -> [B, H_kv * G, S, D]; clone may be missing."""
    if x.target not in VIEWS:
        return None
    expanded: Any = x.args[0]
    if expanded.target is aten.clone.default:
        expanded = expanded.args[0]
    if expanded.target is not aten.expand.default or expanded.args[0].target is not aten.unsqueeze.default:
        return None
    source, dim = call_of(expanded.args[0])[1]
    (batch, kv_heads, *rest), five = source.meta["val"].shape, expanded.meta["val"].shape
    same = dim == 2 and len(five) == 5 and tuple(five[:2]) == (batch, kv_heads) and list(five[3:]) == rest
    return source if same and tuple(x.meta["val"].shape) == (batch, kv_heads * five[2], *rest) else None


def return_unrepeated(backward: fx.Node, output: int, keys: Repeated) -> list[fx.Node]:
    """Puts the gradient that `backward` now returns in the place of the sums of its copies; returns the nodes that are obsolete."""
    graph, sums, views = backward.graph, list[fx.Node](), list[fx.Node]()
    for gradient in outputs_of(backward, output):
        gradient.meta["val"] = keys.gradient
        for view in [user for user in gradient.users if user.target in VIEWS]:
            for node in list(view.users):
                new = gradient
                if node.meta["val"].dim() == 5:
                    with graph.inserting_before(node):
                        new = graph.call_function(aten.unsqueeze.default, (gradient, 2))
                        new.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(new)
                sums.append(node)
            views.append(view)
    return [*sums, *views]
