"""Puts a node of FlexAttention's backward into a joint graph, for an attention that torch knows by another op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ..dropout import Dropout
from ..op import DROPOUT, FLEX_BACKWARD, LEARNT, MARK, REWRITTEN, FlexArguments, Mark, MaskArguments
from ..problem import dtype_name
from ..reference import LOG2E
from .function_builder import everything
from .mask_function import MaskFunction
from .nodes import call
from .score_function import ScoreFunction, identity


def flex_backward(
    graph: fx.Graph,
    mask: MaskFunction | None,
    tensors: Sequence[fx.Node],
    gradients: Sequence[Tensor],
    mark: Mark,
    block_matrix: fx.Node | None = None,
    scores: ScoreFunction | None = None,
    learnt: fx.Node | None = None,
    dropout: tuple[Dropout, fx.Node] | None = None,
) -> fx.Node:
    """The node of query, key, value, out, logsumexp (natural) and grad_out, [B, H, S, D] and [B, H, S].

    mask: None where the problem's has a closed form. gradients: fakes of dq, dk, dv as the nodes after it take them. block_matrix:
    as `MaskArguments` has it; None where the mask function is to be asked of every element. scores: None where they stay.
    learnt: the mask of floats, [B, H, S_q, S_k], that `scores` adds, if its gradient is wanted: the fourth output has it last.
    dropout: what the forward dropped, and its random state, a node of RANDOM_STATE.
    """
    query, key, value, out, logsumexp, grad_out = tensors
    assert mark.resolution
    problem, like = mark.resolution.problem, query.meta["val"]
    with like.fake_mode:
        score = torch.empty((), dtype=like.dtype, device=like.device)
        positions = [torch.empty((), dtype=torch.int32, device=like.device) for _ in range(4)]
    mask = mask or everything(like.device)
    names = [f"dash_{name}_{dtype_name(like.dtype)}" for name in ("score_mod", "joint")]  # all that leave scores share them
    names = [_free_name(graph, name) for name in names] if scores or dropout else names
    scores = scores or identity()
    options: dict[str, Any] = {}
    if dropout is not None:
        scores = scores.with_unread(dropout[1], learnt=False)
        options[DROPOUT] = dropout[0].p, dropout[0].generator
    if learnt is not None:
        scores = scores.with_unread(learnt, learnt=True)
        options[LEARNT] = True
    captures = [x.meta["val"] for x in scores.captures]
    score_mod = _module(graph, names[0], scores.module, [score, *positions, *captures])
    joint = _module(graph, names[1], scores.derivative, [score, *positions, score, *captures])
    captures = [x.meta["val"] for x in mask.captures]
    mask_mod = _module(graph, _free_name(graph, "dash_mask_mod"), mask.module, [*positions, *captures])
    rows, keys = problem.block_size or (None, None)
    lists = dict.fromkeys(MaskArguments._fields)
    block_mask = {**lists, "q_block": rows, "kv_block": keys, "mask_mod": mask_mod, "q_indices": block_matrix}
    base_2 = call(graph, torch.ops.aten.mul.Tensor, logsumexp, LOG2E)
    arguments = FlexArguments(
        *(query, key, value, out, base_2, grad_out, None, score_mod, joint, tuple(block_mask.values())),
        *(problem.softmax_scale, options, scores.captures, mask.captures),
    )
    node = graph.call_function(FLEX_BACKWARD, tuple(arguments))
    of_captures: list[Tensor | None] = [None] * len(scores.captures)
    if learnt is not None:
        with like.fake_mode:
            of_captures[-1] = torch.empty_like(learnt.meta["val"], memory_format=torch.contiguous_format)
    node.meta["val"] = (*gradients, tuple(of_captures))
    say_rewritten(node, mark)
    return node


def say_rewritten(node: fx.Node, mark: Mark) -> None:
    """Marks a node of FlexAttention's backward for the lowering, and says so in the text of the graph, by which caches know it."""
    arguments = FlexArguments(*node.args)
    name = "grad_logsumexp" if arguments.grad_out is None else "grad_out"
    grad = getattr(arguments, name)
    function_ops = mark.resolution.problem.function_ops if mark.resolution and mark.stock else 0
    options: dict[str, Any] = {name: x for name, x in (("at_load", mark.at_load), ("function_ops", function_ops)) if x}
    with node.graph.inserting_before(node):
        said = node.graph.call_function(REWRITTEN, (grad, mark.mask, mark.stock or None), options)
    said.meta = {key: value for key, value in grad.meta.items() if key != MARK}
    node.update_arg(FlexArguments._fields.index(name), said)
    node.meta[MARK] = mark


def _module(graph: fx.Graph, name: str, module: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.Node:
    """A module of the graph's, under the name; its nodes have fakes, which Inductor's later passes ask for."""
    root: Any = graph.owning_module
    if not hasattr(root, name):
        fake_mode: Any = inputs[0].fake_mode  # type: ignore[attr-defined]
        FakeTensorProp(module, fake_mode).propagate_dont_convert_inputs(*inputs)
        root.register_module(name, module)
    return graph.get_attr(name)


def _free_name(graph: fx.Graph, prefix: str) -> str:
    """One that no module of the graph's has."""
    number = 0
    while hasattr(graph.owning_module, f"{prefix}_{number}"):
        number += 1
    return f"{prefix}_{number}"
