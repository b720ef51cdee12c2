"""The replay's machine on loops written by hand, the decoding of control codes, and the command."""

from __future__ import annotations

import json

import pytest

from benchmarks.machine_code.__main__ import main
from benchmarks.machine_code.cubin import parse
from benchmarks.machine_code.replay import Constants, Replay, replay_loop, times_by_place
from benchmarks.machine_code.replay.operations import ControlCode, Operation, control_codes, decoded, step_of

pytestmark = pytest.mark.nightly

# Of the kernel for an H100 at d = 128, as cuobjdump prints it.
SASS = """
        /*2910*/                   S2R R222, SR_TID.X ;                                      /* 0x0000000000de7919 */
                                                                                             /* 0x000e620000002100 */
        /*2920*/                   DEPBAR.LE SB0, 0x5 ;                                      /* 0x000081400000791a */
                                                                                             /* 0x000fc80000000000 */
        /*45f0*/              @!P4 BRA 0x4610 ;                                              /* 0x000000000004c947 */
                                                                                             /* 0x004fea0003800000 */
        /*4600*/                   REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR6][R200.64], R152 ; /* 0x00000098c80079a6 */
                                                                                             /* 0x0005e4000c10f786 */
        /*4610*/              @!P4 BRA 0x4630 ;                                              /* 0x000000000004c947 */
                                                                                             /* 0x000fea0003800000 */
        /*4620*/                   REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR6][R200.64+0x1000], R156 ; /* 0x0010009cc80079a6 */
                                                                                             /* 0x0007e4000c10f786 */
"""

S = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0"  # 32 clocks of work and of shared memory, for each warpgroup
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
COPY = "LDGSTS.E.BYPASS.128 [R45+0xd000], desc[UR20][R42.64], P0"
ADD = "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR24][R202.64], R36"
POLL, RELEASE = "LDG.E.STRONG.GPU R24, desc[UR24][R152.64]", "REDG.E.ADD.S32.STRONG.GPU desc[UR24][R24.64], R27"


def loop(*lines: str | tuple[str, int, int, int]) -> list[Operation]:
    """Operations from SASS, each alone or with its write and read scoreboards and its wait mask; and the branch back."""
    rows = [line if isinstance(line, tuple) else (line, 7, 7, 0) for line in [*lines, "@P0 BRA 0x0"]]
    text = "\n".join(f"/*{16 * i:04x}*/ {line} ;" for i, (line, *_) in enumerate(rows))
    codes = {16 * i: ControlCode(1, write, read, mask) for i, (_, write, read, mask) in enumerate(rows)}
    return decoded(parse(text), codes)


# Round figures: what is counted by hand below does not hang on a fit.
BY_HAND = {"jump": 1, "matmul_dispatch": 1, "matmul_latency": 28, "addition_bandwidth": 32, "barrier": 20}


def replayed(*lines: str | tuple[str, int, int, int], warps: int = 8, **constants: float) -> Replay:
    found = replay_loop(loop(*lines), warps=warps, constants=Constants().set_from(BY_HAND | constants))
    if found.exposed:
        assert found.tensor_cycles + sum(found.exposed.values()) == pytest.approx(found.cycles)
    return found


def test_control_codes():
    """Each addition has the next scoreboard for its operands; the branch before the first waits for scoreboard 2."""
    codes = [(1, 1, 7, 0), (4, 7, 7, 0), (5, 7, 7, 0b100), (2, 7, 2, 0), (5, 7, 7, 0), (2, 7, 3, 0)]
    names = ("stall", "write_scoreboard", "read_scoreboard", "wait_mask")
    expected = [ControlCode(**dict(zip(names, code, strict=True))) for code in codes]
    assert control_codes(SASS) == {i.address: code for i, code in zip(parse(SASS), expected, strict=True)}


def test_matmuls_follow_each_other():
    """Two of two warpgroups on one set of tensor cores, back to back."""
    found = replayed(S, S)
    assert found.cycles == found.tensor_cycles == pytest.approx(128, rel=0.06)  # queued ahead, in no equal steps
    assert not found.exposed
    assert found.flop == 4 * 2 * 64 * 64 * 16
    assert replayed(S, S, warps=4).cycles == 64


def test_a_wait_for_a_matmul():
    """The tensor cores idle between its end, its report and the next one's issue."""
    found = replayed(S, WAIT, warps=4, matmul_latency=28)
    assert found.cycles == 32 + 28 + 2  # the branch, and the next matmul, which starts when it issues
    assert found.exposed["matmul latency"] == pytest.approx(28)
    slower = replayed(S, WAIT, warps=4, matmul_latency=128)
    assert slower.cycles - found.cycles == 100


