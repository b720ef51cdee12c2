"""Trains by two ranks whose trials say something else at random: `python -m tests.soak.verdicts`.

At each start a rank's trials are faked: the kernel is fit or unfit, or cannot be tried, and such a kernel has run on the GPU's
model or has not. The ranks share a cache folder, as on one machine, or have one each. Then either all ranks have the same bits
after each step, or the one that comes second raises before its first backward runs. Exits with 1 where neither is so, or where one
of both never happened.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path

from tests.emulated.processes import ranks

RANKS, STEPS_A_START = 2, 10
SAID = ("fit", "unfit", "untried", "untried, has run")
EQUAL, RAISED = "equal bits", "raised before a backward"


def start(folder: Path, seed: int) -> str:
    """What became of one start; what is neither EQUAL nor RAISED is wrong."""
    ended = ranks(RANKS, ["-m", "tests.soak.verdicts", "--rank-of", str(folder), "--seed", str(seed)], folder, 300)
    said = [json.loads((folder / f"said{rank}").read_text()) for rank in range(RANKS)]
    statuses = [status for status, _, _ in ended]
    if statuses == [0] * RANKS and said[0]["digests"] == said[1]["digests"] and len(said[0]["digests"]) == STEPS_A_START:
        return EQUAL
    if any("RanksDifferError" in each["raised"] and not each["backwards"] for each in said):  # the other waits for it in vain
        return RAISED
    return f"wrong: {statuses} {said}\n" + "\n".join(output for _, output, _ in ended)


def rank_of(folder: Path, seed: int) -> None:
    """One rank: a linear layer before an attention, gradients summed over the ranks after each step."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import dash_inductor
    from dash_inductor.first_use import known, verdict
    from dash_inductor.first_use.known import Verdict

    rank = int(os.environ["RANK"])
    draw = random.Random(f"{seed} {rank}")
    says = draw.choice(SAID)
    shares = random.Random(seed).random() < 0.5
    verdict._is_asked = lambda guard, device: True  # as on a GPU
    verdict._tried = lambda *_: Verdict({"fit": True, "unfit": False}.get(says), says)
    verdict.has_run = lambda kind, device: says == "untried, has run"
    known.cache_dir = lambda: str(folder / ("trials" if shares else f"trials{rank}"))
    dist.init_process_group("gloo", f"file://{folder}/ranks", timedelta(seconds=60), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    dash_inductor.configure(guarantee="device")
    layer = torch.nn.Linear(16, 16)

    def attend(x: torch.Tensor) -> torch.Tensor:
        x = layer(x)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = torch.compile(attend, backend="dash")
    found = {"says": says, "shares": shares, "raised": "", "backwards": 0, "digests": []}
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    data = torch.Generator().manual_seed(rank)
    try:
        for _ in range(STEPS_A_START):
            optimizer.zero_grad()
            out = compiled(torch.randn(1, 2, 100, 16, generator=data))
            out.square().sum().backward()
            found["backwards"] += 1
            for parameter in layer.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            bits = b"".join(parameter.detach().numpy().tobytes() for parameter in layer.parameters())
            found["digests"].append(hashlib.sha256(bits).hexdigest()[:12])
    except Exception as error:
        found["raised"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (folder / f"said{rank}").write_text(json.dumps(found))


def main(arguments: list[str]) -> int:
    """0 if each start was right, and both ends came about."""
    parser = argparse.ArgumentParser("python -m tests.soak.verdicts", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank-of", type=Path)
    args = parser.parse_args(arguments)
    if args.rank_of:
        rank_of(args.rank_of, args.seed)
        return 0
    counts: Counter[str] = Counter()
    for n in range(args.steps // STEPS_A_START):
        with tempfile.TemporaryDirectory() as folder:
            counts[start(Path(folder), args.seed + n)] += 1
    for outcome, count in counts.items():
        print(f"{count} starts: {outcome}")
    return int(set(counts) != {EQUAL, RAISED})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
