"""Our Triton templates as Inductor kernels: exactly one choice each, never a timing."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.common import WorkspaceArg
from torch._inductor.codegen.triton import texpr
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, TritonTemplateKernel
from torch._inductor.virtualized import V

from dash_inductor.schedule.packing import FAMILY_CODES
from dash_inductor.templates import source

from . import load_check
from .buffers import contiguous
from .header import add_kernel

TEMPLATE_COMMENT = "# dash_inductor template: "  # above a kernel in generated code
# FLEX_ARGUMENTS: Inductor's argument -> template variable. FLEX_FUNCTIONS: result -> (number in Mods.subgraphs, tile arguments);
# share_0 and so on, behind them, are what elements add to gradients of captured tensors.
FLEX_ARGUMENTS = {"score": "pre_mod", "grad_score_mod": "grad_scores", "b": "z", "h": "hq", "m": "m", "n": "n"}
FLEX_FUNCTIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    "scores": (0, ("score",)),
    "grad_pre_mod": (1, ("score", "grad_score_mod")),
    "visible": (2, ()),
}
SHARE = "share_"
LOADED = re.compile(r"\bload\((\w+)")  # a buffer, in what Inductor prints of a function
VARIABLE = re.compile(r"\btmp\d+\b")  # of a function's code
# In a kernel's triton_meta, where nobody else reads them: how many CTAs of it an SM must hold, or loading it is an error; and what
# the generated module calls the address to which it reports a wait that gave up, in two halves.
CTAS_PER_SM = "dash_ctas_per_sm"
FAILED_WAIT = "dash_failed_wait"


class Kernel(TritonTemplateKernel):
    """A template kernel that can take scalars computed from sizes: the launch's call sizes after the first, by index."""

    template = ""  # its name

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra_template_env_fns += [self.scalar, self.failed_wait, self.begin_functions, self.function, self.family_codes]

    def scalar(self, index: int) -> str:
        """The kernel's name for the `index`-th scalar; the wrapper computes it from the run-time sizes."""
        expression = sympy.sympify(self.call_sizes[1 + index])
        return texpr(self.rename_indexing(V.graph.sizevars.lookup_precomputed_size(expression)))

    def family_codes(self, *known: str) -> dict[str, int]:
        """The numbers by which a kernel that writes tables is told the family; ValueError where it does not know all of them."""
        if {*known} != {*FAMILY_CODES}:
            raise ValueError(f"{self.template} knows the families {', '.join(known)}, not {', '.join(FAMILY_CODES)}")
        return {name: code for code, name in enumerate(FAMILY_CODES)}

    def failed_wait(self, half: str) -> str:
        """The kernel's name for the high or low half of the address to which it reports a wait that gave up; 0 without one."""
        name = (self.triton_meta or {}).get(FAILED_WAIT)
        if not name:
            return "0"
        symbol = sympy.Symbol(f"{name}_{half}", integer=True)
        # torch 2.11 asks for a hint of each argument that is an integer, and knows none of this name.
        sizevars = V.graph.sizevars
        if symbol not in sizevars.backed_var_to_val:
            sizevars.backed_var_to_val = ChainMap({symbol: sympy.Integer(0)}, sizevars.backed_var_to_val)  # those of Dynamo stay
        return str(self.args.size(symbol))

    def begin_functions(
        self,
        outputs: Sequence[str],
        fixed: Sequence[str],
        shape: tuple[str, str] = ("BLOCK_N", "BLOCK_M"),
        keys_axis: int = 0,
        prefix: str = "",
    ) -> list[str]:
        """The lines of these FLEX_FUNCTIONS that depend on no argument but those named in `fixed`: they go before a loop that
        changes the others. `function` has the rest.

        shape, keys_axis: of the tile that the functions are computed for. prefix: of their variables, where a kernel has the
        functions for tiles of two shapes.
        """
        varying = {*FLEX_ARGUMENTS.values()} - {*fixed}
        before: list[str] = []
        self.functions: dict[str, str] = {}
        for output in outputs:
            within = []
            code = VARIABLE.sub(rf"{prefix}\g<0>", self._function(output, shape, keys_axis))
            for statement in ast.parse(code).body:
                line = ast.get_source_segment(code, statement) or ""
                names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
                read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
                written = {node.id for node in names if isinstance(node.ctx, ast.Store)}
                if not read & varying and all(name.startswith(f"{prefix}tmp") for name in written):
                    before.append(line)
                else:
                    within.append(line)
                    varying |= written
            self.functions[output] = "\n".join(within)
        return before

    def function(self, output: str) -> str:
        """The code that computes it for a tile, without the lines of `begin_functions`."""
        return self.functions[output]

    def _function(self, output: str, shape: tuple[str, str], keys_axis: int) -> str:
        """The code of one of Mods.subgraphs, by the name that the template gives its result."""
        if output.startswith(SHARE):
            number, arguments = len(FLEX_FUNCTIONS) + int(output.removeprefix(SHARE)), FLEX_FUNCTIONS["grad_pre_mod"][1]
        else:
            number, arguments = FLEX_FUNCTIONS[output]
        kinds: dict[str, Any] = {name: FLEX_ARGUMENTS[name] for name in (*arguments, "b", "h", "m", "n")}
        if "input_dtypes" in inspect.signature(TritonTemplateKernel.modification).parameters:  # from torch 2.13 on
            rows, columns = (shape[0], "1"), ("1", shape[1])
            keys, queries = (rows, columns) if keys_axis == 0 else (columns, rows)
            kinds["input_shapes"] = dict.fromkeys(arguments, shape) | {"m": queries, "n": keys}
            kinds["input_dtypes"] = dict.fromkeys("bhmn", "index")
        return self.modification(subgraph_number=number, output_name=output, **kinds).strip()

    def jit_lines(self) -> str:
        """The decorators under the template's name; above them one that holds the kernel's occupancy against the tile table's."""
        lines = f"{TEMPLATE_COMMENT}{self.template}\n{textwrap.dedent(super().jit_lines()).strip()}"
        expected = (self.triton_meta or {}).get(CTAS_PER_SM)
        if expected is None:
            return lines
        check = load_check.expect
        return f"from {check.__module__} import {check.__name__}\n\n@{check.__name__}({expected})\n{lines}"


