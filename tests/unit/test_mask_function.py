"""Masks of recorded graphs are read as the functions that they are, and captured where they are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from dash_inductor.decision import Declined
from dash_inductor.rewrite.mask_bounds import require_32_bits
from dash_inductor.rewrite.mask_function import MaskFunction
from dash_inductor.rewrite.mask_reader import read, tell_of_least_rows

BATCH, HEADS, Q_LEN, KV_LEN = 2, 3, 9, 9
CPU = torch.device("cpu")
Mask = Callable[..., Tensor]

M, N = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None]
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0]])
STARTS = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0]])


def recorded(mask: Mask, *inputs: Tensor) -> tuple[fx.GraphModule, fx.Node]:
    """The graph that makes a mask, by Inductor's decompositions, and the node of it."""
    module = make_fx(mask, tracing_mode="fake", decomposition_table=select_decomp_table())(*inputs)
    return module, next(node for node in module.graph.nodes if node.op == "output").args[0]


def read_mask(mask: Mask, *inputs: Tensor, causal: bool = False) -> MaskFunction:
    """Of a mask that adds nothing to scores."""
    function, scores = read(recorded(mask, *inputs)[1], CPU, causal=causal)
    assert scores is None
    return function


class _Values(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def run_node(self, node: fx.Node) -> Any:
        self.values = getattr(self, "values", {})
        self.values[node] = super().run_node(node)
        return self.values[node]


class _InRange(fx.Interpreter):
    """Runs a function as a kernel does, which reads whatever memory an index names: there must be an element."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.index.Tensor:
            for size, at in zip(args[0].shape, args[1], strict=True):
                assert bool(((at >= 0) & (at < size)).all())
        return super().call_function(target, args, kwargs)


def as_function(mask: Mask, *inputs: Tensor, causal: bool = False) -> Tensor:
    """bool [B, H, S_q, S_k]: what the function that was read says of every element, given the values of its captures."""
    module, node = recorded(mask, *inputs)
    function, scores = read(node, CPU, causal=causal)
    assert scores is None
    run = _Values(module)
    run.run(*inputs)
    captures = [run.values[capture] for capture in function.captures]
    grid = torch.meshgrid(*(torch.arange(size) for size in (BATCH, HEADS, Q_LEN, KV_LEN)), indexing="ij")
    visible = torch.as_tensor(_InRange(function.module).run(*grid, *captures))
    return visible.bool().expand(BATCH, HEADS, Q_LEN, KV_LEN)


def as_tensor(mask: Mask, *inputs: Tensor) -> Tensor:
    """bool [B, H, S_q, S_k]: the mask itself."""
    value = mask(*inputs)
    return (value if value.dtype == torch.bool else value == 0).expand(BATCH, HEADS, Q_LEN, KV_LEN)


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None]


def causal() -> Tensor:
    m, n = positions()
    return n <= m


def window() -> Tensor:
    m, n = positions()
    return (n <= m) & (n > m - 3)


def padded(padding: Tensor) -> Tensor:
    return causal()[None, None] & padding.bool()[:, None, None, :]


def gathered(padding: Tensor) -> Tensor:
    """As transformers asks: each index a tensor of four dimensions."""
    batch, n = torch.arange(BATCH)[:, None, None, None], torch.arange(KV_LEN)[None, None, None]
    return padding.bool()[batch, n] & causal()


def documents(starts: Tensor) -> Tensor:
    ids = starts.cumsum(1)
    return causal() & (ids[:, None, :, None] == ids[:, None, None, :])


def additive(padding: Tensor) -> Tensor:
    """Two masks of floats, one upon the other."""
    above = torch.full((Q_LEN, KV_LEN), -float("inf")).triu(1)
    return above + torch.where(padding[:, None, None, :] > 0, 0.0, -float("inf"))


def selected(padding: Tensor) -> Tensor:
    """Causal for the odd heads, and within the padding for the even ones."""
    odd = (torch.arange(HEADS) % 2 == 1)[:, None, None]
    return torch.where(odd, causal(), padding.bool()[:, None, None, :])


def least(padding: Tensor) -> Tensor:
    """Of T5, where the bias is no parameter: the least number hides, and twice that is -inf."""
    bias = torch.zeros(1, HEADS, Q_LEN, KV_LEN)
    padded_bias = torch.where(padding.bool()[:, None, None, :], bias, torch.finfo().min)
    return torch.where(causal(), 0.0, torch.finfo(torch.bfloat16).min) + padded_bias


def masked_fill(padding: Tensor) -> Tensor:
    return torch.zeros(BATCH, 1, Q_LEN, KV_LEN).masked_fill(~padded(padding), -float("inf"))


def distances() -> Tensor:
    m, n = positions()
    return (m - n).abs() <= 2


def grid_of_pictures() -> Tensor:
    m, n = positions()
    return (m // 3 == n // 3) | (m % 3 == n % 3)


def by_query(padding: Tensor) -> Tensor:
    return (padding.bool()[:, :, None] & padding.bool()[:, None, :])[:, None]


def transposed() -> Tensor:
    return causal().mT.mT.contiguous()


def sliced() -> Tensor:
    longer = torch.arange(KV_LEN + 4)
    return (longer[None, :] <= longer[:, None])[2 : Q_LEN + 2, 2 : KV_LEN + 2]


def sliced_apart() -> Tensor:
    """By another start in each dimension: from a longer causal mask, one that begins earlier."""
    longer = torch.arange(KV_LEN + 4)
    return (longer[None, :] <= longer[:, None])[3 : Q_LEN + 3, 1 : KV_LEN + 1]


def cut_off() -> Tensor:
    """Padded to a multiple of 16, and cut again, as SDPA aligns a mask."""
    bias = torch.where(causal(), 0.0, -float("inf"))
    return torch.nn.functional.pad(bias, (0, 7))[:, :KV_LEN]


def from_the_end(distance: Tensor) -> Tensor:
    """Of a small tensor that is indexed from its end, by negative distances."""
    m, n = positions()
    return distance[n - m].bool() & distance[torch.tensor([-1])].bool()


def not_both() -> Tensor:
    """A product of booleans, negated: as integers -1 and -2 would both be true."""
    m, n = positions()
    return ~((n > m) * (n > 2))


def twice() -> Tensor:
    """0 + 2m, which is not m."""
    m, n = positions()
    return torch.add(torch.zeros_like(m), m, alpha=2) >= n + 3


def in_32_bits() -> Tensor:
    """A product that wraps in the graph wraps in the function."""
    m, n = (x.int() for x in positions())
    return m * 60000000 * 60 >= n


def everything() -> Tensor:
    return torch.ones(Q_LEN, KV_LEN, dtype=torch.bool)


def nothing() -> Tensor:
    return torch.zeros(Q_LEN, KV_LEN, dtype=torch.bool)


def table(distance: Tensor) -> Tensor:
    """What a small tensor says of each distance."""
    m, n = positions()
    return distance[m - n + KV_LEN].bool()


READABLE: list[tuple[Mask, tuple[Tensor, ...], int]] = [  # how many tensors it captures
    (causal, (), 0),
    (window, (), 0),
    (padded, (PADDING,), 1),
    (gathered, (PADDING,), 1),
    (documents, (STARTS,), 1),
    (additive, (PADDING,), 1),
    (selected, (PADDING,), 1),
    (masked_fill, (PADDING,), 1),
    (least, (PADDING,), 1),
    (distances, (), 0),
    (grid_of_pictures, (), 0),
    (by_query, (PADDING,), 2),
    (transposed, (), 0),
    (sliced, (), 0),
    (sliced_apart, (), 0),
    (cut_off, (), 0),
    (everything, (), 0),
    (nothing, (), 0),
    (table, (torch.arange(2 * KV_LEN) % 3,), 1),
    (from_the_end, (torch.arange(2 * KV_LEN) % 3,), 2),
    (not_both, (), 0),
    (twice, (), 0),
    (in_32_bits, (), 0),
    (lambda padding: padding.bool()[:, None, None, :], (PADDING,), 1),
    (lambda ids: ids[:, None, :, None] == ids[:, None, None, :], (STARTS.float(),), 1),
]


@pytest.mark.parametrize(("mask", "inputs", "captures"), READABLE, ids=[mask.__name__ for mask, *_ in READABLE])
def test_the_function_says_what_the_mask_does(mask, inputs, captures):
    assert torch.equal(as_function(mask, *inputs), as_tensor(mask, *inputs))
    function = read_mask(mask, *inputs)
    assert len(function.captures) == captures
    assert all(capture.meta["val"].numel() <= 2 * BATCH * KV_LEN for capture in function.captures)


def test_is_causal_hides_more():
    seen = as_function(lambda padding: padding.bool()[:, None, None, :], PADDING, causal=True)
    assert torch.equal(seen, as_tensor(padded, PADDING))


def test_what_it_differs_by():
    """The matrix of blocks has as many batch elements and heads."""

    def differs(mask: Mask, *inputs: Tensor) -> tuple[bool, bool]:
        b, h, *_ = read_mask(mask, *inputs).module.graph.nodes
        return bool(b.users), bool(h.users)

    assert [differs(causal), differs(padded, PADDING), differs(selected, PADDING)] == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("mask", "inputs", "q_len", "kv_len", "expected"),
    [
        (causal, (), Q_LEN, KV_LEN, "causal"),
        (transposed, (), Q_LEN, KV_LEN, "causal"),
        (sliced, (), Q_LEN, KV_LEN, "causal"),
        (cut_off, (), Q_LEN, KV_LEN, "causal"),
        (everything, (), Q_LEN, KV_LEN, "full"),
        (lambda: positions()[0] >= positions()[1] - 100, (), Q_LEN, KV_LEN, "full"),
        (lambda: positions()[0] >= positions()[1] + 1, (), Q_LEN, KV_LEN, None),
        (window, (), Q_LEN, KV_LEN, None),
        (window, (), 3, 3, "causal"),  # within the window
        (nothing, (), Q_LEN, KV_LEN, None),
        (padded, (PADDING,), Q_LEN, KV_LEN, None),
        (selected, (PADDING,), Q_LEN, KV_LEN, None),
        (lambda: torch.full((Q_LEN, KV_LEN), -float("inf")).triu(1), (), Q_LEN, KV_LEN, "causal"),
        (lambda: torch.full((Q_LEN, KV_LEN), -float("inf")).triu(2), (), Q_LEN, KV_LEN, None),
    ],
)
def test_what_has_a_closed_form(mask, inputs, q_len, kv_len, expected):
    assert read_mask(mask, *inputs).kind(q_len, kv_len) == expected


def test_constants_behind_a_mask():
    """One document, told by positions that the graph makes: causal. Two: not."""

    def one_after(jump: int) -> Mask:
        def mask() -> Tensor:
            positions = torch.arange(KV_LEN).expand(BATCH, KV_LEN)
            ids = positions.diff(prepend=positions[:, :1] - 1).ne(1 + jump).cumsum(1)
            return causal() & (ids[:, None, :, None] == ids[:, None, None, :])

        return mask

    assert read_mask(one_after(0)).kind(Q_LEN, KV_LEN) == "causal"
    assert read_mask(one_after(1)).kind(Q_LEN, KV_LEN) is None


def test_what_is_the_same_for_the_whole_batch():
    """Positions that are expanded to it, as transformers does, differ between no two elements of it."""

    def of_documents(later: int) -> MaskFunction:
        def mask() -> Tensor:
            batch = torch.arange(BATCH)[:, None, None, None]
            ids = (torch.arange(KV_LEN) // 5).expand(BATCH, KV_LEN) * (torch.arange(BATCH)[:, None] * later + 1)
            ids = ids.cumsum(1)
            m, n = positions()
            return causal() & (ids[batch, m] == ids[batch, n])

        assert torch.equal(as_function(mask), as_tensor(mask))
        return read_mask(mask)

    assert [bool(next(iter(of_documents(later).module.graph.nodes)).users) for later in (0, 1)] == [False, True]


def test_causal_is_seen_without_lengths():
    """Lengths known at run time only: by the function's own text."""
    assert read_mask(causal).kind("s0", "s0") == "causal"
    assert read_mask(window).kind("s0", "s0") is None
    m, n = 0, 1
    assert read_mask(lambda: positions()[m] >= positions()[n]).kind("s0", "s0") == "causal"
    assert read_mask(lambda: positions()[n] >= positions()[m]).kind("s0", "s0") is None, "it looks ahead"


S_BY_S = torch.arange(Q_LEN * KV_LEN).view(Q_LEN, KV_LEN) % 7 - 3.0
WHOLE: list[tuple[Mask, tuple[Tensor, ...], list[int]]] = [  # dimensions of what is captured
    (lambda mask: mask, (S_BY_S > 0,), [2]),
    (lambda mask: ~mask & causal(), (S_BY_S > 0,), [2]),
    (lambda mask: mask[None, None].expand(BATCH, HEADS, Q_LEN, KV_LEN), (S_BY_S > 0,), [2]),
    (lambda bias: bias > 0, (S_BY_S,), [2]),
    (lambda x: (x @ x.mT) > 0, (S_BY_S,), [2]),
    (lambda x: ((x @ x.mT) > 0) & causal(), (S_BY_S,), [2]),
    (lambda x: (x.view(3, 3, KV_LEN) + 1).view(Q_LEN, KV_LEN) > 0, (S_BY_S,), [2]),
    (lambda: (positions()[0] * 0.1) > positions()[1], (), [2]),
    (lambda: positions()[0] * 2**30 > positions()[1], (), [2]),
    (lambda: positions()[0].to(torch.uint8) + 250 > positions()[1], (), [2]),
    (lambda length: positions()[1] < length.item(), (torch.tensor(5),), [2]),
]


@pytest.mark.parametrize(("mask", "inputs", "dims"), WHOLE)
def test_what_is_no_function_is_captured(mask, inputs, dims):
    """Whole where it varies with query and key: what the graph is given, or else the mask itself."""
    assert torch.equal(as_function(mask, *inputs), as_tensor(mask, *inputs))
    captures = read_mask(mask, *inputs).captures
    assert [capture.meta["val"].dim() for capture in captures] == dims
    computed = [capture.meta["val"] for capture in captures if capture.op != "placeholder"]
    assert all(x.dtype == torch.bool for x in computed if x.numel() >= Q_LEN * KV_LEN)


LOW = torch.finfo().min
BIASES: list[tuple[Mask, tuple[Tensor, ...], int, int]] = [  # how many tensors the mask captures, and the score function
    (lambda bias: bias, (S_BY_S,), 1, 1),
    (lambda bias: bias.masked_fill(bias > 1, -float("inf")), (S_BY_S,), 1, 1),
    (lambda bias: bias + torch.where(causal(), 0.0, -float("inf")), (S_BY_S,), 1, 1),
    (lambda bias: bias[None, :].expand(Q_LEN, KV_LEN), (S_BY_S[0],), 1, 1),
    (lambda bias: bias * 0.3, (S_BY_S,), 1, 1),
    (lambda bias: torch.where(causal(), bias * 0.3, LOW), (S_BY_S,), 1, 1),
    (lambda bias: torch.where(bias > 0, bias[0], LOW), (S_BY_S,), 1, 1),
    (lambda padding: ((1.0 - padding) * LOW)[:, None, None, :], (PADDING,), 1, 1),
    (lambda padding: ((1.0 - padding) * -10000.0)[:, None, None, :].expand(-1, HEADS, Q_LEN, -1), (PADDING,), 1, 1),
    (lambda slopes: slopes[:, None, None] * -(positions()[0] - positions()[1]).abs(), (torch.tensor([0.5, 0.25, 0.1]),), 1, 1),
    (lambda: torch.where(causal(), 0.0, -1e9), (), 0, 0),
    (lambda padding: torch.where(padding[:, None, None, :] > 0, 0.0, torch.finfo(torch.float16).min), (PADDING,), 0, 1),
    (lambda: torch.where(causal(), 0.5, LOW), (), 0, 0),
    (lambda: torch.full((Q_LEN, KV_LEN), 0.1, dtype=torch.bfloat16) + 0, (), 0, 0),
    (lambda bias: torch.where(causal(), bias, 0.1).bfloat16(), (S_BY_S / 3,), 1, 1),
    (lambda bias: torch.where(causal(), bias.bfloat16(), 0.1).float(), (S_BY_S / 3,), 1, 1),
    (lambda bias: bias + bias, (S_BY_S,), 1, 1),
    (lambda distance: torch.where(causal(), 0.0, LOW) + distance, (S_BY_S.long(),), 1, 1),
    (lambda bias, factor: bias + factor.item(), (S_BY_S, torch.tensor(0.5)), 1, 1),
    (lambda: (positions()[1] - positions()[0]).float(), (), 1, 1),
]


@pytest.mark.parametrize(("mask", "inputs", "of_mask", "of_scores"), BIASES)
def test_biases(mask, inputs, of_mask, of_scores):
    """What is neither 0 nor hides is added to the score, in the value that the graph has."""
    module, node = recorded(mask, *inputs)
    visible, scores = read(node, CPU)
    run = _Values(module)
    run.run(*inputs)
    assert scores and (len(visible.captures), len(scores.captures)) == (of_mask, of_scores)
    grid = torch.meshgrid(*(torch.arange(size) for size in (BATCH, HEADS, Q_LEN, KV_LEN)), indexing="ij")
    score = torch.full(grid[0].shape, 2.0)
    seen = torch.as_tensor(_InRange(visible.module).run(*grid, *(run.values[x] for x in visible.captures)))
    made = _InRange(scores.module).run(score, *grid, *(run.values[x] for x in scores.captures))
    added = mask(*inputs).float().expand(score.shape)
    assert torch.equal(seen.expand(score.shape), added > LOW / 4)
    assert torch.equal(made.where(seen, 0), (2.0 + added).where(seen, 0))
    grad, *others = scores.derivative(score, *grid, score * 3, *scores.captures)
    assert torch.equal(grad, score * 3) and others == [None] * (4 + of_scores)


def test_a_nan_is_seen():
    """And comes into the gradients, as it does of stock."""
    function, scores = read(recorded(lambda bias: bias, S_BY_S)[1], CPU)
    nan = torch.full_like(S_BY_S, float("nan"))
    m, n = positions()
    assert scores and function.module(0, 0, m, n, nan).all()


def test_a_mask_elsewhere():
    with pytest.raises(Declined, match="the mask is on cpu, and the attention on meta"):
        read(recorded(lambda bias: bias, S_BY_S)[1], torch.device("meta"))


def test_long_addresses():
    """Of an element past 2**31 the address does not fit positions' 32 bits."""
    counts = []
    for rows in (2**15, 2**16):
        function, _ = read(
            recorded(lambda mask: mask, torch.empty(rows, 2**15, dtype=torch.bool, device="meta"))[1], torch.device("meta")
        )
        counts.append(str(function.module.graph).count("torch.int64"))
    assert counts == [0, 2]


def test_a_negative_index_counts_from_the_end():
    """Of positions themselves that is not followed: they are captured, as the small tensor that they are."""

    def mask() -> Tensor:
        m, n = positions()
        return torch.arange(KV_LEN)[n - 4] <= m

    assert torch.equal(as_function(mask), as_tensor(mask))


def test_bits_are_not_truth_values():
    """4 & True is 0, and 4 + False an integer."""

    def mask(padding: Tensor) -> Tensor:
        m, n = positions()
        return (((m * 4) & (m >= 0)) == 0) & ((padding[:, None, None, :].bool() + 0) == (n > 0))

    assert torch.equal(as_function(mask, PADDING), as_tensor(mask, PADDING))


# What random masks are made of: (m, n, padding, ids) -> bool.
numbers = st.integers(-12, 12)
leaves = st.one_of(
    st.tuples(st.just("offset"), st.sampled_from(["le", "lt", "ge", "gt", "eq", "ne"]), numbers),
    st.tuples(st.just("distance"), st.integers(0, 6)),
    st.tuples(st.just("block"), st.integers(1, 5)),
    st.tuples(st.just("rest"), st.integers(1, 5), st.integers(0, 4)),
    st.sampled_from([("padding",), ("by query",), ("document",), ("later document",), ("everything",)]),
)
masks = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or", "xor", "where"]), inner, inner),
        st.tuples(st.sampled_from(["not", "unsqueeze", "clone", "expand", "added"]), inner),
    ),
    max_leaves=6,
)


