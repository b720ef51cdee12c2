"""What the ranks of a job tell each other, in the store that torch.distributed began with, which answers at once.

Whoever comes first to a subject writes what it has. Whoever has something else writes the difference down, where all ranks see it.
Nobody waits for anybody. This module needs nothing of the rest of the package, which may be switched off.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

KEY = "dash_inductor"
DIFFERENCES, DIFFERENCE, TOLD, FACTS = "differences", "difference", "told", "facts"
SWITCH = "DASH_INDUCTOR"  # the fact whether the package is on; where it is off it is the only one
SECONDS = 120.0  # after which a rank that has told nothing is named
MOST = 20  # differences that are reported

_ranks: list[Rank] = []  # of this process, one at most


class Rank:
    """This process in a process group."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.default, self.rank, self.world_size = store, rank, world_size
        self._store: Any = dist.PrefixStore(KEY, store)
        self._began = time.monotonic()
        self._told: set[str] = set()
        self._facts: list[Mapping[str, str]] = []
        self._has_named_silent = False

    def tell(self, subject: str, mine: Mapping[str, Any]) -> None:
        """What this rank has of a subject, once."""
        if subject in self._told:
            return
        self._told.add(subject)
        first, theirs = json.loads(self._store.compare_set(subject, "", json.dumps([self.rank, mine])))
        names = [SWITCH] if mine.get(SWITCH) != theirs.get(SWITCH) else dict.fromkeys([*theirs, *mine])
        for name in names:
            if theirs.get(name) != mine.get(name):
                text = f"{name} is {theirs.get(name)} on rank {first} and {mine.get(name)} on rank {self.rank}"
                self._store.set(f"{DIFFERENCE}/{self._store.add(DIFFERENCES, 1)}", text)

    def tell_facts(self, mine: Mapping[str, str], graph: str = "") -> None:
        """What decides bits in this process, once; and for each graph what it was compiled under: the first settings, the second or
        so on, which are compared where ranks have the graph under theirs of that number."""
        if not graph and self._facts:
            return
        if mine not in self._facts:
            self._facts.append(mine)
            self._store.set(f"{TOLD}/{self.rank}", "")
        self.tell(f"{FACTS}/{graph}/{self._facts.index(mine)}", mine)

    def differences(self) -> list[str]:
        """Those that ranks have written down, each once."""
        keys = [f"{DIFFERENCE}/{n + 1}" for n in range(min(MOST, self._store.add(DIFFERENCES, 0)))]
        return list(dict.fromkeys(self._store.get(key).decode() for key in keys if self._store.check([key])))

    def silent(self) -> list[int]:
        """The ranks that have told nothing although this one began long ago; later none."""
        if self._has_named_silent or time.monotonic() - self._began < SECONDS:
            return []
        self._has_named_silent = True
        return [rank for rank in range(self.world_size) if not self._store.check([f"{TOLD}/{rank}"])]


def this_rank() -> Rank | None:
    """The process in its default process group; None where there is none, or it is alone in it."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    store = dist.distributed_c10d._get_default_store()
    if not _ranks or _ranks[0].default is not store:
        _ranks[:] = [Rank(store, dist.get_rank(), dist.get_world_size())]
    return _ranks[0]


def tell_off() -> None:
    """That the package is off in this process; no error of a store is one of a process that does without the package."""
    try:
        if rank := this_rank():
            rank.tell_facts({SWITCH: "off"})
    except Exception:
        return


def after_begin(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Stands around `init_process_group` where the package is off."""
    stock(*args, **kwargs)
    tell_off()
