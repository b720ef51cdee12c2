"""The look that all commands share: tables, lists of figures, JSON, errors, and with rich also bars of progress and code in colour.

What goes into a file or a pipe is text without colours, of a fixed width. A terminal has its own width, and bold headings unless
NO_COLOR is set.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import IO, Any, NoReturn

PROGRAM = "python -m dash_inductor"
WIDTH = 120  # columns of what is no terminal
LEAST_WIDTH = 20  # for terminals that say they have none
LONG_WORD = 24  # a longer word may be broken
GAP = "  "  # between a name and its figure, and between the columns of a plain table


class CommandError(ValueError):
    """What the user can put right: the command line prints it in one line and ends with status 2."""


def fail(command: str, message: object) -> NoReturn:
    """Print an error in one line on stderr, and end with status 2. `command` is "" where it is not known."""
    print(f"{f'{PROGRAM} {command}'.rstrip()}: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print what `--json` asks for."""
    print(json.dumps(value, indent=indent))


def rendered(title: str, rows: Sequence[Mapping[str, object]], width: int = WIDTH) -> str:
    """A table as text without colours; `rows` share their keys.

    Cells wrap. Where the longest words of all columns do not fit into `width` side by side, each row is a list of its cells.
    """
    return _drawn(title, rows, width, colours=False)


def table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print the table, as wide as the terminal."""
    print(_drawn(title, rows, width_of_terminal(), colours=_colours(sys.stdout)))


def listed(figures: Mapping[str, object], width: int = WIDTH) -> str:
    """Name and figure, line by line; long figures wrap beside their names.

    >>> print(listed({"family": "shift", "makespan ns": 36000, "formula": None}))
    family       shift
    makespan ns  36,000
    formula      -
    """
    longest = max(map(len, figures), default=0)
    indent = " " * (longest + len(GAP))
    left = max(width - len(indent), LEAST_WIDTH)
    wrapped = (
        f"\n{indent}".join(textwrap.wrap(_figure(value), left, break_on_hyphens=False) or [""]) for value in figures.values()
    )
    return "\n".join(f"{name:<{longest}}{GAP}{text}".rstrip() for name, text in zip(figures, wrapped, strict=True))


def section(title: str, figures: Mapping[str, object]) -> None:
    """Print a heading, and below it name and figure, line by line."""
    if not figures:
        print(f"{_heading(title, _colours(sys.stdout))}: none")
        return
    print(_heading(title, _colours(sys.stdout)))
    print(textwrap.indent(listed(figures, width_of_terminal() - len(GAP)), GAP))


def code(title: str, text: str) -> None:
    """Print a heading, and below it Python, in colour on a terminal where rich is installed."""
    print(_heading(title, _colours(sys.stdout)), end="\n\n")
    if _colours(sys.stdout):
        with suppress(ImportError):
            from rich.console import Console
            from rich.syntax import Syntax

            return Console().print(Syntax(text, "python", theme="ansi_dark", word_wrap=True))
    print(text)


@contextmanager
def progress(purpose: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show on stderr how far a command is; what this yields is called with the name of each step as it begins.

    On a terminal it is a bar that disappears in the end; else a line "[2/5] name" for each step.
    """
    begun = 0
    with _bar() as bar:
        task = bar and bar.add_task(purpose, total=total)

        def step(name: str) -> None:
            nonlocal begun
            most = max(total, begun + 1)
            if bar:
                bar.update(task, description=f"{purpose}: {name}", completed=begun, total=most)
            else:
                print(f"[{begun + 1}/{most}] {name}", file=sys.stderr, flush=True)
            begun += 1

        yield step


def _bar() -> AbstractContextManager[Any]:
    """A bar of rich's on a terminal, or None."""
    if _colours(sys.stderr):
        with suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            return Progress(*columns, console=Console(stderr=True), transient=True)
    return nullcontext()


def width_of_terminal() -> int:
    """The columns of the terminal that stdout is, or WIDTH where it is none."""
    return max(LEAST_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def _colours(stream: IO[str]) -> bool:
    """Whether `stream` is a terminal that takes more than text."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _figure(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if type(value) is int else str(value)


def _heading(title: str, colours: bool) -> str:
    return f"\033[1m{title}\033[0m" if colours else title


def _drawn(title: str, rows: Sequence[Mapping[str, object]], width: int, *, colours: bool) -> str:
    if not rows:
        return f"{_heading(title, colours)}: none"
    names = list(rows[0])
    cells = [["" if row[name] is None else str(row[name]) for name in names] for row in rows]
    columns = [[name, *column] for name, column in zip(names, zip(*cells, strict=True), strict=True)]
    words = [min(LONG_WORD, max(len(word) for cell in column for word in cell.split() or [""])) for column in columns]
    room = width - len(GAP) * (len(names) - 1)
    if sum(words) > room:
        rest = ({name: cell for name, cell in zip(names, line, strict=True) if cell} for line in cells)
        body = "\n\n".join(textwrap.indent(listed(figures, width - len(GAP)), GAP) for figures in rest)
        return f"{_heading(title, colours)}\n\n{body}"
    widths = [max(map(len, column)) for column in columns]
    while sum(widths) > room:  # the widest column that can gives way
        widest = max((i for i, word in enumerate(words) if widths[i] > word), key=lambda i: widths[i])
        widths[widest] -= 1
    right = [all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in names]
    head, *lines = (_wrapped(line, widths, right) for line in [names, *cells])
    return "\n".join([_heading(title, colours), "", head, GAP.join("-" * width for width in widths), *lines])


def _wrapped(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    """A row of a table, of as many lines as its longest cell needs."""
    wrapped = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths, strict=True)]
    return "\n".join(
        GAP.join(
            part.rjust(width) if flush else part.ljust(width) for part, width, flush in zip(parts, widths, right, strict=True)
        ).rstrip()
        for parts in itertools.zip_longest(*wrapped, fillvalue="")
    )
