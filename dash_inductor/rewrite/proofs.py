"""What a joint graph shows of a mask: whether a BlockMask is the full or the causal mask, by mask_mod and by its lists."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_aggregate

from ..op import MaskArguments
from .nodes import reached

NO_BLOCK_MASK = (2**30, 2**30)  # rows and keys of the one block that torch lists where it is given no BlockMask
MOST_ELEMENTS = 2**24  # of a tensor that is computed for a proof
aten = torch.ops.aten


@unset_fake_temporarily()
def mask_of(mask: MaskArguments, mask_mod: fx.GraphModule) -> str | None:
    """full or causal, for lengths that are known in a causal mask; None where the graph does not show it.

    mask_mod alone shows nothing, for the lists may leave blocks out. Where torch is given no BlockMask, it makes one of one block.
    """
    kind = _kind(mask_mod)
    pairs = [(mask.q_num, mask.q_indices), (mask.full_q_num, mask.full_q_indices)]
    lists = [constant(x) for pair in pairs if pair[0] is not None for x in pair]
    known = [x for x in lists if x is not None]
    if kind is None or len(known) < len(lists) or not (isinstance(mask.q_block, int) and isinstance(mask.kv_block, int)):
        return None
    q_blocks = mask.kv_num.meta["val"].shape[2]
    partial, *rest = (_matrix(known[n], known[n + 1], q_blocks) for n in range(0, len(known), 2))
    full = rest[0] if rest else torch.zeros_like(partial)
    if not _whole(mask, partial):
        return None
    if kind == "full":
        return kind if (partial | full).all() else None
    if mask.q_len != mask.kv_len or not isinstance(mask.q_len, int):
        return None
    key, row = (size * torch.arange(blocks) for size, blocks in zip((mask.kv_block, mask.q_block), partial.shape[2:], strict=True))
    seen = row + mask.q_block > key[:, None]  # by any row of the block
    all_seen = row >= key[:, None] + mask.kv_block - 1
    return kind if ((partial | full) >= seen).all() and (full <= all_seen).all() else None


def _whole(mask: MaskArguments, matrix: Tensor) -> bool:
    """Whether the blocks of the matrix are known to reach to the last query and key."""
    if (mask.q_block, mask.kv_block) == NO_BLOCK_MASK:
        return True
    ends = ((mask.q_len, mask.q_block * matrix.shape[3]), (mask.kv_len, mask.kv_block * matrix.shape[2]))
    return all(isinstance(length, int) and length <= end for length, end in ends)


def _kind(mask_mod: fx.GraphModule) -> str | None:
    if is_causal(mask_mod):
        return "causal"
    value = constant(list(mask_mod.graph.nodes)[-1].args[0])
    return "full" if value is not None and bool(value.all()) else None


def is_causal(mask_mod: fx.GraphModule) -> bool:
    """Whether a function of (b, h, m, n) is m >= n, written in one of two ways."""
    _, _, m, n, *_ = mask_mod.graph.nodes
    visible: Any = list(mask_mod.graph.nodes)[-1].args[0]
    ways = (aten.ge.Tensor, (m, n)), (aten.le.Tensor, (n, m))
    return isinstance(visible, fx.Node) and (visible.target, visible.args) in ways


def constant(node: Any) -> Tensor | None:
    """The value of a node that depends on nothing but constants, computed on the CPU; None for another one, or a large one."""
    return computed(node, {}) if is_constant(node) else None


def is_constant(node: fx.Node) -> bool:
    """Whether a node depends on nothing but constants, none of them large."""
    seen, left = set[fx.Node](), [node]
    while left:
        node = left.pop()
        if not _is_computable(node):
            return False
        seen.add(node)
        left += (x for x in node.all_input_nodes if x not in seen)
    return True


def computed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node on the CPU, where those of some nodes are known."""

    def value(x: Any) -> Any:
        return values[x] if isinstance(x, fx.Node) else torch.device("cpu") if isinstance(x, torch.device) else x

    needed = reached([node], lambda x: () if x in values else x.all_input_nodes) - values.keys()
    for each in [x for x in node.graph.nodes if x in needed]:
        (args, kwargs), op = map_aggregate((each.args, each.kwargs), value), each.target
        values[each] = op(*args, **kwargs)
    return values[node]


def _is_computable(node: fx.Node) -> bool:
    """Whether it is an op of torch whose value its arguments decide, of a size that is known, and not too large."""
    op: Any = node.target
    value = node.meta.get("val")
    if op is operator.getitem:
        return True
    if not isinstance(op, OpOverload) or op.namespace not in ("aten", "prims") or "empty" in op._schema.name:
        return False  # what other ops compute may be another value at run time, and of uninitialised memory it is
    if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    sizes = value.shape if isinstance(value, Tensor) else ()
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= MOST_ELEMENTS


def _matrix(num: Tensor, indices: Tensor, q_blocks: int) -> Tensor:
    """bool [B or 1, H or 1, blocks of keys, blocks of Q]: which are listed."""
    listed = (torch.arange(indices.shape[3]) < num[..., None]) & (indices >= 0) & (indices < q_blocks)
    matrix = torch.zeros(*indices.shape[:3], q_blocks + 1, dtype=torch.bool)
    return matrix.scatter_(3, torch.where(listed, indices, q_blocks).long(), True)[..., :-1]
