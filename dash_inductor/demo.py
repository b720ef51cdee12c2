"""`python -m dash_inductor demo`: a small GPT trained twice, in two processes whose CTAs interleave differently, compared bit for bit."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 20
SEEDS = (1, 2)  # of the CTAs' interleaving; the training's own seed is the same in both processes
KERNEL = "dash_sdpa_backward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default %(default)s)")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # what the child processes do, and where they write


def main(args: argparse.Namespace) -> int:
    if args.train is not None:
        args.train.write_text(json.dumps(train(args.steps)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{seed}.json" for seed in SEEDS]
        children = [_start(seed, file, args.steps) for seed, file in zip(SEEDS, files, strict=True)]
        codes = [child.wait() for child in children]
        if any(codes):
            print(f"a training process failed with exit status {max(codes, key=abs)}", file=sys.stderr)
            return 1
        runs = [json.loads(file.read_text()) for file in files]
    print(text(runs[0]))
    return compare(*runs)


def _start(seed: int, file: Path, steps: int) -> subprocess.Popen[bytes]:
    import torch

    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "DASH_INDUCTOR_SEED": str(seed)}
    if not torch.cuda.is_available():
        environment |= {"DASH_INDUCTOR_EMULATE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dash_inductor", "demo", "--steps", str(steps), "--train", str(file)]
    return subprocess.Popen(command, env=environment)


def train(steps: int) -> dict[str, Any]:
    """Trains and returns losses, a digest of every gradient of every step and of the last weights, decisions and waits."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from . import emulation, enable
    from .record import decisions

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.project = nn.Linear(width, width, bias=False)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.project(attended.transpose(1, 2).flatten(2))
            return x + self.mlp(self.norms[1](x))

    class GPT(nn.Module):
        def __init__(self, length: int, width: int, heads: int, layers: int) -> None:
            super().__init__()
            self.tokens = nn.Embedding(256, width)
            self.positions = nn.Parameter(0.02 * torch.randn(length, width))
            self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, 256, bias=False)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    batch, length = (8, 1024) if on_gpu else (4, 128)
    enable()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = GPT(length, width=128, heads=2, layers=2).to(device)
    if on_gpu:
        model = model.bfloat16()
    loss_of = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text_bytes = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode()
    corpus = torch.frombuffer(bytearray(text_bytes), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(0)

    losses: list[float] = []
    digests: dict[str, str] = {}
    waits: list[int] = []
    for step in range(steps):
        starts = torch.randint(len(corpus) - length - 1, (batch,), generator=draw)
        windows = torch.stack([corpus[start : start + length + 1] for start in starts.tolist()]).to(device)
        emulation.clear_launches()
        optimizer.zero_grad()
        loss = loss_of(windows[:, :-1], windows[:, 1:])
        loss.backward()
        waits += [launch.waits for launch in emulation.launches() if KERNEL in launch.kernel]
        digests |= {f"step {step}: gradient of {name}": _digest(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    digests |= {f"after the last step: {name}": _digest(p) for name, p in model.named_parameters()}
    rows = [
        {
            "attention": decision.shape,
            "mask": decision.mask,
            "schedule": decision.schedule,
            "predicted us": decision.predicted_us,
            "workspace bytes": decision.workspace_bytes,
            "declined": decision.reason,
        }
        for decision in decisions()
    ]
    return {"losses": losses, "digests": digests, "waits": waits if not on_gpu else None, "attentions": rows}


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def text(run: dict[str, Any]) -> str:
    """The loss curve, and a row per attention."""
    lines = [f"step {step:3d}  loss {loss:.4f}  {'#' * round(loss * 10)}" for step, loss in enumerate(run["losses"])]
    for row in run["attentions"]:
        lines.append("  ".join(f"{name}: {value}" for name, value in row.items() if value is not None))
    return "\n".join(lines)


def compare(first: dict[str, Any], second: dict[str, Any]) -> int:
    """0 if both runs agree bit for bit and were really made to wait, else 1, naming the first difference."""
    attentions = first["attentions"]
    if not attentions or any(row["declined"] for row in attentions):
        print("an attention was not rewritten", file=sys.stderr)
        return 1
    for run in (first, second):
        if run["waits"] is not None and not (run["waits"] and all(run["waits"])):
            print(f"an attention in which no CTA had to wait proves nothing: waits per launch {run['waits']}", file=sys.stderr)
            return 1
    if first["digests"].keys() != second["digests"].keys():
        print("the runs have different tensors", file=sys.stderr)
        return 1
    for name, digest in first["digests"].items():
        if digest != second["digests"][name]:
            print(f"bitwise: {name} differs", file=sys.stderr)
            return 1
    if first["losses"] != second["losses"]:
        print("bitwise: a loss differs", file=sys.stderr)
        return 1
    waited = "" if first["waits"] is None else f", {sum(first['waits'])} and {sum(second['waits'])} waits of CTAs"
    print(f"bitwise: identical ({len(first['digests']) + len(first['losses'])} tensors in two processes{waited})")
    return 0
