"""An FX graph as text that is the same in every version of torch; torch's own text, and its symbols, are not."""

from __future__ import annotations

import re
from typing import Any

import torch


def graph_text(graph: torch.fx.Graph) -> str:
    """One line per node, `name: dtype[shape] = op(arguments)`, with symbolic sizes named s0, s1, ... as they appear."""
    symbols: dict[str, str] = {}
    text = "\n".join(_node_text(node) for node in graph.nodes)
    return re.sub(r"\bs\d+\b", lambda symbol: symbols.setdefault(symbol[0], f"s{len(symbols)}"), text)


def _node_text(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    kind = f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    if node.op == "placeholder":
        return f"{node.name}{kind}"
    args = [_argument_text(arg) for arg in node.args]
    args += [f"{name}={_argument_text(arg)}" for name, arg in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(args)}"
    if node.op == "get_attr":
        return f"{node.name}{kind} = {node.target}"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    namespace = getattr(node.target, "namespace", None)
    return f"{node.name}{kind} = {f'{namespace}.' if namespace else ''}{target}({', '.join(args)})"


def _argument_text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_argument_text(item) for item in value)}]"
    return str(value)
