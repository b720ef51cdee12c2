"""The parts of `env` that need torch."""

from __future__ import annotations

import operator
import os
from contextlib import suppress
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from .. import emulation
from ..config import current
from ..devices import key_for
from ..devices.cost_files import COSTS_REMEDY, CostFileError, load_costs
from ..devices.modes import OF_TORCH, mode
from ..devices.target import stays_stock, target_of
from ..hooks.install import is_enabled, is_installed
from ..hooks.table import HOOKS, SETTINGS, TESTED
from ..import_hook import NO_TRITON, has_triton
from ..rewrite.declined import REFUSED, why_no_target
from ..templates import gluon_is_tested, why_no_gluon
from ..templates.tiles import EMULATED, tile

CACHES = ("fx_graph_cache", "fx_graph_remote_cache", "force_disable_caches")
AOT_CACHES = ("enable_autograd_cache", "enable_remote_autograd_cache")
HEAD_DIM = 128  # of the tile that is shown
PAIRS = {
    "2.11": "3.6.0",
    "2.13": "3.7.1",
    "2.14": "3.8.0",
    "2.15": "3.9.0",
}  # torch, and the Triton whose compiled kernels are checked


def versions() -> dict[str, Any]:
    """The versions of torch and of what came with it."""
    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "torch commit": torch.version.git_version,
        "CUDA of torch": torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "none, a CPU build"),
        "cuDNN": torch.backends.cudnn.version() or "none",
    }
    try:
        import triton

        figures["triton"] = triton.__version__
        figures["torch and triton"] = pair(torch.__version__, triton.__version__)
        figures["ptxas"] = triton.knobs.nvidia.ptxas.version
    except Exception as error:
        figures.setdefault("triton", f"cannot be imported ({error})")
        figures["ptxas"] = "none"
    return {name: str(figure) for name, figure in figures.items()}


def pair(torch_version: str, triton_version: str) -> str:
    """Whether the two are a pair of PAIRS.

    >>> pair("2.13.0+cpu", "3.7.1"), pair("2.13.0", "3.9.0").partition(":")[0]
    ('a tested pair', 'untested pair')
    """
    if PAIRS.get(".".join(torch_version.split(".")[:2])) == triton_version:
        return "a tested pair"
    return f"untested pair: take {', '.join(f'torch {one} with {other}' for one, other in PAIRS.items())}"


def modes() -> dict[str, Any]:
    """What torch does for determinism and precision, in a new process."""
    return {
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **{name: mode(name) for name in OF_TORCH},
    }


def inductor(problems: list[str]) -> dict[str, Any]:
    """Settings of Inductor: those under which attention keeps its stock kernel, and the caches."""
    figures = {name: operator.attrgetter(name)(inductor_config) for name in (*REFUSED, *SETTINGS)}
    off = (f"torch._inductor.config.{name} is off" for name in SETTINGS if not figures[name])
    for reason in filter(None, (why_no_target(torch.device("meta")), *off)):
        problems.append(f"{reason}, so that attention keeps its stock kernel: give it its default again")
    figures |= {name: getattr(inductor_config, name, None) for name in CACHES}
    return figures | {name: getattr(functorch_config, name, None) for name in AOT_CACHES}


def in_torch(problems: list[str]) -> dict[str, Any]:
    """What of this package is in torch now."""
    try:
        settings = current()
    except ValueError:  # which is among the problems
        return {"attention pass": "raises at every compilation, since a setting is wrong"}
    if not settings.enabled:
        problems.append("DASH_INDUCTOR=0 switches everything off: unset it to have attention rewritten")
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        problems.append("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps the package off: unset it, or call dash_inductor.enable()")
    if not has_triton():
        problems.append(NO_TRITON)
        return {"attention pass": "off, since there is no Triton", "emulation": "off, since there is no Triton"}
    waiting = "installed as soon as Inductor is imported" if is_enabled() else "off"
    listed = "DASH" in torch.nn.attention.list_flash_attention_impls()
    active = torch.nn.attention.current_flash_attention_impl() == "DASH"
    return {
        "attention pass": "installed" if is_installed() else waiting,
        'eager "DASH"': "active" if active else "listed, not activated" if listed else "not listed",
        "kernel": settings.kernel,
        "emulation": "on" if emulation.active() else "on as soon as Inductor is imported" if settings.emulate else "off",
    }


