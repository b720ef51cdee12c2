"""Which line of the user's code runs now."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch

_PACKAGE = Path(__file__).parents[1]
_TOP = _PACKAGE.parent
# In a checkout these stand beside the package.
_OURS = tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, _TOP / "lowering", _TOP / "templates"))
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_INSTALLED = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib", "stdlib", "platstdlib")})
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+)', re.MULTILINE)
_HANDLE = re.compile(r"\[Provenance debug handles\] (\S+)")
_ENGINE = "_engine_run_backward"  # of torch.autograd.graph: what runs inside it is a backward

Line = tuple[str, int]


class Place(NamedTuple):
    """Two lines, as "file.py:12", or None: the user's, and that of an installed package which it has come to."""

    user: str | None
    package: str | None


def innermost(lines: Iterable[Line]) -> Place:
    """The first of the user's among these lines, innermost first, and the first of a package's before it; torch's do not count."""
    package = None
    for file, number in lines:
        if file.startswith((_TORCH, *_OURS)) or file.startswith("<"):
            continue
        if not file.startswith(_INSTALLED):
            return Place(shown(file, number), package)
        package = package or shown(file, number)
    return Place(None, package)


def shown(file: str, line: int) -> str:
    """A line as reports have it: from the working folder, or from the folder of installed packages."""
    for folder in (f"{os.getcwd()}{os.sep}", *sorted(_INSTALLED, key=len, reverse=True)):
        if file.startswith(folder):
            return f"{file.removeprefix(folder)}:{line}"
    return f"{file}:{line}"


def frames(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """This frame and its callers, innermost first, with the lines they are at."""
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def in_backward(stack: Iterable[tuple[CodeType, int]]) -> Iterator[Line]:
    """The lines of a stack, up to where autograd called it."""
    for code, line in stack:
        if code.co_name == _ENGINE and code.co_filename.startswith(_TORCH):
            return
        yield code.co_filename, line


def of_text(stack: str) -> Place:
    """Where a stack is that torch wrote down."""
    return innermost((frame["file"], int(frame["line"])) for frame in reversed(list(_FRAME.finditer(stack))))


def position(stack: str) -> list[int]:
    """By this, stacks under one call stand in the order in which they ran: where they part, they are in one function."""
    return [int(frame["line"]) for frame in _FRAME.finditer(stack)]


class Wrapper(NamedTuple):
    """A generated module that runs a graph's kernels: its lines, and by a kernel's handle the stacks of what it computes."""

    lines: list[str]
    stacks: dict[str, list[str]]

    def stacks_at(self, line: int) -> list[str]:
        """The stacks of what the kernel or operation computes that it calls at `line`, in the order in which they ran."""
        handle = next(filter(None, map(_HANDLE.search, reversed(self.lines[:line]))), None)
        return [] if handle is None else sorted(self.stacks.get(handle[1], ()), key=position)


def of_error(trace: TracebackType | None) -> str | None:
    """Where an exception was raised: the user's line, or a package's."""
    lines: list[Line] = []
    while trace is not None:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    place = innermost(reversed(lines))
    return place.user or place.package
