"""Patches of FlexAttention: on the CPU its front end refuses training, and its lowering is another kernel than a GPU's."""

from __future__ import annotations

import inspect
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
    """The stock lowering of the forward without its way out for the CPU, from its source."""
    source = inspect.getsource(kernel.flex_attention)
    source = source[source.index("def flex_attention(") :]
    is_cpu = 'query.get_device().type == "cpu"'
    if is_cpu not in source:
        raise RuntimeError(f"emulation does not know the FlexAttention of torch {torch.__version__}")
    scope = dict(vars(kernel))
    exec(compile(source.replace(is_cpu, "False", 1), kernel.__file__, "exec"), scope)
    return scope["flex_attention"]
