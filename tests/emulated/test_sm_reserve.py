"""SMs that are left to communication kernels: fewer CTAs are launched, and where the guarantee says so, the bits stay."""

import operator

import pytest
import torch
from attention import backward, compiled, differing, tables_used
from flex import Attention, causal
from tensors import CAUSAL, FULL, exact

from dash_inductor import decisions, emulation, enabled
from dash_inductor.emulation import emulate
from dash_inductor.schedule.packing import HEADER

pytestmark = pytest.mark.usefixtures("rewriting")

SMS = 6


def carve_out(sms):
    torch._C._set_sm_carveout_experimental(sms)


@pytest.fixture(autouse=True)
def no_carve_out():
    yield
    carve_out(None)


def run(args, mask, reserve, *, dynamic=False, **settings):
    """dq, dk, dv, CTAs that were launched, and the SMs in the report."""
    with enabled(sm_reserve=reserve, **settings), emulate(sms=SMS):
        grads = compiled(backward(mask), dynamic=dynamic)(*args)
    launch = [launch for launch in emulation.launches() if "sdpa_backward" in launch.kernel][-1]
    return grads, launch.programs, decisions()[-1].sms


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_the_reserve_changes_workers_and_no_bits(mask, dynamic):
    """With guarantee device."""
    args = exact(1, 4, 96, 96, 16)
    results = [run(args, mask, reserve, dynamic=dynamic, guarantee="device") for reserve in (0, 2, 5)]
    grads, programs, sms = zip(*results, strict=True)
    assert sms == (SMS, SMS - 2, SMS - 5)
    assert programs[0] > programs[1] > programs[2] and all(map(operator.le, programs, sms))
    assert differing(grads[1], grads[0]) == differing(grads[2], grads[0]) == []


def test_torchs_carve_out_is_the_same_reserve():
    """The larger of the two counts."""
    args = exact(1, 4, 128, 128, 16)
    with tables_used() as tables:
        expected = run(args, CAUSAL, 4)
        carve_out(4)
        for reserve in (0, 3):
            grads, *launched = run(args, CAUSAL, reserve)
            assert launched == list(expected[1:]) == [2, 2]
            assert differing(grads, expected[0]) == []
        carve_out(1)
        assert run(args, CAUSAL, 4)[2] == 2
    assert all(table[:HEADER] == tables[0][:HEADER] for table in tables)


def test_a_block_mask_keeps_none_free_and_says_so(caplog):
    """It takes a CTA for each KV tile."""
    attention = Attention(causal, q_len=96)
    inputs = [x.requires_grad_() for x in attention.tensors()[:3]]
    with enabled(sm_reserve=2), emulate(sms=SMS):
        compiled(attention.function())(*inputs).sum().backward()
    assert decisions()[-1].mask == "block_mask" and decisions()[-1].rewritten
    said = [record.getMessage() for record in caplog.records if "reserved" in record.getMessage()]
    assert said == ["2 SMs are reserved, but a BlockMask takes a CTA for each of its KV tiles, which use whatever SMs are free"]


def test_two_passes_keep_none_free_and_say_so(caplog):
    """Head dims past 128 have no other template."""
    args = exact(1, 1, 32, 32, 136)
    with enabled(sm_reserve=2), emulate(sms=SMS):
        for _ in range(2):
            compiled(backward())(*args)
    assert decisions()[-1].family == "two_pass"
    said = [record.getMessage() for record in caplog.records if "reserved" in record.getMessage()]
    assert said == ["2 SMs are reserved, but attention of head dim 136 takes two passes, which use whatever SMs are free"]
