"""What a cubin says about a kernel: registers, stack, and the instructions of the loops that multiply.

Compilers fail silently: a kernel that spills, is not pipelined or multiplies with the wrong instruction still gives
right results. The figures here are what the tests gate.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import networkx  # which torch brings along

# From this many WARPGROUP.DEPBAR in the loop on, ptxas has put a wait behind every wgmma; a pipelined loop has 3 or 4.
SERIALISED_DEPBARS = 20


@dataclass(frozen=True)
class CubinReport:
    """Figures of one kernel. Counts are of SASS instructions in its main loop, 0 when it has none.

    A kernel with several kinds of CTAs has as many main loops (`main_loops`): then these are sums, but for the asynchronous copies,
    of which the loop with the fewest counts, and the waits for matmuls and barriers, of which that with the most. None: nothing
    to count.
    """

    registers: int  # per thread
    stack_bytes: int  # per thread, wherever it is used
    shared_bytes: int  # per CTA
    main_loops: int
    instructions_in_loop: int
    local_in_loop: int  # LDL and STL: spills
    hgmma: int  # Hopper's asynchronous matmul
    hmma: int  # the synchronous one, of Ampere
    utcmma: int  # Blackwell's (UTCHMMA, UTCQMMA, ...)
    ldgsts: int  # asynchronous copies to shared memory: 0 means that the loads are not pipelined
    utmaldg: int  # the same by TMA
    red: int  # fp32 additions to global memory, scalar or vector; integer ones (semaphores) are not counted
    atomg: int  # atomics that return a value
    warpgroup_depbars: int  # waits for matmuls
    drains: int  # those that leave no matmul in flight
    barriers: int  # BAR.SYNC: of all warps, but where the kernel has warps of several kinds, of all that multiply
    warp_syncs: int  # WARPSYNC: the lanes of a warp meet, which ptxas takes for diverged or the source says may be
    copies_ahead: int | None  # of the loop with the fewest: `copies_ahead`, None where no loop waits for LDGSTS
    idle_fences: int | None  # fences of the whole GPU that `issued_idle`, None without such fences or HGMMA
    idle_additions: int | None  # the same of fp32 additions to global memory
    shuffle_barriers: int | None  # the most `shuffle_barriers` of a loop, None where no loop adds what it loads from tensor memory

    @property
    def wgmma_serialised(self) -> bool:
        """Whether ptxas gave up overlapping Hopper's matmuls."""
        return self.warpgroup_depbars >= SERIALISED_DEPBARS

    def as_dict(self) -> dict[str, int | bool | None]:
        """Every figure by name, for JSON."""
        return {**asdict(self), "wgmma_serialised": self.wgmma_serialised}


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction: `@P0 BRA 0x40` has guard "@P0", opcode "BRA", operands "0x40"."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def is_matmul(self) -> bool:
        """Whether it multiplies matrices, of any generation."""
        return self.base.endswith("MMA")


def inspect(cubin: bytes, shared_bytes: int, count: int = 1) -> CubinReport:
    """Read a cubin of one kernel, which has `count` main loops, with the cuobjdump that comes with Triton.

    `shared_bytes` is `metadata.shared` of the compiled kernel: dynamic shared memory does not stand in the cubin.
    Raises ValueError for a cubin of several functions.
    """
    text = disassemble(cubin)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    functions = text.split("Function : ")[1:]
    if usage is None or len(functions) != 1:
        raise ValueError(f"expected a cubin of one kernel, found {len(functions)}")
    loops = main_loops(parse(functions[0]), indirect_targets(functions[0]), count)
    instructions = [instruction for loop in loops for instruction in loop]
    bases = Counter(instruction.base for instruction in instructions)

    def each(opcode: str) -> list[int]:
        return [sum(instruction.opcode.startswith(opcode) for instruction in loop) for loop in loops]

    def idle(wanted: Callable[[Instruction], bool]) -> int | None:
        return sum(issued_idle(loop, wanted) for loop in loops) if bases["HGMMA"] and any(map(wanted, instructions)) else None

    left_in_flight = [[_last_number(i) for i in loop if i.opcode.startswith("WARPGROUP.DEPBAR")] for loop in loops]
    return CubinReport(
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=shared_bytes,
        main_loops=len(loops),
        instructions_in_loop=len(instructions),
        local_in_loop=bases["LDL"] + bases["STL"],
        hgmma=bases["HGMMA"],
        hmma=bases["HMMA"],
        utcmma=sum(instruction.is_matmul and instruction.base.startswith("UTC") for instruction in instructions),
        ldgsts=min(each("LDGSTS"), default=0),
        utmaldg=min(each("UTMALDG"), default=0),
        red=sum(map(_is_addition, instructions)),
        atomg=bases["ATOMG"] + bases["ATOM"],
        warpgroup_depbars=max(map(len, left_in_flight), default=0),
        drains=max((of_loop.count(0) for of_loop in left_in_flight), default=0),
        barriers=max(each("BAR.SYNC"), default=0),
        warp_syncs=max(each("WARPSYNC"), default=0),
        copies_ahead=min((ahead for ahead in map(copies_ahead, loops) if ahead is not None), default=None),
        idle_fences=idle(lambda instruction: instruction.base == "MEMBAR" and instruction.opcode.endswith(".GPU")),
        idle_additions=idle(_is_addition),
        shuffle_barriers=max((count for count in map(shuffle_barriers, loops) if count is not None), default=None),
    )


