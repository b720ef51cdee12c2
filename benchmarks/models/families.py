"""The families of transformers' models, at toy size, and the batches that they train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LAYERS = 2
LENGTH = 70  # tokens of a sequence: more than a tile, and no multiple of one
SOURCE_LENGTH = 50  # of what an encoder reads for a decoder
PADDING = 13
DOCUMENTS = (30, 40)  # lengths of what is packed into a sequence of LENGTH
VOCABULARY = 64
WINDOW = 24
IGNORED = -100  # the label of a token that has no loss

PLAIN, ONES, PADDED, PACKED, NO_CACHE = "plain", "mask of ones", "padded", "packed", "`use_cache=False`"
CHECKPOINTING, DROPOUT = "checkpointing", "dropout as configured"
CASES = (PLAIN, ONES, PADDED, PACKED, NO_CACHE, CHECKPOINTING, DROPOUT)

Batch = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A family: its class of transformers is `model`, that of its configuration `config`, which is made of `sizes`.

    batch: (case) -> the arguments of a training step. cases: those that mean something to the family. note: what is unusual.
    """

    model: str
    config: str
    sizes: Mapping[str, Any]
    batch: Callable[[str], Batch]
    cases: tuple[str, ...]
    attention: str = "sdpa"
    note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # of `from_config`


def of_text(case: str) -> Batch:
    """Two sequences, or one of several documents; padding is on the left of the first and on the right of the second."""
    if case == PACKED:
        tokens, positions = _tokens(1, LENGTH), torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
        return {"input_ids": tokens, "labels": tokens, "position_ids": positions, "use_cache": False}
    tokens, mask = _tokens(2, LENGTH), _mask(case, LENGTH, left=True)
    batch = {"input_ids": tokens, "labels": _labels(tokens, mask), **_given(attention_mask=mask), **_cache(case)}
    if case == PADDED:
        batch["labels"][0, PADDING] = IGNORED  # which a row that sees no key would have to predict
    return batch


def of_text_pairs(case: str) -> Batch:
    """Two sequences and what follows of each; padding is on the right."""
    target = _target(case)
    return {"input_ids": _tokens(2, SOURCE_LENGTH), **_given(attention_mask=_mask(case, SOURCE_LENGTH)), **target}


def of_speech(case: str) -> Batch:
    """Two recordings and what is said; padding is on the right of the text."""
    return {"input_features": _noise(2, 8, 2 * SOURCE_LENGTH), **_target(case)}


def of_images(case: str) -> Batch:
    """Two images and their classes: 64 patches and a token."""
    return {"pixel_values": _noise(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def of_larger_images(case: str) -> Batch:
    """Two images and their classes: 256 patches."""
    return {"pixel_values": _noise(2, 3, 64, 64), "labels": torch.tensor([0, 1])}


def of_captions(case: str) -> Batch:
    """Two images, of 49 patches and a token, and their captions; padding is on the right of a caption."""
    captions = {"input_ids": _tokens(2, LENGTH), **_given(attention_mask=_mask(case, LENGTH))}
    return {"pixel_values": _noise(2, 3, 28, 28), **captions, "return_loss": True}


def _target(case: str) -> Batch:
    """What a decoder is to say of a source."""
    tokens, mask = _tokens(2, LENGTH, seed=1), _mask(case, LENGTH)
    return {"labels": _labels(tokens, mask), **_given(decoder_attention_mask=mask), **_cache(case)}


def _mask(case: str, length: int, *, left: bool = False) -> Tensor | None:
    """[2, length], 0 where there is padding; None where the case has no mask."""
    if case not in (ONES, PADDED):
        return None
    mask = torch.ones(2, length, dtype=torch.long)
    if case == PADDED:
        mask[1, -PADDING:] = 0
        if left:
            mask[0, :PADDING] = 0
    return mask


def _labels(tokens: Tensor, mask: Tensor | None) -> Tensor:
    return tokens if mask is None else tokens.masked_fill(mask == 0, IGNORED)


def _given(**tensors: Tensor | None) -> Batch:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _cache(case: str) -> Batch:
    return {"use_cache": False} if case == NO_CACHE else {}


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(4, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))  # none of the special ones


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    **SPECIAL,
}
ENCODER: Mapping[str, Any] = {name: size for name, size in DECODER.items() if name not in ("num_key_value_heads", "head_dim")}
IMAGES: Mapping[str, Any] = {**{name: ENCODER[name] for name in list(ENCODER)[1:5]}, "patch_size": 4}
PAIRS: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", LAYERS), ("ffn_dim", 32))},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **SPECIAL,
    "decoder_start_token_id": 3,
}
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]
EXPERTS = {"experts_implementation": "batched_mm"}  # of a compiled model: others read on the host who is chosen, or need a GPU
NO_OPTIONS: Mapping[str, Any] = {}
WITHOUT_PACKING = tuple(case for case in CASES if case != PACKED)
WITHOUT_CACHE = tuple(case for case in WITHOUT_PACKING if case != NO_CACHE)


