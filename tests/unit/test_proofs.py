"""What a graph shows of a BlockMask: full and causal ones, whatever else stands in the lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.op import MaskArguments
from dash_inductor.rewrite.proofs import constant, mask_of

LOWER = [[0, 1, 2], [1, 2], [2]]  # blocks of Q for each block of keys
MASK_MODS = {"causal": lambda b, h, m, n: m >= n, "full": lambda b, h, m, n: torch.full((), True)}


def constants(rows: list[list[int]]) -> tuple[fx.Node, fx.Node]:
    """num and indices [1, 1, blocks of keys, 3], as nodes of a graph that makes them of nothing."""
    num = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
    indices = torch.tensor([[[[*row, *[0] * (3 - len(row))] for row in rows]]], dtype=torch.int32)

    def made(x: Tensor) -> fx.Node:
        graph = fx.Graph()
        parts = [graph.call_function(torch.ops.aten.full.default, ([1], value)) for value in x.flatten().tolist()]
        for part in parts:
            part.meta["val"] = torch.empty(1)
        line = graph.call_function(torch.ops.aten.cat.default, (parts,))
        line.meta["val"] = x.flatten()
        node = graph.call_function(torch.ops.aten.view.default, (line, list(x.shape)))
        node.meta["val"] = x
        return node

    return made(num), made(indices)


def proven(rows: list[list[int]], mask_mod: str = "causal", full: list[list[int]] | None = None, **others: Any) -> str | None:
    """Of a mask of 96 queries and keys in blocks of 32."""
    num, indices = constants(rows)
    full_num, full_indices = (None, None) if full is None else constants(full)
    kv_num = SimpleNamespace(meta={"val": torch.empty(1, 1, 3)})
    mask = MaskArguments(96, 96, kv_num, None, None, None, num, indices, full_num, full_indices, 32, 32, None)
    zeros = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    return mask_of(mask._replace(**others), make_fx(MASK_MODS[mask_mod])(*zeros))


@pytest.mark.parametrize(
    ("op", "arguments", "value"),
    [
        (torch.ops.aten.full.default, ([2], 3), [3, 3]),
        (torch.ops.prims.iota.default, (2,), [0, 1]),
        (torch.ops.aten.empty.memory_format, ([2],), None),  # whatever stood there
        (torch.ops.aten.rand.default, ([2],), None),
    ],
    ids=str,
)
def test_what_is_constant(op, arguments, value):
    keywords = {"start": 0, "step": 1, "dtype": torch.int64, "device": torch.device("cuda"), "requires_grad": False}
    node = fx.Graph().call_function(op, arguments, keywords if op.namespace == "prims" else {"device": torch.device("cuda")})
    node.meta["val"] = torch.empty(2)
    found = constant(node)
    assert (value is None and found is None) or found.tolist() == value


def test_an_op_of_the_user_is_not_constant():
    """It may compute another value at run time."""
    calls = []

    @torch.library.custom_op("dash_test::lists", mutates_args=())
    def lists(x: Tensor) -> Tensor:
        calls.append(x)
        return x + len(calls)

    graph = fx.Graph()
    one = graph.call_function(torch.ops.aten.full.default, ([2], 1))
    node = graph.call_function(torch.ops.dash_test.lists.default, (one,))
    one.meta["val"] = node.meta["val"] = torch.empty(2)
    assert constant(node) is None and calls == []


@pytest.mark.parametrize(
    ("rows", "others", "kind"),
    [
        (LOWER, {}, "causal"),
        ([[2, 1, 0], [2, 1], [2]], {}, "causal"),
        ([[0], [1], [2]], {"full": [[1, 2], [2], []]}, "causal"),
        ([[0, 1, 2]] * 3, {}, "causal"),  # mask_mod hides the rest
        ([[0, 1, 2], [1], [2]], {}, None),
        ([[1, 2], [1, 2], [2]], {}, None),
        ([[0], [1], [2]], {"full": [[0, 1, 2], [2], []]}, None),  # the first block is not all visible
        ([[0], [1], [2]], {"full": [[1, 2], [0, 2], []]}, None),
        ([[-1, 99, 0], [1, 2], [2]], {}, None),
        (LOWER, {"q_len": 128, "kv_len": 128}, None),  # the lists do not reach so far
        (LOWER, {"kv_len": 64}, None),
        (LOWER, {"q_block": SimpleNamespace()}, None),  # a size that the graph takes
        ([[0, 1, 2]] * 3, {"mask_mod": "full"}, "full"),
        (LOWER, {"mask_mod": "full"}, None),
        ([[0, 1, 2]] * 3, {"mask_mod": "full", "q_len": 97}, None),
    ],
)
def test_what_is_proven(rows, others, kind):
    assert proven(rows, **others) == kind
