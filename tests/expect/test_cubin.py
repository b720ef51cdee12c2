"""The cubin analysis, on small kernels compiled for GPUs that are not there and on SASS written by hand."""

import random

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.machine_code import cubin
from benchmarks.machine_code.cubin import CubinReport, inspect, main_loops, natural_loops, parse

POINTERS = {"x": "*bf16", "y": "*bf16", "out": "*fp32", "counter": "*i32", "steps": "i32"}


@triton.jit
def matmul(x, y, out, counter, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ATOMIC: tl.constexpr, WHERE: tl.constexpr):
    """A matmul whose loop also does what ATOMIC says, WHERE: in the loop, before it, or in a loop without matmuls."""
    rows = tl.arange(0, M)
    columns = tl.arange(0, N)
    inner = tl.arange(0, K)
    slots = rows[:, None] * N + columns[None, :]
    total = tl.zeros([M, N], tl.float32)
    first = 0
    if WHERE == "before":
        first = tl.atomic_add(counter, 1)
    if WHERE == "other loop":
        for step in range(steps):
            tl.atomic_add(out + step * N + columns, 1.0, sem="relaxed")
    for step in range(first, steps):
        a = tl.load(x + rows[:, None] * 4096 + (step * K + inner)[None, :])
        b = tl.load(y + (step * K + inner)[:, None] * 4096 + columns[None, :])
        total = tl.dot(a, b, total)
        if WHERE == "loop":
            if ATOMIC == "float":
                tl.atomic_add(out + step * N + columns, 1.0, sem="relaxed")
            elif ATOMIC == "integer":
                tl.atomic_add(counter + step, 1, sem="relaxed")
            elif ATOMIC == "value":
                total += tl.atomic_add(counter + step, 1, sem="relaxed")
    tl.store(out + slots, total)


def compiled(
    atomic: str = "", where: str = "", *, arch: int = 90, shape: tuple[int, int, int] = (128, 128, 64), warps: int = 4
) -> CubinReport:
    m, n, k = shape
    constants = {"M": m, "N": n, "K": k, "ATOMIC": atomic, "WHERE": where}
    signature = {name: POINTERS.get(name, "constexpr") for name in matmul.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(matmul.arg_names) if name in POINTERS}
    source = ASTSource(fn=matmul, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 3}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return inspect(binary.asm["cubin"], binary.metadata.shared)


def test_hopper_loop():
    report = compiled()
    assert report.hgmma == 8  # one warpgroup: 64 of 128 rows and 16 of 64 columns of K an instruction
    assert report.ldgsts == 16  # two tiles of 16 KB, 128 threads, 16 bytes each
    assert (report.hmma, report.utcmma, report.local_in_loop, report.red, report.atomg) == (0, 0, 0, 0, 0)
    assert not report.wgmma_serialised
    assert report.shared_bytes >= 2 * (128 * 64 + 64 * 128) * 2
    assert 64 < report.registers <= 255
    assert 20 < report.instructions_in_loop < 400


@pytest.mark.parametrize(("arch", "kind"), [(80, "hmma"), (100, "utcmma")])
def test_matmuls_of_other_architectures(arch, kind):
    report = compiled(arch=arch)
    assert [name for name in ("hgmma", "hmma", "utcmma") if getattr(report, name)] == [kind]
    assert report.ldgsts > 0


@pytest.mark.parametrize(
    ("atomic", "where", "red", "atomg"),
    [
        ("float", "loop", True, False),
        ("integer", "loop", False, False),  # a RED, but not of fp32: a semaphore's release
        ("value", "loop", False, True),
        ("", "before", False, False),  # the ticket
        ("", "other loop", False, False),  # a loop, but not the main one
    ],
)
def test_atomics(atomic, where, red, atomg):
    report = compiled(atomic, where)
    assert (report.red > 0, report.atomg > 0) == (red, atomg)
    assert report.hgmma == 8


def test_spills():
    report = compiled(shape=(128, 512, 16))  # 512 fp32 a thread in the accumulator alone
    assert report.local_in_loop > 0
    assert report.stack_bytes > 0


