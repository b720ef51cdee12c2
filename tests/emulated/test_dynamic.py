"""Lengths known only at run time: one graph for all, with the choice, the table and the bits of a static graph of each length."""

import random

import pytest
import torch
from attention import assert_right, assert_two_passes, attention, backward, compiled, differing, gradients, rewritten, tables_used
from tensors import CAUSAL, FULL, qkv
from torch._dynamo import config as dynamo_config

from dash_inductor import decisions, enabled
from dash_inductor.config import current
from dash_inductor.devices.target import target_of
from dash_inductor.emulation import emulate
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.schedule import pack_plan

pytestmark = pytest.mark.usefixtures("rewriting")


def chosen_table(mask, batch, kv_heads, group, q_len, kv_len, head_dim=16):
    """The table of a static graph of these sizes, under the settings and the emulation in force."""
    problem = Problem(mask, batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim, "fp32")
    plan, _ = resolve(problem, current(), target_of(torch.device("cpu"), current())).schedule
    return pack_plan(plan)


LENGTHS = {
    CAUSAL: [(n, n) for n in (53, 16, 130, 224, 64, 100)],
    FULL: [(53, 130), (16, 40), (130, 53), (70, 224), (64, 64), (33, 100)],
}


@pytest.mark.parametrize("mask", [CAUSAL, pytest.param(FULL, marks=pytest.mark.nightly)])
def test_six_lengths_through_one_graph(mask):
    """Automatic dynamic shapes: the second length recompiles and no other; a length's bits are those of a graph of its own."""
    function = attention(causal=mask == CAUSAL)

    def step(compiled_function, q_len, kv_len):
        *inputs, grad_out = qkv(1, 2, q_len, kv_len, 16)
        return gradients(compiled_function, inputs, grad_out)

    def lengths_of_one_graph(order, alone=False):
        automatic = compiled(function, dynamic=None)
        for sizes in order[:2]:
            step(automatic, *sizes)
        with dynamo_config.patch(error_on_recompile=True), tables_used(alone=alone) as tables:
            grads = {sizes: step(automatic, *sizes) for sizes in order}
        return grads, dict(zip(order, tables, strict=True))

    order = LENGTHS[mask]
    with emulate():
        dynamic, tables = lengths_of_one_graph(order)
        assert rewritten() == 2
        _, in_reverse = lengths_of_one_graph(order[::-1], alone=True)  # whichever came first
        for sizes in order:
            table = chosen_table(mask, 1, 2, 1, *sizes)
            assert tables[sizes][: len(table)] == in_reverse[sizes][: len(table)] == table
            *inputs, grad_out = qkv(1, 2, *sizes, 16)
            assert_right(dynamic[sizes], function, inputs, grad_out)
        for sizes in order[:3]:
            assert differing(dynamic[sizes], step(compiled(function), *sizes)) == []


TABLES = [
    # settings, mask, and SMs, head dim, query heads of a kv head of each case
    ({}, FULL, (6, 16, 1), (132, 128, 4)),
    ({}, CAUSAL, (6, 16, 1), (132, 128, 4), (11, 16, 2)),
    ({"guarantee": "device"}, CAUSAL, (6, 16, 1)),
    ({"guarantee": "batch"}, FULL, (7, 16, 1)),
    ({"schedule": "ascending"}, FULL, (5, 16, 1)),
    ({"schedule": "ascending"}, CAUSAL, (5, 16, 1)),
    ({"schedule": "descending"}, FULL, (3, 16, 2)),
    ({"schedule": "descending"}, CAUSAL, (24, 16, 1)),
    ({"schedule": "shift"}, FULL, (24, 16, 1)),
    ({"schedule": "symmetric"}, CAUSAL, (13, 16, 1)),
    ({"launch": "chained"}, FULL, (6, 16, 1)),
    ({"launch": "chained"}, CAUSAL, (6, 16, 2)),
    ({"launch": "chained", "schedule": "ascending"}, CAUSAL, (6, 16, 1)),
]


@pytest.mark.parametrize(("settings", "mask", "case"), [(*row[:2], case) for row in TABLES for case in row[2:]])
def test_the_table_is_that_of_a_static_graph(settings, mask, case):
    """One graph with dynamic batch and lengths writes the table that each size would have had as a constant."""
    sms, head_dim, group = case
    draw = random.Random(f"{settings}{mask}")

    def draw_sizes():
        q_len, kv_len = (draw.choice([draw.randint(2, 40), draw.randint(2, 400), draw.randint(2, 1500)]) for _ in range(2))
        return draw.randint(2, 5), q_len, kv_len if mask == FULL else q_len

    def call(function, batch, q_len, kv_len):
        query = torch.empty(batch, 2 * group, q_len, head_dim)
        key = torch.empty(batch, 2, kv_len, head_dim)
        function(query, query, key, key, query, torch.empty(batch, 2 * group, q_len))

    families = set()
    with enabled(template="one_pass", **settings), emulate(sms=sms):
        function = compiled(backward(mask), dynamic=True)
        with tables_used(alone=True) as tables:
            call(function, 3, 100, 90 if mask == FULL else 100)
            with dynamo_config.patch(error_on_recompile=True):
                for _ in range(20):
                    batch, q_len, kv_len = draw_sizes()
                    call(function, batch, q_len, kv_len)
                    table = chosen_table(mask, batch, 2, group, q_len, kv_len, head_dim)
                    assert tables[-1][: len(table)] == table, (batch, q_len, kv_len)
                    families.add(tuple(table[:4]))
    assert len(families) > 3


@pytest.mark.parametrize(("mask", "head_dim"), [(FULL, 16), pytest.param(CAUSAL, 16, marks=pytest.mark.nightly), (CAUSAL, 192)])
def test_four_lengths_in_two_passes(mask, head_dim):
    """Each has the bits of a graph of its own."""
    lengths = [53, 130, 2, 64]
    function = attention(causal=mask == CAUSAL)

    def step(compiled_function, length):
        *inputs, grad_out = qkv(1, 2, length, length if mask == CAUSAL else length + 30, head_dim)
        return gradients(compiled_function, inputs, grad_out)

    with enabled(template="two_pass" if head_dim <= 128 else "auto"), emulate():
        static = {length: step(compiled(function), length) for length in lengths}
        dynamic = compiled(function, dynamic=True)
        step(dynamic, 70)
        with dynamo_config.patch(error_on_recompile=True):
            for length in lengths:
                assert differing(step(dynamic, length), static[length]) == [], length
    assert_two_passes()


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_report_of_two_passes(dynamic):
    *inputs, grad_out = qkv(2, 3, 70, 70, 16)
    with enabled(template="two_pass"), emulate():
        gradients(compiled(attention(causal=True), dynamic=dynamic), inputs, grad_out)
    decision = decisions()[-1]
    assert "-> two_pass (deterministic by construction), tile 16x64x16 and 32x32x16, guarantee run" in str(decision)
    assert (decision.roles, decision.heads_in_flight) == (None, None)
    assert (decision.predicted_us is None) == dynamic
    if not dynamic:
        assert decision.workspace_bytes == 2 * 4 * 2 * 3 * 80  # delta and lse, fp32, of 70 rows padded to Q tiles of 16
