"""The contracts of an attention backward: the op that SDPA becomes, its fake and its specification; and FlexAttention's HOP.

    dash::sdpa_backward(grad_out, query, key, value, out, logsumexp, *, mask, scale=None, stock=None, at_load=None)
        -> (dq, dk, dv)

query is [B, H, S_q, D]; key [B, H_kv, S_k, D] and value [B, H_kv, S_k, D_v] with H_kv dividing H; out and grad_out are
[B, H, S_q, D_v]; logsumexp is the natural log, fp32 [B, H, S_q]. `mask` is full or causal; `scale` that of the scores,
None for 1 / sqrt(D). dq, dk, dv have the strides of `torch.empty_like`.

`stock` names the op that it stands for: what its gradients look like in memory, and what is recorded of it, follow from that, so
that it is in the text of the graph, by which Inductor's caches know it. `at_load` is a line of Python that the code generated for
it runs when it is loaded. (A second tracing of a backward, by compiled autograd, keeps arguments and no meta.)

    flex_attention_backward(query, key, value, out, logsumexp, grad_out, grad_logsumexp, score_mod, joint, block_mask, scale, ...)

is torch's own, and stays what it is: logsumexp and its gradient are in base 2, [B, H, S_q]; key and value may have a batch of 1;
score_mod, its derivative (joint) and mask_mod are graphs. Where the pass puts such a node into the graph, for an SDPA under a mask
or a varlen attention, score_mod is the identity, and the lists of the block mask are None: its blocks are those of its matrix
(`MaskArguments`), or without one those of mask_mod.

    dash::rewritten(grad_out, mask, stock, *, at_load=None, function_ops=0) -> grad_out

is grad_out itself, on its way into such a node that becomes kernels of ours. It puts into the text of the graph what the joint
graph proved of the mask, and the op that the node stands for, None for itself; of another op `Problem.function_ops` too,
since a second tracing may simplify the functions, which would then count as less.

    dash::sum_in_order(x, dims, keepdim, dtype) -> x summed along these dims

takes the place of torch's sum where a learnt mask was broadcast: sizes alone decide its order. It adds in fp32 and rounds once.

    dash::random_state(seed, offset, like) -> int64 [2]

is the random state of a forward that drops, where our kernels read it (`DROPOUT`).

    dash::of_segments(x, n) -> parts

stands behind dk or dv of a node in segments (`SEGMENTS`), [..]: what each of n segments of the queries adds to it, fp32 [n, ..].

    dash::note(x, decision) -> x

is x itself. Its lowering records the decision, JSON of a `Decision`: that of an attention that keeps its stock kernel.

    dash::keep(x) -> x

is x as the forward has it, kept for the backward: what is written to x later does not reach it, and nobody computes it again.

Compiled code has no copy of what `note` and `rewritten` return. They are no views, which torch could not functionalize.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ..config import current
from ..devices.target import target_of
from ..problem import Problem
from ..reference import planned
from ..resolve import Resolution, resolve
from ..schedule import MASKS

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv

_library = torch.library.Library("dash", "DEF")
_library.define(
    "sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, *, "
    "str mask, float? scale=None, str? stock=None, str? at_load=None) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def check(tensors: Sequence[Tensor], mask: str, scale: float | None = None) -> None:
    """Raises ValueError, naming the argument, for what the op does not take; sizes may be symbolic."""
    grad_out, query, key, value, out, logsumexp = tensors
    if mask not in MASKS:
        raise ValueError(f"mask={mask!r} is not one of {', '.join(MASKS)}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4 or any(size == 0 for size in x.shape):
            raise ValueError(f"{name} {tuple(x.shape)} is not [B, H, S, D] with at least one element")
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    value_dim = value.shape[3]
    shapes = (
        ("key", key, (batch, kv_heads, kv_len, head_dim)),
        ("value", value, (batch, kv_heads, kv_len, value_dim)),
        ("out", out, (batch, heads, q_len, value_dim)),
        ("grad_out", grad_out, (batch, heads, q_len, value_dim)),
        ("logsumexp", logsumexp, (batch, heads, q_len)),
    )
    for name, x, shape in shapes:
        dtype = torch.float32 if name == "logsumexp" else query.dtype
        if x.dim() != len(shape) or any(has != must for has, must in zip(x.shape, shape, strict=True)):
            raise ValueError(f"{name} {tuple(x.shape)} must be {shape}, for query {tuple(query.shape)} and key {tuple(key.shape)}")
        if x.dtype != dtype or x.device != query.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, it must be {dtype} on {query.device} like query")
    if declined := Problem.of(query, key, value, mask=mask, scale=scale).why_not_taken():
        raise declined


def sdpa_backward_fake(*tensors: Tensor, mask: str, scale: float | None = None, **unread: str | None) -> Gradients:
    """Empty gradients; ValueError as `check`."""
    check(tensors, mask, scale)
    _, query, key, value, *_ = tensors
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def sdpa_backward_eager(*tensors: Tensor, mask: str, scale: float | None = None, **unread: str | None) -> Gradients:
    """The gradients by the specification, under the settings in force; ValueError as `check` and `resolve`."""
    check(tensors, mask, scale)
    grad_out, query, key, value, out, logsumexp = tensors
    settings = current()
    problem = Problem.of(query, key, value, mask=mask, scale=scale)
    plan, _ = resolve(problem, settings, target_of(query.device, settings)).schedule
    return planned(grad_out, query, key, value, out, logsumexp, plan, scale)


_library.impl("sdpa_backward", sdpa_backward_eager, "CompositeExplicitAutograd")
torch.library.register_fake("dash::sdpa_backward", sdpa_backward_fake, lib=_library)
SDPA_BACKWARD = torch.ops.dash.sdpa_backward.default

_library.define("sum_in_order(Tensor x, int[] dims, bool keepdim, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def sum_in_order(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """torch's sum, contiguous; only compiled code has an order of its own."""
    return x.sum(dims, keepdim, dtype=torch.float32).to(dtype).contiguous()


