"""A program of several commands: their help, their errors in one line, and a process that compiles where a command needs one."""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import textwrap
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from .. import __version__
from .console import PACKAGE, CommandError, fail

# With either of these torch is emulated in this process, and Triton compiles nothing.
EMULATING = ("TRITON_INTERPRET", "DASH_INDUCTOR_EMULATE")
NEEDS_HELP = ("the following arguments are required", "unrecognized arguments")  # argparse's words


@dataclass(frozen=True)
class Program:
    """What `python -m MODULE COMMAND` runs.

    Attributes:
        module: that Python starts.
        description: in its help.
        examples: words after its name, for its help.
        commands: by name the module, whose docstring is the description in its help and which has EXAMPLES, `add_arguments` and
            `main`; and its purpose in one line.
        compiling: commands that need Triton's compiler; one that has --device needs it for a device alone.
        of_our_making: commands whose errors are in no argument, unless they are a CommandError.
        elsewhere: commands that another program has, and the module that starts it in a checkout of the repository.
    """

    module: str
    description: str
    examples: Sequence[str]
    commands: Mapping[str, tuple[ModuleType, str]]
    compiling: Collection[str] = ()
    of_our_making: Collection[str] = ()
    elsewhere: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """What a shell starts it by."""
        return f"python -m {self.module}"

    def run(self) -> NoReturn:
        """The command line, as a process that ends with it."""
        try:
            code = self.main()
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends
            code = 1
        sys.exit(code)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run one command; the exit status is 2 where it cannot run."""
        argv = sys.argv[1:] if argv is None else list(argv)
        if argv and not argv[0].startswith("-") and argv[0] not in self.commands:
            fail(self.name, self._unknown(argv[0]))
        parser = self.parser()
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            getattr(args, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.command is None:
            parser.print_help()
            return 0
        compiles = args.command in self.compiling and getattr(args, "device", True) is not None
        if compiles and any(os.environ.get(name, "0") != "0" for name in EMULATING):
            environment = {name: value for name, value in os.environ.items() if name not in EMULATING}
            return subprocess.run([sys.executable, "-m", self.module, *argv], env=environment).returncode
        command = f"{self.name} {args.command}"
        try:
            code: int = self.commands[args.command][0].main(args)
        except ImportError as error:
            fail(command, f"{error}; `python -m {PACKAGE} env` lists what is installed")
        except (ValueError, OSError) as error:
            is_ours = args.command in self.of_our_making and not isinstance(error, CommandError)
            if is_ours or isinstance(error, BrokenPipeError):
                raise
            fail(command, error)
        return code

    def parser(self) -> argparse.ArgumentParser:
        """The parser of its command line, with one for each command."""
        epilog = _examples(self.name, self.examples)
        parser = _Parser(prog=self.name, description=self.description, epilog=epilog, formatter_class=_Formatter)
        parser.add_argument("--version", action="version", version=f"dash-inductor {__version__}")
        commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
        for name, (module, purpose) in self.commands.items():
            epilog = _examples(f"{self.name} {name}", module.EXAMPLES)
            command = commands.add_parser(name, help=purpose, description=module.__doc__, epilog=epilog, formatter_class=_Formatter)
            module.add_arguments(command)
            command.set_defaults(parser=command)
        return parser

    def _unknown(self, command: str) -> str:
        if self.elsewhere and command in self.elsewhere:
            return f"{command} runs from a checkout of the repository: python -m {self.elsewhere[command]} {command}"
        close = difflib.get_close_matches(command, self.commands, 1)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(self.commands)}"
        return f"there is no command {command!r}; {hint}"


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
        fail(self.prog, message + hint)


def _examples(begin: str, arguments: Sequence[str]) -> str:
    """Lines to paste into a shell, wrapped for 80 columns."""
    lines = (f"{begin} {words}".strip() for words in arguments)
    return "examples:\n" + "\n".join(
        textwrap.indent(" \\\n    ".join(textwrap.wrap(line, 72, break_long_words=False, break_on_hyphens=False)), "  ")
        for line in lines
    )