def _is_addition(instruction: Instruction) -> bool:
    """Whether it adds to fp32 values in global memory."""
    return instruction.base.startswith("RED") and ".ADD.F32" in instruction.opcode


def copies_ahead(loop: Sequence[Instruction]) -> int | None:
    """The groups of LDGSTS that may still be under way after the loop's first wait for some, less those that one step issues.

    Below 0 the first wait is for copies that the step before issued at its end: nothing is prefetched. None: no such wait.

    >>> two_stages = "/*0000*/ DEPBAR.LE SB0, 0x0 ; /*0010*/ LDGDEPBAR ; /*0020*/ LDGDEPBAR ;"
    >>> copies_ahead(parse(two_stages)), copies_ahead(parse(two_stages.replace("0x0 ;", "0x2 ;")))
    (-2, 0)
    """
    left = [
        _last_number(instruction) for instruction in loop if instruction.base == "DEPBAR" and instruction.operands.startswith("SB0")
    ]
    return left[0] - sum(instruction.base == "LDGDEPBAR" for instruction in loop) if left else None


def shuffle_barriers(loop: Sequence[Instruction]) -> int | None:
    """The barriers of the CTA between a load from tensor memory and the first fp32 addition to global memory behind it.

    Some: the values are shuffled through shared memory. None: nothing is added, or nothing comes from tensor memory.

    >>> shuffle_barriers(parse("/*0000*/ LDTM.x32 R4, tmem[UR4] ; /*0010*/ BAR.SYNC 0x0 ; /*0020*/ REDG.E.ADD.F32x4 [R2], R4 ;"))
    1
    """
    count = None
    for instruction in (*loop, *loop):  # the loop may begin between the two
        if instruction.base == "LDTM":
            count = 0
        elif count is not None and _is_addition(instruction):
            return count
        elif count is not None and instruction.base == "BAR":
            count += 1
    return None


def issued_idle(loop: Sequence[Instruction], wanted: Callable[[Instruction], bool]) -> int:
    """The wanted instructions that stand where every HGMMA before them has been waited for: there the tensor cores idle."""
    count = groups_in_flight = 0
    for turn in range(2):  # the second turn begins with the groups that the first leaves in flight
        for instruction in loop:
            if instruction.base == "HGMMA":
                groups_in_flight += "gsb0" in instruction.operands  # ends a group
            elif instruction.opcode.startswith("WARPGROUP.DEPBAR"):
                groups_in_flight = min(groups_in_flight, _last_number(instruction))
            elif turn and not groups_in_flight and wanted(instruction):
                count += 1
    return count


