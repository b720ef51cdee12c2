"""Kernels with one synchronisation weakened: does the executor see it?

A site is a synchronising instruction and a way to weaken it: deleted, a count one too high, acquire or release made relaxed, a
scope narrowed to the CTA, a wait that always passes. Each is executed beside the unbroken kernel, in one case or in several of the
same kernel. A silent one may be redundant: then other sites, which still stand, give the same order, and with all of them gone more
is found than without those others alone. Or nothing is seen even with all of its opcode weakened together, or of barriers of a warp
with others. What stays is a hole: of the cases, whose threads do not come there, or of the executor.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .cases import Prepared, Result
from .lower import Program
from .parse import Kernel, parse

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
    "narrow": ("ld.", "st.", "atom.", "red.", "fence.acq_rel", "fence.sc", "membar"),
}
WIDE = re.compile(r"\.(cluster|gpu|gl|sys)\b")  # scopes


@dataclass(frozen=True)
class Site:
    """One instruction of a kernel, by its number, and how it is weakened."""

    number: int
    way: str
    text: str
    kernel: str  # its name

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
        elif self.way == "narrow":
            found.opcode = WIDE.sub(".cta", found.opcode)
        else:
            found.opcode, found.operands = "mov.pred", [found.operands[0], "-1"]


@dataclass
class Verdict:
    """What was seen of a mutant: races, faults, values; `redundant` says why it need not be seen, if it need not.

    was_reached: whether a thread of the unbroken kernel comes to the site.
    """

    site: Site
    races: Counter[tuple[str, str, str]]  # how often each was seen
    fault: str | None
    wrong: bool
    was_reached: bool = True
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
            seen = "SILENT" if self.was_reached else "no thread comes there"
        return f"{self.site.way}: {self.site.text}: {seen}"


def sites(kernel: Kernel) -> list[Site]:
    """Every synchronisation of a kernel, each way to weaken it."""
    return [
        Site(number, way, kernel.where(number), kernel.name)
        for number, instruction in enumerate(kernel.instructions)
        for way, opcodes in WAYS.items()
        if instruction.opcode.startswith(opcodes)
        if way != "one more" or str(instruction.operands[-1]).isdigit()
        if way != "narrow" or WIDE.search(instruction.opcode)
    ]


def kernels(prepared: Prepared) -> list[Kernel]:
    """Those that synchronise, as they were compiled, the one that does so most last. `prepared` must have run."""
    found = [program.kernel for program in prepared.programs.values()]
    return sorted((kernel for kernel in found if sites(kernel)), key=lambda kernel: len(sites(kernel)))


def main_kernel(prepared: Prepared) -> Kernel:
    return kernels(prepared)[-1]


def _ptx(prepared: Prepared, name: str) -> str:
    return next(ptx for ptx, program in prepared.programs.items() if program.kernel.name == name)


def edited(prepared: Prepared, change: Callable[[Kernel], None], name: str = "") -> dict[str, Program]:
    """A kernel as `change` leaves it, for `Prepared.run`; without a name the main one."""
    kernel = parse(ptx := _ptx(prepared, name or main_kernel(prepared).name))
    change(kernel)
    return {ptx: Program(kernel)}


def judged(cases: Sequence[Prepared], weakened: Sequence[Site], seed: int = 0) -> Verdict:
    """Executes one kernel, whose PTX all cases have in common, with these sites weakened: what any case shows."""

    def weaken(kernel: Kernel) -> None:
        for site in weakened:
            site.weaken(kernel)

    programs = edited(cases[0], weaken, weakened[0].kernel)
    results = [case.run(seed, edited=programs) for case in cases]
    races = Counter[tuple[str, str, str]]()
    for race in (race for result in results for race in result.races):
        races[race["kind"], race["at"], race["earlier"]] += race["times"]
    fault = next((result.fault for result in results if result.fault), None)
    return Verdict(weakened[0], races, fault, any(map(is_wrong, cases, results)))


def is_wrong(prepared: Prepared, result: Result) -> bool:
    """Whether a gradient is further off than rounding explains."""
    limit = LIMITS[prepared.case.dtype]
    return any(not error < limit for error in result.errors.values())


def all_judged(cases: Sequence[Prepared], kernel: Kernel | None = None) -> Iterator[Verdict]:
    """Each mutant's verdict, of the main kernel if none is named. For a silent one, others are searched for what replaces it."""
    search = _Search(cases, kernel or main_kernel(cases[0]))
    idle = {alike: judged(cases, found).silent for alike, found in _by_opcode(search.sites).items()}
    verdicts = [judged(cases, [site]) for site in search.sites]
    # Triton has one before each copy by TMA, where mostly no lane has anything to say to another: a search for each would be long.
    between_lanes = at_once(cases, [each.site for each in verdicts if _opcode(each.site) == "bar.warp.sync" and each.silent])
    for site, verdict in zip(search.sites, verdicts, strict=True):
        verdict.was_reached = any(case.programs[_ptx(case, site.kernel)].was_reached(site.number) for case in cases)
        if verdict.silent and verdict.was_reached:
            if idle[_opcode(site)]:
                verdict.redundant = f"every {_opcode(site)} may be weakened"
            elif site in between_lanes:
                verdict.redundant = f"{len(between_lanes)} bar.warp.sync may go at once"
            elif _opcode(site) == "bar.warp.sync":  # needed once those are gone, which the choice tried one after the other
                verdict.redundant = f"some of the {len(between_lanes)} bar.warp.sync that may go at once order the same"
            elif others := search.replacing(site):
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