def sass(*lines: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/    {line} ; /* 0x00000000000c7947 */" for i, line in enumerate(lines))


def addresses(text: str) -> list[int]:
    return [instruction.address // 16 for loop in main_loops(parse(text)) for instruction in loop]


def test_parse():
    (wait,) = parse("        /*31b0*/              @!P2 BRA P3, 0x3150 ;          /* 0xfffffffc00e4a947 */")
    assert (wait.address, wait.guard, wait.opcode, wait.operands) == (0x31B0, "@!P2", "BRA", "P3, 0x3150")
    assert [wait] == parse("  /*31b0*/  @!P2 BRA P3, 0x3150          &req={2,1}    ?trans5;   /* 0xfffffffc00e4a947 */")
    (matmul,) = parse("  /*10050*/  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;")
    assert matmul.base == "HGMMA" and matmul.is_matmul and not wait.is_matmul


@pytest.mark.parametrize(
    ("lines", "loop"),
    [
        # The innermost loop with matmuls; a poll inside.
        ("MOV R0, RZ; IADD3 R1, R1, 0x1, RZ; HMMA R4; LDG R2; @!P0 BRA 0x30; @P1 BRA 0x20; @P2 BRA 0x10; EXIT", [2, 3, 4, 5]),
        # Code of a loop outside its addresses: the rare way lies behind the exit.
        ("HMMA R4; @P0 BRA 0x50; FADD R1, R1, R2; @P1 BRA 0x0; EXIT; REDG.E.ADD.F32 [R2], R1; BRA 0x20", [0, 1, 2, 3, 5, 6]),
        # Code between a loop's addresses that leaves it.
        ("HMMA R4; @!P0 BRA 0x40; STL [R1], R2; EXIT; @P1 BRA 0x0; EXIT", [0, 1, 4]),
        # Reconvergence.
        ("BSSY B0, 0x40; HMMA R4; @P0 BRA 0x40; BSYNC B0; @P1 BRA 0x0; EXIT", [0, 1, 2, 3, 4]),
        ("BSSY B0, 0x50; HMMA R4; BSYNC B0; EXIT; EXIT; @P1 BRA 0x0; EXIT", [0, 1, 2, 5]),
        # A branch with its condition among the operands, and one that is always taken.
        ("HMMA R4; BRA P1, 0x40; FADD R1; FADD R2; @P0 BRA 0x0; EXIT", [0, 1, 2, 3, 4]),
        ("HMMA R4; @PT BRA 0x40; FADD R1; FADD R2; @P0 BRA 0x0; EXIT", [0, 1, 4]),
        # No loop, and none with matmuls.
        ("HMMA R4; EXIT; BRA 0x20", []),
        ("FADD R4; @P0 BRA 0x0; EXIT", []),
    ],
)
def test_the_main_loop(lines, loop):
    assert addresses(sass(*lines.split("; "))) == loop


def test_the_loop_with_most_matmuls():
    """Peeled iterations before the main loop, more than it holds itself, and a remainder loop after it."""
    text = sass(
        *["UTCHMMA tmem[UR1]"] * 4,
        "FADD R1, R1, R2",  # 4: main loop
        "@P1 ELECT P2, URZ, PT",  # Blackwell issues a matmul for one lane at a time
        "UTCHMMA tmem[UR1]",
        "@P1 BRA.U.ANY 0x50",
        "UTCHMMA tmem[UR1]",
        "@P0 BRA 0x40",
        "UTCHMMA tmem[UR1]",  # 10: remainder
        "@P0 BRA 0xa0",
        "@P0 BRA 0x0",
        "EXIT",
    )
    assert addresses(text) == [4, 5, 6, 7, 8, 9]
    assert [len(loop) for loop in main_loops(parse(text), count=2)] == [6, 2]
    assert len(main_loops(parse(text), count=5)) == 2


def test_figures_of_several_main_loops(monkeypatch):
    """Sums, but for asynchronous copies, of which the loop with the fewest counts, and for waits, that with the most."""
    text = sass(
        *["HGMMA.64x64x16 R4", "HGMMA.64x64x16 R4", "LDGSTS.E [R2], [R4]", "LDGSTS.E [R2], [R4]"],
        *["WARPGROUP.DEPBAR.LE gsb0, 0x0", "STL [R1], R2", "@P0 BRA 0x0"],  # 0 to 6
        *["HGMMA.64x64x16 R4", "LDGSTS.E [R2], [R4]", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"],
        *["LDL R2, [R1]", "@P0 BRA 0x70", "EXIT"],  # 7 to 12
    )
    monkeypatch.setattr(cubin, "disassemble", lambda _: f"REG:10 STACK:0\nFunction : k\n{text}")
    one, both = inspect(b"", 0), inspect(b"", 0, 2)
    assert (one.main_loops, one.instructions_in_loop, one.hgmma) == (1, 7, 2)
    assert (one.ldgsts, one.local_in_loop, one.warpgroup_depbars) == (2, 1, 1)
    assert (both.main_loops, both.instructions_in_loop, both.hgmma) == (2, 13, 3)
    assert (both.ldgsts, both.local_in_loop, both.warpgroup_depbars) == (1, 2, 2)
    assert inspect(b"", 0, 3) == both


def test_copies_ahead():
    """Groups under way after the first wait, less those of a step; of several loops the one with the fewest."""
    step = ["LDGSTS.E [R2], [R4]", "LDGDEPBAR", "LDGSTS.E [R2], [R4]", "LDGDEPBAR"]

    def ahead(*waits: int) -> int | None:
        return cubin.copies_ahead(parse(sass(*(f"DEPBAR.LE SB0, {left:#x}" for left in waits), *step)))

    assert (ahead(0), ahead(2, 1), ahead(3)) == (-2, 0, 1)
    assert ahead() is None
    assert cubin.copies_ahead(parse(sass("DEPBAR.LE SB1, 0x0", *step))) is None  # not the scoreboard of the copies


def test_issued_while_the_tensor_cores_idle():
    """A group of matmuls is in flight from its last one on, round the loop's end too, until a wait leaves fewer groups."""

    def idle(*lines: str) -> int:
        return cubin.issued_idle(parse(sass(*lines)), lambda instruction: instruction.base == "MEMBAR")

    fence, group, wait = "MEMBAR.SC.GPU", "HGMMA.64x64x16 R4, gdesc[UR4], gsb0", "WARPGROUP.DEPBAR.LE gsb0, {:#x}".format
    assert idle(fence, group, wait(0)) == idle(group, wait(0), fence) == idle(fence) == 1
    assert idle(group, fence, wait(0)) == idle(fence, wait(0), group) == 0
    assert idle(group, group, wait(1), fence, wait(0), fence) == 1
    assert idle("HGMMA.64x64x16 R4, gdesc[UR4]", fence, group, wait(0)) == 1  # the group has not ended
    assert idle(group, wait(0), fence, fence) == 2


@pytest.mark.parametrize(
    ("matmul", "others", "figures"),
    [
        ("HGMMA.64x64x16 R4, gsb0", ["MEMBAR.SC.GPU", "REDG.E.ADD.F32.FTZ.RN [R2], R1"], (0, 0)),
        ("HGMMA.64x64x16 R4, gsb0", ["WARPGROUP.DEPBAR.LE gsb0, 0x0", "MEMBAR.ALL.GPU", "REDG.E.ADD.F32x4 [R2], R1"], (1, 1)),
        ("HGMMA.64x64x16 R4, gsb0", ["MEMBAR.ALL.CTA", "REDG.E.ADD.S32 [R2], R1"], (None, None)),  # of a CTA; a release
        ("HMMA.16816 R4", ["MEMBAR.SC.GPU", "REDG.E.ADD.F32 [R2], R1"], (None, None)),  # never in flight
    ],
)
def test_idle_figures(monkeypatch, matmul, others, figures):
    text = sass(matmul, *others, "@P0 BRA 0x0", "EXIT")
    monkeypatch.setattr(cubin, "disassemble", lambda _: f"REG:10 STACK:0\nFunction : k\n{text}")
    report = inspect(b"", 0)
    assert (report.idle_fences, report.idle_additions, report.copies_ahead) == (*figures, None)


def test_waits_for_matmuls_and_barriers(monkeypatch):
    waits = [f"WARPGROUP.DEPBAR.LE gsb0, {left:#x}" for left in (1, 1, 0)]
    barriers = ["BAR.SYNC.DEFER_BLOCKING 0x0", "BAR.ARV 0x8, 0x120", "WARPSYNC.ALL", "WARPSYNC R4"]
    text = sass(
        "BAR.SYNC 0x0", "HGMMA.64x64x16 R4, gsb0", *waits, *barriers, "@P0 BRA 0x10", "BAR.SYNC 0x0", "WARPSYNC.ALL", "EXIT"
    )
    monkeypatch.setattr(cubin, "disassemble", lambda _: f"REG:10 STACK:0\nFunction : k\n{text}")
    report = inspect(b"", 0)
    assert (report.warpgroup_depbars, report.drains, report.barriers, report.warp_syncs) == (3, 1, 1, 2)


def test_indirect_branches_are_refused():
    with pytest.raises(ValueError, match="indirect branch at 0x10"):
        main_loops(parse(sass("HMMA R4", "BRX R2", "EXIT")))


def test_indirect_branches_whose_targets_are_known():
    """The dispatch of a warp-specialised kernel: each partition has a loop, and goes back to it."""
    text = sass("BRX R2", "HMMA R4", "@P0 BRA 0x10", "BRA 0x0", "UTMALDG", "@P1 BRA 0x40", "EXIT")
    attributes = "Offset of Indirect Branch: 0x0\t Number of targets: 3\n\tTargets: 0x10 0x40 0x60 \n"
    targets = cubin.indirect_targets(attributes)
    assert targets == {0x0: [0x10, 0x40, 0x60]}
    assert [[i.address // 16 for i in loop] for loop in main_loops(parse(text), targets)] == [[1, 2]]


def test_against_a_slow_definition():
    """Dominators from first principles: h dominates v if v cannot be reached without h."""
    rng = random.Random(7)
    for _ in range(200):
        size = rng.randrange(1, 9)
        graph = [rng.sample(range(size), rng.randrange(min(size, 3))) for _ in range(size)]

        def reached(start: int, without: int | None, graph: list[list[int]] = graph) -> set[int]:
            seen: set[int] = set()
            pending = [start] if start != without else []
            while pending:
                vertex = pending.pop()
                if vertex not in seen:
                    seen.add(vertex)
                    pending.extend(head for head in graph[vertex] if head != without)
            return seen

        expected = []
        for header in reached(0, None):
            tails = {t for t in reached(0, None) - reached(0, header) if header in graph[t]}
            if tails:
                inside = {v for v in reached(0, None) if v != header and tails & reached(v, header)}
                expected.append(inside | {header})
        assert sorted(map(sorted, natural_loops(graph))) == sorted(map(sorted, expected))
