"""Models of diffusers, at their own head dims: one layer of each kind, few heads."""

from __future__ import annotations

from typing import Any

import torch

from .model import PADDED, PLAIN, Call, Model

TEXT_DIM = 512
TEXT_LENGTH = 64


def _text(dim: int = TEXT_DIM, length: int = TEXT_LENGTH) -> Any:
    return torch.randn(2, length, dim)


def _time() -> Any:
    return torch.tensor([1, 500])


def pixart(case: str) -> Call:
    """PixArt reads padded text, by cross-attention under a mask."""
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=4, num_layers=1, cross_attention_dim=4 * 72, caption_channels=TEXT_DIM, sample_size=32
    )
    inputs = {"encoder_hidden_states": _text(), "encoder_attention_mask": torch.ones(2, TEXT_LENGTH), "timestep": _time()}
    return Call(model, (torch.randn(2, 4, 32, 32),), {**inputs, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}})


def flux(case: str) -> Call:
    """Flux attends to text and image at once."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, num_attention_heads=4, joint_attention_dim=TEXT_DIM, pooled_projection_dim=64
    )
    inputs = {"encoder_hidden_states": _text(), "pooled_projections": torch.randn(2, 64), "timestep": torch.rand(2)}
    return Call(
        model, (torch.randn(2, 256, 64),), {**inputs, "img_ids": torch.zeros(256, 3), "txt_ids": torch.zeros(TEXT_LENGTH, 3)}
    )


def sd3(case: str) -> Call:
    """Stable Diffusion 3."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        **{"sample_size": 32, "num_layers": 2, "num_attention_heads": 4, "joint_attention_dim": TEXT_DIM},
        **{"caption_projection_dim": 4 * 64, "pooled_projection_dim": 64},
    )
    inputs = {"encoder_hidden_states": _text(), "pooled_projections": torch.randn(2, 64), "timestep": _time()}
    return Call(model, (torch.randn(2, 16, 32, 32),), inputs)


def wan(case: str) -> Call:
    """Wan 2.1, on two frames."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(num_attention_heads=4, num_layers=1, text_dim=TEXT_DIM, ffn_dim=512)
    return Call(model, (torch.randn(2, 16, 2, 16, 16), _time(), _text()))


def cogvideox(case: str) -> Call:
    """CogVideoX, on two frames."""
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        **{"num_attention_heads": 4, "num_layers": 1, "text_embed_dim": TEXT_DIM, "max_text_seq_length": TEXT_LENGTH},
        **{"sample_width": 16, "sample_height": 16, "sample_frames": 5},
    )
    return Call(model, (torch.randn(2, 2, 16, 16, 16), _text(), _time()))


def dit(case: str) -> Call:
    """DiT."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=4, num_layers=1)
    return Call(model, (torch.randn(2, 4, 32, 32),), {"timestep": _time(), "class_labels": torch.tensor([0, 1])})


def hunyuan_video(case: str) -> Call:
    """HunyuanVideo hides padded text."""
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        **{"num_attention_heads": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
        **{"text_embed_dim": TEXT_DIM, "pooled_projection_dim": 64},
    )
    inputs = {
        "timestep": _time(),
        "encoder_hidden_states": _text(),
        "encoder_attention_mask": torch.ones(2, TEXT_LENGTH, dtype=torch.bool),
        "pooled_projections": torch.randn(2, 64),
        "guidance": torch.tensor([1000.0, 1000.0]),
    }
    return Call(model, (torch.randn(2, 16, 2, 16, 16),), inputs)


def unet(case: str) -> Call:
    """Stable Diffusion 1.5's UNet, of one level."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        **{"sample_size": 16, "block_out_channels": (320,), "layers_per_block": 1, "cross_attention_dim": TEXT_DIM},
        **{"down_block_types": ("CrossAttnDownBlock2D",), "mid_block_type": None, "up_block_types": ("CrossAttnUpBlock2D",)},
    )
    return Call(model, (torch.randn(2, 4, 16, 16), _time(), _text()))


MODELS = (
    Model("diffusers", "diffusers PixArt (encoder mask)", pixart, (PADDED,)),
    Model("diffusers", "diffusers Flux", flux, (PLAIN,)),
    Model("diffusers", "diffusers SD3", sd3, (PLAIN,)),
    Model("diffusers", "diffusers Wan 2.1", wan, (PLAIN,)),
    Model("diffusers", "diffusers CogVideoX", cogvideox, (PLAIN,)),
    Model("diffusers", "diffusers DiT", dit, (PLAIN,)),
    Model("diffusers", "diffusers HunyuanVideo (text mask)", hunyuan_video, (PADDED,)),
    Model("diffusers", "diffusers SD1.5 UNet (1 level, D=40)", unet, (PLAIN,)),
)
