"""The command line.

`codegen` shows the code for a GPU that is not there, `gates` judges that of every tile, `replay` estimates what a main loop takes
on Hopper, `demo` trains twice and compares bits, `simulate` replays a schedule and `compare` all families of them, `choose` says
which one is taken, `calibrate` measures what that rests on.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dash_inductor import calibrate, choosing, compare, demo, gates, simulate
from dash_inductor.devices import DEVICES, device
from dash_inductor.replay import SMALLEST
from dash_inductor.replay import command as replaying

# With either of these torch is emulated in this process, and Triton compiles nothing.
EMULATING = ("TRITON_INTERPRET", "DASH_INDUCTOR_EMULATE")
# Figures of the whole kernel; all others are of its main loop.
OF_KERNEL = ("num_warps", "num_stages", "registers", "stack_bytes", "shared_bytes", "main_loops", "tmem_columns", "ctas_per_sm")
# Commands that compile nothing here; all but the last need no torch.
PLAIN = {"replay": replaying, "simulate": simulate, "compare": compare, "choose": choosing, "calibrate": calibrate}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 for arguments that make no sense."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _arguments()
    args = parser.parse_args(argv)
    if args.command == "demo":
        return demo.main(args)
    if args.command in PLAIN:
        try:
            return PLAIN[args.command].main(args)
        except ValueError as error:
            args.parser.error(str(error))
    if any(os.environ.get(name, "0") != "0" for name in EMULATING):
        environment = {name: value for name, value in os.environ.items() if name not in EMULATING}
        return subprocess.run([sys.executable, "-m", "dash_inductor", *argv], env=environment).returncode
    if args.command == "gates":
        return gates.main(args)
    try:
        report = _codegen(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m dash_inductor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    codegen = commands.add_parser("codegen", help="the kernel generated for a GPU, and what its cubin says")
    codegen.add_argument("--device", required=True, choices=DEVICES, help="the GPU; it need not be there")
    for name in ("q-len", "kv-len", "batch", "heads", "head-dim"):
        codegen.add_argument(f"--{name}", required=True, type=int, metavar="N")
    codegen.add_argument("--kv-heads", type=int, metavar="N", help="key and value heads (default: as many as --heads)")
    codegen.add_argument("--mask", default="full", choices=("full", "causal"))
    codegen.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    codegen.add_argument("--dynamic", action="store_true", help="sequence lengths that are known only at run time")
    codegen.add_argument("--json", action="store_true", help="everything, as JSON")
    codegen.add_argument(
        "--cubin", type=Path, metavar="FILE", help="writes the main kernel's cubin; others beside it, with their names"
    )

    judged = commands.add_parser("gates", help="every kernel of the tile tables, compiled, and the rules that it breaks")
    gates.add_arguments(judged)

    training = commands.add_parser("demo", help="train a small GPT twice, interleaved differently, and compare bits")
    demo.add_arguments(training)
    training.set_defaults(parser=training)

    predicted = commands.add_parser(
        "replay", help="what the main loop of a Hopper cubin takes a step by estimate, and what it waits for"
    )
    simulated = commands.add_parser("simulate", help="one schedule: its time, its bounds, who runs what, a Gantt chart")
    compared = commands.add_parser("compare", help="every family over the number of KV tiles: time over the lower bound")
    chosen = commands.add_parser("choose", help="which schedule an attention gets on a GPU, and what it is chosen among")
    calibrated = commands.add_parser("calibrate", help="measure the cost constants of the GPU that is there")
    plain = (predicted, simulated, compared, chosen, calibrated)
    for command, module in zip(plain, PLAIN.values(), strict=True):
        module.add_arguments(command)
        command.set_defaults(parser=command)
    return parser


def _codegen(args: argparse.Namespace) -> dict[str, Any]:
    """The report of `codegen`; ValueError if the attention is not rewritten."""
    import torch
    import triton

    from dash_inductor.codegen import DTYPES, ONE_PASS_MATMULS, attention_backward, compile_kernel
    from dash_inductor.target import Target, tiles_for

    generated = attention_backward(
        args.device,
        q_len=args.q_len,
        kv_len=args.kv_len,
        batch=args.batch,
        heads=args.heads,
        kv_heads=args.heads if args.kv_heads is None else args.kv_heads,
        head_dim=args.head_dim,
        mask=args.mask,
        dtype=args.dtype,
        dynamic=args.dynamic,
    )
    if not generated.matmuls:
        reasons = [decision.reason for decision in generated.decisions if decision.reason is not None]
        raise ValueError(f"the attention keeps its stock kernel: {'; '.join(reasons) or 'no pass matched it'}")
    gpu = device(args.device)
    tiles = tiles_for(Target(gpu.key, gpu.arch, gpu.sms), getattr(torch, DTYPES[args.dtype]), args.head_dim, args.mask)

    def report(name: str) -> dict[str, Any]:
        tile = tiles.one_pass if generated.matmuls[name] == ONE_PASS_MATMULS else tiles.two_pass
        assert tile
        compiled = compile_kernel(generated.kernels[name], args.device)
        if args.cubin:
            path = args.cubin if name == generated.main_kernel else args.cubin.with_stem(f"{args.cubin.stem}.{name}")
            path.write_bytes(compiled.cubin)
        figures = gates.figures(compiled, gpu.arch, tile)
        return {
            "kernel": name,
            "device": args.device,
            **figures,
            **gates.predicted(compiled, tile),
            "gates": gates.violated(figures, gpu.arch, tile),
            "launch": list(generated.launches[name]),
            "source": generated.kernels[name],
        }

    main, *others = map(report, generated.matmuls)
    return {
        **main,
        "others": others,
        "decisions": [dataclasses.asdict(decision) for decision in generated.decisions],
        "graph": generated.graph,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
    }


def _show(report: dict[str, Any]) -> None:
    """The report for people: figures and code of each kernel, in colour on a terminal where rich is installed."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    _show_kernel(report, f"{report['kernel']} on {report['device']} ({versions})", {"Graph": report["graph"]})
    for other in report["others"]:
        print()
        _show_kernel(other, other["kernel"], {})


def _show_kernel(report: dict[str, Any], title: str, sections: dict[str, str]) -> None:
    figures = {name: value for name, value in report.items() if isinstance(value, int)}
    rows = [(name if name in OF_KERNEL else f"{name} *", str(value)) for name, value in figures.items()]
    for loop in report["predicted_cycles"] or ():
        by_cause = {"tensor cores": loop["tensor_cycles"], **loop["exposed"]}
        rows.append(("cycles a step, estimate *", f"{loop['cycles']:.0f}"))
        rows += [(f"  {cause} *", f"{cycles:.0f}") for cause, cycles in by_cause.items() if cycles >= SMALLEST]
    rows += [("broken rule", sentence) for sentence in report["gates"]]
    sections = sections | {"Launch": "\n".join(report["launch"]), "Kernel": report["source"].strip()}
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        _show_in_colour(title, rows, sections)
        return
    print(title, *(f"{name:<26}{value:>10}" for name, value in rows), "* in the main loop", sep="\n")
    for heading, text in sections.items():
        print(f"\n{heading}\n\n{text}")


def _show_in_colour(title: str, rows: list[tuple[str, str]], sections: dict[str, str]) -> None:
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.table import Table

    console = Console()
    table = Table("figure", "value", caption="* in the main loop")
    for row in rows:
        table.add_row(*row)
    console.print(title, table, sep="\n")
    for heading, text in sections.items():
        console.rule(heading, align="left")
        console.print(Syntax(text, "python", theme="ansi_dark", word_wrap=True))
