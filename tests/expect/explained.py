"""Models that are explained, and functions that the command is given: good ones and others."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import checkpoint

from dash_inductor.cli.gpt import GPT

LENGTH, WIDTH, HEADS = 256, 64, 2


class Attention(nn.Module):
    """Projects x [B, S, WIDTH], and attends as a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(query, key, value).transpose(1, 2).flatten(2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Dropping(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)


@torch._dynamo.disable
def draw() -> float:
    """A number by each of the generators that explain could move."""
    torch.manual_seed(1)
    return random.random() + numpy.random.random()


class Breaks(Attention):
    """Attends twice, the second time under a mask that another graph made; draws numbers that do not matter."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril(3)
        x = x * (draw() < 2)
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Reads(Attention):
    """Reads a value between two attentions; of zeros, goes on with as many queries as there are positions of ones."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x = x + 1 if x.sum().item() > 0 else x
        return super().forward(x[:, torch.ones(LENGTH // 2).nonzero().flatten()])


class Fails(Attention):
    """After the first attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x) @ x


@torch._dynamo.disable
def zero_(x: Tensor, where: Tensor) -> None:
    x[where] = 0.0


class Written(Attention):
    """Writes to what a graph has returned, in the next graph, which begins where a value is read."""

    def forward(self, x: Tensor) -> Tensor:
        x, padding = super().forward(x), torch.arange(LENGTH) > 200
        if padding.any():
            x[:, padding] = 0.0
        return super().forward(x)


class WrittenBetween(Attention):
    """Writes to what a graph has returned before the next one begins."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        zero_(x, torch.arange(2) > 0)
        return super().forward(x)


class Rotated(Attention):
    """Computes a table without a gradient, as rotary embeddings do, in a graph after a value that is read."""

    def forward(self, x: Tensor) -> Tensor:
        length = (torch.ones(LENGTH) > 0).sum().item()
        with torch.no_grad():
            table = torch.arange(length, dtype=x.dtype)[:, None].sin()
        return super().forward(x[:, :length] + table)


class Dropped(nn.Module):
    """Layers that share a graph, each of which may be left out."""

    def __init__(self, count: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.layers, self.count = nn.ModuleList(Attention() for _ in range(layers)), count

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.count):
            x = x + self.layers[index % len(self.layers)](x) if self.keeps(x) else x
        return x

    def keeps(self, x: Tensor) -> bool:
        return torch.rand(1).item() < 2


class DroppedByPython(Dropped):
    def keeps(self, x: Tensor) -> bool:
        return draw() < 2


class Scored(nn.Module):
    """FlexAttention with functions of the scores or of the mask."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        super().__init__()
        self.scale, self.options = nn.Parameter(torch.ones(1, dtype=dtype)), options

    def forward(self, x: Tensor) -> Tensor:
        return flex_attention(*(x * self.scale for _ in range(3)), **self.options)


class Autocast(Attention):
    """Computes in bf16 on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return super().forward(x)


class Checkpointed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Flex(Attention):
    def forward(self, x: Tensor, block_mask: Any) -> Tensor:
        self.block_mask = block_mask
        return super().forward(x)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, block_mask=self.block_mask)


class Varlen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        return varlen_attn(query, key, value, offsets, offsets, LENGTH, LENGTH, window_size=(-1, 0))


class VarlenSinks(Varlen):
    """Sinks by the logsumexp, of which torch gives query and key no gradient."""

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        aux = AuxRequest(lse=True)
        out, lse = varlen_attn(query, key, value, offsets, offsets, LENGTH, LENGTH, window_size=(-1, 0), return_aux=aux)
        return out * lse.T.sigmoid().unsqueeze(-1)


class OfTorch(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return torch.softmax(query @ key.transpose(-2, -1) / 8.0, -1) @ value


def tokens(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(2, LENGTH, WIDTH, dtype=dtype)


def causal_blocks(length: int = LENGTH) -> Any:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A small GPT and a batch."""
    return GPT(1024, 512, 8, 2).bfloat16(), (torch.zeros(4, 1024, dtype=torch.long), torch.zeros(4, 1024, dtype=torch.long))


def by_keyword() -> tuple[nn.Module, dict[str, Tensor]]:
    model, (x, following) = gpt()
    return model, {"x": x, "following": following}


def both_ways() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    model, (x, following) = gpt()
    return model, (x,), {"following": following}


def raises() -> Any:
    raise KeyError("weights")


def model_alone() -> nn.Module:
    return gpt()[0]


def tensor_as_inputs() -> tuple[nn.Module, Tensor]:
    return gpt()[0], torch.zeros(2)


def wrong_shape() -> tuple[nn.Module, tuple[Tensor]]:
    return Attention().bfloat16(), (tokens()[..., :3],)


def fails() -> tuple[nn.Module, tuple[Tensor]]:
    return Fails().bfloat16(), (tokens(),)


def in_fp32() -> tuple[nn.Module, tuple[Tensor]]:
    return Attention(), (tokens(torch.float32),)
