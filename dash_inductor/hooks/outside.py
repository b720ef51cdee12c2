"""Attention that trains outside of the graphs that Inductor compiles, where the pass does not come by: recorded, and told.

Each place in the code once, while settings ask for it, or where Dynamo came to its limit of recompilations: users compiled that
attention, and it was rewritten until lengths varied too often. What is computed stays as it is. On a CPU that emulates no GPU
nothing is missed, for its stock ops are deterministic. After `activate_flash_attention_impl("DASH")` flash attention is not missed
either. Not seen are nested tensors, and SDPA that torch makes matmuls of (its math path).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.types import FrameAction
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake

from .. import emulation
from ..config import current
from ..decision import Declined, add_eager, is_new
from ..rewrite.declined import decision_of_call, mask_of, tell
from ..rewrite.origin import Origin
from ..rewrite.stock_ops import implementation_for
from . import install

FLEX = "flex_attention"
OUTSIDE = Declined(
    "it runs outside of the graphs that Inductor compiles",
    "let torch.compile reach this call: compile the module before DistributedDataParallel or another wrapper goes around it, or "
    "call it from a module of your own, and mend graph breaks, which TORCH_LOGS=graph_breaks names. Where it cannot be compiled, "
    'torch.nn.attention.activate_flash_attention_impl("DASH") rewrites flash attention in eager code',
)
LIMIT = Declined(
    "it runs in eager mode: Dynamo skips its frame, which came to the limit of recompilations (recompile_limit or "
    "accumulated_recompile_limit)",
    "let fewer graphs be compiled: torch.compile(..., dynamic=True), torch._dynamo.mark_dynamic for a size that varies, or lengths "
    "that are padded to a few; TORCH_LOGS=recompiles names what varies. Or raise torch._dynamo.config.recompile_limit",
)
_HERE = Path(__file__).parent
_DYNAMO = eval_frame.__file__
_NO_CALLERS = (*(str(folder) for folder in (Path(torch.__file__).parent, _HERE, _HERE.parent / "emulation")), "<")


def attend(op: OpOverload, stock: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in front of the autograd kernel of an op of attention."""
    if _is_missed(args[:3]) and not ("_flash_" in str(op) and torch.nn.attention.current_flash_attention_impl() == "DASH"):
        named = {argument.name: x for argument, x in zip(op._schema.arguments, args, strict=False)} | kwargs
        _tell(str(op), args[:3], mask_of(named), implementation_for(str(op), named))
    return stock.call_boxed(keyset, *args, **kwargs)


def attend_flex(stock: Callable[..., Any], *args: Any) -> Any:
    """Stands around FlexAttention as an op of autograd."""
    if _is_missed(args[:3]):
        _tell(FLEX, args[:3], "block_mask")
    return stock(*args)


def convert_frame(stock: Callable[..., Any], converter: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around Dynamo's compilation of a frame. At the limit, and there alone, the frame is only run from then on."""
    converted = stock(converter, frame, *args, **kwargs)
    install.skip(frame.f_code, skipped=converted.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY)
    return converted


def _is_missed(inputs: Sequence[Tensor]) -> bool:
    """Whether a training step attends to them now. In a graph that runs no gradient is recorded; one that is traced has fakes."""
    return (
        torch.is_grad_enabled()
        and torch.are_deterministic_algorithms_enabled()
        and any(x.requires_grad for x in inputs)
        and not any(map(is_fake, inputs))
        and (inputs[0].device.type != "cpu" or emulation.active())
    )


def _tell(op: str, inputs: Sequence[Tensor], mask: str, implementation: str | None = None) -> None:
    settings, frames = current(), [frame for frame, _ in traceback.walk_stack(sys._getframe())]  # innermost first
    inside = next((number for number, x in enumerate(frames) if not x.f_code.co_filename.startswith(_NO_CALLERS)), -1)
    caller, declined = frames[inside], LIMIT if _is_skipped(frames[inside:]) else OUTSIDE
    if settings.on_unsupported == "fallback":
        if declined is OUTSIDE:
            return
        settings = replace(settings, on_unsupported="warn")
    file, line = caller.f_code.co_filename, caller.f_lineno
    first = is_new((op, file, line, declined))
    if not first and settings.on_unsupported != "error":
        return
    origin = Origin(f"{file}:{line}", _module(frames), "")
    decision = replace(decision_of_call(op, inputs, mask, declined), implementation=implementation)
    if first:
        counters["inductor"]["dash_declined"] += 1
        add_eager(replace(decision, source=origin.source, module=origin.module))
    tell(declined, decision, origin, settings)


def _is_skipped(frames: Sequence[FrameType]) -> bool:
    """Whether Dynamo would have compiled what these run, were it not for its limit.

    A compiled function has a frame of Dynamo around it. So has what is disabled inside of one, and a plain call has none.
    """
    frames = [x for x in frames if install.is_skipped(x.f_code) or x.f_code.co_filename == _DYNAMO]
    return len(frames) > 1 and frames[0].f_code.co_filename != _DYNAMO == frames[-1].f_code.co_filename


def _module(frames: Sequence[FrameType]) -> str:
    """The path of the innermost module that runs, in the outermost one."""
    modules = [each for frame in frames if isinstance(each := frame.f_locals.get("self"), nn.Module)]
    if not modules:
        return ""
    path = next((name for name, each in modules[-1].named_modules() if each is modules[0]), "")
    return path.removeprefix("_orig_mod").removeprefix(".")
