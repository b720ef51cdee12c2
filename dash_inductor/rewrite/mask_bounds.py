"""How large the integers are that a mask makes of positions.

Inductor computes what depends on positions and constants alone as it computes indices: in 32 bits, whatever the dtype, and
simplified first. So where they do not suffice, nobody else knows which mask a forward has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..decision import Declined
from .mask_reader import CASTS, EVERY_POINTWISE, FILLS, PRODUCTS, SAME
from .nodes import SQUEEZES, VIEWS, aten, call_of, reached

prims = torch.ops.prims
LARGEST = 2**31 - 1
LONGEST = 2**23  # of a size that is known at run time only: longer sequences have too many blocks
MOVES = {
    *(*VIEWS, *SQUEEZES, *SAME, *CASTS),
    *(aten.expand.default, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.index.Tensor),
}
REMAINDERS = {aten.remainder.Scalar, aten.remainder.Tensor}
DIVISIONS = {aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode}
FOLLOWED = MOVES | EVERY_POINTWISE | FILLS | {prims.iota.default}


def require_32_bits(mask: fx.Node) -> None:
    """Raises Declined where the mask makes an integer of positions that 32 bits may not hold."""
    made = reached([mask], lambda node: node.all_input_nodes if node.target in FOLLOWED else ())
    most = dict[Any, int | None]()
    for node in mask.graph.nodes:
        if node not in made:
            continue
        most[node] = _most(node, most)
        if (most[node] or 0) > LARGEST:
            reason = f"the mask makes integers up to {most[node]} of positions, for which torch.compile takes 32 bits"
            raise Declined(reason, "keep what the mask computes below 2**31, or make it outside of the compiled function")


def _most(node: fx.Node, most: dict[Any, int | None]) -> Any:
    """The largest that an integer of the node may be, or the least less its sign; None for what is read from memory, which is
    computed with in its own dtype."""

    def of(x: Any) -> int | None:
        if isinstance(x, fx.Node):
            return most[x]
        return LONGEST if isinstance(x, torch.SymInt) else abs(int(x))

    (op, args), value = call_of(node), node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return of(value) if isinstance(value, (int, torch.SymInt)) else None
    if value.is_floating_point() or value.is_complex():
        return None
    if value.dtype == torch.bool:
        return 1
    if op is prims.iota.default:
        length, start, step = (of(x) or 0 for x in (args[0], node.kwargs["start"], node.kwargs["step"]))
        return max(length - 1, 0) * step + start
    if op in FILLS:
        return of(args[-1])
    if op in MOVES:
        return of(args[0])
    if op in REMAINDERS:
        return None if of(args[0]) is None else of(args[1])
    if op not in EVERY_POINTWISE:
        return None
    parts: list[Any] = [of(x) for x in args]
    if None in parts:
        return None
    alpha: Any = node.kwargs.get("alpha", 1)
    first, *others = parts
    if op in PRODUCTS:
        return first * others[0]
    if op in DIVISIONS:
        return -(-first // (others[0] or 1)) if isinstance(args[1], int) else first
    return first + sum(others) * abs(alpha)
