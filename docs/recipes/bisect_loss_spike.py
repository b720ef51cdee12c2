"""Two runs of one config part ways, or one loss spikes and the other does not: `check` names the op that differs.

    python bisect_loss_spike.py                            # on a GPU
    DASH_INDUCTOR_EMULATE=1 python bisect_loss_spike.py    # without one, at toy size

Needs dash-inductor. What it takes of you is `step`: one training step from its seeds on (load the last checkpoint before the spike,
seed, forward, backward) that returns the model. `check` runs it again and again, in other processes too, and compares every
gradient bit for bit; the argument `same` keeps to this process, which is quicker. Here a router's jitter draws from a generator
that nobody seeds: `check` names that line, and passes the step that seeds it. From the command line, in the folder of your script:

    python -m dash_inductor check bisect_loss_spike:step
"""

import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts

import torch
import torch.nn.functional as F
from torch import nn

import dash_inductor

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
WIDTH, HEADS, BATCH, LENGTH, EXPERTS = (512, 8, 8, 2048, 8) if GPU else (32, 2, 2, 64, 4)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Mixes its experts' outputs; jitter on the way in keeps them all in use."""

    def __init__(self):
        super().__init__()
        self.choose, self.experts = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, EXPERTS)
        self.jitter = torch.Generator(DEVICE)
        self.jitter.seed()  # from the operating system: torch.manual_seed() does not reach it

    def forward(self, x):
        jittered = x * torch.rand(x.shape, generator=self.jitter, device=x.device, dtype=x.dtype).mul(0.02).add(0.99)
        return (self.choose(jittered).softmax(-1) * self.experts(x)).sum(-1)


def step(seed_of_jitter=None):
    """One training step from its seeds on."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = nn.Sequential(torch.compile(Attention(), backend="dash"), Router()).to(DEVICE, DTYPE)
    if seed_of_jitter is not None:
        model[1].jitter.manual_seed(seed_of_jitter)
    model(torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE, dtype=DTYPE)).square().mean().backward()
    return model


def repaired_step():
    return step(seed_of_jitter=0)


if __name__ == "__main__":
    kinds = sys.argv[1:] or None
    found, repaired = dash_inductor.check(step, kinds=kinds), dash_inductor.check(repaired_step, kinds=kinds)
    print(found)
    print(repaired)
    assert not found.identical and repaired.identical
