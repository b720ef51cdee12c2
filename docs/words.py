"""Counts the words of README and docs that are written by hand: `python -m docs.words`, a part of `make docs-check`.

A word is what stands between two spaces; a link, a table's bar or a line of code counts as such. Left out are what the code writes,
between the markers of docs/generate/blocks.py, the page that `python -m benchmarks.harm` writes as a whole, and CHANGELOG.md.
"""

from __future__ import annotations

import sys

from .generate.blocks import BLOCK, pages

LIMIT = 28_000
GENERATED = ("no_harm.md",)


def by_hand(text: str) -> int:
    """The words of a page without its generated blocks.

    >>> by_hand("one two <!-- commands: -->\\n| a | table |\\n<!-- end --> three")
    3
    """
    return len(BLOCK.sub("", text).split())


def counts() -> dict[str, int]:
    """The words of each page."""
    return {page.name: by_hand(page.read_text()) for page in pages() if page.name not in GENERATED}


def main() -> int:
    """Print a line per page and the sum; 1 if that is above the limit."""
    found = counts()
    total = sum(found.values())
    for name, count in [*found.items(), ("all", total), ("at most", LIMIT)]:
        print(f"{name:24}{count:7,}")
    return int(total > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
