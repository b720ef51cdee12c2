"""Models of transformers: each by the implementation of attention that it takes by itself, some by a better one beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..models.families import EXPERTS, LOCAL_AND_GLOBAL, SPECIAL
from .model import CHECKPOINTED, PACKED, PADDED, PLAIN, Call, Model

LENGTH = 512  # tokens of a sequence
SOURCE_LENGTH = 400  # of what an encoder reads for a decoder
DOCUMENTS = (200, 312)
WINDOW = 128
SMALL: Mapping[str, Any] = {"vocab_size": 128, "intermediate_size": 512, **SPECIAL}  # nothing that attention sees
EIGHT = {"hidden_size": 1024, "num_attention_heads": 8}  # heads of 128
GROUPED = {**EIGHT, "num_key_value_heads": 2}
OF_256 = {**GROUPED, "head_dim": 256, "num_attention_heads": 4}
SIXTY_FOUR = {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
MIXTURE = {"num_local_experts": 2, "num_experts_per_tok": 2, **EXPERTS}
DECODING = (PLAIN, PADDED, PACKED, CHECKPOINTED)
ENCODING = (PLAIN, PADDED, CHECKPOINTED)

Inputs = Callable[[str], dict[str, Any]]


def text(case: str, length: int = LENGTH) -> dict[str, Any]:
    """Two sequences, padded on the left and on the right, or documents in a row."""
    if case == PACKED:
        tokens, positions = _tokens(1, LENGTH), torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
        return {"input_ids": tokens, "labels": tokens, "position_ids": positions, "use_cache": False}
    tokens = _tokens(2, length)
    mask = {"attention_mask": padding(2, length)} if case == PADDED else {}
    return {"input_ids": tokens, "labels": tokens, **mask}


def text_pairs(case: str) -> dict[str, Any]:
    """Two sequences, padded on the right, and what follows of each."""
    mask = {"attention_mask": padding(2, SOURCE_LENGTH)} if case == PADDED else {}
    return {"input_ids": _tokens(2, SOURCE_LENGTH), "labels": _tokens(2, LENGTH), **mask}


def images(size: int = 224, count: int = 2) -> Inputs:
    """Pixels alone, each time others."""
    return lambda case: {"pixel_values": torch.randn(count, 3, size, size)}


def classified(case: str) -> dict[str, Any]:
    """Two images and their classes."""
    return {**images()(case), "labels": torch.tensor([0, 1])}


def captions(length: int, size: int = 224, **rest: Any) -> Inputs:
    """Two images and what is said of them."""
    return lambda case: {**images(size)(case), "input_ids": _tokens(2, length), **rest}


def speech(case: str) -> dict[str, Any]:
    """Two recordings of a second."""
    return {"input_values": torch.randn(2, 16000)}


def padding(count: int, length: int) -> Any:
    """[count, length], 0 at the end of the last sequence, and at the start of the first."""
    mask = torch.ones(count, length, dtype=torch.long)
    mask[-1, -100:] = 0
    mask[0, :50] = 0
    return mask


def _tokens(*shape: int) -> Any:
    return torch.randint(4, 60, shape)  # none of the special ones


def built(model: str, config: str, sizes: Mapping[str, Any], implementation: str | None = None, **options: Any) -> Any:
    """A model that trains, of the classes of transformers that are called so."""
    import transformers

    transformers.logging.set_verbosity_error()
    if implementation is not None:
        options["attn_implementation"] = implementation
    return getattr(transformers, model)._from_config(getattr(transformers, config)(**sizes), **options).train()


def _family(
    name: str,
    stem: str,
    kind: str = "Model",
    cases: tuple[str, ...] = (PLAIN,),
    inputs: Inputs = text,
    *,
    config: str = "",
    sizes: Mapping[str, Any],  # parts, such as those of the text, are given as their sizes
    implementation: str | None = None,
    better: str = "",
    needs_values: bool = False,
) -> Model:
    """One of the classes {stem}{kind} and {stem}Config, if no other is named.

    `name` ends with the implementation in brackets: the one that the class takes by itself, or `implementation`.
    """

    def make(case: str) -> Call:
        module = built(f"{stem}{kind}", config or f"{stem}Config", sizes, implementation)
        taken = module.config._attn_implementation
        if not name.endswith(f"[{taken}]"):
            raise RuntimeError(f"transformers takes {taken}")
        if case == CHECKPOINTED:
            module.gradient_checkpointing_enable()
        return Call(module, kwargs=inputs(case))

    return Model("transformers", name, make, cases, better, as_on_a_gpu, needs_values=needs_values)


def as_on_a_gpu() -> AbstractContextManager[None]:
    """In which transformers calls FlexAttention as it does for tensors of a GPU."""
    from ..models.measure import as_on_a_gpu

    return as_on_a_gpu()


def _decoder(name: str, stem: str, cases: tuple[str, ...], layers: int = 1, *, sizes: Mapping[str, Any] = {}, **rest: Any) -> Model:
    """A class {stem}ForCausalLM."""
    config = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}.get(stem, "")
    sizes = {**SMALL, "num_hidden_layers": layers, **sizes}
    return _family(name, stem, "ForCausalLM", cases, config=config, sizes=sizes, **rest)


def _masked(name: str, stem: str, cases: tuple[str, ...], *, sizes: Mapping[str, Any] = {}) -> Model:
    """An encoder, a class {stem}ForMaskedLM, of two layers."""
    return _family(name, stem, "ForMaskedLM", cases, sizes={"vocab_size": 128, "num_hidden_layers": 2, **SPECIAL, **sizes})


def _pairs(name: str, stem: str, cases: tuple[str, ...], sizes: Mapping[str, Any]) -> Model:
    """An encoder and a decoder, a class {stem}ForConditionalGeneration."""
    return _family(name, stem, "ForConditionalGeneration", cases, text_pairs, sizes={"vocab_size": 128, **sizes})


DECODERS = (
    _decoder(
        "Gemma3 text (head dim 256) [sdpa]",
        "Gemma3",
        DECODING,
        2,
        sizes={**OF_256, "sliding_window": WINDOW, "layer_types": LOCAL_AND_GLOBAL},
    ),
    _decoder(
        "Gemma2 (softcap, sdpa default) [eager]",
        "Gemma2",
        (PLAIN, PADDED),
        2,
        sizes=OF_256,
        better="Gemma2 flex (head 256) [flex_attention]",
    ),
    _decoder(
        "Gemma2 flex (head 256) [flex_attention]",
        "Gemma2",
        (PLAIN,),
        sizes={**OF_256, "sliding_window": WINDOW, "layer_types": ["sliding_attention"]},
        implementation="flex_attention",
    ),
    _decoder(
        "Phi3 (sliding 256) [sdpa]",
        "Phi3",
        DECODING,
        2,
        sizes={"hidden_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8, "sliding_window": 256},
    ),
    _decoder("Falcon rope [sdpa]", "Falcon", DECODING, 2, sizes={"hidden_size": 512, "num_attention_heads": 8, "alibi": False}),
    _decoder(
        "Falcon alibi [sdpa]",
        "Falcon",
        DECODING,
        2,
        sizes={
            **{"hidden_size": 512, "num_attention_heads": 8, "alibi": True},
            **{"new_decoder_architecture": False, "multi_query": False},
        },
    ),
    _decoder("BLOOM (alibi, dropout 0) [eager]", "Bloom", DECODING, 2, sizes={"n_layer": 2, "hidden_size": 512, "n_head": 8}),
    _decoder("MPT (alibi) [eager]", "Mpt", ENCODING, 2, sizes={"n_layers": 2, "d_model": 512, "n_heads": 4}),
    _decoder("Mixtral (batched_mm) [sdpa]", "Mixtral", (PLAIN, PACKED), 2, sizes={**GROUPED, **MIXTURE}),
    _decoder("OLMo2 [sdpa]", "Olmo2", DECODING, 2, sizes=GROUPED),
    _decoder(
        "DeepSeek-V3 (192/128) [sdpa]",
        "DeepseekV3",
        (PLAIN, PACKED),
        sizes={"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "first_k_dense_replace": 1},
    ),
    _decoder(
        "Gemma (head 256) [sdpa]",
        "Gemma",
        (PLAIN, PACKED),
        sizes={"hidden_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
    ),
    _decoder(
        "Cohere2 sliding [sdpa]",
        "Cohere2",
        (PLAIN, PACKED),
        sizes={**GROUPED, "sliding_window": WINDOW, "layer_types": ["sliding_attention"]},
    ),
    _decoder("GPT-J (hand-written) [eager]", "GPTJ", (PLAIN,), sizes={"n_layer": 1, "n_embd": 1024, "n_head": 4}),
    _decoder("GPT-NeoX (dropout 0) [sdpa]", "GPTNeoX", (PADDED,), sizes=EIGHT),
    _decoder("OPT (dropout .1 default) [sdpa]", "OPT", (PADDED,), sizes={"hidden_size": 768, "num_attention_heads": 12}),
    _family("GPT2 default dropout .1 [sdpa]", "GPT2", "LMHeadModel", sizes={"vocab_size": 128, "n_layer": 1, **SPECIAL}),
    _decoder("GLM4 [sdpa]", "Glm4", (PADDED,), sizes=GROUPED),
    _decoder("Qwen2 [sdpa]", "Qwen2", (PADDED, CHECKPOINTED), sizes=GROUPED),
    _decoder(
        "Bamba hybrid [sdpa]",
        "Bamba",
        (PLAIN,),
        sizes={**GROUPED, "attn_layer_indices": [0], "mamba_n_heads": 16, "mamba_d_head": 128},
    ),
    _decoder(
        "Llama4 text (chunked) [sdpa]",
        "Llama4",
        (PLAIN, PACKED),
        sizes={
            **{"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "num_local_experts": 2},
            **{"intermediate_size_mlp": 256, "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention"]},
        },
    ),
    _decoder("StableLM [sdpa]", "StableLm", (PLAIN,), sizes={**EIGHT, "num_key_value_heads": 8}),
    _decoder("Nemotron [sdpa]", "Nemotron", (PADDED,), sizes=GROUPED),
    _decoder("Starcoder2 [sdpa]", "Starcoder2", (PACKED,), sizes=GROUPED),
    _decoder("Granite [sdpa]", "Granite", (PLAIN,), sizes=GROUPED),
    _decoder(
        "Qwen3-Next full attn [sdpa]",
        "Qwen3Next",
        (PLAIN,),
        sizes={
            **{"hidden_size": 512, "num_experts": 4, "num_experts_per_tok": 2, **EXPERTS},
            **{"layer_types": ["full_attention"]},  # 16 heads of 256
        },
    ),
    _decoder(
        "gpt-oss sdpa-refused default [eager]",
        "GptOss",
        (PLAIN,),
        sizes={**SIXTY_FOUR, **MIXTURE},
        better="gpt-oss flex [flex_attention]",
    ),
    _decoder(
        "gpt-oss flex [flex_attention]",
        "GptOss",
        (PLAIN,),
        inputs=functools.partial(text, length=2048),  # a few tiles of keys would be left to stock
        sizes={**SIXTY_FOUR, **MIXTURE},
        implementation="flex_attention",
    ),
    _decoder(
        "Jamba [sdpa]",
        "Jamba",
        (PLAIN,),
        sizes={
            **{**GROUPED, "num_experts": 2, **EXPERTS, "use_mamba_kernels": False},
            **{"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 100, "expert_layer_offset": 99},
        },
    ),
)

T5 = {"num_layers": 1, "num_decoder_layers": 1, "decoder_start_token_id": 0}

ENCODERS = (
    _masked(
        "DeBERTa-v2 [eager]",
        "DebertaV2",
        ENCODING,
        sizes={
            **{"hidden_size": 512, "num_attention_heads": 8, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
            **{"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True, "attention_probs_dropout_prob": 0.0},
        },
    ),
    _family(
        "XLNet [eager]",
        "XLNet",
        "LMHeadModel",
        sizes={"vocab_size": 128, "n_layer": 2, "d_model": 256, "n_head": 4, "d_inner": 256, "dropout": 0.0, **SPECIAL},
        needs_values=True,
    ),
    _masked("BERT default dropout .1 [sdpa]", "Bert", (PLAIN, PADDED)),
    _masked("RoBERTa dropout .1 [sdpa]", "Roberta", (PLAIN, PADDED), sizes={"max_position_embeddings": LENGTH + 2}),
    _masked("ELECTRA dropout 0 [sdpa]", "Electra", (PADDED,), sizes={"attention_probs_dropout_prob": 0.0}),
    _masked("DistilBERT default .1 [sdpa]", "DistilBert", (PADDED,), sizes={"n_layers": 2}),
    _masked("ModernBERT (local 128) [sdpa]", "ModernBert", ENCODING),
    _masked(
        "Nomic/ESM (HF esm) [sdpa]",
        "Esm",
        (PADDED,),
        sizes={
            **{"hidden_size": 320, "num_attention_heads": 20, "position_embedding_type": "rotary"},
            **{"attention_probs_dropout_prob": 0.0, "pad_token_id": 1},
        },
    ),
    _pairs(
        "Pegasus att dropout default [sdpa]",
        "Pegasus",
        ENCODING,
        {"encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 2},
    ),
    _pairs("T5 dropout 0 [sdpa]", "T5", (PLAIN, PADDED), {**T5, "dropout_rate": 0.0}),
    _pairs("T5 default dropout .1 [sdpa]", "T5", (PLAIN,), T5),
)

ONE_LAYER = {"num_hidden_layers": 1}
TWO_TOWERS = {"text_config": ONE_LAYER, "vision_config": ONE_LAYER}
RECORDED = {**ONE_LAYER, "mask_time_prob": 0.0, "layerdrop": 0.0}
UNDROPPED = {**RECORDED, "attention_dropout": 0.0}


def _features(case: str) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 200, 160)}


def _codes(case: str) -> dict[str, Any]:
    return {"input_ids": _tokens(2 * 4, 128)}  # four codebooks


def _read_aloud(case: str) -> dict[str, Any]:
    return {**captions(32, 384)(case), "labels": _tokens(2, 32)}


SPEECH_AND_IMAGES = (
    _family("Wav2Vec2 (default dropout .1) [sdpa]", "Wav2Vec2", inputs=speech, sizes=RECORDED),
    _family("Wav2Vec2 (dropout 0) [sdpa]", "Wav2Vec2", inputs=speech, sizes=UNDROPPED),
    _family("WavLM (rel bias) [eager]", "WavLM", inputs=speech, sizes=UNDROPPED),
    _family("Wav2Vec2-BERT (relative key) [sdpa]", "Wav2Vec2Bert", inputs=_features, sizes=UNDROPPED),
    _family("MusicGen decoder [sdpa]", "Musicgen", "ForCausalLM", inputs=_codes, config="MusicgenDecoderConfig", sizes=ONE_LAYER),
    _family(
        "SAM vision (learnt rel pos) [sdpa]",
        "SamVision",
        inputs=images(512, 1),
        sizes={"num_hidden_layers": 2, "global_attn_indexes": [1], "image_size": 512},
    ),
    _family(
        "Swin (HF) [sdpa]",
        "Swin",
        "ForImageClassification",
        inputs=classified,
        sizes={"depths": [2], "num_heads": [3], "embed_dim": 96},
    ),
    _family("SegFormer [sdpa]", "Segformer", inputs=images(128), sizes={"depths": [1, 1, 1, 1]}),
    _family("SigLIP [sdpa]", "Siglip", inputs=captions(64, return_loss=True), sizes=TWO_TOWERS),
    _family("ViT-MAE [sdpa]", "ViTMAE", "ForPreTraining", inputs=images(), sizes={**ONE_LAYER, "decoder_num_hidden_layers": 1}),
    _family("DINOv2 [sdpa]", "Dinov2", inputs=images(), sizes=ONE_LAYER),
    _family("BEiT (learnt rel bias) [sdpa]", "Beit", inputs=images(), sizes={**ONE_LAYER, "use_relative_position_bias": True}),
    _family("BLIP vision+text [eager]", "Blip", "ForConditionalGeneration", inputs=_read_aloud, sizes=TWO_TOWERS),
    _family("Idefics3/SmolVLM vision [sdpa]", "Idefics3Vision", "Transformer", inputs=images(), sizes=ONE_LAYER),
)

MODELS = (*DECODERS, *ENCODERS, *SPEECH_AND_IMAGES)
