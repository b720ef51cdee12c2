"""Our kernel beside others at the same time in one process, and a wait for a CTA that never comes."""

import json
import subprocess
import sys

import pytest
import torch
from test_on_gpu import DEVICE, LAUNCHES, ONE_PASS, attention, backward_of, gradients, inputs

import dash_inductor
from dash_inductor.templates import source

NEVER_SERIALISED = (
    "Two cooperative launches at once do not come one after the other on this driver: their CTAs wait for each other's SMs. "
    'Document it, and use `launch="chained"` where several streams run backwards'
)


def at_once(*launches):
    """How many elements differ from those of a launch alone, while each of `launches` runs on a stream of its own."""
    alone = [launch() for launch in launches]
    streams = [torch.cuda.Stream() for _ in launches]
    differing = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in launches]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(LAUNCHES):
        for stream, launch, expected, count in zip(streams, launches, alone, differing, strict=True):
            with torch.cuda.stream(stream):  # the host waits for nothing
                for grad, right in zip(launch(), expected, strict=True):
                    count += (grad != right).sum()
    torch.cuda.synchronize()
    return [count.item() for count in differing]


def test_two_cooperative_launches_at_once():
    """Either takes more than half of the SMs: if both had some of their CTAs running, these would wait for the others for ever."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    leaves, grad_out = inputs(1, 2 * sms, 2 * sms, 2048, 2048, 64)
    with dash_inductor.enabled(schedule="descending", launch="grouped", **ONE_PASS):
        launch = backward_of(True, leaves, grad_out)
    decision = dash_inductor.decisions()[-1]
    assert decision.launch == "grouped" and 2 * decision.roles * decision.heads_in_flight > sms
    try:
        differing = at_once(launch, launch)
    except RuntimeError as fault:
        pytest.fail(f"{NEVER_SERIALISED}: {fault}")
    assert differing == [0, 0]


def test_eager_and_compiled_at_once():
    """Stock attention in eager mode takes SMs that our CTAs wait for; the bits of both are those that they have alone."""
    leaves, grad_out = inputs(2, 8, 8, 2048, 2048, 128)
    with dash_inductor.enabled(**ONE_PASS):
        compiled = backward_of(True, leaves, grad_out)
    eager = attention(True)
    assert at_once(compiled, lambda: gradients(eager, leaves, grad_out)) == [0, 0]


LONELY = """
import json, time, torch, triton, triton.language as tl
from triton.experimental import gluon

{functions}

for semaphore in (torch.ones(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")):
    torch.cuda.synchronize()
    start, said = time.perf_counter(), None
    try:
        lonely[(1,)](semaphore, num_warps=1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    print(json.dumps([time.perf_counter() - start, said]), flush=True)
"""
TRITON = """
@triton.jit
def lonely(semaphore):
    wait(semaphore, 1, False)
"""
GLUON = """
from dash_inductor.templates.gluon_functions import wait_for_rank

@gluon.jit
def lonely(semaphore):
    wait_for_rank(semaphore, 1)
"""
SECONDS = 60  # 2**25 polls of at most 1.5 us


def lonely(kernel: str) -> str:
    """A program in which one CTA waits for a rank that has come, and then for one that never does."""
    _, *functions = source("functions").split("@triton.jit\ndef ")
    (wait,) = (function for function in functions if function.startswith("wait("))
    return LONELY.format(functions={"triton": f"@triton.jit\ndef {wait}{TRITON}", "gluon": GLUON}[kernel])


@pytest.mark.parametrize("kernel", ["triton", "gluon"])
def test_a_wait_without_a_partner_is_an_error_and_no_hang(kernel, tmp_path):
    if kernel == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90")
    program = tmp_path / "lonely.py"
    program.write_text(lonely(kernel))
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=2 * SECONDS)
    (_, fine), (seconds, said) = map(json.loads, ended.stdout.splitlines())
    assert fine is None
    assert said is not None and "CUDA error" in said
    assert seconds < SECONDS
