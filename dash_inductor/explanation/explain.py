"""What torch.compile makes of each attention of a model, and why: nothing is run."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import __version__, config
from ..decision import Decision
from ..devices import device as named_device
from ..devices.cost_files import has_estimates
from ..import_hook import NO_TRITON, has_triton
from ..text import in_one_line
from .report import Attention, Explanation

if TYPE_CHECKING:
    from torch import nn

    from .joint_graphs import Traced

AS_ON = 'explain(model, ..., device="h100") (on the command line --device h100) says what that GPU would do'
AUTOTUNES = (
    "max_autotune is on, and chooses FlexAttention's kernels by timing wherever torch._inductor.config.deterministic is off. "
    "torch.use_deterministic_algorithms(True) switches that on, in torch 2.13 for the thread that calls it alone, and "
    "torch.set_deterministic_debug_mode does not; TORCHINDUCTOR_DETERMINISTIC=1 does for the process"
)
EMULATED, CPU = "emulated", "cpu"
_LOCK = threading.RLock()  # one at a time: what torch keeps for the whole process is put back as it was


def explain(model: nn.Module, /, *inputs: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """What torch.compile of a training step of `model(*inputs, **kwargs)` would make of each attention, and why.

    Forward and backward are compiled up to the choice of kernels, in strict deterministic mode, or with warn_only where that is
    set already, for static shapes and whether or not the package is switched on. Nothing changes: parameters, gradients, buffers,
    random numbers, what torch.compile has compiled and `decisions()` stay as they are. Nothing runs, and no memory is allocated
    for tensors: model and inputs may be on the meta device. There are two exceptions. Where the forward reads the value of a
    tensor between two graphs, and model and inputs have values, the forward runs, without a gradient. And the mask_mod of a
    BlockMask among the inputs is asked of neighbours, to count documents. Threads that call this take
    turns; the others go on as before.

    Where the forward ends before its end, the report has what was found so far, and what stopped it.

        report = explain(model, tokens, device="h100")
        assert report.all_deterministic, report

    Args:
        model: compiled as a whole, in training or evaluation mode, as it is.
        inputs, kwargs: as the model is called. A forward that has an argument called `device` takes that one by position.
        device: a key of `dash_inductor.devices.DEVICES`, such as "h100": all tensors are taken to be on that GPU, which need not be
            there. None for the device that they are on, where the meta device stands for the GPU if there is one.

    Raises:
        ValueError: with the remedy, in one line: there is no such device, the model is no module, its forward fails before any
            graph is found, the package is switched off, or there is no Triton.
    """
    import torch

    traced, decisions, where, sms = traced_for(model, inputs, kwargs, device)
    import triton

    from . import packing

    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    rows = tuple(Attention.of(decision, sms, warn_only=warn_only) for decision in decisions)
    graphs = {id(each.graph) for each in traced.found if not isinstance(each, Decision)}
    notes = (*_notes(model, rows, len(graphs), where), *packing.notes(model, inputs, kwargs))
    versions = {"dash_inductor": __version__, "torch": torch.__version__, "triton": triton.__version__}
    return Explanation(where, rows, config.current().guarantee, warn_only, versions, notes, traced.stopped)


def traced_for(model: Any, inputs: Any, kwargs: Any, device: str | None) -> tuple[Traced, list[Decision], str, int]:
    """The joint graphs of a model after the pass, what is decided of their attentions, the device's name, and its SMs.

    Arguments and errors are those of `explain`.
    """
    import torch

    if not has_triton():
        raise ValueError(NO_TRITON)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"explain takes a torch.nn.Module and its inputs, not {type(model).__name__}: pass the model itself")
    if device is not None:
        device = device.lower()
        named_device(device)

    from ..hooks.joint_pass import ready

    if not ready().enabled:
        raise ValueError("dash_inductor is switched off by DASH_INDUCTOR=0: unset it to have the model explained")
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    with _LOCK, config.within(replace(config.current(), on_unsupported="fallback")):
        return _decided(model, inputs, kwargs, device)


def _decided(model: nn.Module, inputs: Any, kwargs: Any, device: str | None) -> tuple[Traced, list[Decision], str, int]:
    import torch
    from torch._inductor import config as inductor_config

    from .. import emulation
    from ..codegen.mode import deterministic
    from ..hooks.install import installed
    from . import decisions, gpu_attention
    from .joint_graphs import joint_graphs, line_of
    from .no_trace import leaving_no_trace

    def traced_on(place: torch.device | None) -> Traced:
        try:
            with inductor_config.patch(deterministic=inductors_own):
                return joint_graphs(model, inputs, kwargs, place, gpu_attention.taken_for_gpu)
        except NotImplementedError as error:  # of flex_attention on a CPU
            raise ValueError(f"{in_one_line(error)} {AS_ON}") from error
        except Exception as error:
            reason = f"{line_of(error)}: {in_one_line(error).rstrip('.')}"
            raise ValueError(f"compiling {type(model).__name__} failed: {reason}; does it train on these inputs?") from error

    modules = {name for name, _ in model.named_modules()}
    # torch.set_deterministic_debug_mode, for one, leaves it off, and Dynamo switches it on when it has compiled a frame.
    inductors_own = inductor_config.deterministic or not torch.are_deterministic_algorithms_enabled()
    cpu, warn_only = torch.device("cpu"), torch.is_deterministic_algorithms_warn_only_enabled()
    with installed(), leaving_no_trace(), deterministic(warn_only=warn_only):
        if device is not None:
            decisions.require_compiler()
            untouched = config.within(replace(config.current(), enabled=False))  # by the pass, until it is on the GPU
            with gpu_attention.attention_of(named_device(device)), untouched:
                traced = traced_on(cpu)
            with inductor_config.patch(deterministic=inductors_own):
                return traced, decisions.decide_on(device, traced.found, modules), device, named_device(device).sms
        devices = {x.device.type for x in (*model.parameters(), *model.buffers())}
        place = None
        if "meta" in devices:
            place = torch.device("cuda", 0) if torch.cuda.is_available() else cpu
        on_gpu = "cuda" in devices or (place is not None and place.type == "cuda")
        if on_gpu:
            where, sms = torch.cuda.get_device_name(), torch.cuda.get_device_properties().multi_processor_count
        else:
            where, sms = (EMULATED, config.current().sms) if emulation.active() else (CPU, 0)
        traced = traced_on(place)
        return traced, decisions.decisions_of(traced.found, modules), where, sms


def _notes(model: nn.Module, rows: tuple[Attention, ...], graphs: int, where: str) -> list[str]:
    """What a reader of the report should know beside its rows."""
    from torch._inductor import config as inductor_config

    notes = []
    if not rows:
        found = f"{graphs} graph{'s' if graphs != 1 else ''}"
        notes.append(
            f"no attention with a gradient was found in the {found} that torch.compile makes of the model. What counts are calls "
            "of scaled_dot_product_attention, flex_attention and varlen_attn on tensors that require a gradient, and attention "
            "written by hand where torch.compile recognises it"
        )
    kernels = {(row.decision.device, row.decision.kernel) for row in rows}
    if any(has_estimates(device, kernel) for device, kernel in kernels if kernel is not None):
        notes.append(
            "times come from a cost model whose constants are estimates for this device: they rank schedules, but measure nothing"
        )
    if inductor_config.max_autotune and any("flex" in row.op and row.decision.chosen_by_timing is None for row in rows):
        notes.append(AUTOTUNES)
    if where == CPU and rows:
        notes.append(f"the model is taken to be on the CPU, where attention stays as it is: {AS_ON}")
    if not model.training:
        notes.append("the model is in evaluation mode, where dropout is off: call model.train() before, to see it as it trains")
    return notes
