"""tanh without a branch: how far it is off, and that nothing else of a function changes."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.ir import Subgraph

from dash_inductor.lowering.tanh import SMALL, without_branches

aten, CPU = torch.ops.aten, torch.device("cpu")


def function(*ops: torch._ops.OpOverload) -> Subgraph:
    """Ops, one after the other."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for op in ops:
        x = graph.call_function(op, (x,))
    graph.output(x)
    return Subgraph(name="function", graph_module=fx.GraphModule({}, graph))


def tanh(x: Tensor) -> Tensor:
    return without_branches(function(aten.tanh.default), CPU).graph_module(x)


def test_units_in_the_last_place() -> None:
    """Beside float64, in both formulas and where they meet."""
    small = torch.logspace(-38, 0, 500_000, dtype=torch.float64).float()
    places = torch.linspace(SMALL - 1e-4, SMALL + 1e-4, 100_000, dtype=torch.float64).float()
    x = torch.cat([small, torch.linspace(0, 12, 1_000_000), places, torch.tensor([88.0, 200.0, 3e38])])
    x = torch.cat([x, -x])
    true = torch.tanh(x.double())
    unit = torch.nextafter(true.abs().float(), torch.tensor(torch.inf)).double() - true.abs().float().double()
    assert ((tanh(x).double() - true).abs() / unit).max() < 4


def test_what_is_no_number() -> None:
    inf = torch.inf
    assert tanh(torch.tensor([inf, -inf, 0.0])).tolist() == [1.0, -1.0, 0.0] and tanh(torch.tensor(torch.nan)).isnan()


def test_it_is_computed_in_fp32() -> None:
    x = torch.linspace(-3, 3, 1001).bfloat16()
    assert tanh(x).dtype == torch.float32 and torch.allclose(tanh(x), torch.tanh(x.float()), rtol=1e-6)


def test_every_tanh_and_nothing_else_is_replaced() -> None:
    whole = function(aten.sin.default, aten.tanh.default, aten.tanh.default, aten.cos.default)
    module, x = without_branches(whole, CPU).graph_module, torch.linspace(-2, 2, 101)
    assert torch.allclose(module(x), whole.graph_module(x), rtol=1e-6)
    ops = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert aten.tanh.default not in ops and ops.count(aten.exp2.default) == 2
    assert ops.count(aten.sin.default) == ops.count(aten.cos.default) == 1
    assert aten.tanh.default in [node.target for node in whole.graph_module.graph.nodes]  # the forward has it too
    other = function(aten.sin.default)
    assert without_branches(other, CPU) is other