def built(tree: Any, padding: Tensor, starts: Tensor) -> Tensor:
    """The mask of a tree, a bool tensor that broadcasts to [B, H, S_q, S_k]."""
    m, n = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
    ids = starts.cumsum(1)
    kind, *rest = tree
    parts = [built(part, padding, starts) for part in rest if isinstance(part, tuple)]
    if kind == "offset":
        return getattr(torch, rest[0])(m - rest[1], n)
    if kind == "rest":
        return (m + n) % rest[0] <= rest[1]
    if kind in ("and", "or", "xor"):
        return getattr(torch, f"bitwise_{kind}")(*parts)
    simple: dict[str, Callable[[], Tensor]] = {
        "distance": lambda: (m - n).abs() <= rest[0],
        "block": lambda: m // rest[0] >= n // rest[0],
        "padding": lambda: padding.bool()[:, None, None, :],
        "by query": lambda: padding[:, None, :, None] > 0,
        "document": lambda: ids[:, None, :, None] == ids[:, None, None, :],
        "later document": lambda: ids[:, None, :, None] >= ids[:, None, None],
        "everything": lambda: torch.ones(Q_LEN, KV_LEN, dtype=torch.bool),
        "where": lambda: torch.where(n > 3, *parts),
        "not": lambda: parts[0].logical_not(),
        "unsqueeze": lambda: parts[0] if parts[0].dim() > 3 else parts[0].unsqueeze(0),
        "clone": lambda: parts[0].contiguous().clone(),
        "expand": lambda: parts[0].expand(BATCH, HEADS, Q_LEN, KV_LEN),
        "added": lambda: torch.where(parts[0], 0.0, -float("inf")).add(torch.zeros(1)) == 0,
    }
    return simple[kind]()


