"""Which kernel an attention that is rewritten takes, and why it is not the Gluon kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from dash_inductor.config import AUTO, GLUON
from dash_inductor.decision import Decision
from dash_inductor.explanation import decisions
from dash_inductor.hooks.hook import around_here
from dash_inductor.op import MARK
from dash_inductor.problem import BLOCK_MASK
from dash_inductor.resolve import Resolution, kernel_for
from dash_inductor.templates.tiles import NoTile, gluon_tile

from .report import BY_PRICE, FEW_CHAINS


@dataclass(frozen=True)
class Resolved(Decision):
    """The decision of an attention that is rewritten, with what it was resolved to."""

    resolution: Resolution | None = None


@contextmanager
def resolved() -> Iterator[None]:
    """Inside, decisions that `explain` makes of rewritten attentions are `Resolved`."""

    def keep(stock: Any, node: fx.Node, *rest: Any) -> Resolved:
        return Resolved(**vars(stock(node, *rest)), resolution=node.meta[MARK].resolution)

    with around_here(decisions, "_lowered_once", keep):
        yield


def kernel_of(decision: Decision) -> str:
    """Kernel and template by the names of the record: "gluon one_pass"."""
    return f"{decision.kernel} {decision.template}"


def why_no_gluon(decision: Decision) -> str:
    """The reason, in the order in which `resolve` asks; "" where it is the Gluon kernel."""
    if decision.kernel == GLUON:
        return ""
    assert isinstance(decision, Resolved) and decision.resolution
    problem, settings, target = decision.resolution.problem, decision.resolution.settings, decision.resolution.target
    if asked := [f"{name}={value!r}" for name in ("kernel", "template") if (value := getattr(settings, name)) != AUTO]:
        return f"{' and '.join(asked)} asks for another"
    try:
        tile = gluon_tile(target.arch, problem.dtype, *problem.head_dims)
    except NoTile as no_tile:
        return str(no_tile)
    declined = problem.why_no_gluon(settings) or (problem.why_no_blocks(tile) if problem.mask == BLOCK_MASK else None)
    if declined:
        return str(declined)
    return FEW_CHAINS if kernel_for(problem, settings, target) == GLUON else BY_PRICE