class LazySource:
    """A Jinja template that is compiled when it is first rendered: most graphs need two of ours, and one out of a cache none."""

    def __init__(self, source: str) -> None:
        self._source = source

    @functools.cached_property
    def _compiled(self) -> Any:
        return TritonTemplate._template_from_string(self._source)

    def render(self, **names: Any) -> str:
        """The source for these variables, as Jinja's `render`."""
        return self._compiled.render(**names)


class KernelTemplate(TritonTemplate):
    """A template whose kernels know its name."""

    _template_from_string = LazySource  # called by the base class

    def __init__(self, name: str, grid: Any, source: str, **options: Any) -> None:
        super().__init__(f"dash_{name}", grid, source, **options)
        self.text = source
        self.kernel_type = type("Kernel", (Kernel,), {"template": name})


@SymbolicGridFn
def programs(count: Any, *scalars: Any, cdiv: Any = None, min: Any = None, max: Any = None) -> tuple[Any, int, int]:
    """A one-dimensional grid of `count` programs; the scalars and the template's constants do not matter to it."""
    return (count, 1, 1)


def _template(name: str, *parts: str) -> KernelTemplate:
    """The template made of the files of `parts`, or of the one that has its name."""
    # From 2.13 on a template may leave its inputs' layouts open; ours reads their strides.
    frozen = "always_freeze_layout" in inspect.signature(TritonTemplate.__init__).parameters
    return KernelTemplate(
        name, grid=programs, source=source(*parts or (name,)), **({"always_freeze_layout": True} if frozen else {})
    )


