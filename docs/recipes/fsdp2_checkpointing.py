"""FSDP2 with activation checkpointing, put together as torchtitan does: two runs have the same bits on every rank.

    torchrun --nproc-per-node 8 fsdp2_checkpointing.py                            # on GPUs
    DASH_INDUCTOR_EMULATE=1 torchrun --nproc-per-node 2 fsdp2_checkpointing.py    # without one, at toy size, over gloo

Needs dash-inductor; torchtitan itself is not needed: the three steps of its parallelize() stand below. Promises the same losses and
weights for the same software, GPU model and number of ranks: run it twice and compare the last line. Emulated, another
`DASH_INDUCTOR_SEED` is another order of thread blocks, and the same line. How ranks' gradients are summed is up to NCCL, which
has one order for one algorithm and topology: NCCL_ALGO=Ring pins it. NCCL's kernels take RESERVED of the GPU's SMs at most, and
attention's backward leaves these to them, so that both run at the same time; which number is best has not been measured.
"""

import hashlib
import os
import tempfile

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import dash_inductor

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
LAYERS, WIDTH, HEADS, BATCH, LENGTH = (8, 1024, 16, 2, 4096) if GPU else (2, 32, 2, 1, 96)
TOKENS, STEPS = 256, 2
RESERVED = 16 if GPU else 1  # SMs, of which the emulated device has 6; the same on every rank, and in every run with the same bits


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class HeldToManifest:
    """What decides bits, in a checkpoint of torch.distributed.checkpoint: whoever loads it is held to that."""

    def state_dict(self):
        return {f"rank {rank}": dash_inductor.manifest().to_json()}

    def load_state_dict(self, state):
        dash_inductor.manifest(check=dash_inductor.Manifest.of_text(state[f"rank {rank}"]))


os.environ.setdefault("NCCL_MAX_CTAS", str(RESERVED))  # NCCL reads it when its first communicator is made
dist.init_process_group("nccl" if GPU else "gloo")
rank = dist.get_rank()
if GPU:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.use_deterministic_algorithms(True)
dash_inductor.configure(sm_reserve=RESERVED)
torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, TOKENS, bias=False))
model.to(DEVICE, DTYPE)
for index in range(1, LAYERS + 1):
    layer = checkpoint_wrapper(model[index], preserve_rng_state=False)
    model[index] = torch.compile(layer, backend="dash", fullgraph=True)
    fully_shard(model[index])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

data = torch.Generator().manual_seed(1 + rank)  # other data on every rank
for step in range(STEPS):
    tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=data).to(DEVICE)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    if rank == 0:
        print(f"step {step}  loss of rank 0 {loss.item().hex()}  grad norm {norm.item().hex()}")  # hex shows every bit

shared = [tempfile.mkdtemp() if rank == 0 else None]  # on a file system that all ranks see
dist.broadcast_object_list(shared)
dcp.save({"model": model.state_dict(), "manifest": HeldToManifest()}, checkpoint_id=shared[0])
dcp.load({"model": model.state_dict(), "manifest": HeldToManifest()}, checkpoint_id=shared[0])  # as a run that is resumed does

attentions = dash_inductor.decisions()
assert attentions and all(decision.rewritten for decision in attentions), attentions
weights = torch.cat([p.detach().full_tensor().float().flatten() for p in model.parameters()])
if rank == 0:
    digest = hashlib.sha256(weights.cpu().numpy()).hexdigest()[:16]
    print(f"attentions rewritten: {len(attentions)}; weights of all {dist.get_world_size()} ranks: {digest}")
dist.destroy_process_group()
