"""The Gluon kernel compiled for Hopper: what its cubin must and must not hold, in the loop of each of its partitions."""

import functools
import re
import sys
from collections import Counter
from typing import NamedTuple

import pytest
import triton

from benchmarks.machine_code.cubin import disassemble, indirect_targets, innermost_loops, inspect, parse
from benchmarks.machine_code.gates import MOST_BARRIERS_OF_GLUON
from benchmarks.machine_code.gluon import compile_gluon
from dash_inductor import templates
from dash_inductor.devices import device
from dash_inductor.templates import gluon_kernel
from dash_inductor.templates.tiles import gluon_tile


class Cell(NamedTuple):
    head_dim: int
    dtype: str
    mask: str
    group: int  # query heads of a kv head
    length: int
    round_robin: bool = False  # whether heads may straddle rounds
    in_parts: bool = False  # chains

    def __str__(self):
        return f"d{self.head_dim}-{self.mask}-{self.length}{'-queue' * self.round_robin}{'-parts' * self.in_parts}"


CELLS = [
    Cell(64, "bf16", "full", 1, 512),
    Cell(64, "bf16", "causal", 1, 512),
    Cell(64, "fp16", "causal", 2, 475),
    Cell(64, "fp16", "full", 2, 475),
    Cell(128, "fp16", "full", 1, 512),
    Cell(128, "bf16", "causal", 1, 512),
    Cell(128, "bf16", "causal", 2, 475),
    Cell(128, "bf16", "full", 2, 475),
    *(Cell(head_dim, "bf16", mask, 1, 512, True) for head_dim in (64, 128) for mask in ("full", "causal")),
    Cell(64, "bf16", "block_mask", 1, 512),
    Cell(64, "fp16", "block_mask", 2, 475),
    Cell(128, "bf16", "block_mask", 1, 512),
    Cell(128, "fp16", "block_mask", 2, 475),
    Cell(256, "bf16", "full", 1, 512),
    Cell(256, "fp16", "causal", 2, 475),
    Cell(256, "bf16", "full", 2, 475),
    Cell(256, "bf16", "full", 1, 512, True),
    Cell(256, "bf16", "causal", 1, 512, True),
    Cell(256, "bf16", "block_mask", 1, 512),
    Cell(256, "fp16", "block_mask", 2, 475),
    *(Cell(head_dim, "bf16", "block_mask", 2, 475, in_parts=True) for head_dim in (64, 128, 256)),
]
# Instructions of the consumers' loop, measured with Triton 3.6 to 3.9, and about a tenth more.
MOST_INSTRUCTIONS = {
    (64, "full"): 680,
    (64, "causal"): 760,
    (64, "block_mask"): 810,
    (128, "full"): 530,
    (128, "causal"): 600,
    (128, "block_mask"): 515,
    (256, "full"): 520,
    (256, "causal"): 560,
    (256, "block_mask"): 550,
}
MOST_INSTRUCTIONS_OF_3_9 = {(128, "block_mask"): 540, (256, "full"): 545, (256, "causal"): 575, (256, "block_mask"): 575}
# Loads and stores of what registers do not hold in the consumers' loop, by Triton, head dim and mask; and where heads may straddle
# rounds.
MOST_SPILLED: dict[str, dict[tuple[int, str], int]] = {
    "3.6": {(128, "full"): 1, (128, "causal"): 3, (128, "block_mask"): 2},
    "3.7": {(128, "causal"): 1},
    "3.9": {(256, "full"): 1, (256, "causal"): 1, (256, "block_mask"): 1},
}
MOST_SPILLED_IN_A_QUEUE: dict[str, dict[tuple[int, str], int]] = {
    "3.6": {(128, "causal"): 7},
    "3.7": {(128, "causal"): 3},
    "3.9": {(128, "causal"): 10, (256, "full"): 1, (256, "causal"): 1},
}
MOST_SPILLED_BY_WHO_ADDS = {("3.9", 256, "block_mask"): 1}
DQ_STORED, DO_READ = ("0x8, 0x120", "0x9, 0x120"), "0xd, 0x120"  # named barriers of 288 threads
OF_A_STAGE = re.compile(r"R\d+, 0x120")  # one of two or three

TRITON = ".".join(triton.__version__.split(".")[:2])

cells = pytest.mark.parametrize("cell", CELLS, ids=str)


@functools.cache
def kernel(cell):
    """The kernel as Triton compiles it for an H100."""
    sizes = {"q_len": cell.length, "kv_len": cell.length, "batch": 2, "heads": 3 * cell.group, "kv_heads": 3}
    how = {"head_dim": cell.head_dim, "mask": cell.mask, "dtype": cell.dtype, "round_robin": cell.round_robin}
    parts = {"bands": 4, "sets": cell.group} if cell.in_parts else {}
    return compile_gluon("h100", **sizes, **how, **parts)