@given(masks, st.booleans(), st.booleans())
def test_random_masks(tree, floats, causal_too):
    """Every one is read, and right."""

    def mask(padding: Tensor, starts: Tensor) -> Tensor:
        visible = built(tree, padding, starts)
        return torch.where(visible, 0.0, -float("inf")) if floats else visible

    actual = as_function(mask, PADDING, STARTS, causal=causal_too)
    expected = as_tensor(mask, PADDING, STARTS)
    assert torch.equal(actual, expected & (M >= N) if causal_too else expected)
    kind = read_mask(mask, PADDING, STARTS, causal=causal_too).kind(Q_LEN, KV_LEN)
    assert kind is None or torch.equal(actual, ((M >= N) if kind == "causal" else M >= 0).expand_as(actual))


def test_behind_a_long_graph():
    """A mask of what a deep model computes: small, and captured."""

    def mask(x: Tensor) -> Tensor:
        for _ in range(1500):
            x = x.sin()
        return (x > 0)[:, None, None, :]

    assert len(read_mask(mask, torch.ones(BATCH, KV_LEN)).captures) == 1


def test_of_one_key():
    """Its position is a number, which the op compares with a number."""
    function = read_mask(lambda: (torch.arange(1)[None] == 0) & (torch.arange(Q_LEN)[:, None] >= 0))
    assert function.kind(Q_LEN, 1) == "full"


