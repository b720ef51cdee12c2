"""SDPA under masks of floats that are learnt: the gradient of each element is dS there, which torch sums where it was broadcast."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import assert_right, compiled, error, gradients, in_interleavings, mutate, rewritten
from flex import INTERLEAVINGS
from ordered_sums import Sum, large
from tensors import BF16, FP16, FP32, normal, qkv
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from dash_inductor import decisions, emulation, enabled
from dash_inductor.lowering import sums
from dash_inductor.op import captured
from dash_inductor.rewrite import sdpa

pytestmark = pytest.mark.usefixtures("rewriting")

BATCH, HEADS, Q_LEN, KV_LEN = 2, 2, 40, 75
EFFICIENT = "aten._scaled_dot_product_efficient_attention_backward.default"
STORE = "tl.store(pointers, tl.where(p == 0.0, 0.0, share).to(SHARE.dtype.element_ty), mask=inside)"
Mask = Callable[[Tensor], Tensor]  # of what is learnt


def attend(mask: Mask) -> Callable[..., Tensor]:
    """SDPA of query, key, value and what is learnt."""

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask(bias).to(query.dtype))

    return function


def inputs_of(*shape: int, q_len: int = Q_LEN, head_dim: int = 16, dtype: torch.dtype = FP32) -> tuple[list[Tensor], Tensor]:
    """query, key, value and a bias; the gradient of the output."""
    *tensors, grad_out = (x.to(dtype) for x in qkv(BATCH, HEADS, q_len, KV_LEN, head_dim))
    return [*tensors, normal(*shape, seed=7).to(dtype)], grad_out


def check(mask: Mask, inputs: list[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """The gradients of an attention, which is rewritten: they are right."""
    with emulation.emulate():
        actual = gradients(compiled(attend(mask)), inputs, grad_out)
    assert rewritten() == 1 and decisions()[-1].op == EFFICIENT and decisions()[-1].mask == "block_mask"
    assert_right(actual, attend(mask), inputs, grad_out)
    return actual


def as_it_is(bias: Tensor) -> Tensor:
    return bias


def causal(bias: Tensor) -> Tensor:
    """Of the first queries; a whole block of keys is hidden from all of them."""
    return bias.masked_fill(torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


def by_buckets(table: Tensor) -> Tensor:
    """T5's: a row of the table [buckets, heads] for each distance."""
    distance = (torch.arange(KV_LEN) - torch.arange(Q_LEN)[:, None]).clamp(-8, 7) + 8
    return F.embedding(distance, table).permute(2, 0, 1)[None]


