"""A sequence's gradients do not depend on what it is packed with: the trainer's part of parity between trainer and sampler.

    python trainer_and_sampler.py                            # on a GPU
    DASH_INDUCTOR_EMULATE=1 python trainer_and_sampler.py    # without one, at toy size

Needs dash-inductor. In reinforcement learning a sampler computes log-probabilities in one batch, and a trainer computes them again
in another. So forwards must not depend on the batch, and with the level `batch` the gradients of attention do not either.

In torchtitan `DebugConfig(batch_invariant=True, deterministic=True)` sets torch's flag, takes the matmuls and reductions of the
package batch_invariant_ops, and gives FlashAttention 3 one split; add `guarantee="batch"`, as below. In vLLM, which samples:
VLLM_BATCH_INVARIANT=1. Both must take the same forward of attention. This script compares attention alone: other layers need
those ops.
"""

import hashlib
from itertools import accumulate

import torch
from torch.nn.attention.varlen import varlen_attn

import dash_inductor

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
HEADS, KV_HEADS, DIM, LENGTH = (16, 4, 128, 1500) if GPU else (4, 2, 16, 45)
PACKS = [(LENGTH,), (700, LENGTH, 396), (1, LENGTH), (3000, 50, LENGTH)] if GPU else [(LENGTH,), (7, LENGTH, 30), (1, LENGTH)]


def attend(query, key, value, offsets, longest):
    """Causal. One split is all that FlashAttention 2 knows; with FlashAttention 3 active in torch, add `num_splits=1`."""
    gqa = {} if query.shape[1] == key.shape[1] else {"enable_gqa": True}
    return varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=(-1, 0), **gqa)


def random(tokens, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, DIM, generator=generator).to(DEVICE, DTYPE)


torch.use_deterministic_algorithms(True)
compiled = torch.compile(attend, backend="dash", dynamic=True)
shapes = (HEADS, KV_HEADS, KV_HEADS, HEADS)  # of query, key, value and the gradient of the output
ours = [random(LENGTH, heads, seed) for seed, heads in enumerate(shapes)]
digests = []
with dash_inductor.enabled(guarantee="batch"):  # torch._inductor.config.batch_invariant = True does the same, where torch has it
    for pack in PACKS:
        place = pack.index(LENGTH)
        before, after = sum(pack[:place]), sum(pack[place + 1 :])
        packed = [
            torch.cat([random(before, heads, 10 + n), x, random(after, heads, 20 + n)])
            for n, (x, heads) in enumerate(zip(ours, shapes, strict=True))
        ]
        offsets = torch.tensor([0, *accumulate(pack)], dtype=torch.int32, device=DEVICE)
        leaves = [x.requires_grad_() for x in packed[:3]]
        out = compiled(*leaves, offsets, max(pack))
        grads = torch.autograd.grad(out, leaves, packed[3])
        digest = hashlib.sha256()
        for x in (out.detach(), *grads):
            digest.update(x[before : before + LENGTH].float().cpu().numpy().tobytes())
        digests.append(digest.hexdigest()[:16])
        print(f"packed as {pack}: output and gradients {digests[-1]}")

attentions = dash_inductor.decisions()
assert attentions and all(decision.rewritten for decision in attentions), attentions
assert len(set(digests)) == 1, "they depend on the pack"
print(f"attentions rewritten: {len(attentions)}; the same bits in {len(PACKS)} packs: {digests[0]}")
