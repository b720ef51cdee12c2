"""What `explain` says of documents that share a row, by what it is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

import dash_inductor
from dash_inductor.explanation import packing

LENGTH = 256
OF_TWO = torch.cat([torch.arange(156), torch.arange(100)])[None]
STARTS = {"one": [0], "two": [0, 156], "three, of one token too": [0, 100, 101]}


def block_mask(starts: list[list[int]]) -> BlockMask:
    """Causal in each document, those of each batch element beginning at these places."""
    documents = torch.stack([torch.bucketize(torch.arange(LENGTH), torch.tensor(row), right=True) for row in starts])
    return create_block_mask(
        lambda b, h, i, j: (documents[b, i] == documents[b, j]) & (i >= j), len(starts), None, LENGTH, LENGTH, device="cpu"
    )


@pytest.mark.parametrize("name", STARTS)
def test_documents_of_a_block_mask(name: str) -> None:
    assert packing.documents_of(block_mask([STARTS[name], [0]])) == [len(STARTS[name]), 1]


def test_masks_that_are_no_documents() -> None:
    """A window, with keys behind and ahead, keeps nothing apart; one that forbids neighbours is not asked how many."""
    window = create_block_mask(lambda b, h, i, j: (i - j).abs() < 16, None, None, LENGTH, LENGTH, device="cpu")
    unlike = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, 2 * LENGTH, device="cpu")
    fails = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
    fails.mask_mod = lambda b, h, i, j: undefined >= j  # type: ignore[name-defined] # noqa: F821
    assert packing.documents_of(window) == [1]
    assert packing.documents_of(unlike) == packing.documents_of(fails) == []


class Attends(nn.Module):
    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(x, x, x, block_mask=mask)


def test_explain_says_it() -> None:
    x = torch.randn(2, 2, LENGTH, 64, dtype=torch.bfloat16, requires_grad=True)
    found = dash_inductor.explain(Attends(), x, block_mask([STARTS["two"], [0]]), device="h100")
    assert "a block mask keeps 1 to 2 documents in each row apart" in found.notes
    assert "1 to 2 documents" in str(found)


def llama(**settings: object) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes | {"use_cache": False} | settings))


TWO, ONES = "position_ids begin 2 documents in each row", torch.ones(1, LENGTH, dtype=torch.long)
HIDES = ONES * (torch.arange(LENGTH) < 250)


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        ({}, {}, []),
        ({"attention_mask": ONES}, {}, [packing.OF_ONES]),
        ({"attention_mask": HIDES}, {}, []),
        ({}, {"use_cache": True}, [packing.OF_CACHE]),
        ({"use_cache": True, "attention_mask": ONES}, {}, [packing.OF_ONES, packing.OF_CACHE]),
        ({"use_cache": False}, {"use_cache": True}, []),
        ({}, {"use_cache": True, "attn_implementation": "flex_attention"}, [packing.OF_CACHE]),
    ],
)
def test_position_ids(given: dict[str, object], settings: dict[str, object], said: list[str]) -> None:
    """What is said holds: where something is, the second document's first token sees the first document."""
    torch.manual_seed(0)
    model, given = llama(**settings), {"position_ids": OF_TWO, **given}
    assert list(packing.notes(model, (), given)) == [TWO, *said]
    assert list(packing.notes(Attends(), (), given)) == [TWO]  # who knows what another model does with them
    if given.get("attention_mask") is not HIDES and "attn_implementation" not in settings:
        tokens = torch.randint(16, (1, LENGTH))
        packed = model(input_ids=tokens, **given).logits[:, 156:]
        alone = model(input_ids=tokens[:, 156:], use_cache=False).logits
        assert torch.allclose(packed, alone, atol=1e-4) == (said == [])


def test_a_configuration_without_a_cache() -> None:
    model = llama()
    model.config = SimpleNamespace(_attn_implementation="sdpa")  # type: ignore[assignment]
    assert list(packing.notes(model, (), {"position_ids": OF_TWO})) == [TWO]


def test_positions_that_say_nothing() -> None:
    row = {"position_ids": torch.arange(LENGTH)[None], "attention_mask": ONES}
    assert list(packing.notes(llama(), (), row)) == ["position_ids begin 1 document in each row"]
    assert list(packing.notes(llama(), (), {"position_ids": OF_TWO.to("meta")})) == []
    assert list(packing.notes(llama(), (), {"attention_mask": ONES})) == []
