"""Tables, lists of figures, sentences and errors as plain text, and the digest of a text."""

from __future__ import annotations

import hashlib
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence

WIDTH = 120  # columns of what is no terminal
LEAST_WIDTH = 20  # for terminals that say they have none
LONG_WORD = 24  # a longer word may be broken
GAP = "  "  # between a name and its figure, and between the columns of a table
DIGITS = 16  # of a digest


def digest(text: str) -> str:
    """The first hexadecimal digits of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def paragraph(sentence: str) -> str:
    """A sentence without its full stop, as lines.

    >>> paragraph("it has no end")
    'it has no end.'
    """
    return textwrap.fill(f"{sentence}.", WIDTH, subsequent_indent=GAP)


def rendered(title: str, rows: Sequence[Mapping[str, object]], width: int = WIDTH) -> str:
    """A table; `rows` share their keys.

    Cells wrap. Where the longest words of all columns do not fit into `width` side by side, each row is a list of its cells.
    """
    if not rows:
        return f"{title}: none"
    names = list(rows[0])
    cells = [["" if row[name] is None else str(row[name]) for name in names] for row in rows]
    columns = [[name, *column] for name, column in zip(names, zip(*cells, strict=True), strict=True)]
    words = [min(LONG_WORD, max(len(word) for cell in column for word in cell.split() or [""])) for column in columns]
    room = width - len(GAP) * (len(names) - 1)
    if sum(words) > room:
        rest = ({name: cell for name, cell in zip(names, line, strict=True) if cell} for line in cells)
        body = "\n\n".join(textwrap.indent(listed(figures, width - len(GAP)), GAP) for figures in rest)
        return f"{title}\n\n{body}"
    widths = [max(map(len, column)) for column in columns]
    while sum(widths) > room:  # the widest column that can gives way
        widest = max((i for i, word in enumerate(words) if widths[i] > word), key=lambda i: widths[i])
        widths[widest] -= 1
    right = [all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in names]
    head, *lines = (_wrapped(line, widths, right) for line in [names, *cells])
    return "\n".join([title, "", head, GAP.join("-" * width for width in widths), *lines])


def _wrapped(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    """A row of a table, of as many lines as its longest cell needs."""
    wrapped = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths, strict=True)]
    return "\n".join(
        GAP.join(
            part.rjust(width) if flush else part.ljust(width) for part, width, flush in zip(parts, widths, right, strict=True)
        ).rstrip()
        for parts in itertools.zip_longest(*wrapped, fillvalue="")
    )


def listed(figures: Mapping[str, object], width: int = WIDTH) -> str:
    """Name and figure, line by line; long figures wrap beside their names.

    >>> print(listed({"family": "shift", "makespan ns": 36000, "step ns": [1771, 1328], "formula": None}))
    family       shift
    makespan ns  36,000
    step ns      1,771 and 1,328
    formula      -
    """
    longest = max(map(len, figures), default=0)
    indent = " " * (longest + len(GAP))
    left = max(width - len(indent), LEAST_WIDTH)
    wrapped = (
        f"\n{indent}".join(textwrap.wrap(_figure(value), left, break_on_hyphens=False) or [""]) for value in figures.values()
    )
    return "\n".join(f"{name:<{longest}}{GAP}{text}".rstrip() for name, text in zip(figures, wrapped, strict=True))


def _figure(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return " and ".join(map(_figure, value))
    return f"{value:,}" if type(value) is int else str(value)


def in_one_line(error: BaseException) -> str:
    """The error in one line; of one that Dynamo reports, what it reports."""
    # torch 2.11 writes arguments of exceptions as a list of its variables.
    raised = r"\b(?:got|raised exception) (\w+)\((?:\[ConstantVariable\(\w+: )?['\"](.+?)['\"](?:\)\])?\)\s*$"
    if match := re.search(raised, str(error), re.MULTILINE):
        return f"{match[1]}: {match[2]}"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
