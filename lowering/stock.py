"""What stays as torch lowers it: attentions that keep their stock kernels, and what their forwards keep for our backwards."""

from __future__ import annotations

from torch._inductor.ir import TensorBox
from torch._inductor.lowering import clone, register_lowering
from torch._inductor.virtualized import V

from dash_inductor.decision import Decision
from dash_inductor.op import KEEP, NOTE

from .header import record


@register_lowering(NOTE, type_promotion_kind=None)
def note(x: TensorBox, decision: str) -> TensorBox:
    """x, as if there were no note of it; records the decision."""
    record(Decision.of_text(decision))
    return x


@register_lowering(KEEP, type_promotion_kind=None)
def keep(x: TensorBox) -> TensorBox:
    """A copy of an input, which somebody may write to; anything else as it is, in memory."""
    x.realize()
    kept = clone(x) if x.get_name() in V.graph.graph_inputs else x
    kept.realize()  # before a write to x
    return kept