def hooks(problems: list[str]) -> dict[str, Any]:
    """Every place of torch that this package fills, and whether this torch has it."""
    figures = {}
    for hook in HOOKS if has_triton() else ():
        figures[hook.place] = {
            "value": "missing" if hook.is_missing else "patched" if hook.put else "offered by torch",
            "purpose": hook.purpose,
            "needed": hook.needed,
            "since": hook.since,
        }
        if hook.is_missing:
            lost = "so that attention keeps its stock kernel" if hook.needed else f"which {hook.purpose}"
            problems.append(f"torch {torch.__version__} has lost {hook.place}, {lost}: use a torch from {' to '.join(TESTED)}")
    return figures


def gpus(known: list[dict[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """The GPUs that torch sees, with what is `known` of them by nvidia-smi and what this package does on them; and the others."""
    seen = []
    smi = {gpu["uuid"]: gpu for gpu in known}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        figures = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "SMs": properties.multi_processor_count,
            "memory, GiB": round(properties.total_memory / 2**30, 1),
        }
        figures |= smi.pop(f"GPU-{getattr(properties, 'uuid', '')}", {})
        seen.append(figures | _target(torch.device("cuda", index), problems))
    why = "torch is a CPU build: install one for CUDA" if torch.version.cuda is None else "see CUDA_VISIBLE_DEVICES, and the driver"
    problems += [f"torch does not see the {gpu['name']}: {why}" for gpu in smi.values() if not seen]
    found = [*seen, *(gpu | {"torch": f"does not see it; {why}"} for gpu in smi.values())]
    with suppress(ValueError):  # a wrong setting, which is among the problems
        on = has_triton() and current().enabled
        if on and current().emulate:
            found.append({"name": "emulated on the CPU"} | _target(torch.device("cpu"), problems))
        if on and not found:
            problems.append(
                "there is no GPU that torch can use, and nothing is emulated: every attention keeps its stock kernel, which is "
                "deterministic on the CPU; DASH_INDUCTOR_EMULATE=1 emulates a GPU"
            )
    return found


def _target(device: torch.device, problems: list[str]) -> dict[str, Any]:
    """What this package generates for a device, or why it does not."""
    try:
        target = target_of(device, current())
        shown = tile(target.arch, "bf16", HEAD_DIM)
        costs = load_costs(target.key, block_m=shown.block_m, block_n=shown.block_n, head_dim=HEAD_DIM, sms=target.sms)
    except CostFileError as error:
        problems.append(f"{error}: {COSTS_REMEDY}")
        return {"kernels": f"none: {error}"}
    except ValueError as error:
        problems.append(stays_stock(device, error))
        return {"kernels": f"none: {error}"}
    name = "" if device.type == "cpu" else torch.cuda.get_device_properties(device).name
    if current().costs:
        file = f"{current().costs}, as the setting costs says"
    elif not name or key_for(name, int(target.arch)) is not None:
        file = f"{target.key}.toml"
    else:
        file = f"{target.key}.toml, that of another GPU, with this one's SMs"
    return {
        "SMs for our kernels": target.sms,
        "cost file": file,
        "costs": "estimates" if costs.estimate else "measured",
        "tiles of": EMULATED if target.arch == EMULATED else f"sm_{target.arch}",
        f"tile at head dim {HEAD_DIM}": str(shown),
        **({} if target.arch != 90 else {"Gluon kernel": "taken" if gluon_is_tested() else f"not taken: {why_no_gluon()}"}),
    }
