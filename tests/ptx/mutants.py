"""Kernels with one synchronisation weakened: does the executor see it?

A site is a synchronising instruction and a way to weaken it: deleted, a count one too high, acquire or release made relaxed, a wait
that always passes. Each is executed beside the unbroken kernel. A silent one may be redundant: then another site, which still
stands, gives the same order, and with both gone more is found than without that other one alone (`Verdict.replaced_by`).
What stays is a hole of the executor, or of the case: a branch that it does not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .cases import Prepared, Result
from .parse import Instruction, Kernel, Memory

LIMITS = {"bf16": 1e-2, "fp16": 2e-3}  # of the error, in parts of the largest gradient
NOTHING = "nanosleep.u32"  # in the place of a deleted instruction
WAYS = {  # opcode's beginning -> how it is weakened
    "bar.sync": ("delete",),
    "barrier.sync": ("delete",),
    "bar.warp.sync": ("delete",),
    "cp.async.wait_group": ("delete", "one later"),
    "cp.async.commit_group": ("delete",),
    "cp.async.bulk.wait_group": ("delete",),
    "wgmma.wait_group": ("delete", "one later"),
    "wgmma.fence": ("delete",),
    "fence.proxy": ("delete",),
    "fence.mbarrier_init": ("delete",),
    "mbarrier.try_wait": ("pass",),
    "mbarrier.init": ("one more",),
    "ld.global.acquire": ("relax",),
    "ld.acquire": ("relax",),
    "red.release": ("relax",),
    "atom.global.gpu.acq_rel": ("relax",),
}


@dataclass(frozen=True)
class Site:
    """One instruction of a kernel, by its number, and how it is weakened."""

    number: int
    way: str
    text: str

    def weaken(self, kernel: Kernel) -> None:
        """Edits the instruction."""
        found = kernel.instructions[self.number]
        if self.way == "delete":
            found.opcode, found.operands, found.guard = NOTHING, [], ""
        elif self.way in ("one later", "one more"):
            found.operands[-1] = str(int(str(found.operands[-1])) + 1)
        elif self.way == "relax":
            for order in ("acquire", "release", "acq_rel"):
                found.opcode = found.opcode.replace(order, "relaxed")
        else:
            found.opcode, found.operands = "mov.pred", [found.operands[0], "-1"]


@dataclass
class Verdict:
    """What was seen of a mutant: races, faults, values; `replaced_by` where it was silent and another site does its work."""

    site: Site
    races: frozenset[tuple[str, str, str]]
    fault: str | None
    wrong: bool
    replaced_by: Site | None = None
    others: list[Site] = field(default_factory=list)

    @property
    def silent(self) -> bool:
        return not (self.races or self.fault or self.wrong)

    def line(self) -> str:
        """The verdict in a line."""
        if self.races:
            kind, at, _ = sorted(self.races)[0]
            seen = f"race: {kind} at {at}"
        elif self.fault:
            seen = f"fault: {self.fault}"
        elif self.wrong:
            seen = "wrong values only"
        elif self.replaced_by:
            seen = f"redundant: {self.replaced_by.text} orders the same"
        else:
            seen = "SILENT"
        return f"{self.site.way}: {self.site.text}: {seen}"


def sites(kernel: Kernel) -> list[Site]:
    """Every synchronisation of a kernel, each way to weaken it."""
    return [
        Site(number, way, kernel.where(number))
        for number, instruction in enumerate(kernel.instructions)
        for way in next((ways for start, ways in WAYS.items() if instruction.opcode.startswith(start)), ())
        if not (way == "one more" and not _is_number(instruction))
    ]


def _is_number(instruction: Instruction) -> bool:
    last = instruction.operands[-1]
    return not isinstance(last, Memory) and str(last).isdigit()


def main_kernel(prepared: Prepared) -> Kernel:
    """The kernel with the most synchronisation, as it was compiled. `prepared` must have run."""
    return max((program.kernel for program in prepared.programs.values()), key=lambda kernel: len(sites(kernel)))


def judged(prepared: Prepared, weakened: list[Site], seed: int = 0) -> Verdict:
    """Executes the main kernel with these sites weakened."""
    name = main_kernel(prepared).name

    def change(kernel: Kernel) -> None:
        if kernel.name == name:
            for site in weakened:
                site.weaken(kernel)

    result = prepared.run(seed, change=change, changed=name)
    return Verdict(weakened[0], found(result), result.fault, is_wrong(prepared, result))


def found(result: Result) -> frozenset[tuple[str, str, str]]:
    """The races, without where in memory."""
    return frozenset((race["kind"], race["at"], race["earlier"]) for race in result.races)


def is_wrong(prepared: Prepared, result: Result) -> bool:
    """Whether a gradient is further off than rounding explains."""
    limit = LIMITS[prepared.case.dtype]
    return any(not error < limit for error in result.errors.values())


def all_judged(prepared: Prepared, chosen: Callable[[Site], bool] = lambda site: True, nearest: int = 6) -> Iterator[Verdict]:
    """Each mutant's verdict. For a silent one, the sites around it are tried as what replaces it, `nearest` at most."""
    every = sites(main_kernel(prepared))
    alone: dict[Site, Verdict] = {}
    for site in filter(chosen, every):
        verdict = alone.get(site) or judged(prepared, [site])
        alone[site] = verdict
        if verdict.silent:
            others = sorted((other for other in every if other.number != site.number), key=lambda other: _distance(site, other))
            for other in others[:nearest]:
                if other not in alone:
                    alone[other] = judged(prepared, [other])
                both = judged(prepared, [site, other])
                if both.races - alone[other].races or (both.fault and not alone[other].fault):
                    verdict.replaced_by = other
                    break
        yield verdict


def _distance(site: Site, other: Site) -> tuple[bool, int]:
    """The same instruction elsewhere first."""
    return site.text.split()[0] != other.text.split()[0], abs(site.number - other.number)


def redundant_barriers(prepared: Prepared) -> list[Site]:
    """bar.sync that may all be deleted together without a race or a wrong value, in this case: a greedy choice."""
    instructions = main_kernel(prepared).instructions
    gone: list[Site] = []
    for site in sites(main_kernel(prepared)):
        if (
            instructions[site.number].opcode == "bar.sync"
            and judged(prepared, [site]).silent
            and judged(prepared, [*gone, site]).silent
        ):
            gone.append(site)
    return gone
