"""Where in the user's code a node of a joint graph comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx

from .stock_ops import TARGETS, arguments

_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+)', re.MULTILINE)
_ROOT = re.compile(r"[LG]\['\w+'\](\.|$)")  # Dynamo's name of the variable that holds the outermost module
_TORCH = str(Path(torch.__file__).parent)


class Origin(NamedTuple):
    """Where a call of attention comes from: its source line and module, as a decision has them, and the user's stack."""

    source: str | None = None
    module: str = ""
    stack: str = "(no stack trace was recorded)"


def origin_of(node: fx.Node) -> Origin:
    """The origin of the call that the node belongs to."""
    nodes = list(_of_one_call(node))
    found = (next(filter(None, map(of, nodes)), None) for of in (_source, _module, lambda node: node.stack_trace))
    return Origin(**{name: value for name, value in zip(Origin._fields, found, strict=True) if value})


def _of_one_call(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and of a backward the forward node that made its `out`: Dynamo's notes may be on either."""
    yield node
    out = arguments(node)["out"] if node.target in TARGETS else None
    if isinstance(out, fx.Node):
        yield from (out, *out.all_input_nodes)


def _source(node: fx.Node) -> str | None:
    """The innermost frame outside torch, as "file.py:12"."""
    frames = [frame for frame in _FRAME.finditer(node.stack_trace or "") if not frame["file"].startswith(_TORCH)]
    return f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else None


def _module(node: fx.Node) -> str:
    """The path of the innermost module, in the outermost one."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return _ROOT.sub("", list(stack.values())[-1][0], count=1) if stack else ""
