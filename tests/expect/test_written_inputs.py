"""The inputs to which a joint graph writes, by whatever op, and under which name they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch._inductor import compile_fx

from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.explanation.joint_graphs import joint_graphs
from dash_inductor.rewrite.kept import NAME, note_names, written_inputs

SIZE = 64


@triton.jit
def add_one(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, SIZE)
    tl.store(x + places, tl.load(x + places) + 1)


@torch.library.custom_op("dash_tests::add_two", mutates_args=("x",))
def add_two(x: Tensor) -> None:
    x.add_(2)


add_two.register_fake(lambda x: None)


class Model(nn.Module):
    """An attention, and a write to a buffer, to an input, or to what has a gradient."""

    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.write, self.linear = write, nn.Linear(8, 8)
        self.register_buffer("counts", torch.zeros(SIZE))

    def forward(self, x: Tensor, ids: Tensor, made: Tensor) -> Tensor:
        x, ids = x * 1, ids.view(-1)
        q = self.linear(x)[None, None]
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=(ids == ids[:, None]) & (self.counts >= 0) & (made > 0))
        self.write(self, x, ids, made)
        return out.sum() + x.sum() + made.sum()


def without_gradient(model: Model, x: Tensor, ids: Tensor, made: Tensor) -> None:
    with torch.no_grad():
        model.linear.bias.mul_(2)


WRITES: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "nothing": (lambda model, x, ids, made: None, set()),
    "in place": (lambda model, x, ids, made: ids.add_(1), {"ids"}),
    "a buffer": (lambda model, x, ids, made: model.counts.add_(1), {"self.counts"}),
    "a view": (lambda model, x, ids, made: ids[:3].zero_(), {"ids"}),
    "an op of a package": (lambda model, x, ids, made: add_two(model.counts), {"self.counts"}),
    "a kernel of Triton": (lambda model, x, ids, made: add_one[(1,)](model.counts, SIZE), {"self.counts"}),
    "a parameter": (without_gradient, {"self.linear.bias"}),
    "after the graph": (lambda model, x, ids, made: made.mul_(2), {"made"}),  # made of what has a gradient
    "a value that is no input": (lambda model, x, ids, made: (x + 1).mul_(2), set()),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", WRITES)
def test_written_inputs(name, monkeypatch):
    torch._dynamo.reset()
    write, expected = WRITES[name]
    graphs, stock = [], compile_fx._recursive_joint_graph_passes

    def passes(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        note_names(gm.graph)
        graphs.append(gm.graph)
        return stock(gm, *args, **kwargs)

    monkeypatch.setattr(compile_fx, "_recursive_joint_graph_passes", passes)
    with fake_gpu("h100"):  # for which Triton tells what a kernel writes
        inputs = torch.randn(SIZE, 8), torch.zeros(SIZE, dtype=torch.int64), torch.ones(SIZE, requires_grad=True) * 1
        joint_graphs(Model(write), inputs, {})
    assert {node.meta[NAME] for node in written_inputs(graphs[0])} == expected
