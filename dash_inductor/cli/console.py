"""The look that all commands share: tables, lists of figures, JSON, errors, lines of progress.

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
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ..text import GAP, LEAST_WIDTH, WIDTH, listed, rendered

PACKAGE = "dash_inductor"  # which Python starts as a program


class CommandError(ValueError):
    """What the user can put right: the command line prints it in one line and ends with status 2."""


def fail(command: str, message: object) -> NoReturn:
    """Print an error of the command, named as a shell starts it, in one line on stderr, and end with status 2."""
    print(f"{command}: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print what `--json` asks for."""
    print(json.dumps(value, indent=indent))


def table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print the table, as wide as the terminal."""
    print(rendered(_heading(title), rows, width_of_terminal()))


def section(title: str, figures: Mapping[str, object]) -> None:
    """Print a heading, and below it name and figure, line by line."""
    if not figures:
        print(f"{_heading(title)}: none")
        return
    print(_heading(title))
    print(textwrap.indent(listed(figures, width_of_terminal() - len(GAP)), GAP))


def note(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def progress(total: int) -> Callable[[str], None]:
    """A function that is called with the name of each of `total` steps as it begins: it prints a line "[2/5] name" on stderr."""
    numbers = itertools.count(1)

    def step(name: str) -> None:
        number = next(numbers)
        note(f"[{number}/{max(total, number)}] {name}")

    return step


def width_of_terminal() -> int:
    """The columns of the terminal that stdout is, or WIDTH where it is none."""
    return max(LEAST_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def _heading(title: str) -> str:
    is_plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return title if is_plain else f"\033[1m{title}\033[0m"