_library.impl("sum_in_order", sum_in_order, "CompositeExplicitAutograd")
torch.library.register_fake("dash::sum_in_order", sum_in_order, lib=_library)
SUM_IN_ORDER = torch.ops.dash.sum_in_order.default
_library.define("random_state(Tensor seed, Tensor offset, Tensor like) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def random_state(seed: Tensor, offset: Tensor, like: Tensor) -> Tensor:
    """Seed and offset of a forward, int64 [2] where `like` is. A forward leaves them on the CPU, on the GPU while a CUDA graph is
    captured; flash attention as uint64 [2] in the place of the seed."""
    both = seed.view(torch.int64) if seed.dim() else torch.stack([seed, offset])
    return both.to(like.device, copy=True)


_library.impl("random_state", random_state, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dash::random_state", lambda seed, offset, like: torch.empty(2, dtype=torch.int64, device=like.device), lib=_library
)
RANDOM_STATE = torch.ops.dash.random_state.default
_OF_REWRITTEN = ", str mask, str? stock, *, str? at_load=None, int function_ops=0"
for _name, _others in (("note", ", str decision"), ("rewritten", _OF_REWRITTEN), ("keep", "")):
    _library.define(f"{_name}(Tensor x{_others}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, lambda x, *_, **__: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"dash::{_name}", lambda x, *_, **__: torch.empty_like(x), lib=_library)
NOTE, REWRITTEN = torch.ops.dash.note.default, torch.ops.dash.rewritten.default
KEEP = torch.ops.dash.keep.default
has_side_effect(KEEP)  # so that it stays in a forward that does not read what it returns
_library.define("of_segments(Tensor x, int n) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _of_segments(x: Tensor, n: int) -> Tensor:
    raise NotImplementedError("dash::of_segments is of compiled code alone")


_library.impl("of_segments", _of_segments, "CompositeExplicitAutograd")
torch.library.register_fake("dash::of_segments", lambda x, n: x.new_empty([n, *x.shape], dtype=torch.float32), lib=_library)
OF_SEGMENTS = torch.ops.dash.of_segments.default
FLEX_BACKWARD = torch.ops.higher_order.flex_attention_backward
MARK = "dash_inductor"  # key in a node's meta: its Mark
# Kernel options of a node. It drops, (p, generator): its last capture but a learnt one is RANDOM_STATE's.
DROPOUT = "dash_dropout"
# Its dk and dv are those of each of so many segments of the queries, fp32.
SEGMENTS = "dash_segments"
# Its last capture is a learnt mask, [B, H, S_q, S_k], whose gradient is wanted.
LEARNT = "dash_learnt"


@dataclass(frozen=True)
class Mark:
    """What the pass says of a node to those that lower it; no cache sees it.

    Attributes:
        resolution: what the attention gets; None where it keeps its stock kernel.
        stock: the op that the node stands for.
        mask: what a decision calls its mask.
        source, module, joint: of its decision.
        chosen_by_timing: of its decision.
        at_load: a line of Python that the code generated for it runs when it is loaded, if there is one.
        reads_in_place, over_ranks: of its decision.
    """

    resolution: Resolution | None = None
    stock: str = ""
    mask: str = ""
    source: str | None = None
    module: str = ""
    at_load: str | None = None
    reads_in_place: tuple[str, ...] = ()
    chosen_by_timing: str | None = None
    joint: str = ""
    over_ranks: str | None = None

    def is_in_force(self, device: torch.device) -> bool:
        """Whether the settings are still those by which it was resolved, and leave the device as many SMs."""
        assert self.resolution
        settings = current()
        same_settings = settings.deciding() == self.resolution.settings.deciding()
        return same_settings and target_of(device, settings) == self.resolution.target


class FlexArguments(NamedTuple):
    """The arguments of `flex_attention_backward`, in order."""

    query: Any
    key: Any
    value: Any
    out: Any
    logsumexp: Any
    grad_out: Any  # None where nothing depends on out
    grad_logsumexp: Any  # None where nothing depends on it
    score_mod: Any
    joint: Any
    block_mask: Any
    scale: Any
    kernel_options: Any
    score_mod_captures: Any
    mask_mod_captures: Any

    @property
    def mask(self) -> MaskArguments:
        """The block mask by name."""
        return MaskArguments(*self.block_mask[:10], *self.block_mask[-3:])  # the tuple of torch 2.13 has more in between


class MaskArguments(NamedTuple):
    """Lists of blocks, int32: `num` [B or 1, H or 1, blocks], `indices` [.., entries]; `full` ones may be None.

    Where the pass made the mask there are no lists. Then `matrix`, which stands in the place of q_indices, may say which blocks are
    visible: int8 [B or 1, H or 1, blocks of keys, blocks of Q], 0, 1 or 2 where none, some or all of a block is.
    """

    q_len: Any
    kv_len: Any
    kv_num: Any
    kv_indices: Any
    full_kv_num: Any
    full_kv_indices: Any
    q_num: Any  # of blocks of Q, for each block of keys
    q_indices: Any
    full_q_num: Any
    full_q_indices: Any
    q_block: Any  # rows of a block
    kv_block: Any  # keys of a block
    mask_mod: Any

    @property
    def matrix(self) -> Any:
        """The matrix of blocks; None where there is none."""
        return self.q_indices if self.q_num is None else None
