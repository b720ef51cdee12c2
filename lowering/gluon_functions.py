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
import torch
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.virtualized import V

from dash_inductor.problem import GluonFunction

from . import kernels
from .buffers import contiguous
from .mods import Mods, scores_alone

OUTPUTS = ("scores", "grad_pre_mod")
TILE = "BLOCK_N", "BLOCK_M"  # keys are rows
VARYING = {"pre_mod", "grad_scores", "m"}  # arguments that a step changes
HEAD = """from triton.experimental import gluon

from dash_inductor.templates.gluon.names import libdevice, tl, tl_math, triton_helpers
"""

in_trial: ContextVar[GluonFunction | None] = ContextVar("in_trial", default=None)  # which is tried, whatever a graph has
_written: ContextVar[Any] = ContextVar("written")


class _Functions(kernels.Kernel):
    """A kernel whose source is of no use: it leaves the functions' code, and its own arguments. OUTPUTS: which functions."""

    template = "gluon_functions"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra_template_env_fns += [self.write]

    def write(self, *outputs: str) -> str:
        """Called by the template."""
        _written.set(({output: self._function(output, TILE, 0) for output in outputs}, self.args))
        return "pass"


SOURCE = '{{def_kernel("UNREAD")}}\n    {{write(*OUTPUTS)}}\n'
UNLAUNCHED = kernels.KernelTemplate("gluon_functions", grid=kernels.programs, source=SOURCE)
UNLAUNCHED.kernel_type = _Functions


@dataclass(frozen=True)
class Functions:
    """`source` of a module, and the tensors and sizes that its functions take as `captures`, one behind the other. values: dtypes
    of what elements add to gradients of captured tensors."""

    source: str = ""
    captures: Sequence[IRNode] = ()
    sizes: Sequence[sympy.Expr] = ()
    values: Sequence[torch.dtype] = ()


def functions_of(mods: Mods, unread: IRNode) -> Functions:
    """Those of scores and their derivative; none where a score is what it was. unread: any tensor of the attention."""
    if tried := in_trial.get():
        captures = [x for x in mods.captures if isinstance(x, IRNode)][: len(tried.captures)]  # the mask's stand behind
        return Functions(tried.source, captures, [_length(unread)] * tried.sizes, [*map(dtype_of, tried.values)])
    if not mods.score_mod:
        return Functions()
    token = _written.set(None)
    try:
        UNLAUNCHED.generate(
            input_nodes=(unread,),
            layout=contiguous([sympy.Integer(0)], torch.int32, unread.get_device_or_error()),
            call_sizes=[1],
            num_warps=4,
            num_stages=1,
            subgraphs=list(mods.subgraphs or ()),
            triton_meta={},
            BLOCK_N=128,
            BLOCK_M=64,
            OUTPUTS=(*OUTPUTS, *(f"{kernels.SHARE}{number}" for number in range(len(mods.values)))),
        )
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
    values = [x.get_dtype() for x in mods.mutated]
    return Functions(_module(codes), [captured[buffers[name]] for name in of_tensors], [sizes[name] for name in of_sizes], values)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls so."""
    return getattr(torch, name.removeprefix("torch."))


def _length(query: IRNode) -> sympy.Expr:
    return sympy.sympify(query.get_size()[2])


def _module(codes: dict[str, str]) -> str:
    """The source: `before`, `scores_of`, where the derivative is not 1 `derivative_of`, and `share_0_of` for a value."""
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
    for share in [output for output in codes if output.startswith(kernels.SHARE)]:
        source += _function(f"{share}_of", f"pre_mod, grad_scores, {arguments}", [*taken, *within[share], f"return {share}"])
    return source


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    read = dict.fromkeys(re.findall(r"\bcaptured_\d+\b", "\n".join(lines)))
    taken = [f"{each} = captures[{each.removeprefix('captured_')}]" for each in read]
    body = textwrap.indent("\n".join((*taken, *lines)), "    ")
    return f"\n\n@gluon.jit\ndef {name}({arguments}):\n{body}\n"


def functions_before_lowering(
    score_mod: fx.GraphModule, joint: fx.GraphModule, query: Tensor, captures: Sequence[Any], *, trained: bool
) -> Functions:
    """The functions of an attention in a graph that is not lowered yet, by the fakes of its query and of what they capture.

    trained: whether gradients of that are wanted.
    """
    fake_mode: Any = query.fake_mode  # type: ignore[attr-defined]
    graph = fx.Graph()
    names = [graph.placeholder(f"given_{number}").name for number in range(1 + len(captures))]
    graph.output(())
    inputs = [query, *captures]
    lowering = GraphLowering(fx.GraphModule({}, graph), example_inputs=inputs, shape_env=fake_mode.shape_env)
    with V.set_graph_handler(lowering), V.set_fake_mode(fake_mode):
        lowering.run(*inputs)
        unread, *captured = [lowering.graph_inputs[name] for name in names]
        return functions_of(scores_alone(unread, score_mod, joint, captured, trained=trained), unread)
