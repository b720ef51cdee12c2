"""Graphs that write to what their attentions read: gradients are those of what the forward saw, rewritten or not.

An example is a training step of several attentions, each of which reads an input that the step writes to: before it, after it, or
both. It is compared with eager training in float64, in which torch keeps what is written to. HYPOTHESIS_PROFILE=nightly tries 520
attentions, all else 60.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import FP32_ERROR, error
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from tensors import normal
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from dash_inductor import clear_decisions, decisions, emulation
from dash_inductor.op import KEEP
from dash_inductor.rewrite.kept import COMPUTED_AGAIN

pytestmark = pytest.mark.usefixtures("rewriting")

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
ATTENTIONS = 4  # of an example
EXAMPLES = 130 if NIGHTLY else 10
B, H, S, D = 2, 2, 40, 16
SEES_ITSELF = torch.eye(S, dtype=torch.bool)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def far() -> Tensor:
    return torch.arange(S)[:, None] - torch.arange(S)


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return sdpa(q, k, v, ids[:, None, :, None] == ids[:, None, None])


def made_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    return documents(q, k, v, (starts == 1).cumsum(1))


def flat_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return documents(q, k, v, ids.view(B, S))


def by_batch(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return documents(q, k, v, ids * torch.arange(2, B + 2)[:, None])


def window(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    return sdpa(q, k, v, (far() >= 0) & (far() < length))


def padding(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    return sdpa(q, k, v, (tokens != 0)[:, None, None] | SEES_ITSELF)


def given_bool(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, mask | SEES_ITSELF)


def given_float(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return sdpa(q, k, v, bias.to(q.dtype))


def computed_float(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return sdpa(q, k, v, (bias.to(q.dtype).sin() @ bias.to(q.dtype).cos()) / S)


def by_distance(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return sdpa(q, k, v, table.to(q.dtype)[far() + S])


def three_dimensions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(*(x.flatten(0, 1) for x in (q, k, v)), mask | SEES_ITSELF).unflatten(0, (B, H))


def five_dimensions(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return sdpa(*(x[None] for x in (q, k, v)), bias.to(q.dtype)[None, None, None])[0]


def learnt(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """A mask that has a gradient, and is made of what is written to."""
    return sdpa(q, k, v, q.square().mean((1, 2, 3), keepdim=True) * factor.to(q.dtype))


def keys(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Repeated for the query heads, which our backward does without."""
    return sdpa(q, *(y.to(q.dtype).repeat_interleave(H, 1) for y in (x, x.sin())), far() >= 0)


