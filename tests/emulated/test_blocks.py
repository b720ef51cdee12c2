"""mask="blocks": any set of whole tiles, as a constant of the graph."""

import random

import pytest
import torch
from attention import FP32_ERROR, GRADIENTS, OP, compiled, differing, differing_when_compiled, error
from tensors import BF16, FP32, TILE, exact, qkv
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from dash_inductor import decisions, emulation, enabled
from dash_inductor.emulation import emulate
from dash_inductor.reference import reference
from dash_inductor.schedule import Geometry, make_order

pytestmark = pytest.mark.usefixtures("rewriting")


def rows_of(*rows):
    return [[cell == "x" for cell in row] for row in rows]


DOCUMENTS = rows_of("xx....", "..xxxx", "..xxxx")
HOLES = rows_of("x..x.xx", ".......", "x.xx..x", "..xx.xx")  # KV tile 1, Q tiles 1 and 4
ONE = rows_of("..", ".x")
ALL = rows_of("xxxx", "xxxx", "xxxx")
ALL_BUT_ONE = rows_of("xxxxxx", "xxx.xx", "xxxxxx")


def by_table(rows, **kwargs):
    """The op, with `blocks` made in the function."""
    return lambda *args: OP(*args, mask="blocks", blocks=torch.tensor(rows), **kwargs)


def visible(rows, q_len, kv_len):
    """[S_q, S_k]: which keys each query sees."""
    return torch.tensor(rows).repeat_interleave(TILE.block_n, 0).repeat_interleave(TILE.block_m, 1)[:kv_len, :q_len].T


def autograd(inputs, grad_out, seen):
    """(out, lse, gradients), each row over the keys that it sees; nothing where there are none."""
    query, key, value = (x.detach().requires_grad_() for x in inputs)
    group = query.shape[1] // key.shape[1]
    s = query @ key.repeat_interleave(group, 1).mT * query.shape[3] ** -0.5
    s = s.masked_fill(~seen, -torch.inf)
    lse = s.detach().logsumexp(-1)
    p = torch.where(seen, torch.exp(s - torch.where(lse.isneginf(), 0, lse)[..., None]), 0)
    out = p / p.sum(-1, keepdim=True).clamp(min=1e-30) @ value.repeat_interleave(group, 1)
    return out.detach(), lse, torch.autograd.grad(out, (query, key, value), grad_out)


@pytest.mark.parametrize(
    ("rows", "batch", "heads", "kv_heads", "q_len", "kv_len", "dtype"),
    [
        (DOCUMENTS, 1, 2, 2, 96, 96, FP32),
        (DOCUMENTS, 2, 4, 2, 83, 70, FP32),
        (HOLES, 1, 2, 1, 112, 128, FP32),
        (HOLES, 2, 6, 2, 100, 101, FP32),
        (HOLES, 1, 2, 2, 100, 101, BF16),
        (ONE, 1, 1, 1, 20, 40, FP32),
        (ALL, 1, 2, 2, 64, 96, FP32),
        (rows_of("x"), 1, 2, 2, 9, 20, FP32),  # one element, which Inductor takes out of the constants
    ],
)
def test_gradients(rows, batch, heads, kv_heads, q_len, kv_len, dtype):
    """Against float64; where a Q tile or a KV tile meets nothing, zeros."""
    *inputs, grad_out = qkv(batch, heads, q_len, kv_len, 16, kv_heads=kv_heads, dtype=dtype)
    seen = visible(rows, q_len, kv_len)
    out, lse, expected = autograd([x.double() for x in inputs], grad_out.double(), seen)
    with emulate(seed=q_len):
        actual = compiled(by_table(rows))(grad_out, *inputs, out.to(dtype), lse.float())
    for grad, like, wide in zip(actual, inputs, expected, strict=True):
        assert grad.dtype == dtype and grad.shape == like.shape
        assert error(grad, wide) < (3 * FP32_ERROR if dtype == FP32 else 2e-2)
    dq, dk, dv = actual
    assert not dq[:, :, ~seen.any(1)].any() and not dk[:, :, ~seen.any(0)].any() and not dv[:, :, ~seen.any(0)].any()
    decision = decisions()[-1]
    assert (decision.mask, decision.family) == ("blocks", "searched") and decision.predicted_us is not None


@pytest.mark.parametrize(
    ("settings", "rows", "family"),
    [
        ({}, HOLES, "searched"),
        ({"schedule": "searched"}, ALL_BUT_ONE, "searched"),
        ({"schedule": "ascending"}, HOLES, "ascending"),
        ({"guarantee": "batch"}, HOLES, "descending"),
        ({"launch": "chained"}, HOLES, "descending"),
    ],
)
def test_bits_are_those_of_the_reference_in_every_interleaving(settings, rows, family):
    q_len, kv_len = TILE.block_m * len(rows[0]) - 5, TILE.block_n * len(rows) - 9
    args = exact(1, 4, q_len, kv_len, 16, kv_heads=2)
    with enabled(**settings):
        function = compiled(by_table(rows, scale=0.25))
        launches = []
        for seed in range(8):
            with emulate(seed=seed):
                actual = function(*args)
                expected = by_table(rows, scale=0.25)(*args)
            launches.append(emulation.launches()[-1])
            assert differing(actual, expected) == [], seed
    assert len({launch.schedule for launch in launches}) > 1
    assert any(launch.waits for launch in launches)
    assert decisions()[-1].family == family


def test_the_order_of_the_sums_is_the_table_s():
    """Sharp: descending has other bits on these inputs."""
    args = exact(1, 1, 96, 96, 16)
    geometry = Geometry(96, 96, TILE.block_m, TILE.block_n, "blocks", blocks=ALL_BUT_ONE)
    with emulate():
        expected = by_table(ALL_BUT_ONE, scale=0.25)(*args)
    other = reference(*args, make_order("descending", geometry, 3), 0.25)
    assert differing(expected, other) == GRADIENTS


def test_two_masks_do_not_share_code():
    """The blocks are in the keys of Inductor's caches."""
    rng = random.Random(0)
    args = exact(1, 1, 64, 64, 16)
    masks = [[[rng.random() < 0.6 for _ in range(4)] for _ in range(2)] for _ in range(3)]
    with inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True), emulate():
        for rows in [*masks, *masks]:
            assert differing_when_compiled(by_table(rows), args) == []
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == len(masks)
