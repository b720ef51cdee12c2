"""The stock backwards of attention: SDPA's ops of ATen, FlexAttention's HOP, varlen_attn's op, those of flash_attn.

Normalises SDPA's four backward ops into one record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.nn.attention import varlen

from ..decision import Stock, kernel_of, serves
from ..dropout import EFFICIENT as OF_EFFICIENT
from ..dropout import FLASH as OF_FLASH
from ..op import FLEX_BACKWARD, FlexArguments
from .mask_function import MaskFunction
from .nodes import aten, call, outputs_of, size_of
from .score_function import ScoreFunction

FLASH = aten._scaled_dot_product_flash_attention_backward.default
FLASH_CPU = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = aten._scaled_dot_product_cudnn_attention_backward.default
SDPA = aten.scaled_dot_product_attention.default  # which torch makes one of these of, or matmuls
# Below the ops of SDPA, and what SDPA becomes for jagged tensors: [B, S, H, D] or, of sequences one after the other, [S, H, D].
HEADS_LAST = (aten._flash_attention_backward.default, aten._efficient_attention_backward.default)
CUDNN_JAGGED = aten._cudnn_attention_backward.default
JAGGED = "jagged tensors are not rewritten", "use torch.nn.attention.varlen.varlen_attn, which takes packed sequences"
# Matched only to say why they stay: the reason, and the remedy.
UNSUPPORTED = {
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: (
        "the op of another backend is not rewritten",
        "take flash or memory-efficient attention (torch.nn.attention.sdpa_kernel)",
    ),
    CUDNN_JAGGED: JAGGED,
}
ROWS, PADDED, COLUMN = "[B, H, S_q]", "[B, H, S_q], padded to a multiple of 32 rows", "[B, H, S_q, 1]"  # of a logsumexp


@dataclass(frozen=True)
class StockOp:
    """What tells one backward of SDPA from the others. A new one is a record in SDPA_OPS.

    Attributes:
        devices: types of devices on which SDPA takes it.
        logsumexp: which of ROWS, PADDED and COLUMN its forward leaves.
        forward: the op that the probe asks before a backward is rewritten; None for one whose forward is known.
        names: what it calls arguments that have another name here.
        trains_mask: whether its fourth gradient is that of the mask.
        ends_aligned: whether its causal mask puts the last query in line with the last key, not the first with the first.
        generator: whose random bits its forward drops by, of dash_inductor/dropout; None where only the op knows them.
    """

    devices: tuple[str, ...]
    logsumexp: str
    forward: OpOverload | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    trains_mask: bool = False
    ends_aligned: bool = False
    generator: str | None = None


SDPA_OPS: dict[OpOverload, StockOp] = {
    FLASH: StockOp(
        ("cuda",),
        ROWS,
        ends_aligned=True,
        generator=OF_FLASH,
    ),
    FLASH_CPU: StockOp(("cpu",), ROWS),
    EFFICIENT: StockOp(
        ("cuda", "cpu"),  # the CPU's under emulation
        PADDED,
        forward=aten._scaled_dot_product_efficient_attention.default,
        names={"grad_out": "grad_out_", "attn_mask": "attn_bias"},
        trains_mask=True,
        generator=OF_EFFICIENT,
    ),
    CUDNN: StockOp(("cuda",), COLUMN, forward=aten._scaled_dot_product_cudnn_attention.default, names={"attn_mask": "attn_bias"}),
}
SDPA_TARGETS = [*SDPA_OPS, *UNSUPPORTED]
assert varlen  # importing it registers the op
VARLEN = torch.ops.torch_attn._varlen_attn_backward.default
# Backwards of packages, by what their arguments are called: of the interface files of flash_attn 2.8.3, and of hopper/ in
# flash-attention at 0251105a. The kernels hub has the same ops, in namespaces that end in a hash.
READ, GRADIENTS = ("dout", "q", "k", "v", "out", "softmax_lse"), ("dq", "dk", "dv")
SEQUENCES = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
SIDES = "window_size_left", "window_size_right"
_OPTIONS = "dropout_p", "softmax_scale", "causal", *SIDES, "softcap", "alibi_slopes", "deterministic", "rng_state"
_OPTIONS_3 = "softmax_scale", "is_causal", *SIDES, "softcap", "deterministic", "sm_margin"
_INTERFACES = {
    (*READ, *GRADIENTS, *_OPTIONS): "FA2",
    (*READ, *GRADIENTS, *SEQUENCES, *_OPTIONS, "zero_tensors"): "FA2",
    (*READ, *SEQUENCES[:2], "sequed_q", "sequed_k", *SEQUENCES[2:], *GRADIENTS, *_OPTIONS_3): "FA3",
}
CALLED = "dash_called"  # in the meta of a node that stands in the place of another op: that op
KEPT = "dash_kept"  # what that op would keep, a Stock; None where ours is taken always
WINDOW = "dash_window"  # in the meta of such a node: its window
SCORES = "dash_scores"  # what becomes of its scores: a ScoreFunction, of packed sequences an OfFlashAttn
TARGETS = [*SDPA_TARGETS, *HEADS_LAST, FLEX_BACKWARD, VARLEN]


@dataclass(frozen=True)
class SdpaBackward:
    """What the backwards of SDPA have in common, by one name each.

    called: what the user called, `op` or an op in whose place that was put. kept: what the op of a package would keep, if it was
    that. grad_out, query, out are [B, H, S_q, D], key and value [B, H_kv, S_k, D]. logsumexp is as the op has it
    (`contract_logsumexp`). attn_mask is added to the scores or selects them, None where there is none; trains_mask says whether its
    gradient is wanted. is_causal: query m sees the keys up to m (top-left).
    random: seed and offset of the dropout, as the op has them. scale: None for 1 / sqrt(D). window: what it sees, None for what the
    rest says. scores: what becomes of them before the softmax, None for what the rest says.
    """

    node: fx.Node
    op: OpOverload
    called: OpOverload
    kept: Stock | None
    grad_out: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    out: fx.Node
    logsumexp: fx.Node
    attn_mask: fx.Node | None
    trains_mask: bool
    dropout_p: float
    random: tuple[Any, Any]
    is_causal: bool
    scale: float | None
    window: MaskFunction | None
    scores: ScoreFunction | None


def sdpa_backward_of(node: fx.Node) -> SdpaBackward:
    """Reads a node of one of SDPA_OPS."""
    named, known = arguments(node), SDPA_OPS[node.target]  # type: ignore[index]
    named = {**named, **{ours: named[theirs] for ours, theirs in known.names.items()}}
    return SdpaBackward(
        node=node,
        op=node.target,  # type: ignore[arg-type]
        called=node.meta.get(CALLED, node.target),
        kept=node.meta.get(KEPT),
        window=node.meta.get(WINDOW),
        scores=node.meta.get(SCORES),
        attn_mask=named.get("attn_mask"),
        random=(named.get("philox_seed", named.get("rng_state")), named.get("philox_offset", named.get("unused"))),
        trains_mask=known.trains_mask and named["attn_mask"] is not None and any(x.users for x in outputs_of(node, 3)),
        **{
            name: named[name]
            for name in ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "scale")
        },
    )


def stock_of(op: Any, named: Mapping[str, Any]) -> Stock | None:
    """What an op of torch, called with these arguments, would keep in the deterministic mode in force, by which Dynamo guards a
    graph; None of one for the CPU."""
    kernel = kernel_of(str(op))
    return Stock(kernel, is_strict(), implementation_for(str(op), named)) if kernel else None


def is_strict() -> bool:
    """Whether deterministic mode, which is on, raises errors."""
    return not torch.is_deterministic_algorithms_warn_only_enabled()


def active_implementation() -> str | None:
    """That of torch's registry of flash attention, but for ours, which stands in front of torch's own."""
    name = torch.nn.attention.current_flash_attention_impl()
    return None if name == "DASH" else name


def implementation_for(op: str, named: Mapping[str, Any]) -> str | None:
    """The active one, if it takes an op with these arguments."""
    name = active_implementation()
    return name if name and serves(name, op, named) else None


def implementation_of(op: OpOverload) -> str | None:
    """Which version of flash_attn the backward of a package is, by its schema: "FA2" or "FA3"; None where it is no such."""
    arguments = op._schema.arguments
    written = tuple(x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write)
    return _INTERFACES.get(tuple(x.name for x in arguments)) if written == GRADIENTS else None


def forward_of(op: OpOverload) -> OpOverload | None:
    """The forward of such a backward, by the name that it has in all of them; None where it is not there."""
    name = op._schema.name.rpartition("::")[2].replace("backward", "forward")
    return getattr(getattr(getattr(torch.ops, op.namespace), name, None), "default", None)


def contract_logsumexp(graph: fx.Graph, stock: SdpaBackward) -> fx.Node:
    """The logsumexp that `dash::sdpa_backward` takes, [B, H, S_q]; what that needs is inserted where `graph` inserts now."""
    layout = SDPA_OPS[stock.op].logsumexp
    if layout == PADDED:
        rows = call(graph, aten.slice.Tensor, stock.logsumexp, 2, 0, size_of(graph, stock.query, 2))
        if stock.node.meta.get("partitioner_tag") == "is_backward":
            # As an output of the forward it would guard on whether it is dense: on lengths that are multiples.
            rows.meta["partitioner_tag"] = "must_be_in_backward"
        return rows
    if layout == COLUMN:
        return call(graph, aten.squeeze.dim, stock.logsumexp, 3)
    return stock.logsumexp


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names of its schema, defaults filled in."""
    if node.target is FLEX_BACKWARD:
        return FlexArguments(*node.args)._asdict()
    named = {}
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if not argument.kwarg_only and index < len(node.args):
            named[argument.name] = node.args[index]
        else:
            named[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return named
