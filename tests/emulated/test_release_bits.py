"""Gradients have the bits of this series of releases, 0.1 for 0.1.0 and 0.1.1; docs/contributing.md says which may change them.

Inputs are `exact`: only sums over tiles round, so that the bits are the same on every CPU and change with the order of the sums.
EXPECTTEST_ACCEPT=1 adds those of a new series or a new case.
"""

import hashlib
import json
from pathlib import Path

import expecttest
import pytest
import torch
from attention import backward, compiled, rewritten
from flex import Attention, documents, window
from tensors import CAUSAL, FULL, exact
from test_varlen import Packed

import dash_inductor
from dash_inductor import decisions, emulation, enabled

pytestmark = pytest.mark.usefixtures("rewriting")

FILE = Path(__file__).with_name("release_bits.json")
SERIES = ".".join(dash_inductor.__version__.split(".")[:2])
OF_THE_OP = {  # settings, mask, SMs; heads, kv heads, S_q, S_k
    "ascending": ({"schedule": "ascending"}, FULL, 6, (2, 2, 64, 160)),
    "descending": ({"schedule": "descending"}, CAUSAL, 4, (4, 2, 100, 100)),
    "shift": ({"schedule": "shift"}, FULL, 6, (2, 2, 96, 160)),
    "symmetric": ({"schedule": "symmetric"}, CAUSAL, 4, (2, 2, 128, 128)),
    "shift_round_robin": ({"schedule": "shift_round_robin"}, FULL, 6, (3, 3, 96, 160)),
    "symmetric_round_robin": ({"schedule": "symmetric_round_robin"}, CAUSAL, 5, (3, 3, 180, 180)),
    "chosen, chained": ({"launch": "chained"}, FULL, 6, (2, 2, 53, 130)),
    "chosen": ({}, CAUSAL, 6, (2, 2, 128, 128)),
    "two_pass": ({"template": "two_pass"}, CAUSAL, 6, (4, 2, 150, 150)),
}
OF_A_MASK = {
    "window": Attention(window),
    "documents": Attention(documents(37, 20, 43), kv_heads=1),
    "varlen": Packed((37, 20, 43)),
}


def of_the_op(settings, mask, sms, sizes):
    heads, kv_heads, q_len, kv_len = sizes
    with enabled(**settings), emulation.emulate(sms=sms):
        gradients = compiled(backward(mask, scale=0.25))(*exact(1, heads, q_len, kv_len, 16, kv_heads=kv_heads))
    assert decisions()[-1].family == settings.get("schedule", decisions()[-1].family)
    return gradients


def of_a_mask(attention):
    """What the forward has computed rounds as a CPU's exp does: the backward is given the `exact` out and logsumexp instead."""
    q_len = attention.tensors()[0].shape[-2 if isinstance(attention, Attention) else 0]
    grad_out, query, key, value, out, _ = exact(1, 2, q_len, q_len, 16, kv_heads=attention.kv_heads or 2)
    if isinstance(attention, Packed):
        grad_out, query, key, value = (x[0].transpose(0, 1).contiguous() for x in (grad_out, query, key, value))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    given = []

    def pack(x):
        if not x.is_floating_point() or x.data_ptr() in [leaf.data_ptr() for leaf in leaves]:
            return x
        given.append(torch.empty_like(x).copy_(out) if x.dim() == 4 else torch.zeros_like(x))
        return given[-1]

    with emulation.emulate():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            result = compiled(attention.function())(*leaves)
        gradients = torch.autograd.grad(result, leaves, grad_out)
    assert rewritten() == 1 and sorted(tuple(x.shape) for x in given) == [(1, 2, q_len), (1, 2, q_len, 16)]
    return gradients


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*OF_THE_OP, *OF_A_MASK])
def test_bits_are_those_of_the_series(name):
    gradients = of_the_op(*OF_THE_OP[name]) if name in OF_THE_OP else of_a_mask(OF_A_MASK[name])
    bits = b"".join((x.detach() + 0.0).numpy().tobytes() for x in gradients)  # a sum of nothing is -0.0 on some CPUs
    digest = hashlib.sha256(bits).hexdigest()
    recorded = json.loads(FILE.read_text())
    if expecttest.ACCEPT:
        recorded.setdefault(SERIES, {}).setdefault(name, digest)  # what is recorded stays
        FILE.write_text(json.dumps(recorded, indent=2) + "\n")
    assert recorded.get(SERIES, {}).get(name) == digest, (
        f"other bits than those of {SERIES}: a change that is meant to make them needs a new series (docs/contributing.md)"
    )


def test_every_series_has_every_case_of_its_time():
    recorded = json.loads(FILE.read_text())
    assert list(recorded)[-1] == SERIES and recorded[SERIES].keys() == {*OF_THE_OP, *OF_A_MASK}