@functools.cache
def compiled(cell):
    binary = kernel(cell)
    return binary.cubin, inspect(binary.cubin, binary.metadata.shared)


def loops_with(cubin, base):
    """The innermost loops of the cubin's only kernel that hold such an instruction."""
    sass = disassemble(cubin)
    return innermost_loops(parse(sass), indirect_targets(sass), lambda instruction: instruction.base == base)


def most_spilled(cell):
    of = MOST_SPILLED_IN_A_QUEUE if cell.round_robin else MOST_SPILLED
    return of.get(TRITON, {}).get((cell.head_dim, cell.mask), 0)


def counted(loop):
    return Counter(instruction.base for instruction in loop)


@cells
def test_consumers(cell):
    """Five matmuls as asynchronous ones that overlap, nothing spilled, nothing loaded but an entry of the table and the mask."""
    head_dim = cell.head_dim
    binary, report = compiled(cell)
    assert report.hmma == 0
    # Each has 64 rows, and 16 of the inner dimension: S, dP, dV and dK of every part of a step, and dQ, at head dim 256 in halves.
    rows = gluon_tile(90, "bf16", head_dim).block_m
    is_whole = head_dim == 64 and cell.mask != "block_mask"
    parts = 1 if is_whole else rows // 64
    of_dq = 2 * 64 // 16 if head_dim == 256 else 128 // 16
    assert report.hgmma == parts * 2 * head_dim // 16 + 2 * rows // 16 + of_dq
    assert not report.wgmma_serialised
    (loop,) = loops_with(binary, "HGMMA")
    waits = [i.operands for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR")]
    # One part: dP runs under the softmax of S, dV under dS, dK under the fence behind dS; of 128 rows dV waits for dS. Two: S of
    # the second part runs under the first, and dP of the second and dK of the first under the softmax of the second. 256: as one
    # part, but dK under the store of the first half of dQ, and the second half behind it.
    running = (1, 0, 0) if is_whole else {64: (2, 2, 3, 2, 0), 128: (1, 1, 0), 256: (1, 1, 1, 0)}[head_dim]
    assert waits == [f"gsb0, {matmuls:#x}" for matmuls in running]
    # In two parts registers hold V, and dP's matmuls read it from there, as dV's and dK's do P and dS, at 256 none.
    of_registers = sum(i.base == "HGMMA" and not i.operands.split(", ")[1].startswith("gdesc") for i in loop)
    of_v = head_dim // 16 if parts == 2 else 0
    assert of_registers == (0 if head_dim == 256 else 2 * rows // 16 + parts * of_v)
    assert report.local_in_loop <= most_spilled(cell)
    assert (report.utmaldg, report.ldgsts, report.red, report.atomg, counted(loop)["STG"]) == (0, 0, 0, 0, 0)
    # The entry, and a word for each part; a mask that is full does not ask where the step is.
    assert counted(loop)["LDG"] == {"full": 0, "causal": 1, "block_mask": 1 + parts}[cell.mask]
    most = MOST_INSTRUCTIONS | (MOST_INSTRUCTIONS_OF_3_9 if TRITON == "3.9" else {})
    assert report.instructions_in_loop <= most[head_dim, cell.mask]
    barriers = Counter((i.opcode.partition(".")[2], OF_A_STAGE.sub("of a stage", i.operands)) for i in loop if i.base == "BAR")
    # The end of the step, of grad_out, and dQ; at head dim 256 of the step alone: grad_out has one place, and a half of dQ its own.
    assert barriers.pop(("ARV", "of a stage")) == (1 if head_dim == 256 else 3)
    assert [barriers.pop(("ARV", name), 0) for name in (*DQ_STORED, DO_READ)] == [int(head_dim == 256)] * 3
    ((name, count),) = barriers.items()
    assert name == ("SYNC.DEFER_BLOCKING", "0x0, 0x100")
    assert count == report.barriers <= MOST_BARRIERS_OF_GLUON[head_dim]
    assert (report.drains, report.warp_syncs) == (1 + is_whole, 0)


@cells
def test_dq_is_stored_behind_all_matmuls(cell):
    """In shared memory, 16 bytes of a thread at a time; its arrival is the next step's first. The loop fences no other CTA."""
    head_dim = cell.head_dim
    (loop,) = loops_with(compiled(cell)[0], "HGMMA")
    stored = [i.address for i in loop if i.opcode == "STS.128"]
    assert len(stored) == gluon_tile(90, "bf16", head_dim).block_m * head_dim // 256 // 4
    *_, dq, last = (i.address for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR"))
    arrivals = [i.address for i in loop if i.opcode == "BAR.ARV"]
    first_wait = min(i.address for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR"))
    if head_dim == 256:  # the first half is under dK
        done_before, do_read, done, read = arrivals
        half = len(stored) // 2
        assert dq < do_read < min(stored) and max(stored[:half]) < done < last < read
        stored = stored[half:]
    else:
        done_before, do_read, read = arrivals
        assert last < do_read < read
    assert done_before < first_wait and last < min(stored)
    assert {i.opcode for i in loop if i.base == "MEMBAR"} == {"MEMBAR.ALL.CTA"}


@cells
def test_producer(cell):
    """Q and grad_out in boxes of 128 bytes, lse and delta, behind the end of the step that used the stage."""
    head_dim = cell.head_dim
    (loop,) = loops_with(compiled(cell)[0], "UTMALDG")
    found = counted(loop)
    assert found["UTMALDG"] == 2 * head_dim // 64 + 2
    assert (found["LDL"], found["STL"], found["LDGSTS"], found["ATOMG"]) == (0, 0, 0, 0)
    of_step, of_do = (i.operands for i in loop if i.base == "BAR")
    assert OF_A_STAGE.fullmatch(of_step)
    assert of_do == DO_READ if head_dim == 256 else OF_A_STAGE.fullmatch(of_do)


@cells
def test_who_adds_in_order(cell):
    """A warp polls, takes dQ, stores or adds it by TMA, waits until that is done, fences for the whole GPU and releases. One for
    each place of dQ; at head dim 256 one for each half, which it adds in two parts."""
    loops, of_parts = loops_with(compiled(cell)[0], "UTMAREDG"), []
    names = {
        "LDG.E.STRONG.GPU": "poll",
        "FENCE.VIEW.ASYNC.G": "proxy fence",
        "BAR.SYNC.DEFER_BLOCKING": "stored",
        "UTMASTG.2D": "store",
        "UTMAREDG.2D.ADD": "add",
        "UTMACMDFLUSH": "group",
        "DEPBAR.LE": "wait for the group",
        "SYNCS.ARRIVE.TRANS64.A1T0": "taken",
        "MEMBAR.ALL.GPU": "fence",
        "REDG.E.ADD.S32.STRONG.GPU": "release",
    }
    for loop in loops:
        found = [names[i.opcode] for i in loop if i.opcode in names]
        waits = [i.operands for i in loop if i.opcode == "DEPBAR.LE"]
        if cell.head_dim == 256:
            found = found[: found.index("release") + 1]  # behind it stands what lanes would do that had parted
            bulk = "store", "add", "group"
            # Of each part a store and an addition; the last group is of either.
            assert Counter(name for name in found if name in bulk) == {"store": 2, "add": 2, "group": 3}
            of_parts.append(waits[:-2])  # that of the first half which the second takes the place of
            read = ["wait for the group", "taken"] * (len(waits) - 1)
            expected = ["poll", "proxy fence", "stored", *read, "wait for the group", "fence", "release"]
            assert [name for name in found if name not in bulk] == expected
            assert waits[-2:] == ["SB0, 0x0", "SB0, 0x0"]
        else:
            # First until TMA has read the place, then until all is in global memory.
            assert found == [*list(names.values())[:8], "wait for the group", "fence", "release"]
            assert waits == ["SB0, 0x0", "SB0, 0x0"]
        counts = counted(loop)
        # A round robin's walk is more than 24 registers hold.
        most = 2 if cell.round_robin else MOST_SPILLED_BY_WHO_ADDS.get((TRITON, cell.head_dim, cell.mask), 0)
        assert counts["LDL"] + counts["STL"] <= most
        assert counts["ATOMG"] == 0
    assert sorted(of_parts) == ([[], ["SB0, 0x1"]] if cell.head_dim == 256 else [])
    assert sorted(tuple(i.operands for i in loop if i.base == "BAR") for loop in loops) == [DQ_STORED[:1], DQ_STORED[1:]]


def test_a_triton_without_the_names_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{templates.__name__}.gluon.launch", None)
    with pytest.raises(ValueError, match=r"written for Triton 3\.6 to 3\.9, this is"):
        gluon_kernel()


@cells
def test_shared_memory_and_registers(cell):
    """A CTA fits an SM: 384 threads of 168 registers, of which the consumers' warps take 240 and the four others keep 24."""
    _, report = compiled(cell)
    h100 = device("h100")
    assert report.shared_bytes <= h100.limits.shared_bytes_per_block_optin
    assert 384 * report.registers <= h100.limits.registers_per_sm
    asked = re.findall(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)", kernel(cell).ptx)
    assert set(asked) == {"240", "24"}
    assert h100.limits.registers_per_sm >= 256 * 240 + 128 * 24
