"""What keeps documents apart that share a row, as far as the inputs of a model show it: block masks and position_ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves

MOST_ROWS = 64  # of a batch that are looked at
UNDONE = "transformers does not look at position_ids, so that documents which share a row see one another: {}"
OF_ONES = UNDONE.format("leave out attention_mask, which hides nothing (https://github.com/huggingface/transformers/issues/46634)")
OF_CACHE = UNDONE.format("pass use_cache=False")


def notes(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on inputs that have values; nothing of a mask that cannot be asked, or is made inside of the model."""
    masks = tree_leaves((inputs, kwargs), is_leaf=lambda x: isinstance(x, BlockMask))
    for mask in masks:
        if isinstance(mask, BlockMask) and (counts := documents_of(mask)):
            yield f"a block mask keeps {_counted(counts)} apart"
    positions, hidden = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if _has_values(positions) and positions.dim() == 2:
        counts = documents_at(positions)
        yield f"position_ids begin {_counted(counts)}"
        if max(counts) > 1 and _asks_for_mask_and_cache(model):
            if _has_values(hidden) and bool(hidden.all()):
                yield OF_ONES
            if kwargs.get("use_cache", getattr(model.config, "use_cache", False)):  # which encoders need not have
                yield OF_CACHE


def documents_of(mask: BlockMask) -> list[int]:
    """How many documents each batch element has: one more than pairs of neighbours, neither of which sees the other.

    Of the first head, and of the first MOST_ROWS elements; [] where the mask cannot be asked, or is not square.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> document = torch.tensor([0] * 100 + [1] * 28)
    >>> mask = create_block_mask(lambda b, h, i, j: (document[i] == document[j]) & (i >= j), None, None, 128, 128, device="cpu")
    >>> documents_of(mask)
    [2]
    """
    q_len, kv_len = mask.seq_lengths
    if not _has_values(mask.kv_num_blocks) or q_len != kv_len:
        return []
    device, batch = mask.kv_num_blocks.device, min(mask.shape[0], MOST_ROWS)
    later, zero = torch.arange(1, q_len, device=device), torch.zeros((), dtype=torch.long, device=device)
    counts = []
    for row in torch.arange(batch, device=device):
        try:
            sees, is_seen = (
                torch.vmap(lambda i, at=at, by=by, row=row: mask.mask_mod(row, zero, i + at, i + by))(later)
                for at, by in ((0, -1), (-1, 0))
            )
        except Exception:  # the mask's function is the user's: what it needs may not be there
            return []
        counts.append(1 + int((~(sees | is_seen)).sum()))
    return counts


def documents_at(positions: Tensor) -> list[int]:
    """The same by position_ids, [batch, length]: a document begins where a position is not the one before it and one.

    >>> documents_at(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]))
    [2, 1]
    """
    begins = positions[:MOST_ROWS].diff(dim=-1) != 1
    return (1 + begins.sum(-1)).tolist()


def _asks_for_mask_and_cache(model: nn.Module) -> bool:
    """Whether it is of transformers, and finds documents by position_ids where it has neither: not by flash attention, which does
    so always."""
    is_of_transformers = any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
    return is_of_transformers and "flash" not in str(getattr(model.config, "_attn_implementation", ""))  # which it keeps there


def _has_values(x: Any) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and not isinstance(x, FakeTensor) and x.device.type != "meta"


def _counted(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    number = f"{least} document{'s' if most > 1 else ''}" if least == most else f"{least} to {most} documents"
    return f"{number} in each row"