@pytest.mark.parametrize(("left", "latency", "waits"), [(0, 270, True), (1, 270, False), (1, 900, True), (4, 900, False)])
def test_a_wait_for_copies(left, latency, waits):
    """Groups under way hide the trip to L2, as long as their steps take: one about 260 clocks."""
    step = (COPY, "LDGDEPBAR", f"DEPBAR.LE SB0, {left:#x}", S, S, S, S, WAIT)
    found = replayed(*step, l2_latency=latency)
    assert (found.exposed.get("loads", 0) > 100) == waits
    assert (next(iter(found.exposed)) == "loads") == waits


def test_a_branch_takes_its_time():
    """The one back to the first instruction."""
    assert replayed(S, WAIT, warps=4, jump=30).cycles - replayed(S, WAIT, warps=4).cycles == 29


def test_matmuls_of_a_scheduler_follow_each_other():
    """Two warps issue four each: 64 clocks of work in all, or eight times what one takes."""
    small = S.replace("64x64", "64x8").replace("gdesc[UR4]", "R4, gdesc[UR4]")  # 4 clocks
    together = "BAR.SYNC.DEFER_BLOCKING 0x0"
    assert replayed(*[small] * 4, together).cycles < 80
    assert replayed(*[small] * 4, together, matmul_dispatch=20).cycles == pytest.approx(8 * 20, abs=22)  # and the barrier


LONG = S.replace(", gsb0", "")
LOAD, STORE = ("LDS.64 R8, [R11]", 0, 7, 0), ("STS.128 [R11], R12", 7, 0, 0)
USE = ("FADD R9, R8, R8", 7, 7, 1)


def test_a_load_stands_behind_the_matmuls_of_its_warp():
    """Alone it takes 2 clocks and a trip; behind three matmuls it waits until the last of them starts."""
    alone = replayed(LOAD, USE, S, WAIT, warps=4, shared_latency=300)
    behind = replayed(LONG, LONG, S, LOAD, USE, WAIT, warps=4, shared_latency=300)
    assert behind.cycles - 64 == pytest.approx(alone.cycles - 32 - 28, abs=6)  # then its matmul has ended


def test_matmuls_leave_loads_a_share():
    """Eight stores of 512 bytes by four warps, 128 clocks, beside matmuls that read as much as shared memory has, or half of it."""
    full = [LONG] * 7 + [S]
    half = [line.replace("gdesc[UR4]", "R4, gdesc[UR4]") for line in full]

    def clocks(matmuls: list[str], **constants: float) -> float:
        stored = ("MEMBAR.ALL.CTA", 7, 1, 0)
        return replayed(*matmuls, *[STORE] * 8, stored, ("NOP", 7, 7, 2), warps=4, cta_fence=1, matmul_queue=9, **constants).cycles

    assert clocks(full, least_share=0.25) > clocks(full, least_share=0.5) > clocks(full, least_share=1)
    assert clocks(half, least_share=0.25) == clocks(half, least_share=0.5)


def test_fences_wait_for_stores():
    """A CTA's waits for those of its own warp, a proxy's for all of them."""
    fences = [("MEMBAR.ALL.CTA", 7, 1, 0), ("FENCE.VIEW.ASYNC.S", 2, 7, 2), ("NOP", 7, 7, 4)]
    without = replayed(*fences, S, WAIT, cta_fence=10, async_fence=20)
    behind = replayed(*[STORE] * 4, *fences, S, WAIT, cta_fence=10, async_fence=20)
    assert without.cycles == pytest.approx(10 + 20 + 32 + 28, abs=6)
    assert behind.cycles - without.cycles == pytest.approx(8 * 4 * 4, abs=12)  # 512 bytes take 4 clocks
    assert behind.exposed["fence"] > 100


def test_the_first_matmul_of_a_chain_waits():
    """Until the last but so many of the warp have started; those of one chain are issued one after the other."""

    def longest_wait(*matmuls: str) -> float:
        constants = Constants().set_from(BY_HAND | {"matmul_queue": 1})
        _, times = times_by_place(loop(*matmuls, WAIT), warps=4, constants=constants)
        return max(times[16 * place] for place in range(1, len(matmuls)))

    assert longest_wait(*[LONG] * 7, S) < 3
    assert longest_wait(*[S] * 8) == pytest.approx(32, abs=2)


MINE, OTHERS = "BAR.SYNC.DEFER_BLOCKING R13, 0x100", "BAR.ARV R14, 0x100"  # numbers of barriers in registers: turns


