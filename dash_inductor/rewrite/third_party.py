"""Finds the backwards of attention that other packages brought as ops of their own, and says so of each.

Such an op is known by its name alone, which says attention, and stands in the backward, which is what depends on a tangent. It may
write its gradients into its arguments: then it stands in the graph as an argument of `auto_functionalized` or
`auto_functionalized_v2`. Its argument `deterministic` tells how it is called, and `decision/stock.py` what that is worth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import OpOverload

from ..decision import Decision, Declined, LeftToStock, Verdict, is_of_torch, known_of_package, size_text
from ..op import NOTE
from ..problem import dtype_name
from .declined import WithoutOp, decision_of_call, first_gradient, unread
from .nodes import backward_of, is_tensor
from .stock_ops import implementation_of

OP = "attention of another package"
ATTENTION = re.compile(r"attn|attention|flash|fmha|(^|_)(sdpa|dpa|mha|fa[234])(_|$)", re.IGNORECASE)
BACKWARD = re.compile(r"_?(var(len|iable)_)?(bwd|backward)")  # the whole name, in a namespace that says attention
FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)
FLAG = "deterministic"
NAMES = (("q", "query"), ("k", "key"), ("v", "value"))
OURS = "call torch.nn.functional.scaled_dot_product_attention or torch.nn.attention.varlen.varlen_attn, whose backward is rewritten"
ENVIRONMENT = "transformers passes it where FLASH_ATTENTION_DETERMINISTIC=1 is set"
# Implementations by what is exact: ops of xformers, and modules with autograd functions.
NAMED = {
    **dict.fromkeys(("xformers_flash.flash_bwd.default", "xformers.efficient_attention_backward_cutlass.default"), "xformers"),
    "flash_attn.flash_attn_interface": "FA2",
    "flash_attn_interface": "FA3",
    "flash_attn.cute.interface": "FA4",
}


def attentions(graph: fx.Graph, why: Mapping[fx.Node, Declined | None]) -> Iterator[WithoutOp]:
    """For each attention: a gradient, its node, and what becomes of it. why: by node, why one that could be is not rewritten."""
    found = {node: op for node in graph.nodes if (op := op_of(node)) is not None and says_attention(op)}
    if not found:
        return
    backward = backward_of(graph)
    for node, op in found.items():
        gradient = (node if node.users else None) if is_tensor(node) else first_gradient(node)
        if node in backward and gradient is not None and not any(user.target is NOTE for user in gradient.users):
            named = arguments(node)
            implementation = implementation_of(op) or NAMED.get(str(op))
            declined = _declined(op, named, why.get(node), implementation)
            yield gradient, node, _sized(str(op), named, declined, implementation), declined


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
    """What is said of an autograd function of another package that is in no graph. named: its arguments."""
    broken = "torch.compile breaks the graph at this autograd function, so that no pass sees its backward"
    implementation = NAMED.get(name.rpartition(".")[0])
    declined = _as_called(broken, named.get(FLAG), implementation, None, OURS)
    return replace(_sized(name, named, declined, implementation), source=source, module=module)


def _declined(op: OpOverload, named: Mapping[str, Any], why: Declined | None, implementation: str | None) -> Declined:
    package = f"{why}: it stays the op of another package" if why else "the op of another package"
    silence = f"if it is, name it in the setting silence (DASH_INDUCTOR_SILENCE={op.namespace}); else {OURS}"
    return _as_called(package, named.get(FLAG), implementation, why, silence)


def _as_called(what: str, flag: Any, implementation: str | None, why: Declined | None, unknown: str) -> Declined:
    """The reason, by the argument `deterministic`. why: it is not rewritten. unknown: the remedy where there is no such argument,
    and nothing is known."""
    remedy = why.remedy if why else OURS
    known = known_of_package(implementation)
    if flag is True:
        said, differs = {
            Verdict.YES: (f"deterministic as it is called ({FLAG}=True)", False),
            Verdict.CLAIMED: (f"deterministic by its own flag ({FLAG}=True), which is unproven: {known.source}", None),
        }.get(known.strict, (f"deterministic by its own flag ({FLAG}=True), which nobody here has looked into", None))
        if not isinstance(why, LeftToStock):
            remedy = f"for our kernels, {remedy}"
        elif differs is None:  # something is needed by who wants a proof
            remedy = remedy.removeprefix("none needed: ")
        return LeftToStock(f"{what}, {said}", remedy, stock_differs=differs)
    if flag is False:
        reason = f"{what}, not deterministic as it is called ({FLAG}=False)"
        return Declined(reason, f"pass {FLAG}=True ({ENVIRONMENT}), or {remedy}", stock_differs=True)
    if known.strict == Verdict.NO:
        return Declined(f"{what}, which is not deterministic", remedy, stock_differs=True)
    return Declined(f"{what}, of which is not known whether it is deterministic", unknown, stock_differs=None)


def _sized(name: str, named: Mapping[str, Any], declined: Declined, implementation: str | None) -> Decision:
    """All but the origin; of sizes what arguments called query, key and value tell, nodes of a graph or tensors. Dense tensors have
    the heads last in flash_attn; of another package nobody knows."""
    given = [next((x for alike in names if (x := _value(named.get(alike))) is not None), None) for names in NAMES]
    tensors = [x for x in given if x is not None]
    packed = any(_value(named.get(x)) is not None for x in ("cu_seqlens_q", "cu_seq_q", "cu_seqlens"))
    if len(tensors) < 3 or any(x.dim() not in ((3,) if packed else (4,)) for x in tensors):
        return replace(unread(name, declined), implementation=implementation)
    mask = "varlen" if packed else "causal" if named.get("causal") or named.get("is_causal") else "full"
    if packed or implementation:
        decision = decision_of_call(name, tensors, mask, declined, heads_last=True)
        return replace(decision, implementation=implementation)
    sizes = ", ".join(dict.fromkeys(str([*map(size_text, x.shape)]) for x in tensors))
    query = tensors[0]
    return replace(unread(name, declined), as_given=sizes, device=query.device.type, dtype=dtype_name(query.dtype), mask=mask)


def _value(x: Any) -> Tensor | None:
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    return value if isinstance(value, Tensor) else None
