"""Executes what torch.compile generates for the backward of an attention, from its PTX, on the CPU: values, races, deadlocks.

The GPU need not be there. What this cannot show: ptxas and the machine code, speed, whether a grid is resident, lanes of a warp
running apart, rounding inside a tensor core, and a misreading of the ISA that kernel and executor share.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import Any, NoReturn

from benchmarks.machine_code.commands.codegen import add_attention_of_gpu
from dash_inductor.cli.arguments import at_least
from dash_inductor.cli.console import fail, print_json, progress, section
from dash_inductor.config import CHOICES

from . import mutants
from .cases import ATTENTIONS, Case, Prepared, Result, same_bits

PROGRAM = "python -m tests.ptx"
SETTINGS = ("kernel", "template", "schedule", "launch", "guarantee")
BYTES = 1 << 31  # of tensors, at most


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(PROGRAM, message)


def parser() -> argparse.ArgumentParser:
    """Those arguments of `codegen` that say what is compiled, settings of the project, and how to execute."""
    made = _Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_attention_of_gpu(made)
    made.add_argument(
        "--attention", choices=ATTENTIONS, default="sdpa", help="packed sequences, or a mask: one that the graph makes, or is given"
    )
    made.add_argument("--dropout", type=float, default=0.0, metavar="P", help="drops elements of the scores with this probability")
    for name in SETTINGS:
        made.add_argument(f"--{name}", choices=CHOICES[name], help=f"the setting {name}")
    made.add_argument(
        "--sms", type=at_least(1), metavar="N", help="SMs that the schedule counts on: few make several chains a worker"
    )
    made.add_argument("--seeds", type=at_least(1), default=1, metavar="N", help="interleavings of the CTAs (default 1)")
    made.add_argument("--no-races", action="store_true", help="values only, three times as fast")
    made.add_argument("--mutants", action="store_true", help="also each synchronisation of the main kernel weakened alone")
    return made


def case_of(args: argparse.Namespace) -> Case:
    """The attention that the arguments name."""
    settings = {name: value for name in SETTINGS if (value := getattr(args, name))}
    if args.sms:
        from dash_inductor.devices import device

        settings["sm_reserve"] = max(0, device(args.device).sms - args.sms)
    fields = {field.name for field in dataclasses.fields(Case)} - {"settings", "block", "in_bands", "trained", "gathered"}
    return Case(**{name: getattr(args, name) for name in fields}, settings=settings)


def require_sizes(case: Case) -> None:
    """Raises ValueError for sizes out of reach."""
    dims = case.head_dim + (case.value_dim or case.head_dim)
    rows = case.batch * case.heads * (case.q_len + case.kv_len)
    if 12 * 2 * rows * dims > BYTES or case.q_len * case.kv_len > 1 << 28:
        raise ValueError("sizes out of reach: the tensors take more memory than the executor has")


def report(args: argparse.Namespace) -> dict[str, Any]:
    """What `--json` prints; ValueError for what cannot be executed."""
    case = case_of(args)
    require_sizes(case)
    start = time.perf_counter()
    step = progress(1 + args.seeds)
    step("generating the code")
    prepared = Prepared(case)
    results: list[Result] = []
    for seed in range(args.seeds):
        step(f"seed {seed}, {prepared.steps} steps")
        results.append(prepared.run(seed, check=not args.no_races))
    faults = [result.fault for result in results if result.fault]
    errors = [max(result.errors.values()) for result in results if result.errors]
    made: dict[str, Any] = {
        "device": case.device,
        "kernels": [{"kernel": e.kernel, "grid": list(e.grid), "seconds": round(e.seconds, 3)} for e in results[0].executed],
        "steps": prepared.steps,
        "seconds": round(time.perf_counter() - start, 2),
        "error": None if len(errors) < len(results) else max(errors),
        "races": [race for result in results for race in result.races],
        "deadlock": next((fault for fault in faults if "deadlock" in fault), None),
        "fault": next((fault for fault in faults if "deadlock" not in fault), None),
        "same_bits": same_bits(results),
        "checked": not args.no_races,
        "externs": sorted(set(results[0].externs)),
        "ignored": results[0].ignored,
    }
    if args.mutants and not faults:
        verdicts = []
        step = progress(len(mutants.sites(mutants.main_kernel(prepared))))
        for verdict in mutants.all_judged([prepared]):
            step(verdict.line())
            verdicts.append(verdict)
        made["mutants"] = [verdict.line() for verdict in verdicts]
        made["holes"] = [verdict.line() for verdict in verdicts if verdict.is_hole]
    return made


def is_bad(figures: dict[str, Any], dtype: str) -> bool:
    """Whether what was executed is wrong, racy, stuck or not deterministic."""
    right = figures["error"] is not None and figures["error"] < mutants.LIMITS[dtype]
    return bool(figures["races"] or figures["deadlock"] or figures["fault"] or not figures["same_bits"] or not right)


def _show(figures: dict[str, Any]) -> None:
    kernels = {e["kernel"]: f"grid {tuple(e['grid'])}, {e['seconds']} s" for e in figures["kernels"]}
    section(f"Executed for {figures['device']}", kernels)
    races = f"{len(figures['races'])} found" if figures["checked"] else "not looked for"
    error = "none: it did not end" if figures["error"] is None else f"{figures['error']:.1e} of the largest gradient"
    summary = {"steps": figures["steps"], "seconds": figures["seconds"], "error": error, "races": races}
    summary |= {"deadlock": figures["deadlock"] or "none", "fault": figures["fault"] or "none", "same bits": figures["same_bits"]}
    section("Result", summary | {"not executed from PTX": ", ".join(figures["externs"]), "ignored": ", ".join(figures["ignored"])})
    for race in figures["races"]:
        earlier = f", earlier {race['earlier']}" if race["earlier"] else ""
        print(f"race in {race['kernel']}: {race['kind']} at {race['at']}{earlier}; {race['place']}, {race['times']} times")
    for name in ("mutants", "holes"):
        for line in figures.get(name, ()):
            print(f"{name}: {line}")


def main() -> int:
    """0: right, and no race; 1: not so; 2: bad input."""
    args = parser().parse_args()
    try:
        figures = report(args)
    except (ValueError, MemoryError, NotImplementedError) as error:
        fail(PROGRAM, error)
    if args.json:
        print_json(figures)
    else:
        _show(figures)
    return 1 if is_bad(figures, args.dtype) else 0


if __name__ == "__main__":
    sys.exit(main())