def _decoder(name: str, sizes: Mapping[str, Any] = NO_OPTIONS, note: str = "", **rest: Any) -> Family:
    """One that predicts the next token, of transformers' classes {name}Config and {name}ForCausalLM."""
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    return Family(f"{name}ForCausalLM", config, {**DECODER, **sizes}, of_text, CASES, note=note, **rest)


FAMILIES: Mapping[str, Family] = {
    "Llama": _decoder("Llama"),
    "Qwen3": _decoder("Qwen3"),
    "Mistral": _decoder("Mistral", {"sliding_window": WINDOW}, f"a window of {WINDOW}"),
    "Gemma 2": _decoder(
        "Gemma2",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1},
        f"flex_attention, for transformers refuses SDPA to a soft-cap; a window of {WINDOW} in every other layer",
        attention="flex_attention",
    ),
    "Gemma 3": _decoder(
        "Gemma3", {"sliding_window": WINDOW, "layer_types": LOCAL_AND_GLOBAL}, f"a window of {WINDOW} in every other layer"
    ),
    "Phi3": _decoder("Phi3"),
    "SmolLM3": _decoder("SmolLM3"),
    "GPT-2": Family("GPT2LMHeadModel", "GPT2Config", ENCODER, of_text, CASES),
    "BERT": Family("BertForMaskedLM", "BertConfig", ENCODER, of_text, WITHOUT_CACHE),
    "ModernBERT": Family(
        *("ModernBertForMaskedLM", "ModernBertConfig"),
        {**ENCODER, "local_attention": WINDOW, "layer_types": LOCAL_AND_GLOBAL, "cls_token_id": 1, "sep_token_id": 2},
        *(of_text, WITHOUT_CACHE),
        note=f"a window of {WINDOW} to both sides together in every other layer",
    ),
    "ViT": Family(
        "ViTForImageClassification", "ViTConfig", {**IMAGES, "image_size": 32}, of_images, (PLAIN, CHECKPOINTING, DROPOUT)
    ),
    "CLIP": Family(
        *("CLIPModel", "CLIPConfig"),
        {
            "text_config": {**ENCODER, "projection_dim": 32},
            "vision_config": {**IMAGES, "image_size": 28, "projection_dim": 32},
            "projection_dim": 32,
        },
        *(of_captions, WITHOUT_CACHE),
    ),
    "T5": Family(
        *("T5ForConditionalGeneration", "T5Config"),
        {
            **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": LAYERS, "num_heads": 2},
            **{**SPECIAL, "decoder_start_token_id": 3},
        },
        *(of_text_pairs, WITHOUT_PACKING),
        note="self-attention has a learnt bias; under checkpointing both layers of the decoder run one graph, with its decisions",
    ),
    "Swin": Family(
        *("SwinForImageClassification", "SwinConfig"),
        {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [LAYERS], "num_heads": [2], "window_size": 8},
        *(of_larger_images, (PLAIN, CHECKPOINTING)),
        note="windows of 8 x 8 patches, every other layer's shifted; a learnt bias by the distance of patches",
    ),
    "BEiT": Family(
        *("BeitForImageClassification", "BeitConfig"),
        {**IMAGES, "image_size": 32, "use_relative_position_bias": True, "out_indices": [0]},
        *(of_images, (PLAIN, CHECKPOINTING, DROPOUT)),
        note="a learnt bias by the distance of patches",
    ),
    "Whisper": Family(
        *("WhisperForConditionalGeneration", "WhisperConfig"),
        {**PAIRS, "num_mel_bins": 8, "max_source_positions": SOURCE_LENGTH, "max_target_positions": LENGTH},
        *(of_speech, WITHOUT_PACKING),
    ),
    "BART": Family(
        "BartForConditionalGeneration", "BartConfig", {**PAIRS, "max_position_embeddings": 256}, of_text_pairs, WITHOUT_PACKING
    ),
    "DeepSeek-V3": _decoder(
        "DeepseekV3",
        {
            **{"head_dim": 8, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16},
            **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
            **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        },
        "heads of 24 for queries and keys, of 16 for values",
        options=EXPERTS,
    ),
    "gpt-oss": _decoder(
        "GptOss",
        {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2},
        f"flex_attention, for SDPA knows no attention sinks; a window of {WINDOW} in every other layer",
        attention="flex_attention",
        options=EXPERTS,
    ),
}
