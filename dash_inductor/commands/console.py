"""Tables on the terminal: by rich where it is installed, else plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Prints `rows`, which share their keys."""
    names = list(rows[0])
    cells = [["" if row[name] is None else str(row[name]) for name in names] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
        for line in [names, *cells]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(width=200)
    drawn = Table(*(Column(name, overflow="fold") for name in names), title=title)
    for line in cells:
        drawn.add_row(*line)
    console.print(drawn)
