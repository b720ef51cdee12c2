"""The Gluon kernel on a Hopper GPU: right gradients, the same bits launch after launch, nothing left of poisoned memory."""

from collections.abc import Iterator

import pytest
import test_flex_on_gpu as flex
import test_masked_on_gpu as masked
import test_on_gpu as bodies
import test_varlen_on_gpu as varlen
import torch
from sympy import Integer
from test_on_gpu import GRADIENTS, assert_same_bits, error, inputs

import dash_inductor
from dash_inductor.lowering.dq import in_accumulator_order
from dash_inductor.lowering.launch.gluon import sdpa_backward_gluon
from dash_inductor.reference import LOG2E, reference
from dash_inductor.schedule import MONOTONE, Geometry, make_order, pack
from dash_inductor.templates.operands import Operands
from dash_inductor.templates.tiles import gluon_tile


@pytest.fixture(autouse=True)
def by_gluon(rewriting: None) -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90")
    with dash_inductor.enabled(kernel="gluon"):
        yield


# The same as of the Triton kernel, which the fixture replaces.
test_bits_of_the_chained_launch = bodies.test_bits_of_the_chained_launch
test_bits_beside_a_process_that_keeps_the_gpu_busy = bodies.test_bits_beside_a_process_that_keeps_the_gpu_busy
test_padding = masked.test_padding
test_varlen = varlen.test_varlen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", [shape for shape in bodies.SHAPES if shape[5] in (64, 128, 256)], ids=str)
def test_gradients(shape, dtype):
    bodies.test_gradients(shape, dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("family", "causal"),
    [
        *((family, causal) for family in MONOTONE for causal in (False, True)),
        *((family, False) for family in ("shift", "shift_round_robin")),
        *((family, True) for family in ("symmetric", "symmetric_round_robin")),
    ],
)
def test_bits_of_every_family(family, causal, head_dim):
    bodies.test_bits_of_every_family(family, causal, head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_flex_attention(kind, head_dim):
    flex.test_flex_attention(kind, head_dim)


@pytest.mark.parametrize("settings", [{"template": "one_pass"}, {"kernel": "auto"}], ids=["one_pass", "auto"])
def test_dynamic_lengths_have_the_bits_of_static_ones(settings):
    """By default the same graph takes two passes for some lengths."""
    with dash_inductor.enabled(**settings):
        bodies.test_dynamic_lengths_have_the_bits_of_static_ones(settings.get("template", "auto"))


def test_replay_of_a_cuda_graph():
    bodies.test_replay_of_a_cuda_graph("one_pass")


def test_cuda_graphs_of_inductor(monkeypatch):
    bodies.test_cuda_graphs_of_inductor("one_pass", monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("family", "causal", "q_len", "kv_len", "group"),
    [
        ("shift", False, 512, 512, 1),
        ("ascending", False, 130, 777, 2),
        ("descending", True, 475, 475, 2),
        ("symmetric", True, 512, 512, 1),
    ],
)
def test_one_launch_against_the_reference(family, causal, q_len, kv_len, group, head_dim):
    """The kernel alone: tensors that it writes are full of NaN before, and the schedule is the reference's."""
    batch, kv_heads, roles, heads_in_flight = 2, 2, 2, 2
    leaves, grad_out = inputs(batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim)
    query, key, value = (x.detach() for x in leaves)
    shape = gluon_tile(90, "bf16", head_dim)
    place = in_accumulator_order(shape)
    order = torch.tensor([[int(place(Integer(m), Integer(d))[0]) for d in range(head_dim)] for m in range(shape.block_m)])
    mask = "causal" if causal else "full"
    schedule = make_order(family, Geometry(q_len, kv_len, shape.block_m, shape.block_n, mask), roles)
    scale = head_dim**-0.5

    scores = query.float() @ key.float().repeat_interleave(group, 1).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    out = (scores.softmax(-1) @ value.float().repeat_interleave(group, 1)).to(query.dtype)
    logsumexp = scores.logsumexp(-1)
    rows = -(-q_len // shape.block_m) * shape.block_m

    def padded(x, fill):
        return torch.nn.functional.pad(x, (0, rows - q_len), value=fill).contiguous()

    neg_lse = padded(-logsumexp * LOG2E, -torch.inf)
    delta = padded((out.float() * grad_out.float()).sum(-1), 0.0)
    table = torch.tensor(pack(schedule, heads_in_flight), dtype=torch.int32, device=query.device)

    def once():
        dq = torch.full((*query.shape[:2], rows, head_dim), torch.nan, device=query.device)
        dk, dv = torch.full_like(key, torch.nan), torch.full_like(value, torch.nan)
        workers = schedule.roles * heads_in_flight
        tensors = query, key, value, grad_out, neg_lse, delta, table, None, None, None, dq, dk, dv
        numbers = {"block_m": shape.block_m, "block_n": shape.block_n, "causal": causal, "scale": scale}
        sdpa_backward_gluon(*Operands(*tensors, [], [], workers, cooperative=True, **numbers))
        dq = dq.view(*query.shape[:2], -1, shape.block_m * head_dim)[..., order].flatten(2, 3)
        return (dq[:, :, :q_len] * scale).to(query.dtype), dk, dv

    right = reference(grad_out, query, key, value, out, logsumexp, schedule)
    for name, actual, expected in zip(GRADIENTS, once(), right, strict=True):
        assert error(actual, expected.double()) < 2e-2, name
    assert_same_bits(once)
