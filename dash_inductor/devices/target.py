"""What code is generated for: the cost file of a device, its architecture, and the SMs that our CTAs may use."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import emulation
from ..decision import Declined
from ..templates.tiles import EMULATED, NVIDIA, NoTile
from . import key_for, stand_in
from .cost_files import require_of

if TYPE_CHECKING:
    import torch

    from ..config import Config

log = logging.getLogger("dash_inductor")


@dataclass(frozen=True)
class Target:
    """`key` names the cost file (a device that has one, or the path of the user's own), `arch` (90 for sm_90, or "emulated") the
    tiles; `sms` are the device's less the reserved ones."""

    key: str
    arch: int | str
    sms: int
    reserved_sms: int = 0


def target_of(device: torch.device, settings: Config) -> Target:
    """The target of a torch device.

    Raises:
        Declined: nothing can be generated for it.
        CostFileError: the settings name a cost file that is not one of this device.
    """
    key, arch, sms = _device(device, settings)
    reserved = reserved_sms(settings)
    if reserved >= sms:
        raise Declined(
            f"{reserved} SMs are reserved (sm_reserve, torch's SM carve-out), and the device has {sms}",
            "reserve fewer: sm_reserve, torch's SM carve-out",
        )
    return Target(key, arch, sms - reserved, reserved)


def stays_stock(device: object, why: object) -> str:
    """What is said of a device for which there are no kernels."""
    return f"{device}: {why}: attention keeps its stock kernel there"


def own_device() -> torch.device:
    """Where this process has kernels: its GPU, or the CPU while that emulates one, and where there is none."""
    import torch

    return torch.device("cpu" if emulation.active() or not torch.cuda.is_available() else "cuda")


def is_there(device: torch.device) -> bool:
    """Whether ops run on the device: code is also generated for GPUs that are not there."""
    import torch

    return emulation.active() if device.type == "cpu" else torch.cuda.is_available()


def reserved_sms(settings: Config) -> int:
    """SMs left to other kernels: `sm_reserve` or torch's SM carve-out, whichever is more. Read when a graph is compiled."""
    import torch  # lazily: a target that is named needs none

    carve_out = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)()
    return max(settings.sm_reserve, carve_out or 0)


def sms_of_gpus() -> tuple[int, ...]:
    """SMs of each GPU that the process sees, one number where all have as many; () where there is none.

    For cache keys: torch's have a GPU's name, and not its SMs.
    """
    from torch._dynamo.device_interface import get_interface_for_device

    gpus = get_interface_for_device("cuda")
    if not gpus.is_available():
        return ()
    try:
        sms = tuple(gpus.get_device_properties(gpu).multi_processor_count for gpu in range(gpus.device_count()))
    except RuntimeError:  # a fork of a process that uses CUDA; there torch's key has no GPU either
        return ()
    return sms if len(set(sms)) > 1 else sms[:1]


def _device(device: torch.device, settings: Config) -> tuple[str, int | str, int]:
    """(Key of the cost file, architecture, SMs)."""
    import torch
    from torch._dynamo.device_interface import get_interface_for_device

    if device.type == "cpu":
        emulated = emulation.settings()
        key = require_of(settings.costs, EMULATED, EMULATED) if settings.costs else EMULATED
        return key, EMULATED, settings.sms if emulated is None else emulated.sms
    if torch.version.hip is not None:
        raise Declined("ROCm is not supported", NVIDIA)
    if device.type != "cuda":
        raise Declined(f"device {device.type} is not supported", NVIDIA)
    properties = get_interface_for_device("cuda").Worker.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    if settings.costs:
        key = require_of(settings.costs, properties.name, arch)
    else:
        key = key_for(properties.name, arch) or _stand_in(properties.name, arch)
    return key, arch, properties.multi_processor_count


@functools.cache
def _stand_in(name: str, arch: int) -> str:
    """The cost file that an unknown GPU takes; the log says so once."""
    try:
        key = stand_in(arch)
    except NoTile as no_tile:
        raise Declined(f"no cost file for {name}, and {no_tile}", no_tile.remedy) from None
    log.warning(
        "no cost file for %s (sm_%d): its schedules are chosen with the costs of %s and its own number of SMs", name, arch, key
    )
    return key
