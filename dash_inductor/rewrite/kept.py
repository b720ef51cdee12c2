"""What the backward of an attention reads of the forward is what the forward saw, whoever writes to it later.

A rewritten attention reads what its stock op did not: what a mask is made of, keys before they were repeated. Where that is an
input of the graph, or can be computed from one again, a write to the input would reach the backward: by the graph itself, whose
writes come at its end, or by the user between forward and backward. So each rewriting is compared with the graph before it, and
what it newly reads is kept by the forward where it has to be.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.partitioners import must_recompute
from torch._inductor import config as inductor_config
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from ..decision import Declined
from ..op import KEEP, MARK
from .nodes import backward_of, call, is_tensor, reached

MOST_COPIED = 2**20  # bytes of inputs that a graph copies for the case that the user writes to them before its backward
UNKNOWN = 2**13  # elements of a tensor whose size is known when it is made
NAME = "dash_name"  # in the meta of an input: what the user calls it
COMPUTED_AGAIN = (
    "its backward reads what depends on an input to which the graph writes, and may have to compute that again",
    "leave out torch._functorch.config.activation_memory_budget and aggressive_recomputation, and "
    "torch._inductor.config.custom_partitioner_fn",
)
DYNAMO = "torch._dynamo.symbolic_convert"
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


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The inputs to which a joint graph writes, or torch does for it when it ends: values, or shapes and strides."""
    written = {base for node in graph.nodes for x in _written_by(node) if (base := base_of(x)).op == "placeholder"}
    (output,) = (node for node in graph.nodes if node.op == "output")
    later = [getattr(_whole(x), "mutated_input", None) for x in output.meta.get("desc") or ()]
    inputs = [node for node in graph.nodes if node.op == "placeholder" and "desc" in node.meta]
    return written | {node for node in inputs if _whole(node.meta["desc"]) in later}


def _whole(described: Any) -> Any:
    """What AOTAutograd says of an input or output; where that is a part of a tensor subclass, of the whole."""
    while hasattr(described, "base"):
        described = described.base
    return described


def _written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors to which a node writes. Of a region, whose graph writes to one of its inputs, all that it is given."""
    found: list[fx.Node] = []
    if isinstance(node.target, HigherOrderOperator):
        modules = [getattr(node.graph.owning_module, str(x.target), None) for x in node.all_input_nodes if x.op == "get_attr"]
        inner = [each for module in modules if isinstance(module, fx.GraphModule) for each in module.graph.nodes]
        if any(base_of(x).op == "placeholder" for each in inner for x in _written_by(each)):
            found += filter(is_tensor, node.all_input_nodes)
    elif isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
        for number, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
                fx.node.map_arg(given, found.append)
    return found


def base_of(x: fx.Node) -> fx.Node:
    """The node of which another one is a view; itself if it is none."""
    return _chain(x)[0]


def _chain(x: fx.Node) -> list[fx.Node]:
    """What a node is a view of, the base first; last the node itself."""
    source = _viewed(x)
    return [x] if source is None else [*_chain(source), x]


def _viewed(x: fx.Node) -> fx.Node | None:
    """The node of which an op of ATen makes a view; None for another op."""
    if not isinstance(x.target, OpOverload) or len(x.target._schema.returns) != 1:
        return None
    returned = x.target._schema.returns[0].alias_info
    is_view = returned is not None and not returned.is_write and not x.kwargs
    return x.args[0] if is_view and isinstance(x.args[0], fx.Node) else None


class Keeper:
    """Lets the rewritings of a joint graph, one after the other, read what the forward saw.

    They read copies of inputs, and values that the forward saves. An input that the graph writes to is never read again. Of others
    that only a rewriting reads, small ones are copied; the names of the rest go into its mark.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._written, self._computes_again = graph, written_inputs(graph), _computes_again(graph)

    def keep(self, before: Arguments, obsolete: Iterable[fx.Node]) -> None:
        """Looks at one rewriting.

        Args:
            before: of the graph without it.
            obsolete: nodes that it leaves to be erased.

        Raises:
            Declined: torch is to compute again what depends on an input that the graph writes to.
        """
        gone, backward = set(obsolete), backward_of(self._graph)
        made = {x for x in self._graph.nodes if x not in gone and not _is_as_before(x, before)}
        # From the backward of the rewriting to where it takes values that the graph had: all that may be computed late.
        late = reached(made & backward, lambda x: (y for y in x.all_input_nodes if y in made - backward and y.target is not KEEP))
        read = {y for x in late for y in x.all_input_nodes if y not in backward and y not in late and y.target is not KEEP}
        in_place: dict[str, None] = {}
        for x in [x for x in self._graph.nodes if x in read and is_tensor(x)]:
            is_written = not self._written.isdisjoint(reached([x], lambda y: y.all_input_nodes))
            if is_written:
                self._require_not_computed_again(x)
            at = self._place(x, {*before} & backward, in_place, is_written=is_written)
            if at is not None:
                kept = _by_way_of(_keep(self._graph, at), x, at)
                for node in late:
                    node.replace_input_with(x, kept)
        for node in made:
            if in_place and MARK in node.meta:
                node.meta[MARK] = replace(node.meta[MARK], reads_in_place=tuple(in_place))

    def _place(self, x: fx.Node, backward: set[fx.Node], in_place: dict[str, None], *, is_written: bool) -> fx.Node | None:
        """What of a node, and what it is a view of, is to be kept; None if it may be read as it is.

        backward: what was in it without the rewriting. in_place: takes the names of inputs that are too large for a copy.
        """
        base = base_of(x)
        if any(user in backward and not _is_ours(user) for view in _views(base) for user in view.users):
            return None  # the stock op reads it as well: torch refuses a write to it
        if is_written:
            return base
        if base.op != "placeholder" or self._computes_again:
            return None
        smallest = min(_chain(x), key=_bytes)
        if _is_kept(smallest) or _bytes(smallest) + sum(_bytes(y) for y in self._graph.nodes if y.target is KEEP) <= MOST_COPIED:
            return smallest
        in_place[base.meta.get(NAME, base.name)] = None
        return None

    def _require_not_computed_again(self, x: fx.Node) -> None:
        """Raises Declined where the backward computes a node from an input that was written to by then."""
        if self._computes_again:
            raise Declined(*COMPUTED_AGAIN)
        again = reached([x], lambda y: y.all_input_nodes if must_recompute(y) else ())
        if must_recompute(x) and (inputs := again & self._written):
            names = ", ".join(sorted(y.meta.get(NAME, y.name) for y in inputs))
            reason = (
                f"a checkpoint computes it again from {names}, to which the graph writes: PyTorch's gradients are wrong there too"
            )
            raise Declined(reason, f"write to {names} outside of the compiled graph, or give the checkpoint a copy")


