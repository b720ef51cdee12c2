"""A wait for a CTA that never comes is an error and no hang. Polls are counted, not seconds: the GPU is this test's alone."""

import json
import subprocess
import sys

import pytest
import torch

from dash_inductor.templates import source

LONELY = """
import json, time, torch, triton, triton.language as tl
from triton.experimental import gluon
from dash_inductor.lowering.failed_waits import address_of, failed_waits, report_of

{functions}

for semaphore in (torch.ones(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")):
    torch.cuda.synchronize()
    start, said = time.perf_counter(), None
    try:
        lonely[(1,)](semaphore, *{report}, num_warps=1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    print(json.dumps([time.perf_counter() - start, said, failed_waits()]), flush=True)
"""
TRITON = """
@triton.jit
def lonely(semaphore, high, low):
    wait(semaphore - 11, 11, 1, 4, high, low, False)
"""
GLUON = """
from dash_inductor.templates.gluon.functions import wait_for_rank

@gluon.jit
def lonely(semaphore, report):
    wait_for_rank(semaphore - 11, 11, 1, 4, report)
"""
SECONDS = 60  # 2**25 polls of at most 1.5 us


def lonely(kernel: str) -> str:
    """A program in which one CTA waits for a rank that has come, and then for one that never does."""
    _, *functions = source("functions").split("@triton.jit\ndef ")
    ours = "".join(f"@triton.jit\ndef {function}" for function in functions if function.startswith(("thread(", "wait(")))
    functions = {"triton": ours + TRITON, "gluon": GLUON}[kernel]
    return LONELY.format(functions=functions, report={"triton": "address_of('it')", "gluon": "(report_of('it'),)"}[kernel])


@pytest.mark.parametrize("kernel", ["triton", "gluon"])
def test_a_wait_without_a_partner_ends(kernel, tmp_path):
    if kernel == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90")
    program = tmp_path / "lonely.py"
    program.write_text(lonely(kernel))
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=2 * SECONDS)
    (_, fine, _), (seconds, said, waits) = map(json.loads, ended.stdout.splitlines())
    assert fine is None
    assert said is not None and "CUDA error" in said
    assert seconds < SECONDS
    (wait,) = waits
    assert (
        wait.startswith("it: ")
        and "tile 3 of dQ in query head 2 " in wait
        and wait.endswith("rank is 1, and the tile had 0 additions")
    )
    assert wait in ended.stderr
