"""Sequences of unlike lengths in one row, without padding: varlen_attn, with the same gradients every time.

    python varlen.py                            # on a GPU
    DASH_INDUCTOR_EMULATE=1 python varlen.py    # without one, at toy size

Needs dash-inductor. Promises the same gradients for the same software, GPU model and pack: run it twice and compare the last line.
Emulated, another `DASH_INDUCTOR_SEED` is another order of thread blocks, and the same line. Lengths are dynamic: one compiled graph
serves every pack. A sequence's last bits may depend on what it is packed with, but not at the level `batch`, as
trainer_and_sampler.py shows. On a GPU torch 2.15 may take cuDNN for varlen_attn, which keeps its stock backward;
`dash_inductor.decisions()` says so.
"""

import hashlib
from itertools import accumulate

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn

import dash_inductor

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
WIDTH, HEADS, PACKS = (1024, 16, [(3000, 700, 396), (2048, 2048, 50, 1)]) if GPU else (32, 2, [(90, 25, 10), (70, 58)])
CAUSAL = (-1, 0)  # a window: any number of keys to the left, none to the right


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, offsets, longest):
        """x: [tokens, WIDTH]; offsets: where each sequence begins, and the end, int32; longest: tokens in the longest one."""
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        out = varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=CAUSAL)
        return self.out(out.flatten(1))


torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
layer = Attention().to(DEVICE, DTYPE)
model = torch.compile(layer, backend="dash", dynamic=True)
digest = hashlib.sha256()
for lengths in PACKS:
    x = torch.randn(sum(lengths), WIDTH, device=DEVICE, dtype=DTYPE)
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    layer.zero_grad()
    loss = model(x, offsets, max(lengths)).square().mean()
    loss.backward()
    digest.update(torch.cat([p.grad.float().flatten() for p in layer.parameters()]).cpu().numpy())
    print(f"lengths {lengths}  loss {loss.item().hex()}")  # hex shows every bit

attentions = dash_inductor.decisions()
assert attentions and all(decision.rewritten for decision in attentions), attentions
print(f"attentions rewritten: {len(attentions)}; gradients of both packs: {digest.hexdigest()[:16]}")
