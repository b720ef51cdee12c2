"""The Gluon kernel compiled for Hopper: what its cubin must and must not hold, in the loop of each of its three partitions."""

import functools
import sys
from collections import Counter

import pytest
import torch

from dash_inductor import templates
from dash_inductor.cubin import inspect, loops_with
from dash_inductor.devices import device
from dash_inductor.emulation.named_gpu import named_gpu
from dash_inductor.schedule.table import HEADER
from dash_inductor.templates import gluon
from dash_inductor.templates.tiles import tile

# head dim, dtype, causal, query heads of a kv head, length
CELLS = [
    (64, torch.bfloat16, False, 1, 512),
    (64, torch.float16, True, 2, 475),
    (128, torch.float16, False, 1, 512),
    (128, torch.bfloat16, True, 2, 475),
]
# Instructions of the consumers' loop, measured with Triton 3.6, 3.7 and 3.9, and about a tenth more.
MOST_INSTRUCTIONS = {(64, False): 410, (64, True): 460, (128, False): 480, (128, True): 520}

cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"d{cell[0]}-{cell[1]}-{'causal' if cell[2] else 'full'}"[:40])


@functools.cache
def compiled(head_dim, dtype, causal, group, length):
    """The kernel as Triton compiles it for an H100, launched on [B, H, S, D] views of [B, S, H, D]."""
    batch, kv_heads = 2, 3
    shape = tile(90, "bf16", head_dim)
    n_q = -(-length // shape.block_m)

    def rows(heads, width):
        return torch.empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)

    def scratch(*sizes):
        return torch.empty(batch, kv_heads * group, n_q * shape.block_m, *sizes)

    query, grad_out, key, value = (rows(heads, head_dim) for heads in (kv_heads * group,) * 2 + (kv_heads,) * 2)
    arguments, constants = gluon().arguments(
        query,
        key,
        value,
        grad_out,
        scratch(),
        scratch(),
        torch.zeros(HEADER, dtype=torch.int32),
        scratch(head_dim),
        torch.empty_like(key),
        torch.empty_like(value),
        block_m=shape.block_m,
        block_n=shape.block_n,
        causal=causal,
        scale=head_dim**-0.5,
    )
    with named_gpu("h100"):
        binary = gluon().sdpa_backward.warmup(*arguments, grid=(1,), **constants, launch_cooperative_grid=True)
    return binary.asm["cubin"], inspect(binary.asm["cubin"], binary.metadata.shared)


def counted(loop):
    return Counter(instruction.base for instruction in loop)


@cells
def test_consumers(cell):
    """Five matmuls as asynchronous ones that overlap, nothing spilled, nothing loaded or added by them."""
    head_dim, _, causal, *_ = cell
    binary, report = compiled(*cell)
    assert report.hmma == 0
    # 64 rows of the 128 and 16 of the inner dimension each: S, dP; dQ, in two halves of its columns; dK, dV.
    assert report.hgmma == 2 * head_dim // 16 + 128 // 16 + 2 * 64 // 16
    assert not report.wgmma_serialised
    (loop,) = loops_with(binary, "HGMMA")
    waits = Counter(i.operands for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR"))
    assert waits == {"gsb0, 0x1": 3, "gsb0, 0x0": 1}  # dP runs under the softmax of S, dV under dS, dK under the store of dQ
    assert report.local_in_loop == 0
    assert (report.utmaldg, report.ldgsts, report.red, report.atomg) == (0, 0, 0, 0)
    assert report.instructions_in_loop <= MOST_INSTRUCTIONS[head_dim, causal]


@cells
def test_producer(cell):
    """Q and grad_out in boxes of 128 bytes, lse and delta."""
    head_dim = cell[0]
    (loop,) = loops_with(compiled(*cell)[0], "UTMALDG")
    found = counted(loop)
    assert found["UTMALDG"] == 2 * head_dim // 64 + 2
    assert (found["LDL"], found["STL"], found["LDGSTS"], found["ATOMG"]) == (0, 0, 0, 0)


@cells
def test_dq_writer(cell):
    """dQ by TMA in boxes of 128 bytes, stored or added; the one other atomic is the release."""
    head_dim = cell[0]
    (loop,) = loops_with(compiled(*cell)[0], "UTMAREDG")
    found = counted(loop)
    assert (found["UTMAREDG"], found["UTMASTG"]) == (head_dim // 32, head_dim // 32)
    assert [i.opcode for i in loop if i.base in ("RED", "REDG", "ATOM", "ATOMG")] == ["REDG.E.ADD.S32.STRONG.GPU"]
    assert (found["LDL"], found["STL"]) == (0, 0)


def test_a_triton_without_the_names_it_needs(monkeypatch):
    name = "sdpa_backward_gluon"
    monkeypatch.delattr(templates, name, raising=False)
    monkeypatch.setitem(sys.modules, f"{templates.__name__}.{name}", None)
    with pytest.raises(ValueError, match=r"written for Triton 3\.6 to 3\.9, this is"):
        gluon()


@cells
def test_shared_memory_and_registers(cell):
    """A CTA fits an SM: 384 threads of 168 registers, which the warps then share out among themselves."""
    _, report = compiled(*cell)
    h100 = device("h100")
    assert report.shared_bytes <= h100.limits.shared_bytes_per_block_optin
    assert 384 * report.registers <= h100.limits.registers_per_sm