# The sources of the main kernels of one pass; benchmarks time variants of them.
ONE_PASS_PARTS = ("step", "one_pass", "functions", "round_robin")
BLOCK_MASK_ONE_PASS_PARTS = ("step", "block_mask", "functions")

PREPROCESS = _template("preprocess")
ONE_PASS = _template("one_pass", *ONE_PASS_PARTS)
TWO_PASS = _template("two_pass", "two_pass", "functions")
BLOCK_MASK_ONE_PASS = _template("block_mask", *BLOCK_MASK_ONE_PASS_PARTS)
BLOCK_MATRIX, BLOCK_RANKS, BLOCK_ROWS, MASK_MATRIX = map(_template, ("block_matrix", "block_ranks", "block_rows", "mask_matrix"))
MASK_BITS, DROPOUT_BITS, TABLE, SHARES = map(_template, ("mask_bits", "dropout_bits", "table", "shares"))
# What an attention has for itself. The others make tables, lists and bits, which attentions of a graph may share.
OF_ATTENTION = PREPROCESS, ONE_PASS, TWO_PASS, BLOCK_MASK_ONE_PASS, SHARES


@dataclass(frozen=True)
class Gradients:
    """dq, dk, dv with the strides that the graph was traced with; ints of memory that the schedule takes, its table and rows; and
    what a `Decision` says of it."""

    dq: ir.TensorBox
    dk: ir.TensorBox
    dv: ir.TensorBox
    schedule_ints: sympy.Expr | int
    schedule: dict[str, Any]


def without_names(functions: Sequence[str]) -> list[str]:
    """Functions as Inductor prints them, the buffers that they load by number: their names are those of one graph.

    >>> without_names(["ops.load(primals_4, i0) + ops.load(buf2, 0)", "ops.load(buf2, 0)"])
    ['ops.load(0, i0) + ops.load(1, 0)', 'ops.load(1, 0)']
    """
    numbers: dict[str, int] = {}
    return [LOADED.sub(lambda name: f"load({numbers.setdefault(name[1], len(numbers))}", each) for each in functions]


def call(
    template: KernelTemplate,
    *,
    grid: sympy.Expr | int,
    inputs: Sequence[ir.IRNode],
    constants: Mapping[str, Any],
    output: ir.Layout | None = None,
    num_warps: int = 4,
    num_stages: int = 1,
    mutated: Sequence[ir.IRNode] = (),
    scalars: Sequence[sympy.Expr] = (),
    workspace_arg: WorkspaceArg | None = None,
    triton_meta: Mapping[str, object] | None = None,
    subgraphs: Sequence[ir.ComputedBuffer] | None = None,
) -> ir.TensorBox:
    """Launches `grid` programs of the template on `inputs` and `mutated`; returns its output, which every template has: an empty
    one where `output` is None.

    `constants` are the template's compile-time values, `scalars` integers that the wrapper computes from sizes. `triton_meta`: of
    Inductor's kernel, more than the defaults. `subgraphs`: those of Mods.
    """
    if template in OF_ATTENTION:
        functions = [each.data.inner_fn_str() for each in subgraphs or () if isinstance(each.data, ir.Loops)]
        add_kernel(template.name, template.text, sorted(constants.items()), num_warps, num_stages, without_names(functions))
    choice = template.generate(
        input_nodes=(*inputs, *mutated),
        mutated_inputs=list(mutated),
        layout=output or contiguous([sympy.Integer(0)], torch.int32, inputs[0].get_device_or_error()),
        call_sizes=[grid, *scalars],
        num_warps=num_warps,
        num_stages=num_stages,
        workspace_arg=workspace_arg,
        subgraphs=None if subgraphs is None else list(subgraphs),
        # Whether a multiplication and an addition fuse decides bits, and Triton's default is an environment variable. A fresh dict:
        # Inductor writes into it.
        triton_meta={"launch_cooperative_grid": False, "enable_fp_fusion": True, **(triton_meta or {})},
        **constants,
    )
    return choice.output_node()
