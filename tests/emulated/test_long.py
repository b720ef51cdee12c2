"""A schedule that is too large for a constant of the graph has the bits of the constant: one row serves all chains, or the table is
written at run time."""

import pytest
from attention import assert_right, attention, backward, compiled, differing, gradients, tables_used
from tensors import CAUSAL, FULL, exact, qkv

from dash_inductor import decisions, enabled
from dash_inductor.emulation import emulate
from dash_inductor.lowering import table
from dash_inductor.schedule import packing

pytestmark = pytest.mark.usefixtures("rewriting")

# settings, mask, query heads of a kv head, SMs, lengths
CASES = [
    ({"guarantee": "device"}, FULL, 2, 5, (100, 200)),
    ({"guarantee": "device"}, CAUSAL, 2, 2, (200, 200)),  # roles are mirrored in odd rounds
    ({"schedule": "ascending"}, CAUSAL, 1, 5, (200, 200)),
    ({"schedule": "descending"}, FULL, 1, 3, (70, 100)),
    ({"launch": "chained"}, CAUSAL, 1, 6, (130, 130)),
    ({"launch": "chained"}, FULL, 1, 6, (130, 70)),
    ({"schedule": "shift"}, FULL, 1, 6, (130, 200)),
    ({"schedule": "symmetric"}, CAUSAL, 1, 4, (200, 200)),
]
WRITTEN = ("shift", "symmetric")


ONE_ROW = [(*case, True) for case in CASES if case[0].get("schedule") not in WRITTEN]


@pytest.mark.parametrize(
    ("settings", "mask", "group", "sms", "lengths", "one_row"), [*ONE_ROW, *((*case, False) for case in CASES)]
)
def test_bits_are_those_of_the_constant(settings, mask, group, sms, lengths, one_row, monkeypatch):
    """Where chains cannot share a row, the table is written; a kernel writes that of any family."""
    function = attention(causal=mask == CAUSAL, gqa=group > 1)
    *inputs, grad_out = qkv(1, 2 * group, *lengths, 16, kv_heads=2)

    def step():
        with tables_used() as tables:
            grads = gradients(compiled(function), inputs, grad_out)
        return grads, tables[-1], decisions()[-1]

    with enabled(template="one_pass", **settings), emulate(sms=sms):
        of_constant, constant, decision = step()
        monkeypatch.setattr(packing, "MOST_CONSTANT_INTS", 0)
        if not one_row:
            monkeypatch.setattr(table, "may_share_row", lambda plan: False)
        of_large, large, of_large_decision = step()
        assert_right(of_large, function, inputs, grad_out)
    assert differing(of_large, of_constant) == []
    assert (decision.family, decision.roles) == (of_large_decision.family, of_large_decision.roles)
    if not one_row:
        assert large == constant
    else:
        assert (
            len(large) < len(constant)
            and large[:5] == constant[:5]
            and of_large_decision.workspace_bytes < decision.workspace_bytes
        )


def test_a_round_robin_is_a_constant_of_any_length(monkeypatch):
    monkeypatch.setattr(packing, "MOST_CONSTANT_INTS", 0)
    with enabled(schedule="symmetric_round_robin"), emulate(sms=3), tables_used() as tables:
        compiled(backward(CAUSAL))(*exact(1, 2, 128, 128, 16))
    assert len(tables[0]) == packing.HEADER
