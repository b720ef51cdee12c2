"""Shows the kernels that torch.compile generates for the backward of an attention, for a GPU that need not be there.

The report has their Triton source and launch, and what the machine code says, compiled by the Triton that is installed: registers,
shared memory, CTAs per SM, the instructions of the main loop, and which rules they break; for Hopper also an estimate of the
cycles of a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dash_inductor.cli.arguments import add_attention, add_json
from dash_inductor.cli.console import print_json, section
from dash_inductor.codegen.mods import MASK_MODS, SCORE_MODS
from dash_inductor.devices import DEVICES, device
from dash_inductor.schedule import MASKS
from dash_inductor.templates.tiles import HALF_DTYPES, Template, gluon_tile, tile, two_pass_tile

from .. import gates
from ..replay import SMALLEST
from ..rules import Rules

GLUON_OP = "torch.ops.dash.sdpa_backward_gluon.default"  # which launches the Gluon kernel
# Figures of the whole kernel; all others are of its main loop.
OF_KERNEL = ("num_warps", "num_stages", "registers", "stack_bytes", "shared_bytes", "main_loops", "tmem_columns", "ctas_per_sm")

SIZES = "--q-len 8192 --kv-len 8192 --batch 2 --heads 16 --head-dim 128"
EXAMPLES = (
    f"--device h100 --mask causal {SIZES}",
    f"--device h100 --mask-mod documents --score-mod alibi {SIZES} --json",
    f"--device a100 {SIZES} --cubin kernel.cubin",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `codegen`."""
    add_attention_of_gpu(parser)
    parser.add_argument("--cubin", type=Path, metavar="FILE", help="write the main kernel's machine code; other kernels' beside it")


def add_attention_of_gpu(parser: argparse.ArgumentParser) -> None:
    """A device, an attention whose backward has kernels, FlexAttention's functions among it, and --json."""
    add_attention(parser, devices=tuple(DEVICES), masks=MASKS, dtypes=HALF_DTYPES)
    for name, mods in (("mask-mod", MASK_MODS), ("score-mod", SCORE_MODS)):
        listed = ", ".join(mods)
        parser.add_argument(
            f"--{name}", choices=mods, metavar="MOD", help=f"FlexAttention with this {name.replace('-', '_')}: {listed}"
        )
    parser.add_argument("--dynamic", action="store_true", help="lengths of sequences are known only at run time")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the report; ValueError if the attention is not rewritten, or its sizes make none."""
    figures = report(args)
    if args.json:
        print_json(figures)
    else:
        _show(figures)
    return 0


def report(args: argparse.Namespace) -> dict[str, Any]:
    """The report of `codegen`; ValueError if the attention is not rewritten."""
    import torch
    import triton

    from dash_inductor.codegen.flex import FlexAttention

    from ..flex import flex_backward
    from ..generate import CompiledKernel, attention_backward, compile_kernel
    from ..gluon import compile_gluon, gluon_source

    heads = {"heads": args.heads, "kv_heads": args.heads if args.kv_heads is None else args.kv_heads}
    sizes: dict[str, Any] = {
        "batch": args.batch,
        "head_dim": args.head_dim,
        "value_dim": args.value_dim,
        "dtype": args.dtype,
    } | heads
    if args.mask_mod or args.score_mod:
        if args.q_len != args.kv_len or args.dynamic or args.mask != "full":
            raise ValueError("--mask-mod and --score-mod take one length, known when compiling, and no --mask")
        sizes |= {"mask_mod": args.mask_mod or "none", "score_mod": args.score_mod or "none"}
        generated = flex_backward(args.device, FlexAttention(length=args.q_len, **sizes))
    else:
        sizes |= {"q_len": args.q_len, "kv_len": args.kv_len, "mask": args.mask}
        generated = attention_backward(args.device, dynamic=args.dynamic, **sizes)
    is_gluon = GLUON_OP in generated.source
    if not generated.templates and not is_gluon:
        reasons = [decision.reason for decision in generated.decisions if decision.reason is not None]
        raise ValueError(f"the attention keeps its stock kernel: {'; '.join(reasons) or 'no pass matched it'}")
    arch = device(args.device).arch

    def described(name: str, compiled: CompiledKernel, rules: Rules, launch: Sequence[str], source: str) -> dict[str, Any]:
        if args.cubin:
            is_main = name == (GLUON_OP if is_gluon else generated.main_kernel)
            path = args.cubin if is_main else args.cubin.with_stem(f"{args.cubin.stem}.{name}")
            path.write_bytes(compiled.cubin)
        figures = gates.figures(compiled, rules)
        return {
            "kernel": name,
            "device": args.device,
            **figures,
            **gates.predicted(compiled, rules),
            "gates": rules.violated(figures),
            "launch": list(launch),
            "source": source,
        }

    def of_template(name: str) -> dict[str, Any]:
        find = tile if generated.templates[name] == Template.ONE_PASS else two_pass_tile
        rules = Rules(arch, find(arch, args.dtype, args.head_dim, args.value_dim))
        source = generated.kernels[name]
        return described(name, compile_kernel(source, args.device), rules, generated.launches[name], source)

    def of_gluon() -> dict[str, Any]:
        lengths = {"q_len": args.q_len, "kv_len": args.kv_len, "batch": args.batch}
        (mask,) = {str(decision.mask) for decision in generated.decisions if decision.rewritten}
        sizes = lengths | heads | {"head_dim": args.head_dim, "value_dim": args.value_dim, "dtype": args.dtype}
        compiled = compile_gluon(args.device, **sizes, mask=mask, score_mod=args.score_mod or "none")
        is_plain = mask in MASKS and args.score_mod in (None, "none")
        rules = Rules(arch, gluon_tile(arch, args.dtype, args.head_dim, args.value_dim), is_gluon=True, is_plain=is_plain)
        launches = [line.strip() for line in generated.source.splitlines() if GLUON_OP in line]
        return described(GLUON_OP, compiled, rules, launches, gluon_source())

    main, *others = *([of_gluon()] if is_gluon else []), *map(of_template, generated.templates)
    return {
        **main,
        "others": others,
        "decisions": [dataclasses.asdict(decision) for decision in generated.decisions],
        "graph": generated.graph,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
    }


def _show(figures: dict[str, Any]) -> None:
    """The report for people: figures and code of each kernel."""
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    _show_kernel(figures, f"{figures['kernel']} on {figures['device']} ({versions})", {"Graph": figures["graph"]})
    for other in figures["others"]:
        print()
        _show_kernel(other, other["kernel"], {})


def _show_kernel(figures: dict[str, Any], title: str, sections: dict[str, str]) -> None:
    of_loop: dict[str, Any] = {}
    of_kernel: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, int):
            (of_kernel if name in OF_KERNEL else of_loop)[name.replace("_", " ")] = value
    of_kernel["broken rules"] = "; ".join(figures["gates"]) or "none"
    section(title, of_kernel)
    section("Main loop", of_loop)
    loops = figures["predicted_cycles"] or ()
    for n, loop in enumerate(loops, 1):
        by_cause = {"all": loop["cycles"], "tensor cores": loop["tensor_cycles"], **loop["exposed"]}
        place = f" of loop {n}" if len(loops) > 1 else ""
        section(
            f"Cycles of a step{place}, an estimate",
            {cause: round(cycles) for cause, cycles in by_cause.items() if cycles >= SMALLEST},
        )
    for heading, text in (sections | {"Launch": "\n".join(figures["launch"]), "Kernel": figures["source"].strip()}).items():
        print(f"\n{heading}\n\n{text}")