def test_additions_press_back():
    """16 of 512 bytes by 8 warps are 65,536 bytes: 2,048 clocks at 32 bytes a clock, whatever is buffered."""
    step = [(ADD, 7, 0, 0)] * 16
    found = replayed(*step, S, ("MOV R1, R2", 7, 7, 1))
    assert found.cycles == pytest.approx(2048, abs=2)
    assert next(iter(found.exposed)) == "additions"
    assert replayed(*step, S, ("MOV R1, R2", 7, 7, 1), addition_bandwidth=64).cycles == pytest.approx(1024, abs=2)


def test_a_fence_waits_for_additions():
    quiet = replayed("MEMBAR.ALL.GPU", S, WAIT)
    assert next(iter(quiet.exposed)) == "membar"
    assert quiet.cycles == pytest.approx(300 + 32 + 28, abs=3)  # the other warpgroup's matmul runs under its fence
    after = replayed(*[(ADD, 7, 0, 0)] * 4, "MEMBAR.ALL.GPU", S, WAIT, warps=4)
    assert after.cycles == pytest.approx(256 + 270 + 32 + 28, abs=10)  # 8,192 bytes, and the last one's acknowledgement
    copies = (COPY, "MEMBAR.ALL.GPU", S, WAIT)
    assert replayed(*copies, gpu_fence_of_copies=1).cycles > replayed(*copies).cycles + 20


CHAIN = ((POLL, 0, 7, 0), ("IADD3 R1, R1, 0x1, RZ", 7, 7, 1), (ADD, 7, 1, 0), "MEMBAR.ALL.GPU", RELEASE, S, WAIT)
LATE = ("MEMBAR.ALL.GPU", RELEASE, *CHAIN[:3], S, WAIT)  # released before its additions, a step hands over those of the step before


def test_handover():
    """After the poll an addition's trip and acknowledgement, half a trip of the release, and a whole one of the other's poll."""
    found, slower = replayed(*CHAIN), replayed(*CHAIN, l2_latency=370)
    assert found.handover_cycles == pytest.approx(64 + 270 + 135 + 270, abs=50)
    assert slower.handover_cycles - found.handover_cycles == pytest.approx(250, abs=30)
    assert found.chained_cycles >= found.cycles
    assert replayed(*LATE).handover_cycles > found.handover_cycles


def opcodes(step: list[Operation], warp: int) -> list[str]:
    return [operation.base for operation in step_of(step, warp)]


def test_what_a_warp_does_in_a_step():
    """Thread 64, of warp 2, polls; rank 0 alone stores; a mask is for an edge, where it is not."""
    step = loop(
        "ISETP.NE.AND P1, PT, R0, 0x40, PT",  # 0
        "@P1 BRA 0x40",
        POLL,
        "@P2 BRA 0x20",  # spins
        "@P3 BRA 0x60",  # 4
        "FSEL R1, R1, -INF, P4",
        "@P5 BRA 0x80",  # 6
        "STG.E.128 desc[UR24][R202.64], R36",
        "@P6 BRA 0xa0",  # 8
        ADD,
        "BRA 0xc0",  # 10
        "NOP",
        S,  # 12
    )
    always = ["ISETP", "BRA", "BRA", "BRA", "BRA", "REDG", "BRA", "HGMMA", "BRA"]
    assert opcodes(step, 0) == always
    assert opcodes(step, 2) == [*always[:2], "LDG", "BRA", *always[2:]]


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ([S, "IMMA.16832.S8.S8 R4, R8, R12, R4"], {}, "IMMA in the main loop: the replay has no model of it"),
        ([S, "UTMAREDG.2D [UR4]", "UTMALDG.2D [UR4]"], {}, "UTMALDG, UTMAREDG in the main loop"),
        (["NOP"], {}, "no HGMMA or HMMA"),
        ([MINE, S], {"warps": 12}, "take turns in the main loop: the replay knows two, not 12 warps"),
        ([S], {"warps": 6}, "there are 6 warps"),
        (["@P1 BRA 0x30", POLL, S, WAIT], {}, "every warp waits for another one: WARPGROUP.DEPBAR.LE$"),  # one warp's matmul
        ([S], {"smem": 1}, "unknown constant 'smem': the known ones are tensor_flop, "),
        ([S], {"barrier": 0}, "barrier must be positive, got 0"),
        ([S], {"gpu_fence_of_copies": 2}, "gpu_fence_of_copies is 0 or 1, not 2"),
    ],
)
def test_what_cannot_be_replayed(lines, settings, message):
    with pytest.raises(ValueError, match=message):
        replayed(*lines, **settings)


def test_the_list_of_constants(capsys):
    assert main(["replay", "--constants", "--json", "--set", "barrier=30"]) == 0
    listed = json.loads(capsys.readouterr().out)["constants"]
    assert listed["barrier"]["value"] == 30 and listed["barrier"]["guess"] is True
    assert all(constant["unit"] and constant["source"] for constant in listed.values())
