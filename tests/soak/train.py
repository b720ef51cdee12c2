"""One rank of tests/soak: trains from the last checkpoint of its folder, to a step or until it is killed.

A decoder of two layers on the text behind Python's help(): SDPA under a causal mask, then FlexAttention in bf16 under a mask of
documents, with grouped heads; dropout, AdamW, and DDP over the ranks. SDPA is in fp32: bf16 would round away most differences
between two orders of a sum. After each step a rank writes down a digest of its weights and of the optimizer's state, and in the end
what it compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pydoc_data.topics
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel

import dash_inductor
from dash_inductor import emulation

# One batch element, four heads and four KV tiles under a causal mask: at level `run` the number of SMs decides about the schedule.
WIDTH, HEADS, HEAD_DIM, LENGTH = 64, 4, 16, 128
BLOCK = 32  # queries and keys of a block of the documents' mask
BUCKET_MB = 0.01  # so small that DDP sums the gradients of one layer before the other's are there
TIMEOUT = 120  # seconds, of a collective
NEWLINE = ord("\n")


class Layer(nn.Module):
    """Attention, then an MLP, both residual: [B, S, WIDTH] to the same."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.project = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor, documents: BlockMask | None = None) -> Tensor:
        normed, of = self.attention_norm(x), (self.query, self.key, self.value)
        query, key, value = (project(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for project in of)
        if documents is None:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
            out = flex_attention(query, key, value, block_mask=documents, enable_gqa=True).float()
        x = x + self.project(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Bytes [B, LENGTH] and their mask to logits of the bytes that follow; its layers are compiled one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.first, self.second = Layer(kv_heads=HEADS), Layer(kv_heads=HEADS // 2)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for layer in (self.first, self.second):
            layer.compile(backend="dash", fullgraph=True)

    def forward(self, x: Tensor, documents: BlockMask) -> Tensor:
        x = self.first(self.bytes(x) + self.positions)
        return self.head(self.norm(self.second(x, documents)))


def mask_of(tokens: Tensor) -> BlockMask:
    """A token sees those before it in its own document: a paragraph of the text."""
    document = ((tokens == NEWLINE) & (tokens.roll(1, -1) == NEWLINE)).cumsum(-1)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[batch, query] == document[batch, key])

    return create_block_mask(mask_mod, len(tokens), None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all bits of the weights and of the optimizer's state."""
    hashed = hashlib.sha256()
    for name, parameter in model.named_parameters():
        for what, tensor in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            hashed.update(f"{name} {what}".encode() + tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def last_checkpoint(folder: Path, ranks: int) -> int:
    """The last step of which every rank has one; 0 if there is none."""
    steps = [{int(path.stem) for path in folder.glob(f"*.checkpoint{rank}")} for rank in range(ranks)]
    return max(set.intersection(*steps), default=0)


def train(folder: Path, rank: int, *, until: int, every: int, killed: list[int]) -> None:
    torch.manual_seed(0)  # the same weights on every rank
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    corpus = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(1 + rank)  # where in the text a step reads
    torch.manual_seed(1 + rank)  # dropout
    begun = last_checkpoint(folder, dist.get_world_size())
    if begun:
        saved = torch.load(folder / f"{begun}.checkpoint{rank}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        draw.set_state(saved["draw"])
        torch.set_rng_state(saved["dropout"])
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(BUCKET_MB * 2**20)  # no bucket may be smaller than the first
    dynamo_config.optimize_ddp = False  # the graphs of DDP's optimizer do not come out of caches
    parallel = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    waits = 0
    for step in range(begun + 1, until + 1):
        if killed == [rank, step]:  # between the backwards of the two layers
            model.second.attention_norm.weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        start = int(torch.randint(len(corpus) - LENGTH - 1, (), generator=draw))
        tokens = corpus[None, start : start + LENGTH + 1]
        emulation.clear_launches()
        optimizer.zero_grad()
        logits = parallel(tokens[:, :-1], mask_of(tokens[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        waits += sum(launch.waits for launch in emulation.launches())
        with (folder / f"digests{rank}").open("a") as file:
            file.write(f"{step} {digest(model, optimizer)}\n")
        print(f"step {step}  loss {loss.item():.4f}", flush=True)
        if step % every == 0 or step == until:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(state | {"draw": draw.get_state(), "dropout": torch.get_rng_state()}, folder / f"{step}.checkpoint{rank}")
    report = {
        "begun": begun,
        "waits": waits,
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
        "attentions": [[str(decision), decision.rewritten] for decision in dash_inductor.decisions()],
    }
    (folder / f"report{rank}.json").write_text(json.dumps(report))


def save(state: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    torch.save(state, part)
    part.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, required=True, help="the last step, after which there is a checkpoint")
    parser.add_argument("--every", type=int, required=True, help="steps from one checkpoint to the next")
    parser.add_argument("--killed", type=int, nargs=2, metavar=("RANK", "STEP"), default=[])
    parser.add_argument("--seed", type=int, required=True, help="of the interleaving")
    parser.add_argument("--sms", type=int, required=True)
    parser.add_argument("--guarantee", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dash_inductor.configure(guarantee=args.guarantee)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{args.folder}/ranks", timedelta(seconds=TIMEOUT), rank=rank, world_size=ranks)
    with emulation.emulate(args.seed * ranks + rank, sms=args.sms):
        train(args.folder, rank, until=args.until, every=args.every, killed=args.killed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
