"""Where a wait gave up, as kernels write it into the host's memory; here the test writes in their place."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dash_inductor.lowering import failed_waits

LINE = (
    "one_pass: a CTA gave up waiting to add to tile 3 of dQ in query head 2 (counted through the batch): its rank is 1, and the "
    "tile had 0 additions"
)
# A process that ends after CUDA's error.
ENDS = """
import torch
torch.cuda.is_available, torch.Tensor.pin_memory = lambda: True, lambda tensor: tensor
from dash_inductor.lowering import failed_waits
failed_waits.report_of("one_pass").copy_(torch.tensor([11, 4, 1, 0]))
raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(failed_waits, "_kernels", {})
    monkeypatch.setattr(failed_waits.atexit, "register", lambda function: None)
    failed_waits._reports.cache_clear()
    yield
    failed_waits._reports.cache_clear()


def test_what_is_written_to_the_address_is_told(with_gpu):
    for kernel in ("another", "one_pass"):
        high, low = failed_waits.address_of(kernel)
    assert failed_waits.address_of("one_pass") == (high, low)
    assert failed_waits.failed_waits() == []
    address = high << 32 | low & 0xFFFFFFFF  # as the kernel puts it together
    assert address % 16 == 0  # it stores four integers at once
    (ctypes.c_int32 * failed_waits.INTS).from_address(address)[:] = [11, 4, 1, 0]
    assert failed_waits.failed_waits() == [LINE]


def test_a_sum_of_parts_is_told_from_one_of_dq(with_gpu):
    failed_waits.report_of("one_pass").copy_(torch.tensor([11, -4, 2, 1]))
    (line,) = failed_waits.failed_waits()
    assert line.endswith("its part of a chain to dK and dV: 2 additions come before it, and there had been 1")


def test_both_halves_of_an_address_are_signed(monkeypatch):
    """As kernels take integers, whatever memory there is."""
    monkeypatch.setattr(failed_waits, "report_of", lambda kernel: SimpleNamespace(data_ptr=lambda: 0x7F12_F000_0010))
    assert failed_waits.address_of("one_pass") == (0x7F12, 0xF000_0010 - 2**32)


def test_memory_that_is_made_under_fake_tensors_is_real(with_gpu):
    with torch._subclasses.FakeTensorMode():
        report = failed_waits.report_of("one_pass")
    assert type(report) is torch.Tensor


def test_without_a_gpu_there_is_no_address():
    assert failed_waits.address_of("one_pass") == (0, 0)
    assert failed_waits.failed_waits() == []


def test_it_is_the_last_thing_that_a_process_says():
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    *_, error, said = ended.stderr.splitlines()
    assert error.startswith("RuntimeError: CUDA error")
    assert said == f"dash_inductor: {LINE}. Please report it (docs: troubleshooting, illegal memory access)"


def test_without_page_locked_memory_kernels_run_all_the_same(with_gpu, monkeypatch, caplog):
    def refused(tensor):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    assert failed_waits.address_of("one_pass") == failed_waits.address_of("another") == (0, 0)
    assert failed_waits.failed_waits() == []
    assert caplog.messages == ["a kernel whose wait gives up cannot say where: CUDA error: out of memory"]