def grouped(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return sdpa(q, x.to(q.dtype), v[:, :1], is_causal=True, enable_gqa=True)


def mask_mod(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    def same(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (ids[b, m] == ids[b, n]) | (m == n)

    return flex_attention(q, k, v, block_mask=create_block_mask(same, B, None, S, S, device="cpu", BLOCK_SIZE=64))


def score_mod(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + bias[m, n])


def sink(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
    """One more key of zeros, whose score is the sink's."""
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    bias = torch.cat([q.new_zeros(H, S, S), logits.to(q.dtype)[:, None, None].expand(H, S, 1)], -1)
    return sdpa(q, k, v, bias[None])


def packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return varlen_attn(q, k, v, offsets, offsets, S, S).unflatten(0, (B, S)).transpose(1, 2)


# What eager training on a CPU does not know, written otherwise.
def of_packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
    ids = torch.bucketize(torch.arange(B * S), offsets[1:], right=True)
    return sdpa(q, k, v, ids[:, None] == ids).unflatten(1, (B, S)).transpose(0, 1)


def of_mask_mod(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return sdpa(q, k, v, (ids[:, None, :, None] == ids[:, None, None]) | SEES_ITSELF)


def integers(most: int, *shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """What is read, and what is written to it."""
    return lambda: tuple(torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))


def numbers(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (normal(*shape, seed=3), normal(*shape, seed=4))


def cuts(first: int, second: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: tuple(torch.tensor([0, cut, B * S], dtype=torch.int32) for cut in (first, second))


def bools() -> tuple[Tensor, Tensor]:
    read, written = integers(2, S, S)()
    return read.bool(), written.bool()


# By attention: what it reads, what is written there, and how eager training has it.
KINDS: dict[Callable[..., Tensor], tuple[Callable[[], tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {
    documents: (integers(3, B, S), documents),
    made_documents: (integers(8, B, S), made_documents),
    flat_documents: (integers(3, B * S), flat_documents),
    by_batch: (integers(3, 1, S), by_batch),
    window: (lambda: (torch.tensor(7), torch.tensor(20)), window),
    padding: (integers(3, B, S), padding),
    given_bool: (bools, given_bool),
    computed_float: (numbers(S, S), computed_float),
    by_distance: (numbers(2 * S + 1), by_distance),
    three_dimensions: (bools, three_dimensions),
    five_dimensions: (numbers(S, S), five_dimensions),
    keys: (numbers(B, 1, S, D), keys),
    sink: (numbers(H), sink),
    given_float: (numbers(S, S), given_float),
    learnt: (numbers(S, S), learnt),
    grouped: (numbers(B, 1, S, D), grouped),
    mask_mod: (integers(3, B, S), of_mask_mod),
    score_mod: (numbers(S, S), given_float),
    packed: (cuts(11, 29), of_packed),
}
# These read it in the stock backward too, so that torch refuses later writes.
SAVED_BY_STOCK = (given_float, learnt, grouped, mask_mod, score_mod, packed)


@torch.library.custom_op("dash_tests::refill", mutates_args=("x",))
def refill(x: Tensor, values: Tensor) -> None:
    x.copy_(values)


refill.register_fake(lambda x, values: None)


def in_part(x: Tensor, values: Tensor) -> None:
    x.view(-1)[: x.numel() // 2 + 1].copy_(values.reshape(-1)[: x.numel() // 2 + 1])


def without_gradient(x: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        x.copy_(values)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda x, values: x.copy_(values),
    "masked_fill_": lambda x, values: x.masked_fill_(values != x, values.flatten()[0]),
    "an op of a package": refill,
    "copy_ of a view": in_part,
    "copy_ without a gradient": without_gradient,
}
WHEN = ("before", "after", "around", "between")  # the attention; between forward and backward, outside of the graph


@dataclass(frozen=True)
class Attention:
    """One of a step: how and when what it reads is written to. made: what it reads has a gradient, and was computed."""

    attend: Callable[..., Tensor]
    write: str
    when: str
    made: bool

    def __str__(self) -> str:
        return f"{self.attend.__name__}, written by {self.write} {self.when}{', made' * self.made}"

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Leaves: query, key, value, and what is read; what is written to it, and then."""
        read, values = KINDS[self.attend][0]()
        q, k, v = (normal(B, H, S, D, seed=seed).to(dtype).requires_grad_() for seed in range(3))
        read = read.to(dtype).requires_grad_(self.made) if read.is_floating_point() else read.clone()
        return q, k, v, read, values.to(read.dtype), read.detach().clone()

    def run(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        """In a graph."""
        read, values, again = others
        if self.when in ("before", "around"):
            WRITES[self.write](read, values)
        out = attend(q, k, v, read)
        if self.when in ("after", "around"):
            WRITES[self.write](read, values if self.when == "after" else again)
        return out


def attentions() -> st.SearchStrategy[Attention]:
    def allowed(a: Attention) -> bool:
        has_gradient = KINDS[a.attend][0]()[0].is_floating_point() and a.when != "between"
        is_saved = a.attend in SAVED_BY_STOCK or (a.made and a.attend in (computed_float, keys))
        return (a.when == "before" or not is_saved) and (has_gradient or not a.made)

    kinds = map(st.sampled_from, ([*KINDS], [*WRITES], WHEN, (False, True)))
    return st.builds(Attention, *kinds).filter(allowed)


def train(step: tuple[Attention, ...], dtype: torch.dtype, *, compiled: bool, dynamic: bool = False) -> list[list[Tensor | None]]:
    """The gradients of each attention's leaves."""
    inputs = [a.inputs(dtype) for a in step]
    given = [(q, k, v, read * 1 if a.made else read, *others) for a, (q, k, v, read, *others) in zip(step, inputs, strict=True)]

    def function(*given: tuple[Tensor, ...]) -> list[Tensor]:
        ways = [a.attend if compiled else KINDS[a.attend][1] for a in step]
        return [a.run(way, *x) for a, way, x in zip(step, ways, given, strict=True)]

    outs = (torch.compile(function, fullgraph=True, dynamic=dynamic) if compiled else function)(*given)
    for a, (_, _, _, read, values, _) in zip(step, given, strict=True):
        if a.when == "between":
            WRITES[a.write](read, values)
    leaves = [x for of_one in inputs for x in of_one[:4] if x.requires_grad]
    found = torch.autograd.grad(outs, leaves, [normal(*x.shape, seed=9).to(dtype) for x in outs], allow_unused=True)
    by_leaf = dict(zip(map(id, leaves), found, strict=True))
    return [[by_leaf.get(id(x)) for x in of_one[:4]] for of_one in inputs]


def check(step: tuple[Attention, ...], *, dynamic: bool) -> None:
    """Asserts that all gradients are right, of attentions that are rewritten."""
    torch._dynamo.reset()
    counters.clear()
    clear_decisions()
    with emulation.emulate():
        actual = train(step, torch.float32, compiled=True, dynamic=dynamic)
    with allow_mutation_on_saved_tensors():
        expected = train(step, torch.float64, compiled=False)
    for a, got, right in zip(step, actual, expected, strict=True):
        for name, x, y in zip(("dq", "dk", "dv", "what is written"), got, right, strict=True):
            x, y = (torch.zeros(1) if z is None else z for z in (x, y))
            assert error(x.expand(y.shape) if y.dim() else x, y) < 8 * FP32_ERROR, f"{name} of {a}"
    told = sum(bool(d.reason and d.remedy) for d in decisions())
    assert told <= sum(dynamic and a.attend in (three_dimensions, five_dimensions) for a in step)  # if sizes are symbols
    assert counters["inductor"]["dash_rewritten"] == len(step) - told


TRIED: Counter[str] = Counter()


@given(st.tuples(*[attentions()] * ATTENTIONS), st.booleans())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
def try_all(step: tuple[Attention, ...], dynamic: bool) -> None:
    note(str([*map(str, step)]))
    check(step, dynamic=dynamic)
    TRIED.update(a.when for a in step)


def test_gradients_are_those_of_what_the_forward_saw(record_property: Callable[[str, object], None]) -> None:
    TRIED.clear()
    try_all()
    assert TRIED.total() >= ATTENTIONS * EXAMPLES
    for when, count in TRIED.items():
        record_property(f"attentions written to {when}", count)


def test_what_is_computed_from_what_is_written():
    """It is kept, too, where torch would compute it again in the backward."""
    allowed = ("materialized_backward", "used_far_apart", "long_fusible_chains", "reductions")
    with functorch_config.patch({f"ban_recompute_{name}": False for name in allowed}):
        check((Attention(by_batch, "copy_", "after", made=False),), dynamic=False)


def test_a_view_of_an_input():
    check((Attention(flat_documents, "copy_", "between", made=False),), dynamic=False)


class Counted(torch.nn.Module):
    """Its window grows with each forward; what is far away is what a large buffer says, which nobody writes to."""

    def __init__(self, length: int = S, layers: int = 1) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("window", torch.tensor(7))
        self.register_buffer("far", torch.arange(length)[:, None] - torch.arange(length) % 97)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(self.layers):
            q = sdpa(q, k, v, (self.far >= 0) & (self.far < self.window) | (self.far == 1))
        self.window.add_(8)
        return q


def gradients_of(function: Callable[..., Tensor], *others: Tensor, length: int = S) -> list[Tensor]:
    leaves = [normal(B, H, length, D, seed=seed).requires_grad_() for seed in range(3)]
    return list(torch.autograd.grad(function(*leaves, *others).square().sum(), leaves))


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert max(error(x, y) for x, y in zip(actual, expected, strict=True)) < 8 * FP32_ERROR


@pytest.mark.every_case
@pytest.mark.parametrize("late", [False, True])
def test_a_buffer_that_a_module_counts_up(late):
    """Step by step, in a backward that is compiled when it first runs as well; the second time out of caches."""
    cached = inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True)
    for _ in range(2):
        torch._dynamo.reset()
        model, wanted = Counted(), Counted()
        compiled = torch.compile(model, fullgraph=True)
        with emulation.emulate(), functorch_config.patch(force_non_lazy_backward_lowering=not late), cached[0], cached[1]:
            for _ in range(2):
                assert_same(gradients_of(compiled), gradients_of(wanted))
        assert decisions()[-1].rewritten and model.window == wanted.window == 23


def test_what_is_copied_and_what_is_read_in_place():
    """One copy of the window for all layers; the large buffer is named."""
    joint_graphs: list[torch.fx.Graph] = []
    with inductor_config.patch(joint_custom_post_pass=lambda graph: joint_graphs.append(graph)), emulation.emulate():
        torch.compile(Counted(400, layers=2))(*(normal(1, 1, 400, D).requires_grad_() for _ in range(3)))
    assert sum(node.target is KEEP for node in joint_graphs[0].nodes) == 1
    assert [decision.reads_in_place for decision in decisions()[-2:]] == [("self.far",)] * 2


def read_again(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    out = checkpoint(documents, q, k, v, ids, use_reentrant=False)
    ids.copy_(values)
    return out


def written_before(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    ids.copy_(values)
    return checkpoint(documents, q, k, v, ids, use_reentrant=False)


def test_a_checkpoint_that_computes_a_mask_again():
    """From what was written after it: torch's own gradients are wrong then. From what was written before, they are right."""
    ids, values = KINDS[documents][0]()
    with emulation.emulate():
        gradients_of(torch.compile(read_again, fullgraph=True), ids.clone(), values)
        assert (decisions()[-1].reason or "").startswith("a checkpoint computes it again from ids, to which the graph writes")
        actual = gradients_of(torch.compile(written_before, fullgraph=True), ids.clone(), values)
    assert decisions()[-1].rewritten
    assert_same(actual, gradients_of(documents, values))


@pytest.mark.every_case
@pytest.mark.parametrize("options", [{"activation_memory_budget": 0}, {"aggressive_recomputation": True}])
def test_a_partition_that_computes_much_again(options):
    """Of what is written to an attention is declined then; of what is not, it is not."""
    ids, values = KINDS[documents][0]()
    for when, reason in (("after", COMPUTED_AGAIN[0]), ("between", None)):
        torch._dynamo.reset()
        attention = Attention(documents, "copy_", when, made=False)
        with emulation.emulate(), functorch_config.patch(**options):
            gradients_of(torch.compile(lambda *x, a=attention: a.run(documents, *x, values), fullgraph=True), ids.clone(), values)
        assert decisions()[-1].reason == reason
