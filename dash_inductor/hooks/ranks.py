"""Ranks compare what decides their bits: facts of their processes, verdicts on kernels, and what was decided in graphs.

A collective inside a compilation could hang: ranks need not compile the same graphs, or at the same time. So each tells a store,
when it compiles a graph or takes one into use. Decisions are compared between ranks that met the same graph before the pass under
the same settings, which may change from one graph to the next. A graph that another rank does not have is no difference.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict

import torch

from ..config import current
from ..contract.facts import of_attention
from ..decision import NO_BITS, Decision
from ..devices import target
from ..first_use import verdict
from ..text import digest
from .told import SECONDS, SWITCH, Rank, this_rank

log = logging.getLogger("dash_inductor")
_warned: set[str] = set()


class RanksDifferError(RuntimeError):
    """Ranks compile under what makes their bits differ, at a level of guarantee that promises more."""


def compare(found: Sequence[Decision] = (), *, is_backward: bool = False) -> None:
    """Tells the default process group, if there is one, what decides bits here, and the decisions of a graph; looks at what others
    found.

    Raises:
        RanksDifferError: there is a difference, under guarantee "device" or "batch". Under "run" it is a warning, once.
    """
    device = target.own_device()
    if verdict.is_trial.get() or not target.is_there(device):
        return
    try:
        rank = this_rank()
        if rank is None:
            return
        _tell(rank, device, found, is_backward)
        differences, silent = rank.differences(), rank.silent()
    except Exception as error:  # of a store that is gone, or of no torch that is known: nothing else depends on it
        _warn_once(f"ranks cannot be compared: {error}")
        return
    if silent:
        told = f"{'ranks' if len(silent) > 1 else 'rank'} {', '.join(map(str, silent))}"
        log.warning("%s told nothing in %.0f s: without dash_inductor, or with nothing compiled, bits may be others", told, SECONDS)
    if differences:
        message = f"dash_inductor: ranks differ, and so may their bits: {'; '.join(differences)}"
        if current().guarantee != "run":
            raise RanksDifferError(message)
        _warn_once(message)


def _tell(rank: Rank, device: torch.device, found: Sequence[Decision], is_backward: bool) -> None:
    own = facts(device)
    rank.tell_facts(own)
    for kind, is_used in verdict.is_used.items():
        rank.tell(f"verdict/{kind.text()}", {f"that {kind} is used": str(is_used)})
    for joint in dict.fromkeys(decision.joint for decision in found if decision.joint):
        rank.tell_facts(own, joint)
        of_graph = [decision for decision in found if decision.joint == joint]
        subject = f"graph/{joint}/{'backward' if is_backward else 'forward'}/{digest(str(sorted(own.items())))}"
        rank.tell(subject, _bits(of_graph))


def _bits(decisions: Sequence[Decision]) -> dict[str, str]:
    """What decides bits in the decisions of one graph, by name."""
    return {
        f"{name} of attention {n} ({decision.op} of {decision.shape})": str(value)
        for n, decision in enumerate(decisions)
        for name, value in asdict(decision).items()
        if name not in NO_BITS
    }


def facts(device: torch.device) -> dict[str, str]:
    """What decides bits in this process, by name."""
    return {SWITCH: "on"} | of_attention(device)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)
