"""GRPO under warn_only deterministic mode, as verl trains: attention's backward has the same bits in every run.

    python rl_warn_only.py                            # on a GPU
    DASH_INDUCTOR_EMULATE=1 python rl_warn_only.py    # without one, at toy size

Needs dash-inductor. verl's own trainer needs GPUs and an inference engine; the stand-in below keeps its three steps: sample a group
of answers to each prompt, compute their old log-probabilities by the training graph, update the actor by PPO's clipped ratio.
`warn_only=True` lets ops without a deterministic kernel run, stock attention among them. With on_unsupported="error" an
attention that would keep its stock kernel stops the run instead. Promises the same rewards and weights for the same software and
GPU model, if torch warns of no other op: run it twice and compare the last line.
"""

import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts

import torch
import torch.nn.functional as F
from torch import nn

import dash_inductor

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
WIDTH, HEADS, PROMPTS, GROUP, PROMPT, ANSWER = (512, 8, 16, 8, 1024, 64) if GPU else (32, 2, 1, 4, 90, 6)
TOKENS, STEPS, CLIP = 256, 2, 0.2


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        """tokens: [B, S] -> logits: [B, S, TOKENS]."""
        x = self.embed(tokens)
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)))


def log_probs(actor, tokens):
    """Of the answer's tokens: [B, ANSWER]."""
    logits = actor(tokens[:, :-1])[:, -ANSWER:].float()
    return -F.cross_entropy(logits.flatten(0, 1), tokens[:, -ANSWER:].flatten(), reduction="none").unflatten(0, (-1, ANSWER))


@torch.no_grad()
def rollout(actor, tokens, generator):
    """Samples ANSWER tokens after each prompt; argmax of p / Exp(1) is a sample of p, without multinomial's cumulative sum."""
    for _ in range(ANSWER):
        p = actor(tokens)[:, -1].float().softmax(-1)
        noise = torch.empty(p.shape).exponential_(generator=generator).to(p.device)
        tokens = torch.cat([tokens, (p / noise).argmax(-1, keepdim=True)], 1)
    return tokens


torch.use_deterministic_algorithms(True, warn_only=True)
dash_inductor.configure(on_unsupported="error")
torch.manual_seed(0)
actor = Actor().to(DEVICE, DTYPE)
optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
log_probs_of = torch.compile(log_probs, backend="dash")
generator = torch.Generator().manual_seed(0)
for step in range(STEPS):
    prompts = torch.randint(TOKENS, (PROMPTS, PROMPT), generator=generator).to(DEVICE)
    tokens = rollout(actor, prompts.repeat_interleave(GROUP, 0), generator)
    rewards = (tokens[:, -ANSWER:] < TOKENS // 2).float().mean(1).unflatten(0, (PROMPTS, GROUP))  # a rule: small tokens are good
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    with torch.no_grad():
        old = log_probs_of(actor, tokens)
    ratio = (log_probs_of(actor, tokens) - old).exp()
    advantages = advantages.flatten()[:, None]
    loss = -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}  reward {rewards.mean().item():.4f}  grad norm {norm.item().hex()}")  # hex shows every bit

attentions = dash_inductor.decisions()
assert attentions and all(decision.rewritten for decision in attentions), attentions
weights = torch.cat([p.detach().float().flatten() for p in actor.parameters()])
digest = hashlib.sha256(weights.cpu().numpy()).hexdigest()[:16]
print(f"attentions rewritten: {len(attentions)}; weights: {digest}")
