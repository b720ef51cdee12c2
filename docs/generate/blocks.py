"""Blocks of the pages that the code writes. Each stands below a comment that says what of, and above `<!-- end -->`.

<!-- formula: shift -->                               a formula of the cost model
<!-- output: python -m dash_inductor --help -->       what a command prints, in 100 columns
<!-- head: options | python -m dash_inductor --help -->   the same, up to the line with these words
<!-- commands: -->                                    a table of the commands
<!-- make: -->                                        the commands of the Makefile, as its first lines say
<!-- beside others: -->                               backwards of the first page, measured on an H200
<!-- ran: -->                                         what was timed, ran, was executed or is unverified, by kernel and GPU
<!-- levels: -->                                      what is known of each kernel, dtype and level, by GPU
<!-- stock: -->                                       whether stock's and others' backwards are deterministic, and who says so
<!-- executed: -->                                    what `make execute` executed last, as each Triton compiles it
<!-- measured: h200/gluon -->                         backwards that `qualify` timed on a GPU, of benchmarks/results
<!-- families: -->                                    what `python -m benchmarks.models` found last
<!-- loops: gluon -->                                what `make figures` kept last, a table of benchmarks/loops.py
<!-- reach: models -->                                what `make reach` found last, of models or of recipes
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks import loops
from benchmarks.markdown import markdown
from benchmarks.reach import page
from dash_inductor.cli.main import PROGRAM
from dash_inductor.schedule.families import REGISTER

from . import conformance, results
from .formulas import latex

ROOT = Path(__file__).parents[2]


def pages() -> list[Path]:
    """The pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written(text: str) -> str:
    """A page with its blocks written anew."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{WRITERS[match[2]](match[3].strip())}\n\n{match[5]}", text)


def output(command: str) -> str:
    """What the command prints, fenced."""
    return _fenced(command, _printed(command))


def head(words_and_command: str) -> str:
    """What the command prints up to the line with some words, fenced; StopIteration where no line has them."""
    words, command = words_and_command.split(" | ")
    lines = _printed(command)
    end = next(index for index, line in enumerate(lines) if words in line)
    return _fenced(command, (*lines[:end], "..."))


def _fenced(command: str, lines: tuple[str, ...]) -> str:
    return "\n".join(["```text", f"$ {command}", *lines, "```"])


@functools.cache
def _printed(command: str) -> tuple[str, ...]:
    """Lines; RuntimeError if the command cannot run. An exit status of 1 is an answer."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DASH_INDUCTOR", "TRITON_INTERPRET"))}
    environment |= {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8")
    if done.returncode > 1:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    return tuple(line.rstrip() for line in done.stdout.rstrip().splitlines())


def commands(_: str) -> str:
    """A row per command."""
    return markdown([{"command": f"`{name}`", "what it shows": what} for name, (_, what) in PROGRAM.commands.items()])


def makefile(_: str) -> str:
    """A line per sentence of the Makefile's first comment that begins with a command."""
    comment = [line[2:] for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("# make ")]
    sentences = (sentence for line in comment for sentence in re.split(r"(?<=[.]) +(?=make )", line))
    return "\n".join(re.sub(r"^(make [^:]+):", r"- `\1`:", sentence) for sentence in sentences)


def schedules(_: str) -> str:
    """A row per family of schedules."""
    depend = {True: "lengths and tiles", False: "lengths, tiles and the number of SMs"}
    return markdown(
        [
            {"family": f"`{name}`", "masks": " and ".join(known.masks), "bits depend on": depend[known.is_monotone]}
            for name, known in REGISTER.items()
        ]
    )


WRITERS = {
    "schedules": schedules,
    "formula": latex,
    "output": output,
    "head": head,
    "commands": commands,
    "make": makefile,
    "beside others": results.beside_others,
    "ran": results.ran,
    "executed": results.executed,
    "levels": conformance.levels,
    "stock": conformance.stock,
    "measured": results.measured,
    "families": results.families,
    "loops": loops.table,
    "reach": page.section,
}
BLOCK = re.compile(rf"(<!-- ({'|'.join(WRITERS)}):(.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
