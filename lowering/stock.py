"""Attentions that the pass left alone: lowered as before, with the reason recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import lowerings, make_fallback, register_lowering, tag_to_layout_constraint
from torch._inductor.virtualized import V
from torch._library.utils import get_layout_constraint_tag
from torch._ops import OpOverload

from dash_inductor.decision import Decision
from dash_inductor.op import NOTE

from .header import record


@register_lowering(NOTE, type_promotion_kind=None)
def note(x: TensorBox, decision: str) -> TensorBox:
    """x; what is around it is lowered as if there were no note."""
    record(Decision.of_text(decision))
    return x


def record_declined(targets: Iterable[OpOverload], decision_of: Callable[[fx.Node], Decision | None]) -> None:
    """From now on, the lowering of a stock op in `targets` records `decision_of` its node, unless that is None."""

    def recording(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def lower(*args: Any, **kwargs: Any) -> Any:
            node = V.graph.current_node
            decision = None if node is None else decision_of(node)
            if decision is not None:
                record(decision)
            return stock(*args, **kwargs)

        return lower

    for target in targets:
        if target not in lowerings:  # Inductor would make this when it first meets one
            tag = get_layout_constraint_tag(target, with_default=True)
            make_fallback(target, layout_constraint=tag_to_layout_constraint(tag), warn=False)
        lowerings[target] = recording(lowerings[target])
