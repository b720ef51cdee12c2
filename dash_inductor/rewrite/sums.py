"""The sums of a learnt mask's gradient along what the mask was broadcast along: torch's become ours, in one order."""

from __future__ import annotations

import torch
from torch import fx

from ..op import SUM_IN_ORDER
from .nodes import VIEWS, aten, call, is_tensor, reached

CONVERSION = torch.ops.prims.convert_element_type.default
SUMMED = (torch.float32, torch.bfloat16, torch.float16)  # what a sum in fp32 is as precise for as torch's
OF_ELEMENTS = (*VIEWS, CONVERSION, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)


def put_in_order(gradient: fx.Node, *, all_sums: bool = False) -> list[fx.Node]:
    """Puts ours in the place of the first sum, or of all, on each way from a mask's gradient on; returns torch's, now obsolete.

    Before a sum, elements may be computed from elements, as where the mask is scaled, or where several attentions take it.
    """
    obsolete = []
    followed = (aten.sum.dim_IntList,) if all_sums else ()
    found = reached(
        [gradient], lambda node: node.users if node is gradient or node.target in followed or _is_of_elements(node) else ()
    )
    for node in [node for node in gradient.graph.nodes if node in found and node.target is aten.sum.dim_IntList]:
        x, dims, *others = node.args
        value = node.meta["val"]
        if node.kwargs or not value.is_contiguous() or value.dtype not in SUMMED:
            continue
        if x.target is CONVERSION and x.args[0].meta["val"].is_floating_point():
            x = x.args[0]  # the kernel widens what it reads
        with node.graph.inserting_before(node):
            every = [dim % x.meta["val"].dim() for dim in dims] or [*range(x.meta["val"].dim())]
            ours = call(node.graph, SUM_IN_ORDER, x, every, bool(others and others[0]), value.dtype)
        ours.meta = {**node.meta, **ours.meta}
        node.replace_all_uses_with(ours)
        obsolete.append(node)
    return obsolete


def _is_of_elements(node: fx.Node) -> bool:
    target = node.target
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return is_tensor(node) and (pointwise or target in OF_ELEMENTS)
