"""The models of every library, and how each library is found."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any, NamedTuple

import torch

from . import diffusion, torch_nn, transformers_models
from .model import CHECKPOINTED, PADDED, PLAIN, Call, Model


class Library(NamedTuple):
    """module: what is there if it is installed, and what models import. package: as pip calls it."""

    module: str
    package: str


LIBRARIES = {
    "torch.nn": Library("torch", "torch"),
    "transformers": Library("transformers.modeling_utils", "transformers"),
    "timm": Library("timm", "timm"),
    "torchvision": Library("torchvision", "torchvision"),
    "diffusers": Library("diffusers", "diffusers"),
    "open_clip": Library("open_clip", "open_clip_torch"),
    "x-transformers": Library("x_transformers", "x-transformers"),
    "litgpt": Library("litgpt", "litgpt"),
    "vit-pytorch": Library("vit_pytorch", "vit-pytorch"),
    "segment-anything": Library("segment_anything", "segment-anything"),
    "local": Library("local_attention", "local-attention"),
    "native": Library("native_sparse_attention_pytorch", "native-sparse-attention-pytorch"),
}
DIM, HEADS = 512, 8  # heads of 64
SIZES = {"dim": DIM, "depth": 2, "heads": HEADS, "mlp_dim": DIM}
SQUARE = {"image_size": 224, "patch_size": 16, "num_classes": 10}


def version(library: str) -> str | None:
    """The version that is installed; None if the library is not."""
    module, package = LIBRARIES[library]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    return importlib.metadata.version(package).partition("+")[0]


def load(library: str) -> None:
    """Imports it. What its import raises is raised again by a model that needs it."""
    _define_ops()
    with contextlib.suppress(Exception):
        importlib.import_module(LIBRARIES[library].module)


@functools.cache
def _define_ops() -> None:
    """What torchvision takes from its compiled part, which needs the torch that it was built for. Other libraries import it."""
    if torch.version.cuda is None:
        for op in ("nms", "qnms"):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _images(size: int = 224, count: int = 2) -> Any:
    return torch.randn(count, 3, size, size)


def _tokens(length: int = 512) -> Any:
    return torch.randint(4, 60, (2, length))


def _timm(name: str, model: str, cases: tuple[str, ...] = (PLAIN,), size: int = 224, **options: Any) -> Model:
    def make(case: str) -> Call:
        import timm

        module = timm.create_model(model, **options)
        if case == CHECKPOINTED:
            module.set_grad_checkpointing(True)
        return Call(module, (_images(size),))

    return Model("timm", f"timm {name}", make, cases)


def _torchvision_vit(case: str) -> Call:
    from torchvision.models import VisionTransformer

    return Call(VisionTransformer(224, 16, 2, HEADS, DIM, DIM), (_images(),))


def _torchvision_swin_v2(case: str) -> Call:
    from torchvision.models import swin_transformer as swin

    blocks = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return Call(swin.SwinTransformer([4, 4], 48, [2, 2], [3, 6], [8, 8], **blocks), (_images(256),))


def _vit_pytorch(name: str, module: str, kind: str, **options: Any) -> Model:
    def make(case: str) -> Call:
        return Call(getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(**SQUARE, **SIZES, **options), (_images(),))

    return Model("vit-pytorch", f"vit-pytorch {name}", make)


def _x_transformers(name: str, case: str = PLAIN, *, needs_values: bool = False, **options: Any) -> Model:
    def make(case: str) -> Call:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=DIM, depth=2, heads=HEADS, **options)
        mask = {"mask": torch.ones(2, 512, dtype=torch.bool)} if case == PADDED else {}
        return Call(TransformerWrapper(num_tokens=64, max_seq_len=512, attn_layers=layers), (_tokens(),), mask)

    return Model("x-transformers", f"x-transformers {name}", make, (case,), needs_values=needs_values)


TOWER = {"layers": 2, "width": DIM}
IMAGE_TOWER = {**TOWER, "image_size": 224, "patch_size": 16}
TEXT_TOWER = {**TOWER, "vocab_size": 64, "heads": HEADS}


def _open_clip(case: str) -> Call:
    from open_clip.model import CLIP

    return Call(CLIP(DIM, IMAGE_TOWER, {**TEXT_TOWER, "context_length": 77}), (_images(), _tokens(77)))


def _coca(case: str) -> Call:
    from open_clip.coca_model import CoCa

    text = {**TEXT_TOWER, "context_length": 76, "embed_cls": True, "output_tokens": True}
    decoder = {**TEXT_TOWER, "context_length": 76}
    return Call(CoCa(DIM, decoder, text, {**IMAGE_TOWER, "output_tokens": True}), (_images(), _tokens(76)))


def _litgpt(name: str, **options: Any) -> Model:
    def make(case: str) -> Call:
        from litgpt import GPT, Config

        sizes = {"n_layer": 2, "n_embd": DIM, "n_head": HEADS, "n_query_groups": 2, "block_size": 512}
        vocabulary = {"vocab_size": 64, "padded_vocab_size": 64, "rotary_percentage": 1.0}
        return Call(GPT(Config(**sizes, **vocabulary, **options)), (_tokens(),))

    return Model("litgpt", f"litgpt {name}", make)


def _sam_encoder(case: str) -> Call:
    from segment_anything.modeling import ImageEncoderViT

    sizes = {"img_size": 512, "depth": 2, "embed_dim": 384, "num_heads": 6, "out_chans": 64}
    return Call(ImageEncoderViT(**sizes, use_rel_pos=True, window_size=14, global_attn_indexes=(1,)), (_images(512, 1),))


def _sam_two_way(case: str) -> Call:
    from segment_anything.modeling import TwoWayTransformer

    image = torch.randn(1, 256, 32, 32)
    return Call(TwoWayTransformer(2, 256, 8, 512), (image, torch.randn(1, 256, 32, 32), torch.randn(1, 7, 256)))


def _local(case: str) -> Call:
    from local_attention import LocalTransformer

    sizes = {"num_tokens": 64, "dim": 256, "depth": 2, "max_seq_len": 512, "local_attn_window_size": 64}
    return Call(LocalTransformer(**sizes, causal=True), (_tokens(),))


def _native_sparse(case: str) -> Call:
    from native_sparse_attention_pytorch import SparseAttention

    blocks = {"compress_block_size": 16, "compress_block_sliding_stride": 16, "selection_block_size": 16, "num_selected_blocks": 2}
    sizes = {"dim": 256, "dim_head": 64, "heads": 4, "sliding_window_size": 32}
    return Call(SparseAttention(**sizes, **blocks, use_triton_kernel=False), (torch.randn(1, 128, 256),))


MODELS = (
    *torch_nn.MODELS,
    *transformers_models.MODELS,
    _timm("ViT-S", "vit_small_patch16_224", (PLAIN, CHECKPOINTED), depth=2),
    _timm("ViT-S attn_drop .1", "vit_small_patch16_224", ("dropout",), depth=2, attn_drop_rate=0.1),
    _timm("Swin-T", "swin_tiny_patch4_window7_224", depths=(2, 2), num_heads=(3, 6)),
    _timm("Swinv2", "swinv2_tiny_window8_256", size=256, depths=(2, 2), num_heads=(3, 6)),
    _timm("EVA02", "eva02_tiny_patch14_224", depth=2),
    _timm("DINOv2 reg", "vit_small_patch14_reg4_dinov2", depth=2, img_size=224),
    _timm("DINOv3", "vit_small_patch16_dinov3", size=256, depth=2),
    _timm("BEiT (rel bias)", "beit_base_patch16_224", depth=2),
    _timm("SigLIP2 so400m (D=72)", "vit_so400m_patch14_siglip_224", depth=2),
    _timm("CaiT", "cait_xxs24_224", depth=2),
    Model("torchvision", "torchvision ViT-B", _torchvision_vit),
    Model("torchvision", "torchvision SwinV2", _torchvision_swin_v2),
    *diffusion.MODELS,
    Model("open_clip", "open_clip CLIP ViT", _open_clip),
    Model("open_clip", "open_clip CoCa", _coca),
    _x_transformers("Decoder default"),
    _x_transformers("Decoder flash", PADDED, attn_flash=True),
    _x_transformers("alibi flash", attn_flash=True, alibi_pos_bias=True, alibi_num_heads=4, needs_values=True),
    _litgpt("Llama-like"),
    _litgpt("softcap (gemma2-like)", attention_logit_softcapping=50.0),
    _vit_pytorch("ViT", "vit", "ViT"),
    _vit_pytorch("SimpleViT", "simple_vit", "SimpleViT"),
    _vit_pytorch("CaiT", "cait", "CaiT", cls_depth=1),
    _vit_pytorch("MAE-simple flash", "simple_flash_attn_vit", "SimpleViT", use_flash=True),
    Model("segment-anything", "segment-anything ImageEncoder (rel pos)", _sam_encoder),
    Model("segment-anything", "segment-anything TwoWayTransformer", _sam_two_way),
    Model("local", "local-attention", _local),
    Model("native", "native-sparse-attention (lucidrains)", _native_sparse),
)
