"""Patches of FlexAttention: on the CPU its front end refuses training, and its lowering is another kernel than a GPU's."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.kernel.flex import flex_attention as kernel
from torch._inductor.lowering import lowerings
from torch._inductor.template_heuristics.triton import FlexBwDConfig, FlexConfig
from torch.nn.attention import flex_attention as front_end

from .patches import Patches

BLOCK = 32  # rows of Q and keys of a step of the stock kernels
FORWARD = torch.ops.higher_order.flex_attention


def install_flex(patches: Patches) -> None:
    """Sets them all: tensors of the CPU train, by the Triton kernels that a GPU would run."""
    patches.set(front_end, "_validate_device", lambda query, key, value: None)
    patches.set(InductorChoices, "get_flex_attention_fwd_configs", lambda *_: [FlexConfig(BLOCK, BLOCK, 1, 4)])
    patches.set(InductorChoices, "get_flex_attention_bwd_configs", lambda *_: [FlexBwDConfig(BLOCK, BLOCK, BLOCK, BLOCK, 1, 4)])
    stock, triton = lowerings[FORWARD], _lowering_of_a_gpu()

    def forward(*arguments: Any) -> Any:
        *others, options, score_mod_captures, mask_mod_captures = arguments
        options = {**options, "OUTPUT_LOGSUMEXP": True, "BACKEND": "TRITON"}
        return triton(*others, options, score_mod_captures, mask_mod_captures)

    lowerings[FORWARD] = forward
    patches.callback(lowerings.__setitem__, FORWARD, stock)


def _lowering_of_a_gpu() -> Any:
    """The stock lowering of the forward, but that it takes no device for a CPU, for which it has another kernel."""
    stock = inspect.unwrap(kernel.flex_attention)
    constants = stock.__code__.co_consts
    if constants.count("cpu") != 1:
        raise RuntimeError(f"emulation does not know the FlexAttention of torch {torch.__version__}")
    code = stock.__code__.replace(co_consts=tuple("no device" if constant == "cpu" else constant for constant in constants))
    return types.FunctionType(code, stock.__globals__)
