"""The pass over joint graphs, and a look at the graphs that Inductor leaves it out of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.torch_version import TorchVersion

from .. import emulation
from ..config import Config, current
from ..decision import Declined
from ..first_use.verdict import FAILED
from ..op import MARK
from ..rewrite.by_hand import mark_other_dims
from ..rewrite.declined import log, report_bug
from ..rewrite.graph import rewrite, rewritten
from . import cache_key, failures, ranks
from .hook import PATCHES
from .table import HOOKS, LOWERING, RUNS_PASS, SETTINGS, TESTED


class DashPass(CustomGraphPass):
    """The pass: does nothing, and costs nothing, unless deterministic mode is on. Raises what is wrong with the settings."""

    def __call__(self, graph: fx.Graph) -> None:
        """Runs the pass. Inductor calls it as a custom pass, whose uuid is in the keys of its caches."""
        self.apply(graph)

    def uuid(self) -> Any:
        """What decides what the pass does."""
        return cache_key.KEY.uuid()

    def apply(self, gm: fx.Graph | fx.GraphModule) -> int:
        """Rewrites the graph; returns how many attentions it has met."""
        return _apply(gm if isinstance(gm, fx.Graph) else gm.graph, why_refused()) if is_on() else 0


PASS = DashPass()


def around_joint_passes(stock: Callable[..., fx.GraphModule], gm: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """Stands around Inductor's passes over a joint graph."""
    if torch.are_deterministic_algorithms_enabled():
        mark_other_dims(gm.graph)
    gm = stock(gm, *args, **kwargs)
    decline_if_left_out(gm)
    return gm


def decline_if_left_out(gm: fx.GraphModule) -> bool:
    """Declines the attentions of a graph if the pass is left out; whether it is."""
    name = next((name for name in SETTINGS if not getattr(inductor_config, name)), None)
    if name is None and not RUNS_PASS.is_missing:
        return False
    off = name and Declined(f"torch._inductor.config.{name} is off", f"switch it on: torch._inductor.config.{name} = True")
    if is_on() and _apply(gm.graph, off or why_refused()):
        gm.recompile()
    return True


def why_refused() -> Declined | None:
    """Why no attention is rewritten now, whatever it is; None if there is no such reason."""
    lost = [hook.place for hook in HOOKS if hook.needed and hook.is_missing]
    if lost:
        return Declined(
            f"torch {torch.__version__} has lost {', '.join(lost)}",
            f"use a torch from {TESTED[0]} to {TESTED[1]}, or a newer dash_inductor",
        )
    return failures.failure()


def ready() -> Config:
    """The settings in force, for a compilation that begins: the emulation that they ask for runs, or its error is raised."""
    settings = current()
    if settings.enabled and settings.emulate and not emulation.active():
        emulation.start(settings.seed, sms=settings.sms)
    return settings


def is_on() -> bool:
    """Whether attentions are decided on; raises what is wrong with the settings."""
    return ready().enabled and torch.are_deterministic_algorithms_enabled()


@functools.cache
def warn_of_torch() -> None:
    """Once, of a torch that is older or newer than those that are tested, and of places that it has lost."""
    first, last = TESTED
    release = ".".join(torch.__version__.split(".")[:2])
    if not TorchVersion(first) <= release <= TorchVersion(last):
        log.warning("torch %s is not one of those that dash_inductor is tested with, %s to %s", torch.__version__, first, last)
    for hook in HOOKS:
        if hook.is_missing:
            log.warning("torch has lost %s, by which dash_inductor %s", hook.place, hook.purpose)


def _apply(graph: fx.Graph, refused: Declined | None) -> int:
    from .. import lowering  # noqa: F401 (registers lowerings of our ops)

    warn_of_torch()
    PATCHES.add(*LOWERING)
    met, bugs = rewrite(graph, current(), refused)
    ours = rewritten(graph)
    if ours:
        failures.note_rewritten()
    ranks.compare()
    if bugs or any(node.meta[MARK].resolution.problem.gluon_fails == FAILED for node in ours):
        failures.keep_out_of_caches()
    for bug in bugs:
        report_bug(bug)
    return met
