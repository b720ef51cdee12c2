"""Finds the backwards of attention that other packages brought as ops of their own, and says so of each.

Such an op is known by its name alone, which says attention, and stands in the backward, which is what depends on a tangent. It may
write its gradients into its arguments: then it stands in the graph as an argument of `auto_functionalized` or
`auto_functionalized_v2`. Whether it is deterministic as it is called, its argument `deterministic` tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import OpOverload

from ..decision import Decision, Declined, LeftToStock, is_of_torch
from ..op import NOTE
from .declined import WithoutOp, decision_of_call, first_gradient, unread
from .nodes import backward_of, is_tensor

OP = "attention of another package"
ATTENTION = re.compile(r"attn|attention|flash|fmha|(^|_)(sdpa|dpa|mha|fa[234])(_|$)", re.IGNORECASE)
BACKWARD = re.compile(r"_?(var(len|iable)_)?(bwd|backward)")  # the whole name, in a namespace that says attention
FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)
FLAG = "deterministic"
NAMES = (("q", "query"), ("k", "key"), ("v", "value"))
OURS = "call torch.nn.functional.scaled_dot_product_attention or torch.nn.attention.varlen.varlen_attn, whose backward is rewritten"
ENVIRONMENT = "transformers passes it where FLASH_ATTENTION_DETERMINISTIC=1 is set"
# Backwards that add with atomics, and have no argument for another way.
NOT_DETERMINISTIC = ("xformers_flash.flash_bwd", "xformers.efficient_attention_backward_cutlass")


def attentions(graph: fx.Graph, why: Mapping[fx.Node, Declined | None]) -> Iterator[WithoutOp]:
    """Of each a gradient, its node, and what becomes of it. why: of those that could have been rewritten, why they are not."""
    found = [node for node in graph.nodes if (op := op_of(node)) is not None and says_attention(op)]
    if not found:
        return
    backward = backward_of(graph)
    for node in found:
        gradient = (node if node.users else None) if is_tensor(node) else first_gradient(node)
        if node in backward and gradient is not None and not any(user.target is NOTE for user in gradient.users):
            op, named = op_of(node), arguments(node)
            assert op is not None
            declined = _declined(op, named, why.get(node))
            yield gradient, node, _sized(str(op), named, declined), declined


def op_of(node: fx.Node) -> OpOverload | None:
    """The op of a package that a node calls, plain or functionalized; None if it is torch's, or calls no op."""
    target = node.args[0] if node.target in FUNCTIONALIZED else node.target
    return target if isinstance(target, OpOverload) and not is_of_torch(str(target)) else None


def says_attention(op: OpOverload) -> bool:
    """Whether the name of an op says that it is one of attention. Such a namespace may have norms and the like as well."""
    namespace, name, _ = str(op).split(".")
    return bool(ATTENTION.search(name) or (ATTENTION.search(namespace) and BACKWARD.fullmatch(name)))


def arguments(node: fx.Node) -> dict[str, Any]:
    """The op's arguments by the names of its schema, defaults filled in, without those that it writes."""
    op = op_of(node)
    assert op is not None
    given = () if node.target in FUNCTIONALIZED else node.args
    named = {argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()}
    named |= dict(zip((argument.name for argument in op._schema.arguments), given, strict=False))
    return named | {name: value for name, value in node.kwargs.items() if name in {x.name for x in op._schema.arguments}}


def decision_of_function(name: str, named: Mapping[str, Any], source: str | None, module: str) -> Decision:
    """Of an autograd function of another package that is in no graph, its arguments by their names, and where it is called."""
    broken = "torch.compile breaks the graph at this autograd function, so that no pass sees its backward"
    declined = _as_called(broken, named.get(FLAG), OURS, OURS)
    return replace(_sized(name, named, declined), source=source, module=module)


def _declined(op: OpOverload, named: Mapping[str, Any], why: Declined | None) -> Declined:
    package = f"{why}: it stays the op of another package" if why else "the op of another package"
    remedy = why.remedy if why else OURS
    if named.get(FLAG) is None and str(op).removesuffix(".default") in NOT_DETERMINISTIC:
        return Declined("the op of another package, which is not deterministic", OURS, stock_differs=True)
    silence = f"if it is, name it in the setting silence (DASH_INDUCTOR_SILENCE={op.namespace}); else {OURS}"
    return _as_called(package, named.get(FLAG), remedy, silence)


def _as_called(what: str, flag: Any, remedy: str, unknown: str) -> Declined:
    """The reason, by the argument `deterministic`. unknown: the remedy where there is none."""
    if flag is True:
        return LeftToStock(f"{what}, deterministic as it is called ({FLAG}=True)", f"for our kernels, {remedy}")
    if flag is False:
        reason = f"{what}, not deterministic as it is called ({FLAG}=False)"
        return Declined(reason, f"pass {FLAG}=True ({ENVIRONMENT}), or {remedy}", stock_differs=True)
    return Declined(f"{what}, of which is not known whether it is deterministic", unknown, stock_differs=None)


def _sized(name: str, named: Mapping[str, Any], declined: Declined) -> Decision:
    """All but the origin; of sizes what arguments called query, key and value tell, nodes of a graph or tensors."""
    given = [next((x for alike in names if (x := _value(named.get(alike))) is not None), None) for names in NAMES]
    tensors = [x for x in given if x is not None]
    packed = any(_value(named.get(x)) is not None for x in ("cu_seqlens_q", "cu_seq_q", "cu_seqlens"))
    if len(tensors) < 3 or any(x.dim() not in ((3,) if packed else (4,)) for x in tensors):
        return unread(name, declined)
    causal = named.get("causal") or named.get("is_causal")
    return decision_of_call(name, tensors, "varlen" if packed else "causal" if causal else "full", declined, heads_last=True)


def _value(x: Any) -> Tensor | None:
    if isinstance(x, fx.Node):
        return x.meta["val"] if is_tensor(x) else None
    return x if isinstance(x, Tensor) else None
