"""The command line."""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import textwrap
from collections.abc import Generator, Sequence
from types import ModuleType
from typing import NoReturn

from .. import __version__
from . import check, choose, codegen, compare, demo, env, explain, gates, qualify, replay, simulate
from .console import PROGRAM, CommandError, fail

# By name: the module, whose docstring is the description in its help and which has EXAMPLES; and its purpose in one line.
COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "explain": (explain, "say what becomes of each attention of a model, and why"),
    "check": (check, "run a training step again and again, and name the first op that differs"),
    "demo": (demo, "train a small GPT twice and compare every bit; needs no GPU"),
    "env": (env, "report versions, GPUs, settings and caches, ready to paste"),
    "choose": (choose, "say which schedule an attention gets on a GPU, and why"),
    "codegen": (codegen, "show the kernel for a GPU, and what its machine code says"),
    "compare": (compare, "compare the times of all schedules over the sequence length"),
    "simulate": (simulate, "replay one schedule: its time, its waits, a Gantt chart"),
    "gates": (gates, "compile every kernel, and name the rules that it breaks"),
    "replay": (replay, "estimate what the main loop of a Hopper kernel waits for"),
    "qualify": (qualify, "see whether kernels are right and fast on the GPU that is there"),
}
DESCRIPTION = """\
Deterministic attention training under torch.compile: with torch.use_deterministic_algorithms(True), the backward of attention
becomes a kernel that sums dQ, the gradient of the queries, in one fixed order. These commands show what it does and why.
"""
EXAMPLES = ("demo", "env", "choose --help")
# With either of these torch is emulated in this process, and Triton compiles nothing.
EMULATING = ("TRITON_INTERPRET", "DASH_INDUCTOR_EMULATE")
COMPILING = ("codegen", "gates")
OF_OUR_MAKING = ("demo", "gates")  # their errors are in no argument, unless they are a CommandError
NEEDS_HELP = ("the following arguments are required", "unrecognized arguments")  # argparse's words


class _Formatter(argparse.HelpFormatter):
    """Keeps paragraphs, and lines that are indented; lists the commands flush with the options."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text

    def _iter_indented_subactions(self, action: argparse.Action) -> Generator[argparse.Action, None, None]:
        yield from getattr(action, "_get_subactions", list)()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = textwrap.dedent(text).strip().split("\n\n")
        return "\n\n".join(part if "\n  " in part else textwrap.fill(" ".join(part.split()), width) for part in paragraphs)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        hint = f"; {self.prog} --help has examples" if message.startswith(NEEDS_HELP) else ""
        fail(self.prog.removeprefix(PROGRAM).strip(), message + hint)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 2 where it cannot run."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        fail("", f"there is no command {argv[0]!r}; {hint}")
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(args, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        parser.print_help()
        return 0
    compiles = args.command in COMPILING or (args.command == "explain" and args.device is not None)
    if compiles and any(os.environ.get(name, "0") != "0" for name in EMULATING):
        environment = {name: value for name, value in os.environ.items() if name not in EMULATING}
        return subprocess.run([sys.executable, "-m", "dash_inductor", *argv], env=environment).returncode
    try:
        return COMMANDS[args.command][0].main(args)
    except ImportError as error:
        fail(args.command, f"{error}; `{PROGRAM} env` lists what is installed")
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) or (args.command in OF_OUR_MAKING and not isinstance(error, CommandError)):
            raise
        fail(args.command, error)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description=DESCRIPTION, epilog=_examples("", EXAMPLES), formatter_class=_Formatter)
    parser.add_argument("--version", action="version", version=f"dash-inductor {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    for name, (module, purpose) in COMMANDS.items():
        epilog = _examples(name, getattr(module, "EXAMPLES", ()))
        command = commands.add_parser(name, help=purpose, description=module.__doc__, epilog=epilog, formatter_class=_Formatter)
        module.add_arguments(command)
        command.set_defaults(parser=command)
    return parser


def _examples(command: str, arguments: Sequence[str]) -> str:
    """Lines to paste into a shell, wrapped for 80 columns."""
    lines = (f"{PROGRAM} {command} {words}".replace("  ", " ").strip() for words in arguments)
    return "examples:\n" + "\n".join(
        textwrap.indent(" \\\n    ".join(textwrap.wrap(line, 72, break_long_words=False, break_on_hyphens=False)), "  ")
        for line in lines
    )
