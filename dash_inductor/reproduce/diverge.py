"""Where two runs of a step part: the first operation that makes something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

GENERATOR = "generator:"  # what stands before the state of a torch.Generator among inputs
PYTHON = "the Python code before this line did not do the same"


@dataclass(frozen=True)
class Operation:
    """One operation of a step.

    Attributes:
        name: torch's name, or that of the kernel.
        inputs, outputs: fingerprints of tensors, and plain values.
        random: the random number generators before it.
        source: the user's line, "file.py:12"; of a backward that of the forward; None where none is known.
        lines: what else is known, the likeliest first: of a kernel all lines that it computes, else an installed package's.
        backward: whether it belongs to a backward.
    """

    name: str
    inputs: Any
    outputs: Any
    random: list[str]
    source: str | None
    lines: list[str]
    backward: bool


@dataclass(frozen=True)
class Parting:
    """The first operation that is not the same in both runs.

    Attributes:
        kind: "operation" (equal inputs, another output), "random" (equal inputs, other random numbers), or "python" (its inputs
            differ, or only one run comes to it).
        operation: as the run that leaves the other one did it, or the one that alone did it.
        cause: what is not the same, in words.
    """

    kind: str
    operation: Operation
    cause: str


def parting(first: Sequence[Operation], second: Sequence[Operation]) -> Parting | None:
    """Where `second` leaves `first`, or None if both do the same.

    An operation that one run alone does may be innocent, such as one that fills a cache the first time: it is named if the first
    operation of both that differs comes later, and was given what one run alone has made, or if none of both differs.
    """
    alone: Parting | None = None
    made: set[str] = set()  # by one run alone
    for a, b in _aligned(first, second):
        if a is None or b is None:
            for which, operation in (("the first run", a), ("this run", b)):
                if operation is not None:
                    alone = alone or _parting("python", operation, f"only {which} does it: {PYTHON}")
                    made.update(leaf for leaf in _leaves(operation.outputs) if "[" in leaf)  # tensors
            continue
        pairs = zip_longest(_leaves(a.inputs), _leaves(b.inputs), fillvalue="nothing")
        differing = [(x, y) for x, y in pairs if x != y]
        if differing and all(x.startswith(GENERATOR) for pair in differing for x in pair):
            return _parting("random", b, "its inputs are equal, but the torch.Generator that it draws from is in another state")
        if differing:
            if alone and any(made.intersection(pair) for pair in differing):
                return alone
            x, y = differing[0]
            which = "a tensor that no operation of torch has made or changed" if "[" in x else f"{x} and {y}"
            return _parting("python", b, f"its inputs differ already ({which}): {PYTHON}")
        if a.outputs != b.outputs and a.random != b.random:
            return _parting("random", b, "its inputs are equal, but the random number generator is in another state")
        if a.outputs != b.outputs:
            return _parting("operation", b, "its inputs are equal, and its output is not: it is not deterministic")
    return alone


def _parting(kind: str, operation: Operation, cause: str) -> Parting:
    backward = " in the backward of this line" if operation.backward and operation.source else ""
    return Parting(kind, operation, f"{cause}{backward}")


def _aligned(first: Sequence[Operation], second: Sequence[Operation]) -> Iterator[tuple[Operation | None, Operation | None]]:
    """Pairs of operations, in order; where the runs part, the first operations that each does alone."""
    a, b = ([(each.name, each.source) for each in run] for run in (first, second))
    for tag, i, end_i, j, end_j in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(first[i:end_i], second[j:end_j], strict=True)
        else:
            yield first[i] if i < end_i else None, None
            yield None, second[j] if j < end_j else None


def _leaves(value: object) -> list[str]:
    if isinstance(value, (list, dict)):
        return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(each)]
    return [str(value)]
