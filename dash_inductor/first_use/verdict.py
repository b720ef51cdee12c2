"""Whether a kernel may be used: what its trial said, on this machine or now.

A verdict is asked for when a kernel is chosen, and again when a graph that has it is taken into use, out of whatever cache.
"""

from __future__ import annotations

import functools
import json
import logging
import pkgutil
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, replace
from importlib.resources import files

import torch
import triton
from torch.torch_version import TorchVersion

from ..config import ALWAYS, AUTO, GLUON, TRITON, Config, current
from ..decision import Declined
from ..devices import DEVICES, target
from ..devices.cost_files import has_estimates
from ..resolve import Resolution, resolve
from ..templates import why_no_gluon
from . import known
from .kind import Kind, kinds_of, settings_for
from .known import Verdict
from .process import TRIAL, tried_by_another

RAN = "ran.json"  # by a GPU's name, kinds that ran there by the repository's benchmarks/results
SECONDS = 180, 540  # for a trial in another process, and once more: importing torch and compiling takes most of it
FAILED = "failed its trial on this GPU"
ROOM = 1 << 30  # bytes of a GPU that are free where a trial cannot take memory from a training

FENCED = "3.7.1"  # the first Triton in which a Hopper's wgmma sees what cp.async has copied

log = logging.getLogger("dash_inductor")
is_trial: ContextVar[bool] = ContextVar("is_trial", default=False)  # whether what is compiled now is compiled to be tried
is_used: dict[Kind, bool] = {}  # of the kinds that this process has asked for, whether their kernels are used


class UnfitKernelError(RuntimeError):
    """A kernel whose trial failed on this GPU."""


class UntriedKernelError(RuntimeError):
    """A kernel that could not be tried, under guard="always"."""


def require_fit(resolution: Resolution, device: torch.device) -> Resolution:
    """The resolution, if its kernels are known to work on a device that is there, or turn out to do so now.

    Where the Gluon kernel does not, and nobody asked for it, what the attention gets without it.

    Raises:
        UnfitKernelError: one of them does not.
        Declined: under guard="auto" one could not be tried, and has not run on such a GPU.
        UntriedKernelError: under guard="always" one could not be tried.
    """
    if not target.is_there(device):
        return resolution
    kinds = kinds_of(resolution)
    if device.type == "cuda" and any(kind.kernel == TRITON for kind in kinds):
        _say_if_a_fence_is_missing(*torch.cuda.get_device_capability(device))
    if resolution.lacks_gluon:
        _say_that_gluon_is_not_tested()
    try:
        require_fit_kinds(kinds, device, resolution.settings)
    except UnfitKernelError as unfit:
        if resolution.kernel != GLUON or resolution.settings.kernel != AUTO:
            raise
        _say_that_gluon_failed(str(unfit))
        problem = replace(resolution.problem, gluon_fails=FAILED)
        return require_fit(resolve(problem, resolution.settings, resolution.target), device)
    return resolution


def require_fit_kinds(kinds: Sequence[Kind], device: torch.device, settings: Config | None = None) -> None:
    """Returns if kernels of these kinds may be used on the device under the settings, those in force by default.

    Raises:
        UnfitKernelError, Declined, UntriedKernelError: as `require_fit`.
    """
    settings = settings or current()
    guard = settings.guard
    if not target.is_there(device) or not _is_asked(guard, device):
        return
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    name = str(torch.device(device.type, index))
    for kind in kinds:
        verdict = _verdict(kind, name, settings_for(kind, settings), guard == ALWAYS)
        is_used[kind] = verdict.fit if verdict.fit is not None else guard == AUTO and has_run(kind, name)
        if is_used[kind]:
            continue
        if verdict.fit is False:
            instead = "" if kind.kernel == TRITON else f"; kernel={TRITON!r} takes another kernel"
            raise UnfitKernelError(f"{kind} {FAILED}: {verdict.said}{instead}")
        if guard == ALWAYS:
            raise UntriedKernelError(f"{kind} could not be tried on this GPU: {verdict.said}")
        raise Declined(
            f"its kernel could not be tried on this GPU: {verdict.said}",
            "make room for a trial, in a process of its own, and start anew; DASH_INDUCTOR_GUARD=off takes the kernel untried",
        )


def _is_asked(guard: str, device: torch.device) -> bool:
    return guard == ALWAYS or (guard == AUTO and device.type == "cuda")


