"""Attentions that keep their stock kernels: lowered as if there were no note of them, with the reason recorded."""

from __future__ import annotations

from torch._inductor.ir import TensorBox
from torch._inductor.lowering import register_lowering

from dash_inductor.decision import Decision
from dash_inductor.op import NOTE

from .header import record


@register_lowering(NOTE, type_promotion_kind=None)
def note(x: TensorBox, decision: str) -> TensorBox:
    """x."""
    record(Decision.of_text(decision))
    return x
