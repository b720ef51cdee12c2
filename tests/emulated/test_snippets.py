"""The Python blocks of README.md and of the pages under docs/ run as they stand, those of a page one after the other.

A block that cannot run here stands under a line `<!-- not run: why -->`, and in NOT_RUN.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import restore_flash_attention_impl

import dash_inductor
from dash_inductor.cli.gpt import GPT
from dash_inductor.contract import live

ROOT = Path(dash_inductor.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- (?P<mark>not run: .+) -->\n)?```(?P<language>.*)\n(?P<text>(?s:.*?))^```$", re.MULTILINE)
NOT_RUN: dict[str, int] = {}  # page -> blocks


def python_blocks(page: Path) -> tuple[list[str], int]:
    """Those to run, and how many are marked."""
    blocks = [match for match in BLOCK.finditer(page.read_text()) if match["language"] == "python"]
    run = [match["text"] for match in blocks if not match["mark"]]
    return run, len(blocks) - len(run)


def preamble() -> dict[str, Any]:
    """What every snippet may take for granted: a model, its inputs, and a step that trains it once."""

    def step() -> torch.nn.Module:
        torch.manual_seed(0)
        model = GPT(length=64, width=32, heads=2, layers=1)
        torch.compile(model, backend="dash")(tokens, targets).backward()
        return model

    torch.manual_seed(0)
    tokens, targets = torch.randint(256, (2, 2, 64))
    return {"model": GPT(length=64, width=32, heads=2, layers=1), "tokens": tokens, "targets": targets, "step": step}


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)[0]], ids=lambda page: page.name)
def test_blocks_run(page, as_installed, tmp_path, monkeypatch):
    """If one of them trains, every attention is rewritten."""
    monkeypatch.chdir(tmp_path)  # where they may write
    names = preamble()
    blocks, _ = python_blocks(page)
    try:
        with dash_inductor.enabled():
            for text in blocks:
                exec(compile(text, str(page), "exec"), names)
    finally:
        restore_flash_attention_impl()
        for held in tuple(live._held):  # to a manifest
            held.release()
    decisions = dash_inductor.decisions()
    assert all(decision.rewritten for decision in decisions)
    assert decisions or not any(".backward()" in text for text in blocks)


def test_the_blocks_that_do_not_run_are_known():
    assert python_blocks(ROOT / "README.md")[0], "the README's first block is the one that everybody copies"
    marked = {str(page.relative_to(ROOT)): python_blocks(page)[1] for page in PAGES}
    assert {page: count for page, count in marked.items() if count} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_is_called_python(page):
    """Else nothing runs it."""
    unnamed = [match["text"] for match in BLOCK.finditer(page.read_text()) if match["language"] == ""]
    assert [text for text in unnamed if is_python(text)] == []


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