FITS: list[tuple[Mask, tuple[Tensor, ...]]] = [
    *((mask, inputs) for mask, inputs, _ in READABLE if mask is not in_32_bits),
    (lambda: (positions()[0] // 128) * 128 + 200_000_000 <= positions()[1] * 10, ()),
    (lambda ids: (ids * 2**40)[:, :, None] == ids[:, None], (STARTS,)),  # what is loaded is computed with in its own dtype
    (lambda: positions()[0] < 2**40, ()),
    (lambda: positions()[0].float() * 2.0**40 < positions()[1], ()),
]


def test_what_fits_32_bits():
    for mask, inputs in FITS:
        require_32_bits(recorded(mask, *inputs)[1])


def test_of_any_length():
    """Its positions are less than those of the longest attention that is rewritten."""

    def node(make: Mask) -> fx.Node:
        module = make_fx(
            lambda x: make(torch.arange(x.shape[0])), tracing_mode="symbolic", decomposition_table=select_decomp_table()
        )
        return next(node for node in module(M[:, 0]).graph.nodes if node.op == "output").args[0]

    require_32_bits(node(lambda m: (m // 128) * 128 + 1000 > m % 100 - m * 50))
    with pytest.raises(Declined, match=f"integers up to {(2**23 - 1) * 2**23} of positions"):
        require_32_bits(node(lambda m: m * m.shape[0] < 5))


WRAPS: list[tuple[Mask, int]] = [
    (lambda: ((positions()[0] * 600_000_000) // 7 - positions()[1] * 10) % 5 < 3, 4_800_000_000),
    (in_32_bits, 28_800_000_000),
    (lambda: (positions()[0] * 2**30).float() > positions()[1], 2**33),
    (lambda: torch.where(positions()[0] * 2**28 + (2**31 - 1) > positions()[1], 0.0, -float("inf")), 2**31),
    (lambda: torch.add(positions()[0], positions()[1], alpha=2**28) > 5, 2**31 + 8),
    (lambda: (torch.arange(KV_LEN) * 2**29)[torch.arange(KV_LEN)[None, :].expand(Q_LEN, -1)] > 0, 2**32),
]


@pytest.mark.parametrize(("mask", "most"), WRAPS)
def test_what_may_not_fit_32_bits(mask, most):
    """Inductor computes it as an index, and wraps: the forward has another mask than eager."""
    with pytest.raises(Declined, match=f"the mask makes integers up to {most} of positions"):
        require_32_bits(recorded(mask)[1])


def test_rows_of_least_numbers_are_told_once(caplog):
    """Where a mask of floats is in memory; what is computed of positions is known."""
    tell_of_least_rows.cache_clear()
    caplog.set_level("INFO", "dash_inductor")
    for mask, inputs, *_ in (BIASES[12], BIASES[0], BIASES[1]):
        told = len(caplog.records)
        read(recorded(mask, *inputs)[1], CPU)
        assert len(caplog.records) == (told if mask is not BIASES[0][0] else 1)


@pytest.mark.parametrize(("backend", "times"), [(SDPBackend.FLASH_ATTENTION, Q_LEN), (SDPBackend.MATH, 1)])
def test_what_stock_makes_of_a_row_of_least_numbers(backend, times):
    """The forward averages the values; the gradient is that of the average, or as many times as large."""
    query, key, value = (
        torch.randn(1, 1, Q_LEN, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)
    )
    bias = torch.zeros(Q_LEN, Q_LEN)
    bias[2] = LOW
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    torch.testing.assert_close(out[..., 2, :], value.mean(2))
    (actual,) = torch.autograd.grad(out[..., 2, :].sum(), value)
    torch.testing.assert_close(actual, torch.full_like(actual, times / Q_LEN))
