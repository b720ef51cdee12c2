"""Writes the generated blocks of all pages, and draws the pictures."""

from __future__ import annotations

from .blocks import pages, written
from .pictures import PICTURES, path_of


def main() -> None:
    """Write what the code says now; git shows what changed."""
    for page in pages():
        page.write_text(written(page.read_text()))
    for name, draw in PICTURES.items():
        path_of(name).write_text(draw())


if __name__ == "__main__":
    main()
