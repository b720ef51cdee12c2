"""Estimates how many cycles a step of a Hopper kernel's main loop takes, and what its tensor cores wait for.

FILE.cubin holds one kernel for sm_90, as `codegen --cubin FILE.cubin` writes it. Its instructions are issued one by one on a model
of an SM, whose constants --constants lists with their sources. Some are guesses; --sensitivity says what hangs on them.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dash_inductor.cli.arguments import add_json
from dash_inductor.cli.console import print_json, table

from ..replay import Replay, Sensitivity, loops_of, replay_loop, sensitivity
from ..replay.constants import CONSTANTS, Constants

WORTH_SHOWING = 15  # clocks that a guess moves
EXAMPLES = ("--constants", "kernel.cubin --sensitivity", "kernel.cubin --set barrier=30 --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `replay`."""
    parser.add_argument("cubins", nargs="*", type=Path, metavar="FILE.cubin", help="machine code of one kernel for sm_90")
    parser.add_argument(
        "--loops", type=int, default=1, metavar="N", help="main loops in the kernel: 2 or 3 in two passes (default 1)"
    )
    parser.add_argument("--warps", type=int, default=8, metavar="N", help="warps that run the loop (default 8)")
    parser.add_argument(
        "--tma",
        type=int,
        default=0,
        metavar="BYTES",
        help="bytes that TMA moves to and from shared memory in a step (Gluon: 66560 at head dim 64, 66048 at 128, 131584 at 256)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="give a constant another value (repeatable)"
    )
    parser.add_argument("--constants", action="store_true", help="list every constant with its source, and whether it is a guess")
    parser.add_argument("--sensitivity", action="store_true", help="print the cycles with each guess halved and doubled")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the replays; ValueError for what cannot be replayed."""
    if not args.cubins and not args.constants:
        raise ValueError("name a cubin, or ask for --constants")
    constants = Constants().set_from(dict(map(_assignment, args.set)))
    settings: dict[str, Any] = {"warps": args.warps, "tma_bytes": args.tma, "constants": constants}
    replayed = []
    for path in args.cubins:
        try:
            loops = loops_of(path.read_bytes(), args.loops)
            replays = [replay_loop(loop, **settings) for loop in loops]
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        hangs_on = [sensitivity(loop, **settings) if args.sensitivity else [] for loop in loops]
        replayed.append((path, replays, hangs_on))
    if args.json:
        print_json({"estimate": True, "cubins": list(map(_report, replayed)), "constants": _constants(constants)})
        return 0
    if args.constants:
        table("Constants", [{"name": name, **row} for name, row in _constants(constants).items()])
    for path, replays, hangs_on in replayed:
        for replay, guesses in zip(replays, hangs_on, strict=True):
            print(f"{path.name}: {replay}")
            for note in replay.notes:
                print(f"  {note}")
            for guess in guesses:
                if abs(guess.halved - replay.cycles) + abs(guess.doubled - replay.cycles) > WORTH_SHOWING:
                    print(f"  {guess.name} {guess.value:g}: halved {guess.halved:.0f}, doubled {guess.doubled:.0f} cycles")
    return 0


def _assignment(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--set takes NAME=VALUE with a number, not {text!r}") from None


def _constants(constants: Constants) -> dict[str, dict[str, Any]]:
    return {name: asdict(constant) | {"value": getattr(constants, name)} for name, constant in CONSTANTS.items()}


def _report(replayed: tuple[Path, list[Replay], list[list[Sensitivity]]]) -> dict[str, Any]:
    """A cubin as JSON; what was asked for of its guesses beside each loop."""
    path, replays, hangs_on = replayed
    loops = [
        replay.as_dict() | ({"sensitivity": list(map(asdict, guesses))} if guesses else {})
        for replay, guesses in zip(replays, hangs_on, strict=True)
    ]
    return {"file": str(path), "loops": loops}
