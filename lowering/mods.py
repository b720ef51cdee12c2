"""FlexAttention's functions, score_mod, its derivative and mask_mod, as Inductor writes them into a kernel."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor.ir import ComputedBuffer, StorageBox, Subgraph, TensorBox
from torch._inductor.kernel.flex import flex_attention as stock
from torch._inductor.utils import sympy_product

from dash_inductor.dropout import FLASH, ROUNDS, Dropout
from dash_inductor.op import DROPOUT, LEARNT, FlexArguments
from dash_inductor.op.captured import AXES, Share, shares_of

from .buffers import empty, in_memory, zeros
from .tanh import without_branches

ARGUMENTS = ("b", "h", "m", "n")


@dataclass(frozen=True)
class Mods:
    """subgraphs: score_mod(score, b, h, m, n), its derivative(score, b, h, m, n, grad_score_mod), mask_mod(b, h, m, n); None for
    an attention without them. captures: the tensors and sizes that they read. outputs: everything that they compute.
    shares: what elements of the scores add to the gradients of captured tensors. values: by the node that computes it in the
    derivative, what they add, [B, H, S_q, S_k], zeros where no kernel writes. of_dropout: what a template knows of what the forward
    dropped; random_state: what it reads, int64 [2]; drop_bits: the same as bits, for the Gluon kernel (dropout_bits.py)."""

    subgraphs: list[ComputedBuffer] | None = None
    captures: Sequence[Any] = ()
    outputs: Any = None
    score_mod: bool = False  # whether the kernel calls it
    mask_mod: bool = False
    shares: Sequence[Share] = ()
    values: Mapping[fx.Node, TensorBox] = field(default_factory=dict)
    of_dropout: dict[str, object] = field(default_factory=dict)
    random_state: TensorBox | None = None
    drop_bits: TensorBox | None = None

    @property
    def constants(self) -> dict[str, object]:
        """What a template knows of them when it is compiled; nothing where there are none."""
        if self.subgraphs is None:
            return {}
        functions: dict[str, object] = {"FLEX": True, "SCORE_MOD": self.score_mod, "MASK_MOD": self.mask_mod}
        return functions | ({"SHARES": len(self.values)} if self.values else {}) | self.of_dropout

    @property
    def read(self) -> list[TensorBox]:
        """What kernels read for them, beside the captures."""
        return [] if self.random_state is None else [self.random_state]

    @property
    def ints(self) -> sympy.Expr | int:
        """Ints of memory that bits take."""
        return 0 if self.drop_bits is None else sympy_product(self.drop_bits.get_size())

    @property
    def mutated(self) -> list[TensorBox]:
        """What kernels write for them."""
        return list(self.values.values())

    def note(self, output: Any) -> None:
        """Tells Inductor which sizes the kernel of `output` reads through them."""
        if self.subgraphs is not None:
            buffer: Any = output.data.data
            buffer.subgraph_inps, buffer.subgraph_outs = list(self.captures), self.outputs


NONE = Mods()


def mods_of(arguments: FlexArguments, *, masked: bool, whole: bool) -> Mods:
    """The functions of a HOP that is lowered, mask_mod among them if `masked`. whole: whether kernels visit every tile.

    Raises what the stock lowering does for functions that cannot be inlined.
    """
    device = arguments.query.get_device_or_error()
    built = functools.partial(_built, arguments.query)
    # Realise captures; the forward already did, except those the pass made.
    score_captures, mask_captures = (
        [in_memory(x) if isinstance(x, TensorBox) else x for x in captures]
        for captures in (arguments.score_mod_captures, arguments.mask_mod_captures)
    )
    derivative, is_learnt = arguments.joint.graph_module, LEARNT in arguments.kernel_options
    shares = _shares(derivative.graph, len(arguments.score_mod_captures), is_learnt)
    dtypes = _dtypes(shares, arguments.score_mod_captures)
    stored = Subgraph(name=arguments.joint.name, graph_module=returning(derivative, [_of_score(derivative), *dtypes], device))
    score_mod = built(arguments.score_mod, score_captures, "score", *ARGUMENTS)
    names = ("score", *ARGUMENTS, "grad_score_mod")
    grad_input, *values = built(stored, score_captures, *names)
    joint = stock.process_joint_outputs([grad_input], len(names))
    mask_mod = built(arguments.mask.mask_mod, mask_captures, *ARGUMENTS)
    scores = [*arguments.query.get_size()[:3], arguments.key.get_size()[2]]
    return Mods(
        [score_mod, grad_input, mask_mod, *values],
        [*score_captures, *mask_captures],
        [*stock.get_bwd_subgraph_outputs(score_mod, mask_mod, joint), *values],
        not stock.is_trivial_score_graph(arguments.score_mod.graph_module),
        masked and not stock.is_trivial_mask_graph(arguments.mask.mask_mod.graph_module),
        shares,
        {node: (empty if whole else zeros)(scores, dtype, device) for node, dtype in dtypes.items()},
        *_dropped(arguments, score_captures),
    )


def scores_alone(query: Any, score_mod: fx.GraphModule, joint: fx.GraphModule, captures: Sequence[Any], *, trained: bool) -> Mods:
    """The function of the scores and its derivative, and if captures are trained what elements add to their gradients, with nothing
    else of an attention: there are values of no size."""
    device = query.get_device_or_error()
    # Of a learnt mask the derivative has no gradient.
    shares = (_shares(joint.graph, len(captures), False) or _shares(joint.graph, len(captures), True)) if trained else []
    dtypes = _dtypes(shares, captures)
    derivative = returning(joint, [_of_score(joint), *dtypes], device)
    score = _built(query, Subgraph(name="score_mod", graph_module=score_mod), captures, "score", *ARGUMENTS)
    names = ("score", *ARGUMENTS, "grad_score_mod")
    grad, *values = _built(query, Subgraph(name="joint", graph_module=derivative), captures, *names)
    sizeless = {node: empty([sympy.Integer(0)], dtype, device) for node, dtype in dtypes.items()}
    return Mods([score, grad, score, *values], captures, score_mod=True, shares=shares, values=sizeless)


def _built(query: Any, function: Subgraph, captures: Sequence[Any], *names: str) -> Any:
    """What a function returns, of scalars by these names and of its captures. query: of the attention."""
    dtype, device = query.get_dtype(), query.get_device_or_error()
    placeholders = [stock.create_placeholder(name, torch.int32 if name in ARGUMENTS else dtype, device) for name in names]
    with ComputedBuffer.force_realize():  # a capture that reads nothing is loaded too, not computed from its index
        boxes = [TensorBox(x) if isinstance(x, StorageBox) else x for x in captures]  # one may be what the function returns
        buffers = stock.build_subgraph_buffer([*placeholders, *boxes], without_branches(function, device))
    stock.freeze_irnodes(buffers)
    return buffers


def _shares(derivative: fx.Graph, captures: int, is_learnt: bool) -> list[Share]:
    """The shares of so many captures, with a gradient. That of a learnt mask, [B, H, S_q, S_k], the last, is the score's."""
    if not is_learnt:
        return shares_of(derivative)
    *_, output = derivative.nodes
    _, *index = [node for node in derivative.nodes if node.op == "placeholder"][: 1 + AXES]
    return [Share(captures - 1, output.args[0][0], tuple(index))]


