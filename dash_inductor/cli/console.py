"""The look that all commands share: tables, lists of figures, JSON, errors, and with rich also bars of progress and code in colour.

What goes into a file or a pipe is text without colours, of a fixed width. A terminal has its own width, and bold headings unless
NO_COLOR is set.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import IO, Any, NoReturn

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


def code(title: str, text: str) -> None:
    """Print a heading, and below it Python, in colour on a terminal where rich is installed."""
    print(_heading(title), end="\n\n")
    if _colours(sys.stdout):
        with suppress(ImportError):
            from rich.console import Console
            from rich.syntax import Syntax

            return Console().print(Syntax(text, "python", theme="ansi_dark", word_wrap=True))
    print(text)


def note(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


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


def _heading(title: str) -> str:
    return f"\033[1m{title}\033[0m" if _colours(sys.stdout) else title
