"""One of two ranks that train an attention, of which rank 1 has or does something else: `rank_worker.py FOLDER WHAT`.

The last line that it prints is JSON: what was raised, the backwards that ran, and warnings of the package.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dash_inductor
from dash_inductor.contract import facts
from dash_inductor.first_use import verdict
from dash_inductor.first_use.known import Verdict
from dash_inductor.hooks import told

LENGTH, TURNS = 100, 2


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def twice(x: Tensor) -> Tensor:
    return attend(attend(x))


def main(folder: Path, what: str) -> None:
    rank = int(os.environ["RANK"])
    is_other, settings = rank == 1, {}
    verdict._tried = lambda *_: Verdict(not (is_other and what == "verdict"), "it is wrong here")
    if what == "verdict":
        settings["guard"] = "always"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"cache{rank}")  # as on two machines
    if is_other and what == "schedule":
        settings["schedule"] = "ascending"
    if is_other and what == "torch":
        torch.__version__ = f"{torch.__version__}1"
    if is_other and what == "cost file":
        facts.digest_of = lambda path: "another"  # the emulated device takes none of the user's
    if what == "late":
        told.SECONDS = 1.0
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dash_inductor").addHandler(handler)

    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), rank=rank, world_size=2)
    found = {"raised": "", "backwards": 0, "warnings": messages}
    try:
        if is_other and what == "dead":
            return
        torch.use_deterministic_algorithms(True)
        dash_inductor.configure(guarantee="device", **settings)
        function = twice if is_other and what == "pipeline" else attend
        length = LENGTH + 7 * (is_other and what == "lengths")
        for turn in range(TURNS):
            if is_other and what == "late":
                time.sleep(4)
            wait_for(folder, f"{turn} of 0" if rank else f"{turn - 1} of 1", 1 - rank)
            torch._dynamo.reset()  # each turn compiles, or loads
            x = torch.randn(1, 2, length + turn, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
            compiled = torch.compile(function, backend="dash")
            if rank == 0 and what == "evaluation":
                with torch.no_grad():
                    compiled(x[:, :, :-1])
            compiled(x).sum().backward()
            found["backwards"] += 1
            (folder / f"{turn} of {rank}").touch()
    except Exception as error:
        found["raised"] = str(error)
    finally:
        (folder / f"done{rank}").touch()
        print(json.dumps(found))


def wait_for(folder: Path, turn: str, other: int) -> None:
    """The ranks take turns, rank 0 first, until one ends."""
    while not turn.startswith("-1") and not (folder / turn).exists() and not (folder / f"done{other}").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
