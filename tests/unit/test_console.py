"""The look of all commands: nothing is cropped, or coloured for a file."""

from __future__ import annotations

import json
import sys

import pytest

from dash_inductor.cli import console
from dash_inductor.text import listed, rendered

ROWS = [
    {"module": "blocks.0.attention", "op": "aten._scaled_dot_product_flash_attention_for_cpu", "shape": "[2, 16]", "us": 12.5},
    {
        "module": "[bold]last[/bold] :smile:",
        "op": "flex_attention",
        "shape": "keeps its stock kernel, as it has dropout",
        "us": None,
    },
]
CELLS = {str(value) for row in ROWS for value in row.values() if value is not None}


def letters(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("width", [*range(30, 130), 400])
def test_no_cell_is_cropped_and_no_line_too_long(width):
    text = rendered("Attentions", ROWS, width)
    lines = text.splitlines()
    assert lines[0] == "Attentions" and "\033" not in text
    assert max(map(len, lines)) <= width
    for character in "".join(CELLS):
        written = sum(cell.count(character) for cell in map(letters, CELLS))
        assert letters(text).count(character) >= written, character
    if width == 400:
        assert all(cell in text for cell in CELLS)


def test_the_text_of_a_table():
    assert rendered("Two", [{"name": "a", "ns": 1}, {"name": "bc", "ns": 1000}]) == (
        "Two\n\nname    ns\n----  ----\na        1\nbc    1000"
    )
    assert rendered("None of them", []) == "None of them: none"


def test_a_narrow_table_is_a_list_of_cells():
    rows = [{"module": "blocks.0", "reason": None, "shape": "x"}, {"module": "blocks.1", "reason": "it has dropout", "shape": "x"}]
    assert rendered("Attentions", rows, 18) == (
        "Attentions\n\n  module  blocks.0\n  shape   x\n\n  module  blocks.1\n  reason  it has dropout\n  shape   x"
    )


@pytest.mark.parametrize("columns", [40, 90])
def test_a_terminal_has_its_width_and_bold_headings(columns, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console.table("Attentions", ROWS)
    console.section("Versions", {"torch": "2.13 " * 30})
    bold = capsys.readouterr().out
    assert bold.startswith("\033[1mAttentions\033[0m\n") and "\033[1mVersions\033[0m\n" in bold
    monkeypatch.setenv("NO_COLOR", "1")
    console.table("Attentions", ROWS)
    assert (out := capsys.readouterr().out) == rendered("Attentions", ROWS, columns) + "\n"
    assert max(map(len, out.splitlines())) <= columns


def test_figures_wrap_beside_their_names():
    assert listed({"a": "one two three", "long name": None, "n": 12345}, 31) == (
        "a          one two three\nlong name  -\nn          12,345"
    )
    assert listed({"why": "it is too long for that"}, 25) == "why  it is too long for\n     that"


def test_an_error_is_one_line(capsys):
    for command, message in (("program choose", ValueError("two\n  lines")), ("program", "none")):
        with pytest.raises(SystemExit) as stopped:
            console.fail(command, message)
        assert stopped.value.code == 2
    assert capsys.readouterr() == ("", "program choose: error: two lines\nprogram: error: none\n")


def test_json_is_json(capsys):
    console.print_json({"a": [1, None]})
    console.print_json([[1, 2]], indent=None)
    out = capsys.readouterr().out
    assert json.loads(out.partition("[[")[0]) == {"a": [1, None]} and out.endswith("[[1, 2]]\n")


def test_progress_is_a_line_for_each_step(capsys):
    step = console.progress(2)
    for name in "abc":
        step(name)
    assert capsys.readouterr() == ("", "[1/2] a\n[2/2] b\n[3/3] c\n")
