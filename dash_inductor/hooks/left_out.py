"""Graphs in which Inductor leaves out our pass: each attention says so, in its decision."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config

from ..config import current
from ..rewrite.declined import is_on, leave
from ..rewrite.math_path import note_math_paths
from ..rewrite.stock_ops import TARGETS
from .installed import COMPILE_FX
from .wrapped import unwrap, wrap

PASSES = "_recursive_joint_graph_passes"
SETTINGS = ("pattern_matcher", "use_joint_graph_passes")  # the pass is left out where one is off


def watch() -> None:
    """Looks at joint graphs after Inductor's passes, from now on; as soon as Inductor has a function for them."""
    wrap(sys.modules.get(COMPILE_FX), PASSES, _passes)


def unwatch() -> None:
    """Gives Inductor its own function back."""
    unwrap(sys.modules.get(COMPILE_FX), PASSES)


def _passes(stock: Callable[..., fx.GraphModule], gm: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
    gm = stock(gm, *args, **kwargs)
    say_if_left_out(gm)
    return gm


def say_if_left_out(gm: fx.GraphModule) -> bool:
    """Declines the attentions of a graph if settings of Inductor leave out the pass; whether they do."""
    name = next((name for name in SETTINGS if not getattr(inductor_config, name)), None)
    if name is not None:
        _say_left_out(gm, f"torch._inductor.config.{name} is off")
    return name is not None


def _say_left_out(gm: fx.GraphModule, reason: str) -> None:
    if not is_on():
        return
    for node in gm.graph.nodes:
        if node.target in TARGETS:
            leave(node, reason, current())
    if note_math_paths(gm.graph, current()):
        gm.recompile()