@functools.cache
def _verdict(kind: Kind, device: str, settings: Config, always: bool) -> Verdict:
    file = known.file_of(kind, device)
    verdict = None if always else known.read(file)
    if verdict is None:
        # Who waits does so for longer than others take, so that no bits hang on who came first.
        verdict = known.alone(file, always, 2 * sum(SECONDS), lambda: _tried(kind, device, settings))
    if verdict.fit is None and not always and has_run(kind, device):
        log.warning("%s is used untried (%s): such a kernel has run on a GPU of this model", kind, verdict.said)
    return verdict


def has_run(kind: Kind, device: str) -> bool:
    """Whether a kernel of this kind ran right on a GPU of the device's model when the project measured there."""
    if not device.startswith("cuda"):
        return False
    ran = json.loads(files(__package__).joinpath(RAN).read_text(encoding="utf-8"))
    name = f"{kind.template} in {kind.kernel}, {kind.mask} mask, {kind.dtype}, head dim {kind.head_dim}"
    others = kind.long_schedule, kind.dropout, kind.function
    plain = kind.head_dim == kind.value_dim and others == (None,) * 3 and not (kind.bands or kind.sets)
    return plain and name in ran.get(torch.cuda.get_device_name(device), ())


def _tried(kind: Kind, device: str, settings: Config) -> Verdict:
    """By another process, once more with more time if that says nothing, and then by this one, where that is safe."""
    log.info("%s is used for the first time on this GPU: it is tried on a small attention", kind)
    if device.startswith("cuda"):
        _say_if_unmeasured(torch.cuda.get_device_name(device), settings.costs, kind.kernel)
    job = json.dumps({"kind": asdict(kind), "device": device, "settings": asdict(settings)})
    verdict = tried_by_another(job, SECONDS[0])
    if verdict.fit is None:
        log.info("the trial says nothing of the kernel (%s): it is tried once more", verdict.said)
        verdict = tried_by_another(job, SECONDS[1])
    if verdict.fit is None and _is_safe_here(device):
        log.info("no other process can try the kernel (%s): this one does", verdict.said)
        here = _tried_here(kind, device, settings)
        verdict = here if here.fit is not None else Verdict(None, f"{verdict.said}; here: {here.said}")
    return verdict


def _is_safe_here(device: str) -> bool:
    """Whether a trial disturbs nothing of this process: no CUDA graph is recorded, and memory is left."""
    if not device.startswith("cuda"):
        return True
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.mem_get_info(device)[0] >= ROOM


def _tried_here(kind: Kind, device: str, settings: Config) -> Verdict:
    """In a thread: what compiles now has its modes and its context in this one."""
    verdicts: list[Verdict] = []
    tried = pkgutil.resolve_name(f"{TRIAL}:tried")  # by name: it stands above
    thread = threading.Thread(target=lambda: verdicts.append(tried(kind, device, settings)))
    thread.start()
    thread.join()
    return verdicts[0] if verdicts else Verdict(None, "its thread ended")


@functools.cache
def _say_if_unmeasured(gpu: str, costs: str, kernel: str) -> None:
    """Once for a kernel, where the cost file of a GPU, if it has one, has estimates."""
    file = costs or next((key for key, known in DEVICES.items() if known.name == gpu), None)
    if file is None or has_estimates(file, kernel):
        log.warning("dash_inductor has not been measured on %s: what it says of times there is predicted", gpu)


@functools.cache
def _say_that_gluon_failed(unfit: str) -> None:
    """Once for a kind."""
    log.error("%s. Attentions for which it would be taken get Triton kernels, whose bits are others: please report it", unfit)


@functools.cache
def _say_that_gluon_is_not_tested() -> None:
    """Once."""
    log.warning("%s: attention on this GPU takes Triton kernels, whose bits are others, and which are slower", why_no_gluon())


@functools.cache
def _say_if_a_fence_is_missing(major: int, minor: int) -> None:
    """Once, of Triton's kernels on a Hopper with an old Triton (triton-lang/triton#9610).

    Values are nearly always right: a trial need not see it.
    """
    if major == 9 and TorchVersion(triton.__version__) < FENCED:
        log.warning(
            "Triton %s leaves out a fence on sm_%d%d, between asynchronous copies and the matrix instructions that read what was "
            "copied: bits could differ from run to run. Triton %s has it, which torch 2.13 brings",
            triton.__version__,
            major,
            minor,
            FENCED,
        )