@functools.lru_cache(maxsize=2)
def disassemble(cubin: bytes) -> str:
    """cuobjdump's resource usage, then the SASS, then the attributes in which the targets of indirect branches stand, if any do.

    ValueError for what is no cubin.
    """
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)

        def cuobjdump(*options: str) -> str:
            command = [triton.knobs.nvidia.cuobjdump.path, *options, str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ValueError("no machine code that cuobjdump can read")
            return done.stdout

        sass = cuobjdump("-res-usage", "-sass")
        return sass + cuobjdump("-elf") if " BRX " in sass else sass


# Behind the operands a cuobjdump may write scheduling marks, `&req={1} ?trans5`, as that of CUDA 12.8 does for sm_120.
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:\{\s*)?(@!?U?P\w+)?\s*([A-Z]\w*(?:\.\w+)*)\s*([^&?;]*?)\s*(?:[&?][^;]*)?;")


def parse(sass: str) -> list[Instruction]:
    """The instructions of one function, from the text of `cuobjdump -sass`."""
    matches = _INSTRUCTION.finditer(sass)
    return [Instruction(int(match[1], 16), match[2] or "", match[3], match[4]) for match in matches]


NO_TARGETS: Mapping[int, Sequence[int]] = MappingProxyType({})
_INDIRECT = re.compile(r"Offset of Indirect Branch:\s+0x([0-9a-f]+)\s+Number of targets:\s+\d+\s+Targets:((?:\s+0x[0-9a-f]+)+)")


def indirect_targets(attributes: str) -> dict[int, list[int]]:
    """Address of an indirect branch -> the addresses it can lead to, from the text of `cuobjdump -elf`.

    >>> indirect_targets("Offset of Indirect Branch: 0x200	 Number of targets: 2 Targets: 0x210 0x12c0")
    {512: [528, 4800]}
    """
    return {int(match[1], 16): [int(target, 16) for target in match[2].split()] for match in _INDIRECT.finditer(attributes)}


def main_loops(
    instructions: list[Instruction], indirect: Mapping[int, Sequence[int]] = NO_TARGETS, count: int = 1
) -> list[list[Instruction]]:
    """The innermost loops that hold matmuls: the `count` with the most, or all if they are fewer."""
    loops = innermost_loops(instructions, indirect, lambda instruction: instruction.is_matmul)
    return sorted(loops, key=lambda loop: -sum(instruction.is_matmul for instruction in loop))[:count]


def innermost_loops(
    instructions: list[Instruction], indirect: Mapping[int, Sequence[int]], wanted: Callable[[Instruction], bool]
) -> list[list[Instruction]]:
    """The loops that hold a wanted instruction, and no smaller loop that does."""
    loops = [loop for loop in natural_loops(successors(instructions, indirect)) if any(wanted(instructions[i]) for i in loop)]
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    return [[instructions[i] for i in sorted(loop)] for loop in innermost]


def successors(instructions: list[Instruction], indirect: Mapping[int, Sequence[int]] = NO_TARGETS) -> list[list[int]]:
    """The control-flow graph: for each instruction, which can follow it, by position.

    `indirect` has the targets of indirect branches, by address (`indirect_targets`); ValueError for a branch that it does not have.
    """
    position = {instruction.address: i for i, instruction in enumerate(instructions)}
    barriers = [(i.operands.split(",")[0], _last_number(i)) for i in instructions if i.base == "BSSY"]
    graph = []
    for i, instruction in enumerate(instructions):
        following = [i + 1] if i + 1 < len(instructions) else []
        if instruction.opcode == "BRA.U.ANY":  # until every lane's operand of one instruction was served: no loop
            graph.append(following)
        elif instruction.base == "BRA":
            target = position[_last_number(instruction)]
            graph.append([target, *following] if _is_conditional(instruction) else [target])
        elif instruction.base in ("EXIT", "RET", "KILL"):
            graph.append(following if instruction.guard else [])
        elif instruction.base == "BSYNC":
            targets = [position[target] for barrier, target in barriers if barrier == instruction.operands]
            graph.append(following if i + 1 in targets else targets)
        elif instruction.address in indirect:
            graph.append([position[target] for target in indirect[instruction.address]])
        elif instruction.base in ("BRX", "JMX", "JMP"):
            raise ValueError(f"indirect branch at {instruction.address:#x}: its targets are not in the code")
        else:
            graph.append(following)
    return graph


def _last_number(instruction: Instruction) -> int:
    return int(instruction.operands.rpartition("0x")[2], 16)


def _is_conditional(branch: Instruction) -> bool:
    """Whether a BRA can fall through: it has a guard, or a condition before its target (`BRA P2, 0x40`)."""
    return branch.guard not in ("", "@PT", "@UPT") or "," in branch.operands


def natural_loops(graph: list[list[int]]) -> list[set[int]]:
    """The natural loops of a control-flow graph entered at 0; loops with a common header are one.

    A loop is a header h and the vertices that reach a back edge to h without passing h; an edge to h is a back edge if
    h dominates its tail (Aho, Lam, Sethi, Ullman, "Compilers", 9.6).

    >>> natural_loops([[1], [2, 3], [1], []])
    [{1, 2}]
    """
    flow = networkx.DiGraph((tail, head) for tail, heads in enumerate(graph) for head in heads)
    flow.add_node(0)
    flow = flow.subgraph({0} | networkx.descendants(flow, 0))
    dominator = networkx.immediate_dominators(flow, 0)
    tree = networkx.DiGraph((above, vertex) for vertex, above in dominator.items())
    tree.add_node(0)
    depth = networkx.shortest_path_length(tree, 0)
    bodies: dict[int, set[int]] = {}
    for tail, header in flow.edges:
        if _dominates(header, tail, dominator, depth):
            without_header = flow.subgraph(set(flow) - {header})
            body = {tail} | networkx.ancestors(without_header, tail) if tail != header else set()
            bodies.setdefault(header, {header}).update(body)
    return list(bodies.values())


def _dominates(vertex: int, other: int, dominator: Mapping[int, int], depth: Mapping[int, int]) -> bool:
    while depth[other] > depth[vertex]:
        other = dominator[other]
    return other == vertex
