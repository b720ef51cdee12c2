"""A change of a graph that is made whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx

Arguments = dict[fx.Node, tuple[Any, Any]]  # positional and named, of each node of a graph


@contextlib.contextmanager
def whole_or_not_at_all(backward: fx.Node) -> Iterator[Arguments]:
    """After an exception the graph of `backward` is, node by node, the one found. Gives the arguments that its nodes had.

    Inside, nodes may be added, be given other arguments, and those that read `backward` another meta; no node may be erased.
    """
    graph, module = backward.graph, backward.graph.owning_module
    before = {node: (node.args, node.kwargs) for node in graph.nodes}
    metas = {user: {**user.meta} for user in backward.users}
    names = set() if module is None else {name for name, _ in module.named_children()}
    try:
        yield before
    except BaseException:
        for node, (args, kwargs) in before.items():
            if node.args is not args or node.kwargs is not kwargs:
                node.args, node.kwargs = args, kwargs
        for user, meta in metas.items():
            user.meta = meta
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        for name in [] if module is None else [name for name, _ in module.named_children() if name not in names]:
            delattr(module, name)
        raise
