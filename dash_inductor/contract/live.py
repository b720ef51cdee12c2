"""A process held to a manifest while it runs."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import overload

from ..config import current
from . import graphs
from .comparison import Difference, ManifestError, differences, never_met, of_graph
from .document import Manifest, now
from .graphs import Graph

log = logging.getLogger("dash_inductor")
_held: list[Comparison] = []  # to which graphs are compared as they are taken into use


class Comparison:
    """What this process has that differs from a manifest, so far.

    Attributes:
        recorded: the manifest.
        differences: each once, in the order in which they were found.
    """

    def __init__(self, recorded: Manifest) -> None:
        self.recorded = recorded
        self.differences: list[Difference] = []
        self._is_looked_at = False
        self._lock = threading.Lock()

    @property
    def never_met(self) -> list[str]:
        """Graphs of the manifest that this process has not taken into use yet."""
        return never_met(self.recorded.graphs, graphs.taken())

    def __bool__(self) -> bool:
        """Whether nothing was found that may change bits."""
        return not any(each.may_change_bits for each in self.differences)

    def __str__(self) -> str:
        lines = [*map(str, self.differences), *(f"{name}: in the manifest, and never met" for name in self.never_met)]
        return "\n".join(lines) or "no difference"

    def look_at_process(self) -> None:
        """Compares what there is of the process. Raises ManifestError as `manifest`."""
        self._is_looked_at = True
        self._note(differences(self.recorded, now()))

    def look_at(self, graph: Graph) -> None:
        """Compares a graph that is taken into use, and the process before the first. Raises ManifestError as `manifest`."""
        if not self._is_looked_at:
            self.look_at_process()
        self._note([*of_graph(self.recorded.graphs, graph)])

    def _note(self, found: list[Difference]) -> None:
        with self._lock:
            new = [each for each in found if each not in self.differences]
            self.differences += new
        for each in new:
            log.warning("%s", each)
        if current().on_unsupported == "error" and (first := next((x for x in self.differences if x.may_change_bits), None)):
            raise ManifestError(f"dash_inductor: {first}")  # whoever catches it and goes on comes to it again

    def release(self) -> None:
        """Holds this process to the manifest no longer."""
        _held[:] = [each for each in _held if each is not self]
        atexit.unregister(self.log_never_met)

    def log_never_met(self) -> None:
        """Logs, when the process ends, what it did not come to."""
        for name in self.never_met:
            log.warning("%s: in the manifest, and never met", name)


@overload
def manifest(check: None = None) -> Manifest: ...
@overload
def manifest(check: str | os.PathLike[str] | Manifest) -> Comparison: ...
def manifest(check: str | os.PathLike[str] | Manifest | None = None) -> Manifest | Comparison:
    """What decides the bits of this process's training, as far as it has come; or a comparison with what another one had.

    Call it at the end of a training, or beside a checkpoint, and `write` what it returns. Equal runs write equal bytes.

    With `check`, a path or a Manifest, this process is held to that. Versions, GPU, settings and torch's modes are compared at
    once, so set them before; each graph when it is compiled or comes out of a cache. Each difference is logged as a warning, with
    its consequence for bits, and stands in `differences` of what is returned. What the manifest has and this process never met is
    in `never_met`, and is logged when the process ends. Under on_unsupported="error" the first difference that may change bits
    raises, there and at each graph after it.

    Raises:
        ManifestFileError: the file is of another version, cut off, or edited by hand; a ValueError.
        ManifestError: under on_unsupported="error", here or where a graph is compiled or loaded.
        OSError: the file cannot be read.
    """
    if check is None:
        return now()
    comparison = hold(check if isinstance(check, Manifest) else Manifest.read(check))
    try:
        comparison.look_at_process()
    except ManifestError:
        comparison.release()
        raise
    return comparison


def hold(recorded: Manifest) -> Comparison:
    """Holds this process to a manifest, from the first graph on that is taken into use."""
    comparison = Comparison(recorded)
    _held.append(comparison)
    atexit.register(comparison.log_never_met)
    return comparison


def take(graph: Graph) -> None:
    """Keeps a graph that is taken into use, and compares it. Raises ManifestError as `manifest`."""
    graphs.add(graph)
    for comparison in tuple(_held):
        comparison.look_at(graph)
