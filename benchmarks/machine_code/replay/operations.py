"""SASS as the replay issues it: an instruction with its control code and what kind of work it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..cubin import Instruction

SCOREBOARDS = 6


@dataclass(frozen=True)
class ControlCode:
    """Bits 105 to 125 of an instruction, by which the compiler says what its hardware need not find out.

    They are laid out as on Volta (Jia, Maggioni, Staiger, Scarpazza, "Dissecting the NVIDIA Volta GPU Architecture via
    Microbenchmarking", 2.1). A scoreboard is one of six counters of a warp.
    """

    stall: int  # clocks until the warp's next instruction, at least
    write_scoreboard: int  # it counts down once the result is there; 7: none
    read_scoreboard: int  # the same, once the operands are read
    wait_mask: int  # bit b: scoreboard b must be 0 before the instruction issues

    @classmethod
    def decode(cls, high: int) -> ControlCode:
        """From the upper of an instruction's two 64-bit words.

        >>> ControlCode.decode(0x0005EC0000008000)
        ControlCode(stall=6, write_scoreboard=7, read_scoreboard=2, wait_mask=0)
        """
        bits = high >> 41
        return cls(bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63)


_WORDS = re.compile(r"/\*([0-9a-f]{4,6})\*/.*?/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/")


def control_codes(sass: str) -> dict[int, ControlCode]:
    """Address -> control code, from the text of `cuobjdump -sass` of one function."""
    return {int(match[1], 16): ControlCode.decode(int(match[2], 16)) for match in _WORDS.finditer(sass)}


# By opcode without modifiers; HGMMA, RED, LDG and WARPGROUP are told apart by more (`kind`). All others are arithmetic.
_KINDS = {
    "BAR": "barrier",
    "MEMBAR": "membar",
    "FENCE": "fence",
    "LDGSTS": "copy",
    "LDGDEPBAR": "commit",
    "DEPBAR": "wait for copies",
    "HMMA": "synchronous matmul",
    "MUFU": "mufu",
    "STG": "store",
    "SYNCS": "mbarrier",
    **dict.fromkeys(("LDS", "LDSM", "SHFL", "LDL"), "shared load"),
    **dict.fromkeys(("STS", "STSM", "STL"), "shared store"),
    **dict.fromkeys(("LDC", "ULDC", "S2R", "S2UR"), "constant"),
}
# What the machine has no model of; all of it is asynchronous, or a matmul.
UNKNOWN = frozenset(("IMMA", "IGMMA", "QGMMA", "ATOM", "ATOMG", "ATOMS", "CALL", "BRX", "JMX"))
UNKNOWN |= {"UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP"}
# Issued at half the rate, one warp of a scheduler in two clocks: 64 a clock and SM (CUDA Programming Guide, throughput, 9.0).
_HALF_RATE = re.compile(
    "LOP3|ISETP|FSEL|FSETP|FMNMX|SEL|PRMT|SHF|IADD3|LEA|VIADD|PLOP3|IABS|SGXT|BMSK|F2FP|CS2R|V?IMNMX|P2R|R2P|MOV|VOTE"
)


@dataclass(frozen=True)
class Operation(Instruction):
    """An instruction with its control code, and what the replay reads from its operands."""

    control: ControlCode

    @cached_property
    def kind(self) -> str:
        """Which rule of the machine it follows."""
        if self.guard == "@!PT":  # a placeholder that never runs
            return "arithmetic"
        if self.base == "HGMMA":
            return "matmul"
        if self.opcode.startswith("WARPGROUP.DEPBAR"):
            return "wait for matmuls"
        if self.base in ("RED", "REDG"):
            return "addition" if ".F32" in self.opcode else "release"
        if self.base == "LDG":
            return "poll" if ".STRONG" in self.opcode else "load"
        return _KINDS.get(self.base, "arithmetic")

    @cached_property
    def target(self) -> int | None:
        """The address that a branch leads to."""
        return int(self.operands.rpartition("0x")[2], 16) if self.base == "BRA" else None

    @cached_property
    def pipe(self) -> tuple[str, int] | None:
        """The execution pipe that limits it and for how many clocks a warp takes it; None: one warp a clock."""
        if self.kind == "synchronous matmul":
            return "hmma", 0  # by the constant of its rate
        if self.kind == "matmul":
            return "hgmma", 0
        if self.kind == "mufu" or self.base in ("I2F", "F2I", "I2FP"):
            return "mufu", 0  # by the constant of that name
        if self.base == "IMAD":
            return "multiply", 2
        return ("arithmetic", 2) if _HALF_RATE.fullmatch(self.base) else None

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k) of a matmul: of one warpgroup, `HGMMA.64x128x16`, or of one warp, `HMMA.16816` and `HMMA.1688`."""
        size = self.opcode.split(".")[1]
        if self.base == "HMMA":
            return 16, 8, int(size.removeprefix("168"))
        m, n, k = map(int, size.split("x"))
        return m, n, k

    @property
    def flop(self) -> int:
        """FLOP of a matmul, of one warpgroup or one warp; 0 where the operation is none."""
        if self.kind not in MATMULS:
            return 0
        m, n, k = self.shape
        return 2 * m * n * k

    @cached_property
    def operand_bytes(self) -> int:
        """What a matmul reads from shared memory: B, and A unless its rows come from registers; two bytes an element."""
        m, n, k = self.shape
        from_registers = re.match(r"R\d+, R\d+", self.operands)
        return ((0 if from_registers else m) + n) * k * 2

    @property
    def ends_group(self) -> bool:
        """Whether a matmul is the last of those that are waited for together."""
        return "gsb0" in self.operands

    @cached_property
    def left_in_flight(self) -> int | None:
        """How many groups a wait (for matmuls, or for copies) leaves; None for a DEPBAR on a scoreboard alone."""
        match = re.match(r"(?:gsb0|SB\d), (0x[0-9a-f]+)", self.operands)
        return int(match[1], 16) if match else None

    @cached_property
    def barrier(self) -> tuple[str, int | None]:
        """(number, threads) of a BAR.SYNC or BAR.ARV; None: all threads of the CTA."""
        number, *threads = (operand.strip() for operand in self.operands.split(","))
        return number, int(threads[0], 16) if threads and threads[0].startswith("0x") else None

    @property
    def takes_turns(self) -> bool:
        """Whether a barrier's number stands in a register: it is that of the warpgroup whose turn it is."""
        return self.kind == "barrier" and self.barrier[0].startswith("R")

    @cached_property
    def bytes(self) -> int:
        """What a warp moves: in an access to shared memory, in a copy to it, or in an addition in L2."""
        width = self.opcode.rpartition(".")[2]
        if self.kind == "addition":  # of the vectors F32x2 and F32x4, or of one value
            vector = re.search(r"\.F32x([24])\.", self.opcode)
            return 128 * (int(vector[1]) if vector else 1)
        if self.kind == "copy":
            return 512 if width == "128" else 32  # rows and the table's entry: lanes copy the same words, a sector of L2 in all
        if self.base in ("LDSM", "STSM"):  # one, two or four matrices of 8 x 8
            return 128 * int(width) if width in ("1", "2", "4") else 128
        return 128 * {"64": 2, "128": 4}.get(width, 1)

    @property
    def of_whole_gpu(self) -> bool:
        """Whether a fence is for all threads of the GPU."""
        return self.opcode.endswith(".GPU")


def decoded(loop: Sequence[Instruction], codes: Mapping[int, ControlCode]) -> list[Operation]:
    """A loop of `cubin.main_loops` with its control codes."""
    return [Operation(**vars(instruction), control=codes[instruction.address]) for instruction in loop]


def rotated(loop: Sequence[Operation]) -> list[Operation]:
    """A loop in the order in which it is run, where ptxas has put the block that comes second before the one that is entered.

    Such a loop begins with a block that jumps forward over the one that is entered, which ends with a jump back to the first.
    """
    loop = list(loop)
    over = next((at for at, operation in enumerate(loop) if operation.base == "BRA"), None)
    if over is None or loop[over].guard:
        return loop
    third = next((at for at, operation in enumerate(loop) if operation.address == loop[over].target), None)
    if third is None or third <= over + 1 or loop[third - 1].base != "BRA" or loop[third - 1].target != loop[0].address:
        return loop
    return loop[over + 1 : third] + loop[: over + 1] + loop[third:]


def step_of(loop: Sequence[Operation], warp: int) -> list[Operation]:
    """What one warp issues in a step: of a rank above 0, so that it polls and adds, at once; and in no tile at a mask's edge.

    A branch out of the loop or back is not taken; which ways are taken within it follows from what they hold:

    - the one thread that polls, fences or releases belongs to one warp, and the others pass by;
    - matmuls, additions and barriers are what a step is made of;
    - stores are those of rank 0;
    - a mask (-INF) is for tiles at an edge.
    """
    place = {operation.address: position for position, operation in enumerate(loop)}
    work_ends = max((at for at, operation in enumerate(loop) if operation.kind in _WORK), default=0)
    issued: list[Operation] = []
    here = 0
    while here < len(loop):
        operation = loop[here]
        issued.append(operation)
        there = place.get(operation.target) if operation.target is not None else None
        here += 1
        if there == 0 and here > work_ends:  # the next step; what stands behind it is out of the way
            break
        if there is not None and there >= here and (not operation.guard or _passes_by(loop, here, there, warp)):
            here = there
    return issued


MATMULS = ("matmul", "synchronous matmul")
_WORK = {*MATMULS, "addition", "barrier"}


def _passes_by(loop: Sequence[Operation], first: int, end: int, warp: int) -> bool:
    """Whether a warp takes the conditional branch that stands before `first` and leads to `end`."""
    body = loop[first:end]
    kinds = {operation.kind for operation in body}
    of_one_thread = kinds & {"release", "poll"} or any(
        (operation.base == "MEMBAR" and operation.of_whole_gpu) or operation.opcode.startswith("SYNCS.ARRIVE") for operation in body
    )
    if of_one_thread and "barrier" not in kinds:
        return warp != _warp_of_one_thread(loop, first - 1)
    if kinds & _WORK:
        return False
    if "store" in kinds or any("INF" in operation.operands for operation in body):
        return True
    return any(operation.base in ("EXIT", "BPT", "NANOSLEEP") for operation in body)


def _warp_of_one_thread(loop: Sequence[Operation], branch: int) -> int:
    """Whose thread does not take a branch: its predicate compares the thread's number with a constant, 0 unless it is seen."""
    predicate = loop[branch].guard.lstrip("@!")
    for operation in reversed(loop[:branch]):
        if operation.base == "ISETP" and operation.operands.split(",")[0] == predicate:
            match = re.search(r"R\d+, 0x([0-9a-f]+), ", operation.operands)
            return int(match[1], 16) // 32 if match else 0
    return 0
