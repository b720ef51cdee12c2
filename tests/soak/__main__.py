"""Trains a small model twice, without faults and with them, and compares every bit of it after each step: `make soak`.

Two processes train by DDP on the emulated device, at the guarantee `device`. The second time a rank is killed in the middle of a
step, caches are wiped, CTAs interleave in another order, the device has another number of SMs, or all just start again; each time
the training goes on from the last checkpoint. Weights and the optimizer's state are compared. Exits with 1 if the runs part, and
says in which step, or if a process hangs or fails. Checkpoints, digests and what the processes print are in build/soak.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from dash_inductor.cli.arguments import at_least
from dash_inductor.text import rendered
from tests.emulated.processes import ROOT, ranks

FOLDER = ROOT / "build" / "soak"
TRAIN = str(Path(__file__).with_name("train.py"))
RANKS, ATTENTIONS = 2, 2
STEPS, FAULTS, EVERY = 500, 10, 25
SMS = (16, 8, 6, 9)  # the first is that of the run without faults; at level `run` 8 and 9 have another schedule than 16 and 6
KINDS = KILLED, WIPED, INTERLEAVING, OTHER_SMS, RESTARTED = "rank killed", "caches wiped", "interleaving", "SMs", "restarted"
SECONDS_TO_START, SECONDS_A_STEP = 300, 10  # at most, or a process hangs: many times what idle cores take


@dataclass(frozen=True)
class Device:
    """What may change at a fault: the seed of the interleaving, and the number of SMs."""

    seed: int = 1
    sms: int = SMS[0]


@dataclass(frozen=True)
class Fault:
    """What ends the processes: after `step`, with a checkpoint, or of KILLED in the middle of it; and how they go on."""

    kind: str
    step: int
    device: Device = Device()
    rank: int = 0  # which is killed

    def __str__(self) -> str:
        return f"rank {self.rank} killed" if self.kind == KILLED else self.kind


@dataclass(frozen=True)
class Run:
    """A training: digests by step, of every rank and also of steps taken again; a row for each start of its processes."""

    digests: dict[int, set[str]]
    starts: list[dict[str, object]]
    seconds: float


class BrokenRun(RuntimeError):
    """A process hangs or ends as it should not, or the run does not try what it is for."""


def draw_faults(seed: int, steps: int, count: int) -> list[Fault]:
    """In the order of their steps, all from the second to the last but one; each kind as often as any other, or once more."""
    draw = random.Random(seed)
    kinds = [kind for _ in range(0, count, len(KINDS)) for kind in draw.sample(KINDS, len(KINDS))][:count]
    faults, device = [], Device()
    for kind, step in zip(kinds, sorted(draw.sample(range(2, steps), count)), strict=True):
        if kind == INTERLEAVING:
            device = replace(device, seed=device.seed + 1)
        if kind == OTHER_SMS:
            device = replace(device, sms=SMS[(SMS.index(device.sms) + 1) % len(SMS)])
        faults.append(Fault(kind, step, device, draw.randrange(RANKS)))
    return faults


def run(folder: Path, steps: int, every: int, guarantee: str, faults: list[Fault]) -> Run:
    """Train to `steps` through the faults, with a checkpoint `every` so many steps.

    Raises:
        BrokenRun: see there.
    """
    begin = time.monotonic()
    warm: set[int] = set()  # the numbers of SMs whose graphs are in the caches
    starts = []
    for before, after in zip([None, *faults], [*faults, None], strict=True):
        device = before.device if before else Device()
        if before and before.kind == WIPED:
            shutil.rmtree(folder / "cache")
            warm.clear()
        begun, until = max(0, before.step - every) if before else 0, after.step if after else steps
        options = [f"--until={until}", f"--every={every}", f"--guarantee={guarantee}"]
        options += [f"--seed={device.seed}", f"--sms={device.sms}"]
        killed = after.rank if after and after.kind == KILLED else None
        if after and killed is not None:
            options += ["--killed", str(killed), str(after.step)]
        row, compiled = start(folder, options, killed, SECONDS_TO_START + SECONDS_A_STEP * (until - begun))
        if compiled is not None:
            if (device.sms in warm and compiled) or (before and before.kind == WIPED and not compiled):
                raise BrokenRun(f"{compiled} graphs were compiled after the fault {before!r}")
            warm.add(device.sms)
        fault = {"started after": str(before) if before else "", "step": before.step if before else None}
        starts.append(fault | {"seed": device.seed, "SMs": device.sms} | row)
        print(f"{folder.name}: {', '.join(f'{name} {value}' for name, value in starts[-1].items())}", file=sys.stderr, flush=True)
    digests = defaultdict(set)
    for rank in range(RANKS):
        for line in (folder / f"digests{rank}").read_text().splitlines():
            step, digest = line.split()
            digests[int(step)].add(digest)
    if sorted(digests) != list(range(1, steps + 1)):
        raise BrokenRun(f"{folder.name}: not every step of {steps} left a digest, but {sorted(digests)}")
    return Run(digests, starts, time.monotonic() - begin)


def start(folder: Path, options: list[str], killed: int | None, timeout: float) -> tuple[dict[str, object], int | None]:
    """Start the processes, and wait until they have trained to their last step, or one is killed and the others fail.

    Returns what a row has, and how many graphs were compiled (None where a rank was killed).
    """
    for name in ("ranks", *(f"report{rank}.json" for rank in range(RANKS))):
        (folder / name).unlink(missing_ok=True)
    begin = time.monotonic()
    try:
        ended = ranks(RANKS, [TRAIN, str(folder), *options], folder, timeout)
    except AssertionError as error:
        raise BrokenRun(f"no end after {timeout:.0f} s: {error}") from None
    seconds = round(time.monotonic() - begin, 1)
    for rank, (status, output, _) in enumerate(ended):
        if not (status == 0 if killed is None else status == -9 if rank == killed else status > 0):
            raise BrokenRun(f"rank {rank} ended with status {status}:\n{output}")
    if killed is not None:
        return {"graphs compiled": None, "waits": None, "seconds": seconds}, None
    reports = [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(RANKS)]
    for report in reports:
        if len(report["attentions"]) != ATTENTIONS or not all(rewritten for _, rewritten in report["attentions"]):
            raise BrokenRun(f"not every attention was rewritten: {report['attentions']}")
    compiled, waits = (sum(report[name] for report in reports) for name in ("compiled", "waits"))
    if not waits:
        raise BrokenRun("no CTA had to wait")
    return {"graphs compiled": compiled, "waits": waits, "seconds": seconds}, compiled


def parting(first: Run, second: Run) -> int | None:
    """The first step after which digests differ, of the runs, of ranks, or of a step that was taken again; None if none does."""
    return next((step for step in sorted(first.digests) if len(first.digests[step] | second.digests[step]) > 1), None)


def soak(folder: Path, steps: int, every: int, guarantee: str, faults: list[Fault]) -> int:
    """Train without faults and with them, in folders of `folder`, which is made anew; print what came of it. The exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    without, through = folder / "without_faults", folder / "with_faults"
    without.mkdir(parents=True)
    through.mkdir()
    try:
        first = run(without, steps, every, guarantee, [])
        shutil.copytree(without / "cache", through / "cache")
        second = run(through, steps, every, guarantee, faults)
    except BrokenRun as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    print(rendered(f"{steps} steps with faults, at the guarantee {guarantee}", second.starts))
    print()
    for name, of in (("without faults", first), ("with faults", second)):
        print(f"{name:14}  {of.seconds / 60:5.1f} minutes  {steps / of.seconds:.2f} steps/s  {' '.join(sorted(of.digests[steps]))}")
    parted = parting(first, second)
    same = f"weights and optimizer are identical after each of {steps} steps"
    print(f"bitwise: {same if parted is None else f'the runs part in step {parted}'}")
    return int(parted is not None)


def main(arguments: list[str]) -> int:
    """0 if both trainings have the same bits after each step, else 1."""
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=at_least(3), default=STEPS, metavar="N", help="of each training (default %(default)s)")
    many = f"how many (default {FAULTS}, or as many as there is room for)"
    parser.add_argument("--faults", type=at_least(0), metavar="N", help=many)
    parser.add_argument("--seed", type=at_least(0), help="of the faults: their steps and kinds (default: another each time)")
    parser.add_argument(
        "--guarantee",
        choices=("run", "device", "batch"),
        default="device",
        help="at run another number of SMs must give other bits",
    )
    args = parser.parse_args(arguments)
    room = args.steps - 2
    count = min(FAULTS, room) if args.faults is None else args.faults
    if count > room:
        parser.error(f"argument --faults: {count} faults need {count + 2} steps")
    seed = random.randrange(2**31) if args.seed is None else args.seed
    print(f"seed of the faults: {seed}", flush=True)
    return soak(FOLDER, args.steps, EVERY, args.guarantee, draw_faults(seed, args.steps, count))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
