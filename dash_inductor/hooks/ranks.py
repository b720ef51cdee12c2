"""The ranks of a job tell each other what their bits depend on. Whoever comes later compares; nobody waits for anybody.

A collective inside a compilation could hang: ranks need not compile the same graphs, or at the same time. The store that
torch.distributed began with answers at once.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
import torch.distributed as dist

from ..config import current
from ..devices import target
from ..devices.cost_files import digest_of
from ..first_use.machine import machine
from ..rewrite.stock_ops import active_implementation, is_strict

KEY = "dash_inductor/rank"

log = logging.getLogger("dash_inductor")
_told: Any = None  # the store that knows this rank's


class RanksDifferError(RuntimeError):
    """Ranks compile under what makes their bits differ, at a level of guarantee that promises more."""


def compare_once(device: torch.device) -> None:
    """Tells the default process group, if there is one, and compares with those who told before.

    Raises:
        RanksDifferError: there is a difference, under guarantee "device" or "batch". Under "run" it is a warning in the log.
    """
    global _told
    if not (dist.is_available() and dist.is_initialized() and target.is_there(device)):
        return
    try:
        store = dist.distributed_c10d._get_default_store()
        if store is _told:
            return
        differences = compare(store, dist.get_rank(), dist.get_world_size(), facts(device))
    except Exception as error:  # of a store that is gone, or of no torch that is known: nothing else depends on it
        log.warning("ranks cannot be compared: %s", error)
        return
    if differences:
        message = f"dash_inductor: ranks differ, and so may their bits: {'; '.join(differences)}"
        if current().guarantee != "run":
            raise RanksDifferError(message)
        log.warning(message)
    _told = store


def facts(device: torch.device) -> dict[str, str]:
    """What decides bits, by name."""
    torch_s = {"mode": "strict" if is_strict() else "warn_only", "flash attention": active_implementation() or "torch's"}
    settings = current()
    ours = {name: str(value) for name, value in settings.deciding()} | {
        "cost file": digest_of(settings.costs)[:16] or "the package's"
    }
    return machine(device) | ours | torch_s


def compare(store: dist.Store, rank: int, world_size: int, mine: dict[str, str]) -> list[str]:
    """Tells the store, and returns how those who told before differ."""
    store.set(f"{KEY}{rank}", json.dumps(mine))
    differences = []
    for other in range(world_size):
        key = f"{KEY}{other}"
        if other == rank or not store.check([key]):
            continue
        theirs = json.loads(store.get(key))
        names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
        differences += [f"{name} is {mine.get(name)} on rank {rank} and {theirs.get(name)} on rank {other}" for name in names]
    return differences
