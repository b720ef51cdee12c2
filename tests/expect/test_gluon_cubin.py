"""The Gluon kernel compiled for Hopper: what its cubin must and must not hold, in the loop of each of its three partitions."""

import functools
import re
import sys
from collections import Counter

import pytest

from dash_inductor import templates
from dash_inductor.codegen.gluon import compile_gluon
from dash_inductor.devices import device
from dash_inductor.sass.cubin import disassemble, indirect_targets, innermost_loops, inspect, parse
from dash_inductor.templates import gluon_kernel
from dash_inductor.templates.tiles import gluon_tile

# head dim, dtype, causal, query heads of a kv head, length
CELLS = [
    (64, "bf16", False, 1, 512),
    (64, "bf16", True, 1, 512),
    (64, "fp16", True, 2, 475),
    (64, "fp16", False, 2, 475),
    (128, "fp16", False, 1, 512),
    (128, "bf16", True, 1, 512),
    (128, "bf16", True, 2, 475),
    (128, "bf16", False, 2, 475),
]
# Instructions of the consumers' loop, measured with Triton 3.6, 3.7 and 3.9, and about a tenth more.
MOST_INSTRUCTIONS = {(64, False): 780, (64, True): 800, (128, False): 510, (128, True): 540}
# CTA barriers of a step. Two stand in the source. Triton 3.6 adds one between the two stores of dS, Triton 3.9 one behind each wait
# for matmuls, of which a step of two parts has six and a step of one part four.
MOST_BARRIERS = {64: 7, 128: 5}
STEP_DONE = "0x8, 0x140"  # the named barrier, of 320 threads

cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"d{cell[0]}-{'causal' if cell[2] else 'full'}-{cell[4]}")


@functools.cache
def kernel(head_dim, dtype, causal, group, length):
    """The kernel as Triton compiles it for an H100."""
    sizes = {"q_len": length, "kv_len": length, "batch": 2, "heads": 3 * group, "kv_heads": 3}
    return compile_gluon("h100", **sizes, head_dim=head_dim, mask="causal" if causal else "full", dtype=dtype)


@functools.cache
def compiled(*cell):
    binary = kernel(*cell)
    return binary.cubin, inspect(binary.cubin, binary.metadata.shared)


def loops_with(cubin, base):
    """The innermost loops of the cubin's only kernel that hold such an instruction."""
    sass = disassemble(cubin)
    return innermost_loops(parse(sass), indirect_targets(sass), lambda instruction: instruction.base == base)


def counted(loop):
    return Counter(instruction.base for instruction in loop)


@cells
def test_consumers(cell):
    """Five matmuls as asynchronous ones that overlap, nothing spilled, nothing loaded but the table's entry."""
    head_dim, _, causal, *_ = cell
    binary, report = compiled(*cell)
    assert report.hmma == 0
    # Each has 64 rows, and 16 of the inner dimension: S, dP, dV and dK of every part of a step, and dQ.
    parts = gluon_tile(90, "bf16", head_dim).block_m // 64
    assert report.hgmma == parts * (2 * head_dim // 16 + 2 * 64 // 16) + 128 // 16
    assert not report.wgmma_serialised
    (loop,) = loops_with(binary, "HGMMA")
    waits = [i.operands for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR")]
    # One part: dP runs under the softmax of S, dV under dS, dK under the additions of dQ. Two: S of the second part runs under the
    # first, and dP of the second and dK of the first under the softmax of the second.
    running = {64: (2, 2, 3, 2, 1, 0), 128: (1, 1, 1, 0)}[head_dim]
    assert waits == [f"gsb0, {matmuls:#x}" for matmuls in running]
    assert report.local_in_loop == 0
    assert (report.utmaldg, report.ldgsts, counted(loop)["LDG"]) == (0, 0, 1)
    assert report.instructions_in_loop <= MOST_INSTRUCTIONS[head_dim, causal]
    barriers = Counter((i.opcode.partition(".")[2], i.operands) for i in loop if i.base == "BAR")
    assert barriers.pop(("ARV", STEP_DONE)) == 1
    ((name, count),) = barriers.items()
    assert name == ("SYNC.DEFER_BLOCKING", "0x0, 0x100")
    assert count <= MOST_BARRIERS[head_dim]


@cells
def test_dq_goes_from_registers_under_dk(cell):
    """As vectors of four, stored or added, between the wait for dQ and that for dK; and the loop fences no other CTA."""
    head_dim = cell[0]
    binary, report = compiled(*cell)
    (loop,) = loops_with(binary, "HGMMA")
    vectors = gluon_tile(90, "bf16", head_dim).block_m * head_dim // 256 // 4
    assert (report.red, report.atomg) == (vectors, 0)
    written = [i for i in loop if i.base in ("REDG", "STG")]
    assert Counter(i.opcode for i in written) == {"REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU": vectors, "STG.E.128": vectors}
    *_, dq, dk = (i.address for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR"))
    (done,) = (i.address for i in loop if i.opcode == "BAR.ARV")
    assert all(dq < i.address < dk for i in written)
    assert dk < done
    assert {i.opcode for i in loop if i.base == "MEMBAR"} == {"MEMBAR.ALL.CTA"}


@cells
def test_producer(cell):
    """Q and grad_out in boxes of 128 bytes, lse and delta, behind the end of the step that used the stage."""
    head_dim = cell[0]
    (loop,) = loops_with(compiled(*cell)[0], "UTMALDG")
    found = counted(loop)
    assert found["UTMALDG"] == 2 * head_dim // 64 + 2
    assert (found["LDL"], found["STL"], found["LDGSTS"], found["ATOMG"]) == (0, 0, 0, 0)
    assert [i.operands for i in loop if i.base == "BAR"] == [STEP_DONE]


@cells
def test_keeper_of_the_order(cell):
    """It polls, lets the consumers add, meets them at the end of the step, fences for the whole GPU and releases."""
    (loop,) = (loop for loop in loops_with(compiled(*cell)[0], "REDG") if not counted(loop)["HGMMA"])
    ordered = {
        "LDG.E.STRONG.GPU": "poll",
        "SYNCS.ARRIVE.TRANS64.A1T0": "our turn",
        "BAR.SYNC.DEFER_BLOCKING": "step done",
        "MEMBAR.ALL.GPU": "fence",
        "REDG.E.ADD.S32.STRONG.GPU": "release",
    }
    assert [ordered[i.opcode] for i in loop if i.opcode in ordered] == list(ordered.values())
    assert [i.operands for i in loop if i.base == "BAR"] == [STEP_DONE]
    found = counted(loop)
    assert (found["LDL"], found["STL"], found["ATOMG"]) == (0, 0, 0)


def test_a_triton_without_the_names_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{templates.__name__}.gluon.launch", None)
    with pytest.raises(ValueError, match=r"written for Triton 3\.6 to 3\.9, this is"):
        gluon_kernel()


@cells
def test_shared_memory_and_registers(cell):
    """A CTA fits an SM: 384 threads of 168 registers, of which the consumers' warps take 240 and the four others keep 24."""
    _, report = compiled(*cell)
    h100 = device("h100")
    assert report.shared_bytes <= h100.limits.shared_bytes_per_block_optin
    assert 384 * report.registers <= h100.limits.registers_per_sm
    asked = re.findall(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)", kernel(*cell).ptx)
    assert set(asked) == {"240", "24"}
    assert h100.limits.registers_per_sm >= 256 * 240 + 128 * 24
