"""Trains a small GPT in two processes, and compares every loss, gradient and weight bit for bit.

On a GPU both processes train at the same time, on the kernels of this package. Without a GPU Triton's interpreter runs these
kernels on the CPU, and the two processes interleave their CTAs differently. The exit status is 0 if every bit is the same, and 1
if not.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .arguments import add_json, at_least
from .console import CommandError, print_json, table

EXAMPLES = ("", "--steps 5 --json")
STEPS, MOST_STEPS = 8, 10_000
SEEDS = (1, 2)  # of the CTAs' interleaving; the training's own seed is the same in both processes
SMS = 16  # of the emulated device: four for each head of a batch, so that CTAs share dQ tiles and have to wait
OPENING = """\
A small GPT trains in two processes at the same time; then every bit of the two is compared.
Without a GPU this takes about half a minute on two idle cores. Step 1 takes half of that, for it compiles the model.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `demo`."""
    steps = f"training steps, at most {MOST_STEPS} (default %(default)s)"
    parser.add_argument("--steps", type=at_least(1, MOST_STEPS), default=STEPS, metavar="N", help=steps)
    parser.add_argument("--train", type=Path, metavar="FILE", help="only train once, and write what happened to FILE (JSON)")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """0 if both trainings agree in every bit and every attention really had to wait, else 1."""
    if args.train is None and not args.json:
        print(OPENING, flush=True)  # before torch is imported, which takes seconds
    if problem := _missing(alone=args.train is not None):
        raise CommandError(problem)
    if args.train is not None:
        args.train.write_text(json.dumps(train(args.steps)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{seed}.json" for seed in SEEDS]
        shown = None if args.json else SEEDS[0]
        children = [_start(seed, file, args.steps, shown=seed == shown) for seed, file in zip(SEEDS, files, strict=True)]
        if any([child.wait() for child in children]):
            raise CommandError("a training process failed: what it said is above")
        runs = [json.loads(file.read_text()) for file in files]
    return report(*runs, as_json=args.json)


def report(first: dict[str, Any], second: dict[str, Any], *, as_json: bool) -> int:
    """Print what two trainings came to; 1 if they differ."""
    problem = difference(first, second)
    if as_json:
        shared = {name: first[name] for name in ("emulated", "attentions")}
        waits = [first["waits"], second["waits"]] if first["emulated"] else None
        print_json({"identical": problem is None, "difference": problem, "tensors": len(first["digests"]), "waits": waits} | shared)
        return int(problem is not None)
    print()
    table("Attentions", [{name.replace("_", " "): value for name, value in row.items()} for row in first["attentions"]])
    print()
    if problem is not None:
        print(f"bitwise: {problem}", file=sys.stderr)
        return 1
    waited = f", {first['waits']} and {second['waits']} waits of CTAs" if first["emulated"] else ""
    print(f"bitwise: identical ({len(first['digests'])} tensors in two processes{waited})")
    return 0


def _missing(*, alone: bool) -> str | None:
    """What a training needs and does not have, or None; one that is not `alone` is given an emulation."""
    import torch

    from ..config import current

    try:
        settings = current()
    except ValueError as error:
        return str(error)
    if not settings.enabled:
        return "DASH_INDUCTOR=0 switches off what the demo shows: unset it"
    if alone and not torch.cuda.is_available() and not settings.emulate:
        return "--train needs a GPU, or emulation: set DASH_INDUCTOR_EMULATE=1"
    return None


def _start(seed: int, file: Path, steps: int, *, shown: bool) -> subprocess.Popen[bytes]:
    import torch

    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "DASH_INDUCTOR_SEED": str(seed)}
    if not torch.cuda.is_available():
        environment |= {"DASH_INDUCTOR_EMULATE": "1", "DASH_INDUCTOR_SMS": str(SMS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dash_inductor", "demo", "--steps", str(steps), "--train", str(file)]
    return subprocess.Popen(command, env=environment, stdout=None if shown else subprocess.DEVNULL)


def train(steps: int) -> dict[str, Any]:
    """Trains, printing the loss curve; returns digests of losses, gradients and last weights, attentions and waits."""
    import torch

    from .. import emulation
    from ..decision import decisions
    from ..hooks.install import enable
    from ..reproduce.fingerprint import fingerprint
    from .gpt import GPT

    emulated = not torch.cuda.is_available()
    device, dtype = ("cpu", torch.float32) if emulated else ("cuda", torch.bfloat16)
    batch, length = (2, 128) if emulated else (8, 1024)
    enable()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = GPT(length, width=128, heads=2, layers=2).to(device, dtype)
    loss_of = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    corpus = torch.frombuffer(bytearray(_text().encode()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(0)

    digests: dict[str, str] = {}
    waits = 0
    for step in range(1, steps + 1):
        starts = torch.randint(len(corpus) - length - 1, (batch,), generator=draw).tolist()
        windows = torch.stack([corpus[start : start + length + 1] for start in starts]).to(device)
        emulation.clear_launches()
        optimizer.zero_grad()
        loss = loss_of(windows[:, :-1], windows[:, 1:])
        loss.backward()
        waits += _waits(emulation.launches()) if emulated else 0
        digests[f"loss of step {step}"] = fingerprint(loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            digests[f"gradient of {name} in step {step}"] = fingerprint(parameter.grad)
        optimizer.step()
        print(f"step {step:{len(str(steps))}d} of {steps}  loss {loss:.4f}  {'#' * round(loss.item() * 6)}", flush=True)
    digests |= {f"{name} after the last step": fingerprint(parameter) for name, parameter in model.named_parameters()}
    if not decisions() or not all(decision.rewritten for decision in decisions()):
        raise RuntimeError(f"not every attention was rewritten: {[str(decision) for decision in decisions()]}")
    shown = "module", "shape", "mask", "schedule", "predicted_us", "workspace_bytes"
    attentions = [{name: getattr(decision, name) for name in shown} for decision in decisions()]
    return {"emulated": emulated, "digests": digests, "attentions": attentions, "waits": waits}


def _text() -> str:
    """Real text that every Python has: the language reference behind help()."""
    return "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))


def _waits(launches: list[Any]) -> int:
    """Waits that were not already satisfied; an attention without one would prove nothing. Only its kernel uses atomics."""
    waits = [launch.waits for launch in launches]
    if not waits or not all(waits):
        raise RuntimeError(f"an attention in which no CTA had to wait: {waits} waits in its launches")
    return sum(waits)


def difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """What differs between two runs first, or None; both are of as many steps."""
    return next((f"the {name} differs" for name, digest in first["digests"].items() if digest != second["digests"][name]), None)