class _Search:
    """For what replaces a silent site: a set of others, without all of which it is needed. No execution is made twice."""

    def __init__(self, cases: Sequence[Prepared], kernel: Kernel) -> None:
        self.sites = sites(kernel)
        self._judged = functools.cache(lambda weakened, seed: judged(cases, sorted(weakened, key=self.sites.index), seed))

    def replacing(self, site: Site) -> list[Site]:
        """Such a set, of which no one can be left out: of the same opcode, else of barriers, else of any. Empty if none is."""
        others = [other for alike in _by_opcode(self.sites).values() for other in alike if other.number != site.number]
        nearest = sorted(others, key=lambda other: (other.number < site.number, abs(other.number - site.number)))  # behind first
        # With many gone at once, what the site orders may be seen to race without it too: then one by one.
        for growth in (2, 1):
            for alike in (_opcode, lambda one: "bar" in one.text.split(".")[0], lambda one: ""):  # bar.sync, mbarrier.try_wait, ...
                if found := self._grown(site, [other for other in nearest if alike(other) == alike(site)], growth):
                    return self._least(site, found)
        return []

    def _grown(self, site: Site, others: list[Site], growth: int) -> list[Site]:
        """The first of the others that make the site needed, by parts that grow. Empty if all of them do not."""
        gone: list[Site] = []
        size = 1
        while others:
            gone += self._harmless(gone, others[:size])
            if self._is_needed(site, gone):
                return gone
            others, size = others[size:], size * growth
        return []

    def _harmless(self, gone: list[Site], more: list[Site]) -> list[Site]:
        """Those of `more` without which, and without `gone`, the kernel still ends: one that faults shows no more."""
        if not self._judged(frozenset([*gone, *more]), 0).fault:
            return more
        half = len(more) // 2
        if not half:
            return []
        first = self._harmless(gone, more[:half])
        return first + self._harmless(gone + first, more[half:])

    def _least(self, site: Site, gone: list[Site]) -> list[Site]:
        """What is left when parts are left out for as long as the site stays needed."""
        size = len(gone) // 2
        while size:
            for part in [gone[start : start + size] for start in range(0, len(gone), size)]:
                fewer = [other for other in gone if other not in part]
                if self._is_needed(site, fewer):
                    gone = fewer
            size //= 2
        return gone

    def _is_needed(self, site: Site, gone: list[Site]) -> bool:
        """Whether more is seen with the site weakened too than with the others alone, in each of two interleavings."""
        for seed in (0, 1) if gone else ():
            without, too = (self._judged(frozenset(weakened), seed) for weakened in (gone, [*gone, site]))
            if not (too.races - without.races or (too.fault and not without.fault)):
                return False
        return bool(gone)


def barriers(prepared: Prepared) -> list[Site]:
    """Every bar.sync of the main kernel."""
    kernel = main_kernel(prepared)
    return [site for site in sites(kernel) if kernel.instructions[site.number].opcode == "bar.sync"]


def redundant_barriers(prepared: Prepared) -> list[Site]:
    """Barriers that may all be deleted together without a race or a wrong value, in this case."""
    return at_once([prepared], barriers(prepared))


def at_once(cases: Sequence[Prepared], weakened: Sequence[Site]) -> list[Site]:
    """Those that may all be weakened together and stay silent: a greedy choice."""
    gone: list[Site] = []
    for site in weakened:
        if judged(cases, [*gone, site]).silent:
            gone.append(site)
    return gone
