"""Kernels with one synchronisation weakened: does the executor see it?

A site is a synchronising instruction and a way to weaken it: deleted, a count one too high, acquire or release made relaxed, a wait
that always passes. Each is executed beside the unbroken kernel, in one case or in several of the same kernel. A silent one may be
redundant: then other sites, which still stand, give the same order, and with all of them gone more is found than without those
others alone. Or nothing is seen even with all of its opcode gone together. What stays is a hole of the executor, or of the cases:
a branch that they do not reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .cases import Prepared, Result
from .parse import Kernel

LIMITS = {"bf16": 1e-2, "fp16": 2e-3}  # of the error, in parts of the largest gradient
NOTHING = "nanosleep.u32"  # in the place of a deleted instruction
BARRIERS = ("bar.sync", "barrier.sync", "bar.warp.sync", "fence.proxy", "fence.mbarrier_init", "wgmma.fence")
COPIES = ("cp.async.wait_group", "cp.async.commit_group", "cp.async.bulk.wait_group", "wgmma.wait_group")
WAYS = {  # how an instruction is weakened -> the beginnings of its opcode
    "delete": BARRIERS + COPIES,
    "one later": ("cp.async.wait_group", "wgmma.wait_group"),
    "pass": ("mbarrier.try_wait",),
    "one more": ("mbarrier.init",),
    "relax": ("ld.global.acquire", "ld.acquire", "red.release"),
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
            for order in ("acquire", "release"):
                found.opcode = found.opcode.replace(order, "relaxed")
        else:
            found.opcode, found.operands = "mov.pred", [found.operands[0], "-1"]


@dataclass
class Verdict:
    """What was seen of a mutant: races, faults, values; `redundant` says why it need not be seen, if it need not."""

    site: Site
    races: Counter[tuple[str, str, str]]  # how often each was seen
    fault: str | None
    wrong: bool
    redundant: str = ""

    @property
    def silent(self) -> bool:
        return not (self.races or self.fault or self.wrong)

    @property
    def is_hole(self) -> bool:
        return self.silent and not self.redundant

    def line(self) -> str:
        """The verdict in a line."""
        if self.races:
            kind, at, _ = sorted(self.races)[0]
            seen = f"race: {kind} at {at}"
        elif self.fault:
            seen = f"fault: {self.fault}"
        elif self.wrong:
            seen = "wrong values only"
        elif self.redundant:
            seen = f"redundant: {self.redundant}"
        else:
            seen = "SILENT"
        return f"{self.site.way}: {self.site.text}: {seen}"


def sites(kernel: Kernel) -> list[Site]:
    """Every synchronisation of a kernel, each way to weaken it."""
    return [
        Site(number, way, kernel.where(number))
        for number, instruction in enumerate(kernel.instructions)
        for way, opcodes in WAYS.items()
        if instruction.opcode.startswith(opcodes)
        if way != "one more" or str(instruction.operands[-1]).isdigit()
    ]


def main_kernel(prepared: Prepared) -> Kernel:
    """The kernel with the most synchronisation, as it was compiled. `prepared` must have run."""
    return max((program.kernel for program in prepared.programs.values()), key=lambda kernel: len(sites(kernel)))


def judged(cases: Sequence[Prepared], weakened: Sequence[Site], seed: int = 0) -> Verdict:
    """Executes the main kernel, which all cases have in common, with these sites weakened: what any case shows."""
    name = main_kernel(cases[0]).name

    def change(kernel: Kernel) -> None:
        if kernel.name == name:
            for site in weakened:
                site.weaken(kernel)

    results = [case.run(seed, change=change, changed=name) for case in cases]
    races = Counter[tuple[str, str, str]]()
    for race in (race for result in results for race in result.races):
        races[race["kind"], race["at"], race["earlier"]] += race["times"]
    fault = next((result.fault for result in results if result.fault), None)
    return Verdict(weakened[0], races, fault, any(map(is_wrong, cases, results)))


def is_wrong(prepared: Prepared, result: Result) -> bool:
    """Whether a gradient is further off than rounding explains."""
    limit = LIMITS[prepared.case.dtype]
    return any(not error < limit for error in result.errors.values())


def all_judged(cases: Sequence[Prepared], chosen: Callable[[Site], bool] = lambda site: True) -> Iterator[Verdict]:
    """Each mutant's verdict. For a silent one, the other sites are searched for what replaces it."""
    every = sites(main_kernel(cases[0]))
    idle = {alike: judged(cases, found).silent for alike, found in _by_opcode(every).items()}
    for site in filter(chosen, every):
        verdict = judged(cases, [site])
        if verdict.silent and idle[_opcode(site)]:
            verdict.redundant = f"every {_opcode(site)} may go"
        elif verdict.silent and (others := _replacing(cases, site, every)):
            verdict.redundant = f"{' and '.join(other.text for other in others)} order the same"
        yield verdict


def _opcode(site: Site) -> str:
    return site.text.split()[0]


def _by_opcode(every: Sequence[Site]) -> dict[str, list[Site]]:
    """One site of each instruction."""
    made: dict[str, list[Site]] = {}
    for site in every:
        alike = made.setdefault(_opcode(site), [])
        if all(other.number != site.number for other in alike):
            alike.append(site)
    return made


def _replacing(cases: Sequence[Prepared], site: Site, every: Sequence[Site]) -> Sequence[Site]:
    """A set of other sites of which none can be left out, without all of which the site is needed. Empty if none was found."""
    others = [other for alike in _by_opcode(every).values() for other in alike if other.number != site.number]
    for alike in (_opcode, lambda one: "bar" in one.text.split(".")[0], lambda one: ""):  # bar.sync, mbarrier.try_wait, ...
        gone: list[Site] = []
        for other in sorted(
            others, key=lambda other: (other.number < site.number, abs(other.number - site.number))
        ):  # behind first
            # A kernel that faults ends too early to show more.
            if alike(other) != alike(site) or judged(cases, [*gone, other]).fault:
                continue
            gone.append(other)
            if _is_needed(cases, site, gone):
                for each in gone[:-1]:
                    fewer = [kept for kept in gone if kept is not each]
                    if _is_needed(cases, site, fewer):
                        gone = fewer
                return gone
    return ()


def _is_needed(cases: Sequence[Prepared], site: Site, gone: Sequence[Site]) -> bool:
    """Whether more is seen with the site weakened too than with the others alone, in each of two interleavings."""
    for seed in (0, 1):
        without, too = judged(cases, gone, seed), judged(cases, [*gone, site], seed)
        if not (too.races - without.races or (too.fault and not without.fault)):
            return False
    return True


def barriers(prepared: Prepared) -> list[Site]:
    """Every bar.sync of the main kernel."""
    kernel = main_kernel(prepared)
    return [site for site in sites(kernel) if kernel.instructions[site.number].opcode == "bar.sync"]


def redundant_barriers(prepared: Prepared) -> list[Site]:
    """Barriers that may all be deleted together without a race or a wrong value, in this case: a greedy choice."""
    gone: list[Site] = []
    for site in barriers(prepared):
        if judged([prepared], [*gone, site]).silent:
            gone.append(site)
    return gone
