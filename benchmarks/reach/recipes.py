"""Training as users write it, at the sizes that they train but for fewer layers: what `explain` says of each for an H100."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.families import EXPERTS, LOCAL_AND_GLOBAL
from . import diffusion
from .model import Call, Model
from .transformers_models import as_on_a_gpu, built, padding

LENGTH = 2048
DOCUMENTS = (300, 700, 1048)
VOCABULARY = 32000
TWO_LAYERS = {"num_hidden_layers": 2, "vocab_size": VOCABULARY}
STAND_INS = Path(__file__).parents[2] / "tests" / "emulated"


def _tokens(*shape: int) -> Tensor:
    return torch.randint(4, 1000, shape)


def _llama() -> Any:
    """Llama 3's 8B, of two layers."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    return built("LlamaForCausalLM", "LlamaConfig", {**TWO_LAYERS, **sizes})


def _qwen(implementation: str | None = None) -> Any:
    """Qwen3's 4B, of two layers."""
    sizes = {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return built("Qwen3ForCausalLM", "Qwen3Config", {**TWO_LAYERS, **sizes}, implementation)


def _padded(count: int = 2, length: int = LENGTH) -> dict[str, Any]:
    tokens = _tokens(count, length)
    return {"input_ids": tokens, "attention_mask": padding(count, length), "labels": tokens}


def _flattened(**options: Any) -> dict[str, Any]:
    """Documents in a row, as TRL's `padding_free=True` collates them."""
    from transformers import DataCollatorWithFlattening

    documents = [{"input_ids": list(range(4, 4 + length))} for length in DOCUMENTS]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(documents)
    return {**batch, "use_cache": False}


def llama_padded(case: str) -> Call:
    """Llama on a padded batch."""
    return Call(_llama(), kwargs=_padded())


def qwen_padded(case: str) -> Call:
    """Qwen3 on a padded batch, with gradient checkpointing."""
    model = _qwen()
    model.gradient_checkpointing_enable()
    return Call(model, kwargs={**_padded(), "use_cache": False})


def packed_documents(case: str) -> Call:
    """Documents in one sequence, told apart by `position_ids`."""
    tokens = _tokens(1, LENGTH)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    return Call(_llama(), kwargs={"input_ids": tokens, "position_ids": positions, "labels": tokens, "use_cache": False})


def sft_padding_free(case: str) -> Call:
    """Supervised fine-tuning as TRL's SFTTrainer does it with `padding_free=True`."""
    return Call(_qwen(), kwargs=_flattened())


def flash_attention_2(case: str) -> Call:
    """The same with `attn_implementation="flash_attention_2"` and the lengths of documents as Python numbers."""
    model = _qwen(implementation="eager")
    model.config._attn_implementation = "flash_attention_2"  # behind the back of transformers, which asks for a GPU
    return Call(model, kwargs=_flattened(return_flash_attn_kwargs=True))


def actor_warn_only(case: str) -> Call:
    """An actor's update as verl does it: padding removed, `warn_only=True`, gradient checkpointing."""
    model = _qwen()
    model.gradient_checkpointing_enable()
    batch = _flattened()
    return Call(model, kwargs={name: batch[name] for name in ("input_ids", "position_ids", "use_cache")})


def torchtitan_flex(case: str) -> Call:
    """Blocks with FlexAttention, each checkpointed and compiled by itself, as torchtitan trains them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.nn.attention import flex_attention as flex

    class Block(nn.Module):
        def __init__(self, dim: int = 4096, heads: int = 32, kv_heads: int = 8) -> None:
            super().__init__()
            self.head_dim = dim // heads
            self.norm = nn.RMSNorm(dim)
            self.wq, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(2))
            self.wk, self.wv = (nn.Linear(dim, kv_heads * self.head_dim, bias=False) for _ in range(2))

        def forward(self, x: Tensor, mask: flex.BlockMask) -> Tensor:
            h = self.norm(x)
            q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            out = flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            return x + self.wo(out.transpose(1, 2).flatten(2))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = nn.Embedding(VOCABULARY, 4096)
            self.layers = nn.ModuleList(checkpoint_wrapper(Block()) for _ in range(2))
            for layer in self.layers:
                layer.compile(fullgraph=True)

        def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
            def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & (documents[b, q] == documents[b, k])

            mask = flex.create_block_mask(same_document, len(tokens), None, LENGTH, LENGTH, device=tokens.device)
            x = self.embeddings(tokens)
            for layer in self.layers:
                x = layer(x, mask)
            return x

    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(DOCUMENTS)])
    return Call(Transformer(), (_tokens(2, LENGTH), documents.repeat(2, 1)))


def nanogpt(case: str) -> Call:
    """nanoGPT's attention, GPT-2's sizes."""

    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd: int = 768, n_head: int = 12) -> None:
            super().__init__()
            self.c_attn, self.c_proj, self.n_head = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd), n_head

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.size()
            q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
            return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    return Call(nn.Sequential(CausalSelfAttention(), CausalSelfAttention()), (torch.randn(4, 1024, 768),))


def gemma3(case: str) -> Call:
    """Gemma 3's 4B on a padded batch: heads of 256, windows in every other layer."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    sizes = {"hidden_size": 2560, "sliding_window": 1024, "layer_types": LOCAL_AND_GLOBAL}
    return Call(built("Gemma3ForCausalLM", "Gemma3TextConfig", {**TWO_LAYERS, **heads, **sizes}), kwargs=_padded())


def deepseek(case: str) -> Call:
    """DeepSeek-V3 on a padded batch: heads of 192 for queries and keys, of 128 for values."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": VOCABULARY}
    return Call(built("DeepseekV3ForCausalLM", "DeepseekV3Config", sizes), kwargs=_padded())


def gpt_oss(case: str) -> Call:
    """gpt-oss with `attn_implementation="flex_attention"`, on sequences of one length."""
    sizes = {**TWO_LAYERS, "num_local_experts": 4}
    model, tokens = built("GptOssForCausalLM", "GptOssConfig", sizes, "flex_attention", **EXPERTS), _tokens(2, LENGTH)
    return Call(model, kwargs={"input_ids": tokens, "labels": tokens})


def vit(case: str) -> Call:
    """ViT, base."""
    model = built("ViTForImageClassification", "ViTConfig", {"num_hidden_layers": 2})
    return Call(model, kwargs={"pixel_values": torch.randn(16, 3, 224, 224), "labels": torch.randint(0, 2, (16,))})


def siglip(case: str) -> Call:
    """SigLIP, base: images and captions."""
    sizes = {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}}
    inputs = {"pixel_values": torch.randn(16, 3, 224, 224), "input_ids": _tokens(16, 64), "return_loss": True}
    return Call(built("SiglipModel", "SiglipConfig", sizes), kwargs=inputs)


def esm(case: str) -> Call:
    """ESM-2, 650M, on padded proteins."""
    sizes = {"hidden_size": 1280, "num_attention_heads": 20, "intermediate_size": 5120, "num_hidden_layers": 2}
    options = {"position_embedding_type": "rotary", "attention_probs_dropout_prob": 0.0, "vocab_size": 33, "pad_token_id": 1}
    proteins = torch.randint(4, 24, (4, 1024))
    inputs = {"input_ids": proteins, "attention_mask": padding(4, 1024), "labels": proteins}
    return Call(built("EsmForMaskedLM", "EsmConfig", {**sizes, **options}), kwargs=inputs)


def whisper(case: str) -> Call:
    """Whisper, small: half a minute of sound."""
    parts = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("attention_heads", 12), ("layers", 2))}
    model = built("WhisperForConditionalGeneration", "WhisperConfig", {"d_model": 768, **parts})
    return Call(model, kwargs={"input_features": torch.randn(4, 80, 3000), "labels": _tokens(4, 256)})


def modernbert(case: str) -> Call:
    """ModernBERT, base, on a padded batch."""
    return Call(built("ModernBertForMaskedLM", "ModernBertConfig", {"num_hidden_layers": 4}), kwargs=_padded())


def open_clip(case: str) -> Call:
    """open_clip's ViT-B-16."""
    from open_clip.model import CLIP

    image = {"image_size": 224, "layers": 2, "width": 768, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 2}
    return Call(CLIP(512, image, text), (torch.randn(16, 3, 224, 224), _tokens(16, 77)))


def bert(case: str) -> Call:
    """BERT, base, with `attention_probs_dropout_prob=0.0`, on a padded batch."""
    sizes = {"num_hidden_layers": 2, "attention_probs_dropout_prob": 0.0}
    return Call(built("BertForMaskedLM", "BertConfig", sizes), kwargs=_padded(16, 512))


@contextlib.contextmanager
def warn_only() -> Iterator[None]:
    """Deterministic mode that warns and goes on."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def flash_attn() -> Iterator[None]:
    """transformers takes the ops of flash_attn from the tests' stand-in, which has their names and schemas."""
    from transformers import modeling_flash_attention_utils as of_transformers

    with mock.patch.object(sys, "path", [str(STAND_INS), *sys.path]):
        stand_in = importlib.import_module("flash_attn_stand_in")
    package, of_padding = (module_from_spec(ModuleSpec(name, None)) for name in ("flash_attn", "flash_attn.bert_padding"))
    functions = {name: getattr(stand_in, name) for name in ("flash_attn_func", "flash_attn_varlen_func")}
    vars(package).update(functions, flash_attn_with_kvcache=None)
    vars(of_padding).update(pad_input=of_transformers._pad_input, unpad_input=of_transformers._unpad_input)
    modules = {"flash_attn": package, "flash_attn.bert_padding": of_padding}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        stack.enter_context(mock.patch.object(of_transformers, "is_flash_attn_2_available", lambda **_: True))
        stack.enter_context(mock.patch.object(of_transformers, "_loaded_implementation", None))
        of_transformers.lazy_import_flash_attention("flash_attention_2")
        yield


def _recipe(
    name: str,
    make: Callable[[str], Call],
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    needs: str = "transformers",
    needs_values: bool = False,
) -> Model:
    return Model("recipes", name, make, context=context, needs=needs, needs_values=needs_values)


RECIPES = (
    _recipe("Llama, padded", llama_padded),
    _recipe("Qwen, padded, checkpointed", qwen_padded),
    _recipe("packed documents", packed_documents),
    _recipe("SFT with `padding_free`, as TRL", sft_padding_free),
    _recipe("`flash_attention_2`, packed", flash_attention_2, flash_attn, needs_values=True),
    _recipe("an actor under `warn_only`, as verl", actor_warn_only, warn_only),
    _recipe("FlexAttention, as torchtitan", torchtitan_flex, needs="torch.nn"),
    _recipe("nanoGPT", nanogpt, needs="torch.nn"),
    _recipe("Gemma 3, heads of 256", gemma3),
    _recipe("DeepSeek-V3, heads of 192/128", deepseek),
    _recipe("gpt-oss by FlexAttention", gpt_oss, as_on_a_gpu),
    _recipe("ViT", vit),
    _recipe("SigLIP", siglip),
    _recipe("Flux", diffusion.flux, needs="diffusers"),
    _recipe("Stable Diffusion 3", diffusion.sd3, needs="diffusers"),
    _recipe("Wan", diffusion.wan, needs="diffusers"),
    _recipe("ESM-2", esm),
    _recipe("Whisper", whisper),
    _recipe("ModernBERT", modernbert),
    _recipe("open_clip", open_clip, needs="open_clip"),
    _recipe("BERT without dropout", bert),
)
