"""Counts the calls of attention in a forward that is not compiled."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention, varlen
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dash_inductor.decision.stock import TORCH

from .model import Call

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
QUESTIONS = (Tensor.__bool__, Tensor.item, Tensor.__contains__)
HERE = (str(Path(torch.__file__).parent), __file__)


class Calls(TorchFunctionMode):
    """Counts calls on tensors that require a gradient.

    of_torch: SDPA, FlexAttention, `varlen_attn`. third_party: ops of other packages that are called after attention. written_out:
    every softmax over scores, by the line that calls it, and `nn.MultiheadAttention` that returns its weights.

    Tensors may be without values. Asked whether something is so, they say no: then masks are made, as when a model is compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_torch = self.third_party = 0
        self.written_out: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """All calls."""
        return self.of_torch + self.third_party + self.written_out.total()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in QUESTIONS and args[0].is_meta and (args[0].dtype == torch.bool or function is Tensor.__contains__):
            return False
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs))):
            self._see(function, args, kwargs)
        return function(*args, **kwargs)  # without the mode: what attention itself calls is not counted

    def _see(self, function: Any, args: Any, kwargs: Any) -> None:
        if function is F.scaled_dot_product_attention:
            self.of_torch += 1
        elif function is F.multi_head_attention_forward:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["need_weights"]:
                self.written_out["nn.MultiheadAttention with need_weights=True"] += 1
            else:
                self.of_torch += 1
        elif function in SOFTMAX:
            scores = args[0] if args else kwargs["input"]
            if scores.dim() >= 3 and scores.shape[-1] > 1:
                self.written_out[_line()] += 1
        elif isinstance(function, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
            namespace, _, name = str(function).partition(".")
            self.third_party += namespace not in TORCH and ("attn" in name or "attention" in name)


def _line() -> str:
    """The innermost line outside torch, "file.py:12"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def counted(call: Call) -> Calls:
    """The calls of one forward. FlexAttention and `varlen_attn` compute nothing: on a CPU they do not train."""
    calls = Calls()

    def stand_in(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
        calls.of_torch += any(x.requires_grad for x in (query, key, value))
        out, lse = query[..., :1].expand(*query.shape[:-1], value.shape[-1]), query[..., 0].float()
        if options.get("return_aux") is not None:
            return out, flex_attention.AuxOutput(lse=lse)
        return (out, lse) if options.get("return_lse") else out

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for function in (flex_attention.flex_attention, varlen.varlen_attn):
            _replace(stack, function, stand_in)
        stack.enter_context(calls)
        call.module(*copy.deepcopy(call.args), **copy.deepcopy(dict(call.kwargs)))  # a model may change what it is given
    return calls


def _replace(stack: contextlib.ExitStack, function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """In every module that has the function by its name: packages import it from torch."""
    for module in list(sys.modules.values()):
        if vars(module).get(function.__name__) is function:
            stack.enter_context(mock.patch.object(module, function.__name__, other))