def _of_score(derivative: fx.GraphModule) -> fx.Node | None:
    """The gradient of the score; None for one that score_mod does not read."""
    (output,) = (node for node in derivative.graph.nodes if node.op == "output")
    return output.args[0][0]


def returning(derivative: fx.GraphModule, nodes: Sequence[fx.Node | None], device: torch.device) -> fx.GraphModule:
    """A copy of it that returns these nodes, and 0 for None: that is the gradient of a score which score_mod does not read."""
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(derivative.graph, copied)
    zero = graph.call_function(torch.ops.aten.full.default, ([], 0.0), {"dtype": torch.float32, "device": device})
    graph.output([zero if node is None else copied[node] for node in nodes])
    copy = fx.GraphModule(derivative, graph)  # with the constants that it reads
    copy.graph.eliminate_dead_code()
    copy.recompile()
    return copy


def _dtypes(shares: Sequence[Share], captures: Sequence[Any]) -> dict[fx.Node, torch.dtype]:
    """Each node that computes what elements add, and in which dtype that is stored."""
    return {value: _dtype(value, shares, captures) for value in dict.fromkeys(share.value for share in shares)}


def _dtype(value: fx.Node, shares: Sequence[Share], captures: Sequence[Any]) -> torch.dtype:
    """That of a 16-bit tensor whose elements get one value each, if there is no other; else fp32, for sums are rounded once."""
    of_value = [share for share in shares if share.value is value]
    (dtype, *others) = {captures[share.capture].get_dtype() for share in of_value}
    alone = not others and dtype.itemsize == 2 and all(len(share.kept) == AXES for share in of_value)
    return dtype if alone else torch.float32


def _dropped(arguments: FlexArguments, captures: Sequence[Any]) -> tuple[dict[str, object], TensorBox | None]:
    """Mods.of_dropout and Mods.random_state: the last of the captures, or the one before a learnt mask."""
    if DROPOUT not in arguments.kernel_options:
        return {}, None
    dropout = Dropout(*arguments.kernel_options[DROPOUT])
    of_bits = {"OF_FLASH": dropout.generator == FLASH, "ROUNDS": ROUNDS[dropout.generator], "THRESHOLD": dropout.threshold}
    constants: dict[str, object] = {"DROPOUT": True, "DROP_SCALE": dropout.scale(arguments.query.get_dtype()), **of_bits}
    return constants, captures[-2 if LEARNT in arguments.kernel_options else -1]
