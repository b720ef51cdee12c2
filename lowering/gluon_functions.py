"""FlexAttention's functions of the scores as the Gluon kernel takes them: the source of a module, and what it reads.

Inductor writes their code for a kernel of its own, which nobody launches. What follows from that is in templates/gluon/scores.py.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy
from torch._inductor.ir import IRNode

from . import kernels
from .mods import Mods

OUTPUTS = ("scores", "grad_pre_mod")
TILE = "BLOCK_N", "BLOCK_M"  # keys are rows
VARYING = {"pre_mod", "grad_scores", "m"}  # arguments that a step changes
HEAD = """from triton.experimental import gluon

from dash_inductor.templates.gluon.names import libdevice, tl, tl_math, triton_helpers
"""

_written: ContextVar[Any] = ContextVar("written")


class _Functions(kernels.Kernel):
    """A kernel whose source is of no use: it leaves the functions' code, and its own arguments."""

    template = "gluon_functions"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra_template_env_fns += [self.write]

    def write(self) -> str:
        """Called by the template."""
        _written.set(({output: self._function(output, TILE, 0) for output in OUTPUTS}, self.args))
        return "pass"


UNLAUNCHED = kernels.KernelTemplate("gluon_functions", grid=kernels.programs, source='{{def_kernel("UNREAD")}}\n    {{write()}}\n')
UNLAUNCHED.kernel_type = _Functions


@dataclass(frozen=True)
class Functions:
    """`source` of a module, and the tensors and sizes that its functions take as `captures`, one behind the other."""

    source: str = ""
    captures: Sequence[IRNode] = ()
    sizes: Sequence[sympy.Expr] = ()


def functions_of(mods: Mods, unread: IRNode) -> Functions:
    """Those of scores and their derivative; none where a score is what it was. unread: any tensor of the attention."""
    if not mods.score_mod:
        return Functions()
    token = _written.set(None)
    try:
        kernels.call(UNLAUNCHED, grid=1, inputs=[unread], constants={"BLOCK_M": 64, "BLOCK_N": 128}, subgraphs=mods.subgraphs)
        codes, arguments = _written.get()
    finally:
        _written.reset(token)
    read = [name for name in dict.fromkeys(re.findall(r"\b(?:in_ptr|ks)\d+\b", "\n".join(codes.values())))]
    buffers = {inner: buffer for buffer, inner in arguments.input_buffers.items()}
    sizes = {inner: size for size, inner in arguments.sizevars.items()}
    captured: dict[str, Any] = {x.get_name(): x for x in mods.captures if isinstance(x, IRNode)}
    of_sizes = [name for name in read if name in sizes]
    of_tensors = [name for name in read if name in buffers]
    renamed = {name: f"captured_{number}" for number, name in enumerate((*of_tensors, *of_sizes))}
    codes = {output: re.sub(r"\b(?:in_ptr|ks)\d+\b", lambda found: renamed[found[0]], code) for output, code in codes.items()}
    return Functions(_module(codes), [captured[buffers[name]] for name in of_tensors], [sizes[name] for name in of_sizes])


def _module(codes: dict[str, str]) -> str:
    """The source: `before`, `scores_of` and, where the derivative is not 1, `derivative_of`."""
    before: list[str] = []
    within: dict[str, list[str]] = {}
    kept, varying = [], {*VARYING}
    for output, code in codes.items():
        within[output] = []
        for statement in ast.parse(code).body:
            line = ast.get_source_segment(code, statement) or ""
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            if {node.id for node in names if isinstance(node.ctx, ast.Load)} & varying:
                varying |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            elif isinstance(statement, ast.Assign):
                before.append(line)
                if "tl.load(" in line:
                    kept += [node.id for node in names if isinstance(node.ctx, ast.Store)]
                    continue
            within[output].append(line)
    taken = [f"{name} = kept[{number}]" for number, name in enumerate(kept)]
    before.append(f"return ({''.join(f'{name}, ' for name in kept)})")
    source = HEAD + _function("before", "z, hq, n, captures", before)
    arguments = "z, hq, m, n, captures, kept"
    source += _function("scores_of", f"pre_mod, {arguments}", [*taken, *within["scores"], "return scores"])
    if not re.fullmatch(r"(tmp\d+) = \(grad_scores\)\ngrad_pre_mod = \1", codes["grad_pre_mod"]):
        lines = [*taken, *within["grad_pre_mod"], "return grad_pre_mod"]
        source += _function("derivative_of", f"pre_mod, grad_scores, {arguments}", lines)
    return source


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    read = dict.fromkeys(re.findall(r"\bcaptured_\d+\b", "\n".join(lines)))
    taken = [f"{each} = captures[{each.removeprefix('captured_')}]" for each in read]
    body = textwrap.indent("\n".join((*taken, *lines)), "    ")
    return f"\n\n@gluon.jit\ndef {name}({arguments}):\n{body}\n"