def slopes(of_heads: Tensor) -> Tensor:
    """ALiBi's, learnt."""
    return of_heads[:, None, None] * (torch.arange(KV_LEN) - torch.arange(Q_LEN)[:, None])


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (as_it_is, (Q_LEN, KV_LEN)),
        (as_it_is, (HEADS, Q_LEN, KV_LEN)),
        (as_it_is, (1, HEADS, Q_LEN, KV_LEN)),
        (as_it_is, (BATCH, HEADS, Q_LEN, KV_LEN)),
        (as_it_is, (BATCH, 1, Q_LEN, KV_LEN)),
        (as_it_is, (BATCH, 1, 1, KV_LEN)),
        (as_it_is, (HEADS, 1, KV_LEN)),
        pytest.param(causal, (HEADS, Q_LEN, KV_LEN), marks=pytest.mark.quick),
        (by_buckets, (16, HEADS)),
        (torch.sigmoid, (HEADS, Q_LEN, KV_LEN)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_what_it_is_broadcast_along_and_made_of(mask, shape):
    check(mask, *inputs_of(*shape))


@pytest.mark.parametrize("settings", [{}, {"template": "two_pass"}], ids=["one pass", "two passes"])
def test_keys_that_it_hides_itself(settings):
    """Nobody computes a tile of them: their gradients are zeros that were there before."""
    inputs, grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    inputs[3][..., 20:] = -math.inf
    with enabled(**settings):
        actual = check(as_it_is, inputs, grad_out)
    assert not actual[3][..., 20:].any() and actual[3][..., :20].all()


def test_slopes():
    """A sum of thousands of products that nearly cancel out."""
    inputs, grad_out = inputs_of(HEADS)
    with emulation.emulate():
        *_, actual = gradients(compiled(attend(slopes)), inputs, grad_out)
    *_, expected = gradients(attend(slopes), [x.double() for x in inputs], grad_out.double())
    assert rewritten() == 1 and error(actual, expected) < 1e-4


@pytest.mark.parametrize(("dtype", "allowed"), [(BF16, 2**-5), (FP16, 2**-8)])
def test_half_precision(dtype, allowed):
    inputs, grad_out = inputs_of(1, HEADS, Q_LEN, KV_LEN, dtype=dtype)
    with emulation.emulate():
        actual = gradients(compiled(attend(as_it_is)), inputs, grad_out)
    assert rewritten() == 1
    expected = gradients(attend(as_it_is), [x.double() for x in inputs], grad_out.double())
    assert all(error(a, e) <= allowed for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("settings", [{"guarantee": "device"}, {"guarantee": "batch"}, {"template": "two_pass"}], ids=str)
@pytest.mark.parametrize("warn_only", [False, True], ids=["strict", "warn_only"])
def test_levels_modes_and_templates(settings, warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    with enabled(**settings):
        check(causal, *inputs_of(HEADS, Q_LEN, KV_LEN))


def test_two_passes_of_a_large_head_dim():
    check(causal, *inputs_of(1, HEADS, Q_LEN, KV_LEN, head_dim=160))
    assert decisions()[-1].family == "two_pass"


def test_the_same_bits_in_every_interleaving():
    inputs, grad_out = inputs_of(1, HEADS, Q_LEN, KV_LEN)
    in_interleavings(attend(causal), inputs, grad_out, INTERLEAVINGS)
    assert rewritten() == 1


LARGE = large((BATCH, HEADS, Q_LEN, KV_LEN))
SUMS = {
    "scalar [1]": Sum.of(1, at=lambda b, h, m, n: (0 * n,), kept=()),
    "[S, S]": Sum.of(Q_LEN, KV_LEN, at=lambda b, h, m, n: (m, n), kept=(2, 3)),
    "[H, S, S]": Sum.of(HEADS, Q_LEN, KV_LEN, at=lambda b, h, m, n: (h, m, n), kept=(1, 2, 3)),
    "[1, H, S, S]": Sum.of(1, HEADS, Q_LEN, KV_LEN, at=lambda b, h, m, n: (0 * b, h, m, n), kept=(1, 2, 3)),
    "[B, 1, S, S]": Sum.of(BATCH, 1, Q_LEN, KV_LEN, at=lambda b, h, m, n: (b, 0 * h, m, n), kept=(0, 2, 3)),
    "token [B, 1, 1, S]": Sum.of(BATCH, 1, 1, KV_LEN, at=lambda b, h, m, n: (b, 0 * h, 0 * m, n), kept=(0, 3)),
    "query [H, S, 1]": Sum.of(HEADS, Q_LEN, 1, at=lambda b, h, m, n: (h, m, 0 * n), kept=(1, 2)),
    "slopes [H, 1, 1]": Sum.of(HEADS, 1, 1, at=lambda b, h, m, n: (h, 0 * m, 0 * n), kept=(1,)),
}


def of_large_numbers(query: Tensor, key: Tensor, value: Tensor, of_all: Tensor, bias: Tensor, large: Tensor) -> Tensor:
    """Both are zero, and multiplied by 1e8, 1 or -1e8. The gradient of the first is what the second's is the sum of."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=of_all * large + bias * large)


def in_two_layers(query: Tensor, key: Tensor, value: Tensor, of_all: Tensor, bias: Tensor, large: Tensor) -> Tensor:
    mask = of_all * large + bias * large
    query = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def assert_in_order(function: Callable[..., Tensor], of: Sum, **options: Any) -> None:
    """Bit by bit, in each interleaving. Another order is another sum."""
    inputs, grad_out = inputs_of(*LARGE.shape)
    inputs = [*inputs[:3], torch.zeros_like(inputs[3]), torch.zeros(of.shape), LARGE]
    function = compiled(function, **options)
    for seed, resident in INTERLEAVINGS:
        with emulation.emulate(seed, resident=resident):
            *_, values, actual, _ = gradients(function, inputs, grad_out)
        assert of.is_expected(values, actual)


@pytest.mark.parametrize("name", SUMS)
def test_the_order_of_a_sum(name):
    assert_in_order(of_large_numbers, SUMS[name])
    assert rewritten() == 1


def test_the_order_of_a_sum_of_dynamic_lengths():
    assert_in_order(of_large_numbers, SUMS["token [B, 1, 1, S]"], dynamic=True)
    assert rewritten() == 1


def test_the_order_of_a_sum_of_two_layers():
    assert_in_order(in_two_layers, SUMS["[1, H, S, S]"])
    assert rewritten() == 2


@pytest.mark.every_case
@pytest.mark.parametrize(("dynamic", "splits"), [(False, {-(-BATCH * Q_LEN // 16)}), (True, {32})])
def test_a_sum_has_no_more_splits_than_blocks(monkeypatch, dynamic, splits):
    """Where sizes are known: of the queries of all batch elements, 16 at a time."""
    launched = []
    call = sums.kernels.call

    def recorded(kernel: str, **given: Any) -> Any:
        launched.append(given["constants"].get("SPLITS"))
        return call(kernel, **given)

    monkeypatch.setattr(sums.kernels, "call", recorded)
    inputs, grad_out = inputs_of(1, HEADS, 1, KV_LEN)
    with emulation.emulate():
        gradients(compiled(attend(as_it_is), dynamic=dynamic), inputs, grad_out)
    assert {*launched} - {None} == splits


def test_a_sum_in_float64_stays_torchs():
    """Ours adds in fp32."""
    inputs, grad_out = inputs_of(*LARGE.shape)
    shape = SUMS["token [B, 1, 1, S]"].shape
    inputs = [*inputs[:3], *(x.double() for x in (torch.zeros_like(inputs[3]), torch.zeros(shape), LARGE))]

    def function(query: Tensor, key: Tensor, value: Tensor, of_all: Tensor, bias: Tensor, large: Tensor) -> Tensor:
        mask = of_all * large + bias * large
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))

    with emulation.emulate():
        *_, values, actual, _ = gradients(compiled(function), inputs, grad_out)
    assert rewritten() == 1 and error(actual, values.sum((1, 2), keepdim=True)) < 1e-12


def test_the_order_of_torch_is_seen(monkeypatch):
    monkeypatch.setattr(sdpa, "put_in_order", lambda gradient: [])
    with pytest.raises(AssertionError):
        assert_in_order(of_large_numbers, SUMS["token [B, 1, 1, S]"])


def test_dynamic_lengths():
    with emulation.emulate():
        function = compiled(attend(as_it_is), dynamic=True)
        for length in (40, 33, 70):
            inputs, grad_out = inputs_of(1, HEADS, length, KV_LEN, q_len=length)
            assert_right(gradients(function, inputs, grad_out), attend(as_it_is), inputs, grad_out)
    assert (counters["stats"]["unique_graphs"], rewritten()) == (1, 1)


def test_a_bias_alone_is_learnt():
    """Its gradient is right though nobody wants those of query, key and value."""
    (query, key, value, bias), grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    leaf = bias.requires_grad_()
    with emulation.emulate():
        out = compiled(attend(as_it_is))(query, key, value, leaf)
        (actual,) = torch.autograd.grad(out, leaf, grad_out)
    *_, expected = gradients(attend(as_it_is), [x.double() for x in (query, key, value, bias.detach())], grad_out.double())
    assert rewritten() == 1 and error(actual, expected) < 1e-6


@pytest.mark.parametrize(
    ("name", "change"),
    [("twice", ("share).to(", "2*share).to(")), ("without_a_key", ("mask=inside", "mask=inside & (offs_n[:, None] < KV_LEN - 1)"))],
)
def test_a_kernel_that_stores_something_else_is_seen(name, change, monkeypatch):
    mutate(monkeypatch, "BLOCK_MASK_ONE_PASS", f"learnt_{name}", {STORE: STORE.replace(*change)})
    inputs, grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    with emulation.emulate():
        actual = gradients(compiled(attend(as_it_is)), inputs, grad_out)
    with pytest.raises(AssertionError, match="gradient 3"):
        assert_right(actual, attend(as_it_is), inputs, grad_out)


def test_a_mask_of_too_many_elements(monkeypatch):
    """Its gradient would be one of as many, whatever it is broadcast from."""
    inputs, grad_out = inputs_of(HEADS, Q_LEN, KV_LEN)
    elements = BATCH * HEADS * Q_LEN * KV_LEN
    monkeypatch.setattr(captured, "MOST_ELEMENTS", elements - 1)
    with emulation.emulate():
        actual = gradients(compiled(attend(as_it_is)), inputs, grad_out)
    expected = f"the gradient of what is added to scores takes {elements} elements of memory, more than {elements - 1}"
    assert rewritten() == 0 and decisions()[-1].reason == expected
    assert_right(actual, attend(as_it_is), inputs, grad_out)


class RowAttention(torch.nn.Module):
    """As of structure models: the rows of an alignment [B, rows, S, C] share a bias by pairs of positions, [B, S, S, C]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.bias, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(8, HEADS, bias=False), torch.nn.Linear(32, 32)

    def forward(self, rows: Tensor, pairs: Tensor) -> Tensor:
        query, key, value = self.qkv(rows).unflatten(-1, (3, HEADS, 16)).permute(3, 0, 1, 4, 2, 5)
        bias = self.bias(pairs).permute(0, 3, 1, 2)[:, None]
        with sdpa_kernel(SDPBackend.MATH):  # as torch itself does on a GPU, for five dimensions
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(out.transpose(2, 3).flatten(3)).square().mean()


def sam() -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    """The encoder of images, with relative positions that are added to scores; a window, and all of an image."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "output_channels": 8}
    config = transformers.SamVisionConfig(**sizes, num_hidden_layers=2, global_attn_indexes=[1], window_size=4)
    encoder = transformers.SamVisionModel(config)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, pixels: Tensor) -> Tensor:
            return self.encoder(pixels).last_hidden_state.square().mean()

    with torch.no_grad():
        for index, (name, parameter) in enumerate(encoder.named_parameters()):
            if "rel_pos" in name or "pos_embed" in name:  # which start as zeros
                parameter.copy_(normal(*parameter.shape, seed=index))
    return Loss(), (normal(2, 3, 64, 64),)


def row_attention() -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    return RowAttention(), (normal(1, 3, 40, 32), normal(1, 40, 40, 8, seed=1))


@pytest.mark.parametrize(("made", "attentions"), [(row_attention, 1), pytest.param(sam, 2, marks=pytest.mark.nightly)])
def test_models_train(made, attentions):
    """Every parameter against float64, and in another interleaving; T5, Swin and BEiT are in test_models.py."""
    torch.manual_seed(0)
    model, inputs = made()
    wide = copy.deepcopy(model).double()
    wide(*(x.double() for x in inputs)).backward()
    function, found = compiled(model), []
    for seed in (0, 1):
        model.zero_grad()
        with emulation.emulate(seed):
            function(*inputs).backward()
        found.append([x.grad.clone() for x in model.parameters()])
    assert rewritten() == attentions and all(torch.equal(*pair) for pair in zip(*found, strict=True))
    largest = max(x.grad.abs().max() for x in wide.parameters())
    for actual, (name, parameter) in zip(found[0], wide.named_parameters(), strict=True):
        scale = parameter.grad.abs().max()
        assert (actual - parameter.grad).abs().max() < 1e-5 * (scale if scale > 1e-9 * largest else largest), name
