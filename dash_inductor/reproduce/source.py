"""Which line of the user's code runs now."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
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


def in_backward(stack: Iterable[tuple[FrameType, int]]) -> Iterator[Line]:
    """The lines of a stack, innermost first, up to where autograd called it."""
    for frame, line in stack:
        if frame.f_code.co_name == _ENGINE and frame.f_code.co_filename.startswith(_TORCH):
            return
        yield frame.f_code.co_filename, line


def of_text(stack: str) -> Place:
    """Where a stack is that torch wrote down."""
    return innermost((frame["file"], int(frame["line"])) for frame in reversed(list(_FRAME.finditer(stack))))


class Wrapper(NamedTuple):
    """A generated module that runs a graph's kernels: its lines, and by a kernel's handle the stacks of what it computes."""

    lines: list[str]
    stacks: dict[str, list[str]]

    def stacks_at(self, line: int) -> list[str]:
        """The stacks of what the kernel or operation computes that it calls at `line`, in the order in which they ran."""
        handle = next(filter(None, map(_HANDLE.search, reversed(self.lines[:line]))), None)
        if handle is None:
            return []
        # Where stacks under one call part, they are in one function.
        return sorted(self.stacks.get(handle[1], ()), key=lambda stack: [int(frame["line"]) for frame in _FRAME.finditer(stack)])


def of_error(error: BaseException) -> str | None:
    """Where an exception was raised: the user's line, or a package's."""
    place = innermost((frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__)))
    return place.user or place.package
