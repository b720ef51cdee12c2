"""A small training that writes its manifest: `manifest_worker.py FILE`, or `manifest_worker.py rank` for a file of each rank."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dash_inductor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(self.project(x), x, x, is_causal=True)
        return F.scaled_dot_product_attention(*[x.repeat(1, 1, 1, 17)] * 3)  # declined, for its head dim


def train() -> None:
    """By sizes that are known, and by sizes that are symbols."""
    torch.manual_seed(0)
    model = Model()
    for dynamic, sizes in ((False, (64,)), (True, (96, 128))):
        trained = torch.compile(model, dynamic=dynamic)
        for size in sizes:
            trained(torch.randn(1, 2, size, 16)).sum().backward()


if __name__ == "__main__":
    file = sys.argv[1]
    torch.use_deterministic_algorithms(True)
    if file == "rank":
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", f"file://{os.getcwd()}/store", rank=rank, world_size=2)
        file = f"rank{rank}.json"
    dash_inductor.enable()
    train()
    dash_inductor.manifest().write(file)
