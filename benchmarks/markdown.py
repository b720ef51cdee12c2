"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def markdown(lines: Sequence[Mapping[str, object]]) -> str:
    """A table of rows, at least one, that share their keys.

    >>> print(markdown([{"a": 1, "b": "x|y"}]))
    | a | b |
    | --- | --- |
    | 1 | x\\|y |
    """
    cells = [list(lines[0]), ["---"] * len(lines[0]), *(line.values() for line in lines)]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells)
