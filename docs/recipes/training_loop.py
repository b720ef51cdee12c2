"""A plain training loop whose second run, or whose resumed run, has the bits of the first.

    python training_loop.py                            # on a GPU
    DASH_INDUCTOR_EMULATE=1 python training_loop.py    # without one, at toy size

Needs dash-inductor. Promises the same losses, gradient norms and weights for the same software and GPU model: run it twice and
compare the last line. Emulated, `DASH_INDUCTOR_SEED=1` (2, 3, ...) runs the GPU's thread blocks in another order: same line.
Four things do it: one seed, cuBLAS's fixed workspace, strict deterministic mode, and a checkpoint with all that a step reads.
"""

import hashlib
import os
import tempfile
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts

import torch
import torch.nn.functional as F
from torch import nn

import dash_inductor

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
LAYERS, WIDTH, HEADS, BATCH, LENGTH = (4, 512, 8, 8, 2048) if GPU else (1, 32, 2, 2, 96)
TOKENS, STEPS = 256, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


def train(checkpoint: Path, resume: bool = False) -> str:
    """Trains, saving half-way, or goes on from there; returns a digest of the weights."""
    torch.manual_seed(0)  # weights
    data = torch.Generator().manual_seed(0)  # a generator of its own: its state is one tensor to save
    layers = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, TOKENS))
    layers.to(DEVICE, DTYPE)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    # Where lengths vary, with dynamic=True: else which graph a length gets depends on those before it, which a resumed run has not.
    model = torch.compile(layers, backend="dash")
    first = 0
    if resume:
        saved = torch.load(checkpoint)
        layers.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.set_state(saved["data"].cpu())
        first = saved["step"]
    for step in range(first, STEPS):
        if step == STEPS // 2 and not resume:
            state = {"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "data": data.get_state(), "step": step}
            torch.save(state, checkpoint)
        tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=data).to(DEVICE)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}  loss {loss.item().hex()}  grad norm {norm.item().hex()}")  # hex shows every bit
    weights = torch.cat([p.detach().float().flatten() for p in layers.parameters()])
    return hashlib.sha256(weights.cpu().numpy()).hexdigest()[:16]


torch.use_deterministic_algorithms(True)  # strict: an op that has no deterministic way raises
with tempfile.TemporaryDirectory() as folder:
    straight = train(Path(folder, "half-way.pt"))
    resumed = train(Path(folder, "half-way.pt"), resume=True)
attentions = dash_inductor.decisions()
assert attentions and all(decision.rewritten for decision in attentions), attentions
assert resumed == straight, "the resumed run has other bits"
print(f"attentions rewritten: {len(attentions)}; weights, straight and resumed: {straight}")
