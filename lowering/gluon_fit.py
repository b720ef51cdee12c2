"""Whether the Gluon kernel compiles with a function of the scores, and with how much local memory.

The pass finds that before it resolves anything: once for a source, a tile and a Triton. A file of Inductor's cache folder keeps it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, fx
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import unset_fake_temporarily
from triton.compiler.errors import CompilationError

from dash_inductor.config import TRITON, Config
from dash_inductor.devices.target import Target
from dash_inductor.first_use import known
from dash_inductor.first_use.known import Verdict
from dash_inductor.first_use.machine import machine
from dash_inductor.problem import DTYPES, GluonFunction, Problem
from dash_inductor.schedule.packing import HEADER
from dash_inductor.templates import gluon_is_tested, gluon_kernel
from dash_inductor.templates.operands import Operands
from dash_inductor.templates.tiles import NoTile, Template, gluon_tile
from dash_inductor.text import in_one_line

from .gluon_functions import dtype_of, functions_before_lowering
from .launch.gluon import launch_of


def fitted(
    problem: Problem,
    settings: Config,
    target: Target,
    query: Tensor,
    score_mod: fx.GraphModule,
    joint: fx.GraphModule,
    captures: Sequence[Any],
) -> Problem:
    """The problem with what is known of its function in the Gluon kernel, where it may take that. Tensors are fakes."""
    if not problem.changes_scores or settings.kernel == TRITON or settings.template == Template.TWO_PASS or not gluon_is_tested():
        return problem
    try:
        gluon_tile(target.arch, problem.dtype, *problem.head_dims)
    except NoTile:
        return problem
    if problem.why_no_gluon(settings):
        return problem
    functions = functions_before_lowering(score_mod, joint, query, captures, trained=problem.trains_captures)
    if len(functions.values) > 1:
        many = f"takes one number that an element adds to gradients of captured tensors, not {len(functions.values)}"
        return replace(problem, gluon_fails=many)
    dtypes, values = (tuple(map(str, each)) for each in ([x.get_dtype() for x in functions.captures], functions.values))
    with torch.cuda.device(query.device) if torch.cuda.is_available() else contextlib.nullcontext():
        found = _found(functions.source, dtypes, len(functions.sizes), problem.dtype, problem.head_dims, values)
    if found.fit:
        known_of = GluonFunction(functions.source, dtypes, len(functions.sizes), int(found.said), values)
        return replace(problem, gluon_function=known_of)
    return replace(problem, gluon_fails=f"does not compile with its function of the scores: {found.said}")


@functools.cache
def _found(
    source: str, dtypes: tuple[str, ...], sizes: int, dtype: str, head_dims: tuple[int, int], values: tuple[str, ...] = ()
) -> Verdict:
    """Nothing of it depends on who else compiles it, or how long that takes: it decides bits."""
    asked = source, dtypes, sizes, dtype, head_dims, values
    versions = machine(torch.device("cpu")), triton.knobs.nvidia.ptxas.version
    name = hashlib.sha256(json.dumps([asked, versions]).encode()).hexdigest()[:32]
    file = Path(cache_dir(), "dash_inductor", "functions", f"{name}.json")
    if (kept := known.read(file)) and (kept.fit is False or kept.said.isdecimal()):
        return kept
    found = _compiled(*asked)
    with contextlib.suppress(OSError):  # the next process compiles it again
        file.parent.mkdir(parents=True, exist_ok=True)
        known.write(file, found)
    return found


def _compiled(
    source: str, dtypes: tuple[str, ...], sizes: int, dtype: str, head_dims: tuple[int, int], values: tuple[str, ...]
) -> Verdict:
    """Bytes of local memory a thread, or the error."""
    tile = gluon_tile(90, dtype, *head_dims)
    length = 2 * max(tile.block_m, tile.block_n)

    def empty(*size: int, of: Any = torch.float32) -> Tensor:
        return torch.empty(size, dtype=of, device="meta")

    with unset_fake_temporarily():
        (name,) = (theirs for theirs, ours in DTYPES.items() if ours == dtype)
        query, value = (empty(1, 1, length, dim, of=dtype_of(name)) for dim in head_dims)
        rows, table = empty(1, length), empty(HEADER, of=torch.int32)
        operands = Operands(
            *(query, query, value, value, rows, rows, table, None, None, None, empty(length, tile.block_d), query, value),
            captures=[empty(length, of=dtype_of(name)) for name in dtypes],
            sizes=[length] * sizes,
            workers=1,
            cooperative=True,
            block_m=tile.block_m,
            block_n=tile.block_n,
            causal=False,
            scale=1.0,
            functions=source,
            share=empty(1, 1, length, length, of=dtype_of(values[0])) if values else None,
        )
        launch = launch_of(gluon_kernel(), operands)
        try:
            binary = launch.compile()
        except CompilationError as error:  # not what a full disk or a lack of memory raises
            return Verdict(False, in_one_line(_innermost(error)))
    return Verdict(True, str(_local_bytes(binary.asm["cubin"])))


def _innermost(error: BaseException) -> BaseException:
    """What Triton's errors, one for each call in the source, come from."""
    return error if error.__cause__ is None else _innermost(error.__cause__)


def _local_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", said)))
