"""What of a process's state decides bits: carried into the processes that it starts, and read for hints."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch._dynamo.utils import counters, get_compilation_metrics

from .. import config, emulation
from ..devices.modes import SDPA_KERNELS
from ..hooks import install

REDUCED = tuple(f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16"))


def of_torch() -> dict[str, Any]:
    """torch's settings here that a fresh process would not have."""
    return {
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch._C._get_deterministic_fill_uninitialized_memory(),
        "sdp": {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SDPA_KERNELS},
        "reduced": {name: getattr(torch.backends.cuda.matmul, name) for name in REDUCED},
        "cudnn": [torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark],
        "precision": torch.get_float32_matmul_precision(),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "enabled": install.is_enabled(),
    }


def apply(settings: dict[str, Any]) -> None:
    """Make them those of this process."""
    torch.set_deterministic_debug_mode(settings["deterministic"])
    torch._C._set_deterministic_fill_uninitialized_memory(settings["fill"])
    for name, value in settings["sdp"].items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)
    for name, value in settings["reduced"].items():
        setattr(torch.backends.cuda.matmul, name, value)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = settings["cudnn"]
    torch.set_float32_matmul_precision(settings["precision"])
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    torch.set_num_threads(settings["threads"])
    if settings["enabled"] != install.is_enabled():
        (install.enable if settings["enabled"] else install.disable)()


def variables() -> dict[str, str]:
    """The environment variables by which a fresh process has this one's settings of the package, and its emulation."""
    settings = config.current()
    device = emulation.settings()
    if device is not None:
        settings = replace(settings, emulate=True, seed=device.seed, sms=device.sms)
    values = {config.variable(each.name): getattr(settings, each.name) for each in fields(settings)}
    return {name: str(int(value) if isinstance(value, bool) else value) for name, value in values.items()}


def facts() -> dict[str, Any]:
    """What a report's hints, and the choice of runs, depend on."""
    settings = config.current()
    return {
        "deterministic": torch.get_deterministic_debug_mode(),
        "benchmark": torch.backends.cudnn.benchmark,
        "gpu": torch.cuda.is_available(),
        "dynamic_later": any(x.recompile_reason and "'s" in (x.graph_node_shapes or "") for x in get_compilation_metrics()),
        "timed": counters["inductor"]["select_algorithm_autotune"] > 0,
        "seed": settings.seed,
        "guarantee": settings.guarantee,
        "sm_reserve": settings.sm_reserve,
        "gpus": torch.cuda.device_count(),
        "emulated": emulation.active() or (settings.enabled and settings.emulate),
    }
