"""What an operation was given and what it made, in a few characters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .compare import bits, parts
from .diverge import GENERATOR

CHUNK = 1 << 20  # elements hashed at a time: what bounds the memory that it takes
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed number
_PRIME = 0x100000001B3
_WRITTEN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def fingerprint(tensor: Tensor) -> str:
    """Dtype, shape, and a 64-bit hash of every element's bits and place, made where the tensor is.

    The sum is of integers, so it has no order; the weight of a place is odd, so no single element can change unseen.
    """
    total = 0
    for piece in (piece for part in parts(tensor).values() for piece in bits(part).flatten().split(CHUNK)):
        weighted = piece.to(torch.int64) * _weights(piece.device)[: piece.numel()]
        total = (total * _PRIME + int(weighted.sum())) & 0xFFFF_FFFF_FFFF_FFFF
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]:{total:016x}"


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers without a pattern, one for each place of a chunk."""
    places = torch.arange(1, CHUNK + 1, device=device) * _MIX
    return (places ^ (places >> 29)) * _MIX | 1


def describe(value: Any) -> Any:
    """A tensor's fingerprint; a number, a string or a dtype as it is written; the type of all else, which may have an address."""
    if isinstance(value, Tensor):
        return fingerprint(value)
    if isinstance(value, (list, tuple)):
        return [describe(each) for each in value]
    if isinstance(value, dict):
        return {str(name): describe(each) for name, each in value.items()}
    if isinstance(value, torch.Generator):
        return f"{GENERATOR}{fingerprint(value.get_state())}"
    return repr(value) if isinstance(value, _WRITTEN) else type(value).__name__


def generators() -> list[str]:
    """The states of torch's random number generators: an input of every operation that draws."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [fingerprint(state) for state in states]
