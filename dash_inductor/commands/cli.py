"""The command line.

`codegen` shows the code for a GPU that is not there, `gates` judges that of every tile, `replay` estimates what a main loop takes
on Hopper, `demo` trains twice and compares bits, `simulate` replays a schedule and `compare` all families of them, `choose` says
which one is taken, `calibrate` measures what that rests on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import calibrate, choose, codegen, compare, demo, gates, replay, simulate

# With either of these torch is emulated in this process, and Triton compiles nothing.
EMULATING = ("TRITON_INTERPRET", "DASH_INDUCTOR_EMULATE")
COMMANDS = {
    "codegen": (codegen, "the kernel generated for a GPU, and what its cubin says"),
    "gates": (gates, "every kernel of the tile tables, compiled, and the rules that it breaks"),
    "demo": (demo, "train a small GPT twice, interleaved differently, and compare bits"),
    "replay": (replay, "what the main loop of a Hopper cubin takes a step by estimate, and what it waits for"),
    "simulate": (simulate, "one schedule: its time, its bounds, who runs what, a Gantt chart"),
    "compare": (compare, "every family over the number of KV tiles: time over the lower bound"),
    "choose": (choose, "which schedule an attention gets on a GPU, and what it is chosen among"),
    "calibrate": (calibrate, "measure the cost constants of the GPU that is there"),
}
COMPILING = ("codegen", "gates")
OF_OUR_MAKING = ("gates", "demo")  # no argument of theirs explains an error


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 for arguments that make no sense."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(prog="python -m dash_inductor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, purpose) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        module.add_arguments(command)
        command.set_defaults(parser=command)
    args = parser.parse_args(argv)
    if args.command in COMPILING and any(os.environ.get(name, "0") != "0" for name in EMULATING):
        environment = {name: value for name, value in os.environ.items() if name not in EMULATING}
        return subprocess.run([sys.executable, "-m", "dash_inductor", *argv], env=environment).returncode
    try:
        return COMMANDS[args.command][0].main(args)
    except (ValueError, OSError) as error:
        if args.command in OF_OUR_MAKING or isinstance(error, BrokenPipeError):
            raise
        args.parser.error(str(error))
    return 2
