"""What is decided of the attentions of joint graphs: by the pass, and by the lowering of each attention alone."""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._guards import tracing
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map, tree_map_only

from ..codegen.fake_gpu import fake_gpu
from ..decision import Decision, decisions_in
from ..hooks.hook import around_here
from ..hooks.joint_pass import PASS, decline_if_left_out
from ..op import MARK, NOTE
from ..rewrite.declined import noted
from .joint_graphs import Found, Ready

CUDA = torch.device("cuda", 0)
# Of an attention alone: no kernel is compiled, written into a cache or tried.
LOWERING = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "cpp_wrapper": False,
    "compile_threads": 1,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "triton.autotune_at_compile_time": False,
}


def decisions_of(found: Found, modules: Container[str]) -> list[Decision]:
    """What became of each attention in graphs after the pass, in the order in which the model calls them; decisions stay.

    modules: the paths of the model's.
    """
    known: dict[str, Decision] = {}
    by_graph: dict[fx.GraphModule, list[Decision]] = {}
    made: list[Decision] = []
    for each in found:
        if isinstance(each, Decision):
            made.append(each)
            continue
        if each.graph not in by_graph:
            nodes = [node for module in modules_of(each.graph) for node in module.graph.nodes if MARK in node.meta]
            by_graph[each.graph] = [noted(node) if node.target is NOTE else _lowered_once(node, known) for node in reversed(nodes)]
        # A graph has paths from the module on that calls it, where these begin at that one.
        paths = (f"{each.module}.{decision.module}".strip(".") for decision in by_graph[each.graph])
        made += [
            replace(decision, module=path) if path in modules else decision
            for decision, path in zip(by_graph[each.graph], paths, strict=True)
        ]
    return made


def decide_on(gpu: str, found: Found, modules: Container[str]) -> list[Decision]:
    """The same of graphs of CPU tensors without the pass, as if their tensors were on the GPU, which need not be there.

    Changes the graphs. Raises ValueError and RuntimeError as `fake_gpu`.
    """
    with fake_gpu(gpu):
        for graph in {each.graph: None for each in found if not isinstance(each, Decision)}:
            for module in modules_of(graph):
                move(module)
            for module in modules_of(graph):
                if not decline_if_left_out(module):
                    PASS.apply(module)
        on_gpu = [replace(each, device=CUDA.type) if isinstance(each, Decision) else each for each in found]
        return decisions_of(on_gpu, modules)


def require_compiler() -> None:
    """ValueError where Triton interprets, so that nothing can be generated for a GPU."""
    import triton

    if triton.knobs.runtime.interpret:
        raise ValueError(
            "device= needs Triton's compiler, and this process emulates (TRITON_INTERPRET, DASH_INDUCTOR_EMULATE): unset both, or "
            "leave out device= to have the model explained for the emulated device. In a process of its own, whatever is set, "
            "python -m dash_inductor explain MODULE:FUNCTION --device h100 does it"
        )


def modules_of(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph and those inside, such as the bodies of nested regions."""
    return [module for module in graph.modules() if isinstance(module, fx.GraphModule)]


def _lowered_once(node: fx.Node, known: dict[str, Decision]) -> Decision:
    """What the lowering of a rewritten attention records; of one that is like another in all but its place, what that one did."""
    mark = node.meta[MARK]
    module = _alone(node)
    inner = [getattr(module, str(x.target)) for x in module.graph.nodes if x.op == "get_attr"]
    others = [_text(x.graph) if isinstance(x, fx.GraphModule) else id(x) for x in inner]
    tensors = [_in_memory(x.meta["val"]) for x in module.graph.nodes if x.op == "placeholder"]
    key = repr((replace(mark, source=None, module=""), _text(module.graph), others, tensors, _in_memory(node.meta["val"])))
    if key not in known:
        known[key] = _lowered(module)
    return replace(known[key], source=mark.source, module=mark.module)


def _text(graph: fx.Graph) -> list[str]:
    """A graph, its inputs and nodes by number: names differ from attention to attention."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    named = [
        (node.op, "" if node.op in ("placeholder", "get_attr") else node.target, node.args, node.kwargs) for node in graph.nodes
    ]
    return [repr(fx.node.map_aggregate(each, lambda x: numbers.get(x, x) if isinstance(x, fx.Node) else x)) for each in named]


def _in_memory(value: Any) -> str:
    """Shapes, strides, dtypes and devices."""
    return repr(tree_map_only(Tensor, lambda x: (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device), value))


def _stop(stock: Any, lowering: GraphLowering) -> Any:
    raise Ready(lowering)


def _lowered(module: fx.GraphModule) -> Decision:
    """What the lowering of a rewritten attention alone records, which depends on nothing around it."""
    inputs = [x.meta["val"] for x in module.graph.nodes if x.op == "placeholder"]
    mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    with inductor_config.patch(LOWERING), around_here(GraphLowering, "compile_to_module", _stop):
        try:
            with tracing(None), mode, V.set_fake_mode(mode):
                compile_fx.compile_fx_inner(module, inputs)
        except Ready as lowered:
            (decision,) = decisions_in("\n".join(lowered.args[0].dash_header))
            return decision
    raise AssertionError("Inductor compiled nothing")


def _alone(node: fx.Node) -> fx.GraphModule:
    """A graph of the node, whose tensors are inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def of(x: fx.Node) -> fx.Node:
        if x not in copies:
            if x.op == "get_attr":
                copies[x] = graph.node_copy(x, of)
            else:
                copies[x] = graph.placeholder(x.name)
                copies[x].meta = {"val": x.meta["val"]}
        return copies[x]

    for x in node.all_input_nodes:
        of(x)
    new = graph.node_copy(node, of)
    outputs = []
    for index, val in enumerate(node.meta["val"]):
        if isinstance(val, Tensor):
            outputs.append(graph.call_function(operator.getitem, (new, index)))
            outputs[-1].meta["val"] = val
    graph.output(tuple(outputs))
    module = node.graph.owning_module
    assert module
    return fx.GraphModule(module, graph)


def move(module: fx.GraphModule) -> None:
    """Puts all tensors of a graph onto "cuda:0"."""
    moved: dict[int, Tensor] = {}  # a tensor in several nodes stays one

    def moved_to_gpu(x: Any) -> Any:
        if isinstance(x, FakeTensor):
            if id(x) not in moved:
                moved[id(x)] = on_gpu(x)
            return moved[id(x)]
        return CUDA if isinstance(x, torch.device) and x.type == "cpu" else x

    for node in module.graph.nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(x, moved_to_gpu) for x in (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved_to_gpu, node.meta["val"])


def on_gpu(x: Any) -> Any:
    """A tensor without memory on "cuda:0" in the place of one on the CPU; all else as it is."""
    if not isinstance(x, FakeTensor) or x.device.type != "cpu":
        return x
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(x.fake_mode, like, CUDA)  # faster than an op under the mode, of large graphs by a tenth
