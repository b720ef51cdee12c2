"""FlexAttention's functions, score_mod, its derivative and mask_mod, as Inductor writes them into a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor.ir import ComputedBuffer, TensorBox
from torch._inductor.kernel.flex import flex_attention as stock

from dash_inductor.dropout import FLASH, ROUNDS, Dropout
from dash_inductor.op import DROPOUT, LEARNT, FlexArguments

from .buffers import in_memory, zeros_like

ARGUMENTS = ("b", "h", "m", "n")


@dataclass(frozen=True)
class Mods:
    """subgraphs: score_mod(score, b, h, m, n), its derivative(score, b, h, m, n, grad_score_mod), mask_mod(b, h, m, n); None for
    an attention without them. captures: the tensors and sizes that they read. outputs: everything that they compute.
    bias_gradient: [B, H, S_q, S_k], zeros, into which the kernels write dS, the gradient of what is added to the scores; None where
    nobody wants it. of_dropout: what a template knows of what the forward dropped; random_state: what it reads, int64 [2]."""

    subgraphs: list[ComputedBuffer] | None = None
    captures: Sequence[Any] = ()
    outputs: Any = None
    score_mod: bool = False  # whether the kernel calls it
    mask_mod: bool = False
    bias_gradient: TensorBox | None = None
    of_dropout: dict[str, object] = field(default_factory=dict)
    random_state: TensorBox | None = None

    @property
    def constants(self) -> dict[str, object]:
        """What a template knows of them when it is compiled; nothing where there are none."""
        if self.subgraphs is None:
            return {}
        functions: dict[str, object] = {"FLEX": True, "SCORE_MOD": self.score_mod, "MASK_MOD": self.mask_mod}
        return functions | ({} if self.bias_gradient is None else {"BIAS_GRADIENT": True}) | self.of_dropout

    @property
    def read(self) -> list[TensorBox]:
        """What kernels read for them, beside the captures."""
        return [] if self.random_state is None else [self.random_state]

    @property
    def mutated(self) -> list[TensorBox]:
        """What kernels write for them."""
        return [] if self.bias_gradient is None else [self.bias_gradient]

    def note(self, output: Any) -> None:
        """Tells Inductor which sizes the kernel of `output` reads through them."""
        if self.subgraphs is not None:
            buffer: Any = output.data.data
            buffer.subgraph_inps, buffer.subgraph_outs = list(self.captures), self.outputs


NONE = Mods()


def mods_of(arguments: FlexArguments, *, masked: bool) -> Mods:
    """The functions of a HOP that is lowered, mask_mod among them if `masked`. Raises what the stock lowering does for functions
    that cannot be inlined."""
    dtype, device = arguments.query.get_dtype(), arguments.query.get_device_or_error()

    def placeholders(*names: str) -> list[TensorBox]:
        return [stock.create_placeholder(name, torch.int32 if name in ARGUMENTS else dtype, device) for name in names]

    def built(graph: Any, captures: list[Any], *names: str) -> Any:
        with ComputedBuffer.force_realize():  # a capture that reads nothing is loaded too, not computed from its index
            buffers = stock.build_subgraph_buffer([*placeholders(*names), *captures], graph)
        stock.freeze_irnodes(buffers)
        return buffers

    # Realise captures; the forward already did, except those the pass made.
    score_captures, mask_captures = (
        [in_memory(x) if isinstance(x, TensorBox) else x for x in captures]
        for captures in (arguments.score_mod_captures, arguments.mask_mod_captures)
    )
    learnt = LEARNT in arguments.kernel_options
    if learnt:  # the kernels store its gradient, which is dS
        (output,) = (node for node in arguments.joint.graph_module.graph.nodes if node.op == "output")
        output.args = ([*output.args[0][:-1], None],)
    score_mod = built(arguments.score_mod, score_captures, "score", *ARGUMENTS)
    arguments.joint.graph_module.graph.eliminate_dead_code()
    stock.validate_joint_graph(arguments.joint.graph_module.graph)
    names = ("score", *ARGUMENTS, "grad_score_mod")
    joint = stock.process_joint_outputs(built(arguments.joint, score_captures, *names), len(names))
    assert not joint.mutated_grads  # the pass declines gradients of captures
    mask_mod = built(arguments.mask.mask_mod, mask_captures, *ARGUMENTS)
    return Mods(
        [score_mod, joint.grad_input, mask_mod],
        [*score_captures, *mask_captures],
        stock.get_bwd_subgraph_outputs(score_mod, mask_mod, joint),
        not stock.is_trivial_score_graph(arguments.score_mod.graph_module),
        masked and not stock.is_trivial_mask_graph(arguments.mask.mask_mod.graph_module),
        zeros_like(arguments.score_mod_captures[-1]) if learnt else None,
        *_dropped(arguments, score_captures[-2 if learnt else -1 :]),
    )


def _dropped(arguments: FlexArguments, last: Sequence[Any]) -> tuple[dict[str, object], TensorBox | None]:
    """Mods.of_dropout and Mods.random_state, which is the first of the `last` captures."""
    if DROPOUT not in arguments.kernel_options:
        return {}, None
    dropout = Dropout(*arguments.kernel_options[DROPOUT])
    of_bits = {"OF_FLASH": dropout.generator == FLASH, "ROUNDS": ROUNDS[dropout.generator], "THRESHOLD": dropout.threshold}
    return {"DROPOUT": True, "DROP_SCALE": dropout.scale(arguments.query.get_dtype()), **of_bits}, last[0]
