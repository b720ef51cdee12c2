"""Where two runs of a step part: the first operation that makes something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
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
        op: its name.
        source: the user's line, or None.
        lines: what else is known of it, as in `Operation`.
        cause: what is not the same, in words.
    """

    kind: str
    op: str
    source: str | None
    lines: tuple[str, ...]
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
            alone = alone or _alone(a, b)
            made.update(leaf for each in (a, b) if each for leaf in _leaves(each.outputs) if "[" in leaf)  # tensors
        elif a.inputs != b.inputs and _only_generators_differ(a, b):
            return _parting("random", b, "its inputs are equal, but the torch.Generator that it draws from is in another state")
        elif a.inputs != b.inputs:
            if alone and any(made.intersection(pair) for pair in _differing(a, b)):
                return alone
            return _parting("python", b, f"its inputs differ already{_which(a, b)}: {PYTHON}")
        elif a.outputs != b.outputs and a.random != b.random:
            return _parting("random", b, "its inputs are equal, but the random number generator is in another state")
        elif a.outputs != b.outputs:
            return _parting("operation", b, "its inputs are equal, and its output is not: it is not deterministic")
    return alone


def _parting(kind: str, operation: Operation, cause: str) -> Parting:
    backward = " in the backward of this line" if operation.backward and operation.source else ""
    return Parting(kind, operation.name, operation.source, tuple(operation.lines), f"{cause}{backward}")


def _aligned(first: Sequence[Operation], second: Sequence[Operation]) -> Iterator[tuple[Operation | None, Operation | None]]:
    """Pairs of operations, in order; None beside what one run alone does."""
    a, b = ([(each.name, each.source) for each in run] for run in (first, second))
    for tag, i, end_i, j, end_j in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(first[i:end_i], second[j:end_j], strict=True)
        else:
            yield first[i] if i < end_i else None, None
            yield None, second[j] if j < end_j else None


def _alone(a: Operation | None, b: Operation | None) -> Parting | None:
    if (op := a or b) is None:
        return None
    which = "the first run" if b is None else "this run"
    return _parting("python", op, f"only {which} does it: {PYTHON}")


def _only_generators_differ(a: Operation, b: Operation) -> bool:
    differing = _differing(a, b)
    return bool(differing) and all(x.startswith(GENERATOR) for pair in differing for x in pair)


def _differing(a: Operation, b: Operation) -> list[tuple[str, str]]:
    """The inputs that differ."""
    return [(x, y) for x, y in zip(_leaves(a.inputs), _leaves(b.inputs), strict=False) if x != y]


def _which(a: Operation, b: Operation) -> str:
    """The first input that differs, in brackets."""
    x, y = _differing(a, b)[0]
    return " (a tensor that no operation of torch has made or changed)" if "[" in x else f" ({x} and {y})"


def _leaves(value: object) -> list[str]:
    if isinstance(value, (list, dict)):
        return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(each)]
    return [str(value)]
