"""dash::sdpa_backward: its layouts, and its bits against the eager reference where only the sums over tiles round."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from attention import (
    GRADIENTS,
    OP,
    assert_two_passes,
    backward,
    compiled,
    differing,
    differing_when_compiled,
    last_plan,
    tables_used,
)
from tensors import BF16, CAUSAL, FP16, FULL, arguments, columns, exact, expanded, padded, permuted

from dash_inductor import enabled
from dash_inductor.emulation import emulate
from dash_inductor.reference import planned, reference
from dash_inductor.schedule import Order

pytestmark = pytest.mark.usefixtures("rewriting")

TWO_PASSES = {"template": "two_pass"}


@dataclass(frozen=True)
class Backward:
    """An order with every sum reversed."""

    forward: Order

    @property
    def geometry(self):
        return self.forward.geometry

    def visits(self, j):
        return self.forward.visits(j)[::-1]

    def rank(self, i, j):
        return len(self.geometry.contributors(i)) - 1 - self.forward.rank(i, j)


CASES = [
    # settings, mask, family, and of each case batch, heads, kv heads, S_q, S_k, D, or (D, D of value); SMs; roles, heads in flight
    ({"schedule": "ascending"}, FULL, "ascending", (1, 2, 2, 64, 160, 16, 6, 3, 2), (2, 1, 1, 53, 130, 24, 3, 3, 1)),
    ({"schedule": "ascending"}, CAUSAL, "ascending", (1, 2, 2, 100, 100, 16, 4, 4, 1)),
    ({"schedule": "descending"}, FULL, "descending", (1, 4, 2, 40, 140, 16, 4, 2, 2)),
    ({"schedule": "descending"}, CAUSAL, "descending", (1, 2, 2, 128, 128, 16, 4, 2, 2), (1, 6, 2, 130, 130, 16, 1, 1, 1)),
    ({"schedule": "shift"}, FULL, "shift", (1, 2, 2, 96, 160, 16, 6, 5, 1), (1, 3, 1, 70, 180, 40, 4, 3, 1)),
    ({"schedule": "shift"}, FULL, "shift", (2, 1, 1, 40, 130, 16, 4, 2, 2)),
    ({"schedule": "symmetric"}, CAUSAL, "symmetric", (1, 2, 2, 128, 128, 16, 4, 2, 2), (1, 4, 2, 150, 150, 16, 2, 1, 2)),
    ({"schedule": "symmetric"}, CAUSAL, "symmetric", (1, 1, 1, 220, 220, 16, 3, 2, 1)),
    ({"schedule": "shift_round_robin"}, FULL, "shift_round_robin", (1, 3, 3, 96, 160, 16, 6, 6, 1)),
    ({"schedule": "shift_round_robin"}, FULL, "shift_round_robin", (2, 2, 1, 70, 180, 40, 4, 4, 1)),
    ({"schedule": "shift_round_robin"}, FULL, "shift_round_robin", (1, 3, 3, 33, 130, 16, 7, 3, 1)),
    ({"schedule": "symmetric_round_robin"}, CAUSAL, "symmetric_round_robin", (1, 3, 3, 180, 180, 16, 5, 5, 1)),
    ({"schedule": "symmetric_round_robin"}, CAUSAL, "symmetric_round_robin", (1, 6, 3, 150, 150, 16, 4, 4, 1)),
    ({"schedule": "symmetric_round_robin"}, CAUSAL, "symmetric_round_robin", (2, 1, 1, 300, 300, 16, 2, 2, 1)),
    ({"launch": "chained"}, FULL, "ascending", (1, 2, 2, 53, 130, 16, 6, 5, 2)),
    ({"launch": "chained"}, CAUSAL, "descending", (1, 4, 2, 100, 100, 16, 6, 4, 2)),
    ({}, FULL, "ascending", (1, 2, 2, 96, 130, 128, 6, 3, 2)),
    ({}, CAUSAL, "descending", (1, 2, 2, 128, 128, 64, 6, 3, 2)),
    ({"guarantee": "device"}, CAUSAL, "descending", (1, 2, 2, 128, 128, 16, 6, 3, 2)),
    (TWO_PASSES, FULL, "two_pass", (1, 2, 2, 64, 160, 16, 6, None, None), (2, 6, 2, 53, 130, 24, 6, None, None)),
    (TWO_PASSES, CAUSAL, "two_pass", (1, 2, 2, 128, 128, 16, 6, None, None), (1, 4, 2, 150, 150, 40, 6, None, None)),
    (TWO_PASSES, CAUSAL, "two_pass", (1, 3, 1, 130, 130, 16, 6, None, None), (1, 2, 1, 100, 100, 96, 6, None, None)),
    ({"schedule": "ascending"}, FULL, "ascending", (2, 2, 1, 53, 130, (40, 24), 3, 3, 1), (1, 1, 1, 53, 130, (8, 8), 3, 3, 1)),
    ({"schedule": "descending"}, CAUSAL, "descending", (1, 4, 2, 100, 100, (24, 40), 4, 2, 2)),
    (TWO_PASSES, FULL, "two_pass", (2, 2, 1, 53, 130, (40, 24), 6, None, None), (2, 4, 2, 53, 130, (8, 5), 6, None, None)),
    ({}, FULL, "two_pass", (1, 1, 1, 40, 100, 192, 6, None, None)),
    ({}, CAUSAL, "two_pass", (1, 2, 1, 70, 70, (192, 128), 6, None, None), (1, 1, 1, 70, 70, (200, 256), 6, None, None)),
    ({}, CAUSAL, "two_pass", (1, 2, 1, 100, 100, 256, 6, None, None)),
]


@pytest.mark.parametrize(("settings", "mask", "family", "case"), [(*row[:3], case) for row in CASES for case in row[3:]])
def test_bits_are_those_of_the_reference(settings, mask, family, case):
    batch, heads, kv_heads, q_len, kv_len, dims, sms, *placed = case
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    args = exact(batch, heads, q_len, kv_len, head_dim, kv_heads=kv_heads, value_dim=value_dim)
    specification = backward(mask, scale=0.25)
    with enabled(**settings), emulate(seed=q_len, sms=sms):
        actual, expected = compiled(specification)(*args), specification(*args)
    decision, plan = last_plan(mask, batch * kv_heads, q_len, kv_len)
    assert [decision.family, decision.roles, decision.heads_in_flight] == [family, *placed]
    if family == "two_pass":
        assert_two_passes()
    assert differing(actual, expected) == []

    # Sharp: the reversed sums have other bits.
    reversed_plan = SimpleNamespace(order_of=lambda head: Backward(plan.order_of(head)))
    assert differing(planned(*args, reversed_plan, 0.25), expected) == GRADIENTS


class Read:
    """The order that a table tells the kernel."""

    def __init__(self, table, geometry):
        roles, _, slots, _, n_kv, steps = table[:6]
        lengths = table[8 + slots * roles :][:n_kv]
        self.geometry, entries = geometry, table[-n_kv * steps :]
        self.steps = [{entry & 0xFFFF: entry >> 16 for entry in entries[j * steps :][:length]} for j, length in enumerate(lengths)]

    def visits(self, j):
        return [*self.steps[j]]

    def rank(self, i, j):
        return self.steps[j][i]


@pytest.mark.parametrize(("mask", "families"), [(FULL, ("ascending", "shift")), (CAUSAL, ("descending", "symmetric"))])
def test_the_order_of_the_sums_is_the_table_s(mask, families):
    """Sharp: the table of the other family has other bits on these inputs."""
    args = exact(1, 1, 160, 160, 16)
    actual, expected = [], []
    for family in families:
        with enabled(schedule=family), emulate(), tables_used() as tables:
            actual.append(compiled(backward(mask, scale=0.25))(*args))
        decision, plan = last_plan(mask, 1, 160, 160)
        assert decision.family == family
        expected.append(reference(*args, Read(*tables, plan.order.geometry), 0.25))
    for which, of_the_kernel in enumerate(actual):
        assert differing(of_the_kernel, expected[which]) == []
        assert differing(of_the_kernel, expected[1 - which]) == GRADIENTS


@pytest.mark.parametrize(("dtype", "exponent"), [(BF16, 12), (FP16, 4)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_bits_in_half_precision(dtype, exponent, mask):
    args = exact(1, 2, 128, 128, 16, dtype=dtype, exponent=exponent)
    specification = backward(mask, scale=2**-6)
    with emulate():
        actual = compiled(specification)(*args)
        assert differing(actual, specification(*args)) == []
    assert all(grad.isfinite().all() for grad in actual)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 100), (100, 1), (1, 1)])
def test_bits_of_short_sequences_in_two_passes(q_len, kv_len):
    with enabled(**TWO_PASSES), emulate():
        assert differing_when_compiled(backward(scale=0.25), exact(2, 2, q_len, kv_len, 16)) == []
    assert_two_passes()


@pytest.mark.parametrize(
    ("layout", "dims"),
    [*((layout, (24, 24)) for layout in (list, permuted, columns, expanded, padded)), (padded, (8, 5)), (columns, (1, 24))],
)
def test_layouts(layout, dims):
    """Bits do not depend on strides, and the strides of eager, fake and compiled gradients are the same."""
    args, function = layout(exact(1, 2, 50, 50, dims[0], value_dim=dims[1])), backward(CAUSAL, scale=0.25)
    with emulate():
        actual, eager, contiguous = compiled(function)(*args), function(*args), function(*(x.contiguous() for x in args))
    assert differing(actual, eager) == differing(eager, contiguous) == []
    with torch._subclasses.FakeTensorMode() as mode:
        fake = OP(*(mode.from_tensor(x) for x in args), mask=CAUSAL)
    for grad, real, meta, x in zip(actual, eager, fake, args[1:4], strict=True):
        assert grad.shape == real.shape == meta.shape == x.shape
        assert grad.stride() == real.stride() == meta.stride()
        assert grad.dtype == real.dtype == meta.dtype == x.dtype


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (arguments(1, 2, 40, 70), {"mask": FULL}),
        (arguments(1, 4, 40, 70, 5, kv_heads=2, value_dim=24), {"mask": FULL}),
        (arguments(2, 4, 40, 40, 24, kv_heads=2, dtype=BF16), {"mask": CAUSAL, "scale": 0.5}),
        (permuted(arguments(1, 2, 40, 40, dtype=FP16)), {"mask": CAUSAL}),
        (expanded(arguments(1, 2, 20, 20)), {"mask": FULL}),
        (columns(arguments(1, 1, 1, 33, 128)), {"mask": FULL}),
    ],
)
def test_opcheck(args, kwargs):
    torch.library.opcheck(OP.default, tuple(args), kwargs)
