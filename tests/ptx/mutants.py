"""Kernels with one synchronisation weakened: does the executor see it?

A site is a synchronising instruction and a way to weaken it: deleted, a count one too high, acquire or release made relaxed, a
scope narrowed to the CTA, a wait that always passes. Each is executed beside the unbroken kernel, in one case or in several of the
same kernel. A silent one may be redundant: it is seen with other silent ones gone, which by themselves are not; or with one gone
that is seen, and more than with that alone; or nothing is seen even with all of its opcode weakened together, or, of what orders a
warp, with many others. What stays is a hole: of the cases, whose threads do not come there or have an order of another kind, or of
the executor.
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
# What no other opcode replaces, so that those that may go at once order nothing. Triton has one before each copy by TMA, where
# mostly no lane has anything to say to another, or before each matmul, whose registers mostly nothing has touched.
WITHIN_A_WARP = ("bar.warp.sync", "wgmma.fence")
NEAREST = 12  # of what is seen, that may order the same as what is not
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

    def shows_more_than(self, other: Verdict) -> bool:
        """Whether there are races, or a fault, that the other has not."""
        return bool(self.races - other.races or (self.fault and not other.fault))

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


def judged(cases: Sequence[Prepared], weakened: Sequence[Site], to_the_end: bool = True) -> Verdict:
    """Executes one kernel, whose PTX all cases have in common, with these sites weakened: what any case shows.

    to_the_end: whether to go on behind the first race or fault.
    """

    def weaken(kernel: Kernel) -> None:
        for site in weakened:
            site.weaken(kernel)

    programs = edited(cases[0], weaken, weakened[0].kernel)
    verdict = Verdict(weakened[0], Counter(), None, False)
    for case in cases:
        result = case.run(edited=programs, to_the_end=to_the_end)
        for race in result.races:
            verdict.races[race["kind"], race["at"], race["earlier"]] += race["times"]
        verdict.fault = verdict.fault or result.fault
        verdict.wrong |= is_wrong(case, result)
        if not (to_the_end or verdict.silent):
            break
    return verdict


def is_wrong(prepared: Prepared, result: Result) -> bool:
    """Whether a gradient is further off than rounding explains."""
    limit = LIMITS[prepared.case.dtype]
    return any(not error < limit for error in result.errors.values())


def all_judged(cases: Sequence[Prepared], kernel: Kernel | None = None) -> Iterator[Verdict]:
    """Each mutant's verdict, of the main kernel if none is named. Of a silent one it is asked what replaces it."""
    every = sites(kernel or main_kernel(cases[0]))
    idle = {alike: judged(cases, found, to_the_end=False).silent for alike, found in _by_opcode(every).items()}
    verdicts = [judged(cases, [site], to_the_end=False) for site in every]
    # Ways stand in the order of their strength: what replaces an instruction that is gone replaces one that is weaker.
    doubtful: dict[int, Site] = {}
    for verdict in verdicts:
        site = verdict.site
        verdict.was_reached = any(case.programs[_ptx(case, site.kernel)].was_reached(site.number) for case in cases)
        if verdict.silent and verdict.was_reached and not idle[_opcode(site)]:
            doubtful.setdefault(site.number, site)
    # What cannot go with others is needed without them. Whether it can depends on which were tried before.
    in_order = [*doubtful.values()]
    going = [at_once(cases, in_order), at_once(cases, in_order[::-1])]
    seen = [verdict.site for verdict in verdicts if not verdict.silent]
    alone = functools.cache(lambda other: judged(cases, [other]))

    def replaced(site: Site) -> str:
        if idle[_opcode(site)]:
            return f"every {_opcode(site)} may be weakened"
        site = doubtful[site.number]
        if without := next((gone for gone in going if site not in gone), None):
            return f"needed without {len(without)} others, which may go at once"
        if _opcode(site).startswith(WITHIN_A_WARP):
            return f"{len(going[0])} may go at once"
        for other in sorted(seen, key=lambda other: abs(other.number - site.number))[:NEAREST]:
            if other.number != site.number and judged(cases, [other, site]).shows_more_than(alone(other)):
                return f"{other.text} orders the same"
        return ""

    for verdict in verdicts:
        if verdict.silent and verdict.was_reached:
            verdict.redundant = replaced(verdict.site)
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


def barriers(prepared: Prepared) -> list[Site]:
    """Every bar.sync of the main kernel."""
    kernel = main_kernel(prepared)
    return [site for site in sites(kernel) if kernel.instructions[site.number].opcode == "bar.sync"]


def redundant_barriers(prepared: Prepared) -> list[Site]:
    """Barriers that may all be deleted together without a race or a wrong value, in this case."""
    return at_once([prepared], barriers(prepared))


def at_once(cases: Sequence[Prepared], weakened: Sequence[Site], gone: Sequence[Site] = ()) -> list[Site]:
    """Those that may all be weakened together, and with `gone`, and stay silent: a greedy choice, by halves of what is left."""
    if not weakened or judged(cases, [*gone, *weakened], to_the_end=False).silent:
        return [*gone, *weakened]
    half = len(weakened) // 2
    return at_once(cases, weakened[half:], at_once(cases, weakened[:half], gone)) if half else [*gone]
