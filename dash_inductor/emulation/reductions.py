"""tl.reduce with a combine function of one's own, on whole slices.

The interpreter calls such a function once per element: most of the time of an Inductor kernel, whose max, any, prod,
argmax and Welford all come this way. Here a reduction is a tree over neighbours (as on a GPU, which is free to choose the
order too), and calls the function on whole slices.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction, ReduceOps

from .libdevice import tensor_of
from .patches import Patches

Array = np.ndarray[Any, Any]


def install_reductions(patches: Patches) -> None:
    """Sets all patches of reductions."""
    patches.set(ReduceOps, "generic_reduce", _generic_reduce)
    patches.set(FunctionRewriter, "ast_transformer", _NotTransformer())
    patches.set(interpreter, "_logical_not", _logical_not, is_new=True)
    # What was rewritten without the transformer must be rewritten, and what is rewritten with it forgotten at the end.
    patches.set(InterpretedFunction, "rewritten_fn", {})


class _NotTransformer(interpreter.ASTTransformer):
    """Python's `not` of a block is one bool in the interpreter; Triton compiles it per element."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        node = self.generic_visit(node)  # type: ignore[assignment]
        if not isinstance(node.op, ast.Not):
            return node
        function = ast.Name(id="_logical_not", ctx=ast.Load())
        return ast.copy_location(ast.Call(func=function, args=[node.operand], keywords=[]), node)


def _logical_not(x: Any) -> Any:
    if isinstance(x, tl.tensor) and x.type.is_block():
        return tensor_of(np.logical_not(x.handle.data), tl.int1)
    return not x


def _combine(self: Any, left: Sequence[Array], right: Sequence[Array], dtypes: Sequence[tl.dtype]) -> list[Array]:
    args = [tensor_of(data, dtype) for data, dtype in zip((*left, *right), (*dtypes, *dtypes), strict=True)]
    result = self.combine_fn(*args)
    tensors = result if isinstance(result, tuple) else (result,)
    return [
        np.broadcast_to(tensor.handle.data, data.shape).astype(data.dtype, copy=False)
        for tensor, data in zip(tensors, left, strict=True)
    ]


def _generic_reduce(self: Any, tensors: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    dtypes = [tensor.dtype for tensor in tensors]
    rank = tensors[0].handle.data.ndim
    axis = 0 if self.axis is None else self.axis
    parts = [np.moveaxis(t.handle.data.reshape(-1) if self.axis is None else t.handle.data, axis, 0) for t in tensors]
    while (n := len(parts[0])) > 1:
        even = n - n % 2
        combined = _combine(self, [p[0:even:2] for p in parts], [p[1:even:2] for p in parts], dtypes)
        parts = [np.concatenate([new, old[even:]]) for new, old in zip(combined, parts, strict=True)]
    results = [part[0] for part in parts]
    if self.keep_dims:
        axes = tuple(range(rank)) if self.axis is None else axis
        results = [np.expand_dims(result, axes) for result in results]
    return [self.to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]
