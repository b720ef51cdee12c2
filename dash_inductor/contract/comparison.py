"""Where a process differs from a manifest, and what that does to its bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .document import Manifest
from .graphs import Graph

MOST_PLACES = 3  # of attentions that a line names
NOTHING = "nothing"  # what is said of a fact that one side does not have
# Of an attention: where it is called and what else says no more than where; which trials there were, since kernels of a kind have
# the same bits whatever the trial said; and what its bits hang on, which stands for other fields.
NO_BITS = ("place", "module", "trials", "hangs on", "reason")


class ManifestError(RuntimeError):
    """A process differs from the manifest to which it is held, so that its bits may be others."""


@dataclass(frozen=True)
class Difference:
    """One field that is not what the manifest has.

    Attributes:
        subject: what has the field: "the process", or a graph or attention by name.
        field: its name.
        recorded: what the manifest has.
        found: what this process has.
        consequence: what follows for bits, in words.
        may_change_bits: whether bits may be others.
    """

    subject: str
    field: str
    recorded: str
    found: str
    consequence: str
    may_change_bits: bool = True

    def __str__(self) -> str:
        return f"{self.subject}: {self.field} is {self.found}, and {self.recorded} in the manifest: {self.consequence}"


def differences(recorded: Manifest, found: Manifest) -> list[Difference]:
    """All that differs between two manifests, but for graphs that only the first one has: `never_met` has those."""
    process = *of_process(recorded.attention, found.attention, recorded.graphs), *of_the_rest(recorded.rest, found.rest)
    graphs = (each for graph in found.graphs for each in of_graph(recorded.graphs, graph))
    return list(dict.fromkeys([*process, *graphs]))


def of_process(recorded: Mapping[str, str], found: Mapping[str, str], graphs: Sequence[Graph]) -> Iterator[Difference]:
    """Facts of attention that differ. graphs: those of the manifest, whose attentions say which facts their bits hang on."""
    for field, was, now in _changed(recorded, found):
        hanging = [attention for graph in graphs for attention in graph["attentions"] if field in attention["hangs on"]]
        if hanging:
            levels = ", ".join(sorted({attention["guarantee"] for attention in hanging if "guarantee" in attention}))
            at = f" at level {levels}" if levels else ""
            yield Difference("the process", field, was, now, f"bits of {_places(hanging)} may differ: other {field}{at}")
        else:
            yield Difference("the process", field, was, now, "no attention's bits hang on it", may_change_bits=False)


def of_the_rest(recorded: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Difference]:
    """Facts of everything else that differ."""
    for field, was, now in _changed(recorded, found):
        yield Difference("the process", field, was, now, "bits of what is not attention may differ")


def of_graph(recorded: Sequence[Graph], found: Graph) -> Iterator[Difference]:
    """How a graph differs from that of a manifest which is nearest; nothing if the manifest has it."""
    if any(_same(each, found) for each in recorded):
        return
    name, near = found["graph"], nearest(recorded, found)
    if near is None:
        yield Difference(name, "the graph", NOTHING, "there", "its bits were never recorded")
        return
    was, now = (len(graph["attentions"]) for graph in (near, found))
    if was != now:
        yield Difference(name, "number of attentions", str(was), str(now), "bits of the graph may differ")
        return
    others = False
    for n, (before, after) in enumerate(zip(near["attentions"], found["attentions"], strict=True)):
        place = _place(after)
        for field, then, here in _changed(before, after):
            if field not in NO_BITS:
                others = True
                yield Difference(f"{place}, attention {n} of {name}", field, then, here, f"bits of {place} may differ")
    code = "other code was generated" if others else "bits of what is not attention may differ: other code"
    consequences = {"guards": "sizes may come to other graphs, and so to other kernels", "code": code}
    for field, then, here in _changed(*({each: graph[each] for each in consequences} for graph in (near, found))):
        yield Difference(name, field, then, here, consequences[field])


def _changed(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Fields whose values differ, and these values as texts; of lists what the other one does not have."""
    for field in dict.fromkeys([*recorded, *found]):
        was, now = recorded.get(field, NOTHING), found.get(field, NOTHING)
        if was == now:
            continue
        if isinstance(was, list) and isinstance(now, list):
            was, now = (", ".join(x for x in one if x not in other) or NOTHING for one, other in ((was, now), (now, was)))
        yield field, str(was), str(now)


def nearest(recorded: Sequence[Graph], found: Graph) -> Graph | None:
    """The graph of a manifest which was this one: the same before the pass, or else of the same name."""
    direction = found["graph"].rpartition(" ")[2]
    same_joint = [each for each in recorded if found["joint"] and each["joint"] == found["joint"]]
    same = [each for each in same_joint if each["graph"].rpartition(" ")[2] == direction]
    return next(iter(same or [each for each in recorded if each["graph"] == found["graph"]]), None)


def _same(one: Graph, other: Graph) -> bool:
    """Whether both have the same bits; their names say nothing of that."""
    return _bits(one) == _bits(other)


def _bits(graph: Graph) -> dict[str, Any]:
    attentions = [{name: value for name, value in each.items() if name not in NO_BITS} for each in graph["attentions"]]
    return {"code": graph["code"], "guards": graph["guards"], "attentions": attentions}


def never_met(recorded: Sequence[Graph], found: Sequence[Graph]) -> list[str]:
    """Graphs of a manifest that the process did not take into use, neither as they are nor with differences."""
    met = [each for graph in found for each in recorded if _same(each, graph) or each is nearest(recorded, graph)]
    return [graph["graph"] for graph in recorded if not any(graph is each for each in met)]


def _place(attention: Mapping[str, Any]) -> str:
    return str(attention.get("module") or attention.get("place") or attention["op"])


def _places(attentions: Iterable[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(map(_place, attentions)))
    more = f" and {len(names) - MOST_PLACES} more" if len(names) > MOST_PLACES else ""
    return f"{', '.join(names[:MOST_PLACES])}{more}"
