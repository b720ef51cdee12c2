"""Documents packed into one row, attended by FlexAttention under a document mask: the same gradients every time.

    python packed_documents.py                            # on a GPU
    DASH_INDUCTOR_EMULATE=1 python packed_documents.py    # without one, at toy size

Needs dash-inductor. FlexAttention's own backward is deterministic too and takes seven matmuls a tile; this one takes five. Promises
the same gradients for the same software, GPU model and documents: run it twice and compare the last line. Emulated, another
`DASH_INDUCTOR_SEED` is another order of thread blocks, and the same line. A score_mod may read a tensor which needs a gradient
(a learned bias): the stock backward sums that gradient by atomics, this one in order.
"""

import hashlib

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dash_inductor

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
WIDTH, HEADS, DOCUMENTS = (1024, 16, (3000, 700, 96, 4396)) if GPU else (32, 2, (70, 25, 65))
LENGTH = sum(DOCUMENTS)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, block_mask):
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(flex_attention(query, key, value, block_mask=block_mask).transpose(1, 2).flatten(2))


def document_mask(lengths):
    """A token sees those before it in its own document."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)

    def mask_mod(batch, head, query, key):
        return (query >= key) & (document[query] == document[key])

    return create_block_mask(mask_mod, B=None, H=None, Q_LEN=LENGTH, KV_LEN=LENGTH, device=DEVICE)


torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
layer = Attention().to(DEVICE, DTYPE)
model = torch.compile(layer, backend="dash")
x = torch.randn(1, LENGTH, WIDTH, device=DEVICE, dtype=DTYPE)
model(x, document_mask(DOCUMENTS)).square().mean().backward()

attentions = dash_inductor.decisions()
assert attentions and all(decision.rewritten for decision in attentions), attentions
gradients = torch.cat([p.grad.float().flatten() for p in layer.parameters()])
digest = hashlib.sha256(gradients.cpu().numpy()).hexdigest()[:16]
print(f"attentions rewritten: {len(attentions)}; gradients: {digest}")