def _is_as_before(x: fx.Node, before: Arguments) -> bool:
    args, kwargs = before.get(x, (None, None))
    return x.args is args and x.kwargs is kwargs


def _is_ours(x: fx.Node) -> bool:
    """Whether a node stands for another op, of an attention that was rewritten before."""
    return MARK in x.meta and bool(x.meta[MARK].stock)


def _views(base: fx.Node) -> set[fx.Node]:
    """The node, and all views of it."""
    return reached([base], lambda x: (user for user in x.users if _viewed(user) is x))


def _is_kept(x: fx.Node) -> bool:
    return any(user.target is KEEP for user in x.users)


def _keep(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """What keeps a node, for all attentions of the graph."""
    if _is_kept(x):
        return next(user for user in x.users if user.target is KEEP)
    inputs = [y for y in graph.nodes if y.op == "placeholder"]
    with graph.inserting_after(inputs[-1] if x in inputs else x):
        kept = call(graph, KEEP, x)
    kept.meta |= {"recompute": CheckpointPolicy.MUST_SAVE, "partitioner_tag": "must_be_in_forward"}
    return kept


def _by_way_of(kept: fx.Node, x: fx.Node, at: fx.Node) -> fx.Node:
    """`x`, a view of `at`, as a view of the kept one."""
    chain = _chain(x)
    for view in chain[chain.index(at) + 1 :]:
        with kept.graph.inserting_after(view):  # behind the sizes that it takes
            kept = call(kept.graph, view.target, kept, *view.args[1:])  # type: ignore[arg-type]
    return kept


def _bytes(x: fx.Node) -> int:
    """How many a tensor takes; where its shape is symbolic, by the sizes at hand, which decide no bits here."""
    value = x.meta["val"]
    elements = value.numel()
    return (elements if isinstance(elements, int) else int(elements.node.hint or UNKNOWN)) * value.dtype.itemsize


def _computes_again(graph: fx.Graph) -> bool:
    """Whether more is computed again in a backward than torch does by default: to save memory, or where the user splits graphs."""
    budgets = [functorch_config.activation_memory_budget, *(x for x in map(_budget, graph.nodes) if x is not None)]
    return min(budgets) < 1 or functorch_config.aggressive_recomputation or inductor_config.custom_partitioner_fn is not None


def _budget(node: fx.Node) -> float | None:
    """The share of activations that may be saved, where a user has said that of a part of the model."""
    of_region = getattr(partitioners, "_get_memory_budget_annotation", lambda _: None)(node)
    return node.meta.get("memory_budget") if of_region is None else of_region


def note_names(graph: fx.Graph) -> None:
    """Notes on the inputs of a joint graph what the user calls them, as long as Dynamo compiles it: "mask", "self.window"."""
    compiling = getattr(getattr(sys.modules.get(DYNAMO), "tls", None), "current_tx", None)
    if compiling is None:
        return
    given = compiling.output.graph.find_nodes(op="placeholder")
    for node in graph.find_nodes(op="placeholder"):
        described = _whole(node.meta.get("desc"))
        number = getattr(getattr(described, "base_of", described), "idx", None)
        source = getattr(given[number], "_dynamo_source", None) if number is not None and number < len(given) else None
        if source is not None and NAME not in node.meta:
            node.meta[NAME] = _plain(source.name() if callable(source.name) else source.name)


def _plain(name: str) -> str:
    """Dynamo's name of a tensor as the user writes it.

    >>> _plain("L['self']._modules['layers']._modules['0']._buffers['window']"), _plain("G['table']")
    ('self.layers.0.window', 'table')
    """
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r".\1", name))
