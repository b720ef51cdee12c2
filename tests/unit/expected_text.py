"""Texts that users see, held against files; EXPECTTEST_ACCEPT=1 writes them."""

from __future__ import annotations

from pathlib import Path

import expecttest

FOLDER = Path(__file__).parent / "expected"


def assert_expected(text: str, name: str) -> None:
    """The file `name` holds the text."""
    file = FOLDER / f"{name}.txt"
    if expecttest.ACCEPT:
        file.write_text(text)
    assert text == file.read_text()
