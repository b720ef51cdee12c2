"""Whether a kernel may be used: what its trial said, on this machine or now."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.torch_version import TorchVersion

from ..config import ALWAYS, AUTO, PREFIX, TRITON, Config
from ..devices import DEVICES, target
from ..devices.cost_files import has_estimates
from ..resolve import Resolution
from ..templates import why_no_gluon
from .kind import Kind, kinds_of, settings_for
from .machine import machine

TRIAL = "dash_inductor.reproduce.trial"
VERDICT = "verdict: "  # begins the line of a trial that says what came out; libraries may print others
MOST_SECONDS = 180  # importing torch and compiling takes most of it; a wait that never ends is a fault after ten

FENCED = "3.7.1"  # the first Triton in which a Hopper's wgmma sees what cp.async has copied

log = logging.getLogger("dash_inductor")
is_trial: ContextVar[bool] = ContextVar("is_trial", default=False)  # whether what is compiled now is compiled to be tried


class UnfitKernelError(RuntimeError):
    """A kernel whose trial failed on this GPU."""


@dataclass(frozen=True)
class Verdict:
    """fit: whether the kernel may be used; None where nothing of it ran. said: what was seen.

    judged: whether its gradients were compared. Other processes rely on that alone: a machine that was too slow, or out of memory,
    says nothing of the kernel.
    """

    fit: bool | None
    said: str
    judged: bool = False


def require_fit(resolution: Resolution, device: torch.device) -> Resolution:
    """The resolution, if its kernels are known to work on a device that is there, or turn out to do so now.

    Raises:
        UnfitKernelError: one of them does not.
    """
    if not target.is_there(device):
        return resolution
    guard, kinds = resolution.settings.guard, kinds_of(resolution)
    if device.type == "cuda" and any(kind.kernel == TRITON for kind in kinds):
        _say_if_a_fence_is_missing(*torch.cuda.get_device_capability(device))
    if resolution.lacks_gluon:
        _say_that_gluon_is_not_tested()
    if guard == ALWAYS or (guard == AUTO and device.type == "cuda"):
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        name = str(torch.device(device.type, index))
        for kind in kinds:
            verdict = _verdict(kind, name, settings_for(kind, resolution), guard == ALWAYS)
            if not verdict.fit:
                instead = "" if kind.kernel == TRITON else f"; kernel={TRITON!r} takes another kernel"
                raise UnfitKernelError(f"{kind} failed its trial on this GPU: {verdict.said}{instead}")
    return resolution


@functools.cache
def _verdict(kind: Kind, device: str, settings: Config, always: bool) -> Verdict:
    file = _file(kind, device)
    if not always and (known := _read(file)):
        return known
    log.info("%s is used for the first time on this GPU: it is tried on a small attention", kind)
    if device.startswith("cuda"):
        _say_if_unmeasured(torch.cuda.get_device_name(device), settings.costs, kind.kernel)
    verdict = _tried_by_another(kind, device, settings)
    if verdict.fit is None:
        log.info("no other process can use the GPU (%s): this one tries the kernel", verdict.said)
        verdict = _tried_here(kind, device, settings)
    if verdict.judged:
        _write(file, verdict)
    return verdict


@functools.cache
def _say_if_unmeasured(gpu: str, costs: str, kernel: str) -> None:
    """Once for a kernel, where the cost file of a GPU, if it has one, has estimates."""
    file = costs or next((key for key, known in DEVICES.items() if known.name == gpu), None)
    if file is None or has_estimates(file, kernel):
        log.warning("dash_inductor has not been measured on %s: what it says of times there is predicted", gpu)


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


def _file(kind: Kind, device: str) -> Path:
    named = json.dumps([machine(torch.device(device)), asdict(kind)])
    return Path(cache_dir(), "dash_inductor", "trials", f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json")


def _read(file: Path) -> Verdict | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Verdict(bool(found["fit"]), str(found["said"]), judged=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, verdict: Verdict) -> None:
    """For other processes, several of which may write at once; nobody has to be able to."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
            json.dump(asdict(verdict), new)
        os.replace(new.name, file)
    except OSError as error:
        log.warning("what came out of a trial cannot be kept: %s; each process tries its kernels anew", error)


def _tried_by_another(kind: Kind, device: str, settings: Config) -> Verdict:
    job = json.dumps({"kind": asdict(kind), "device": device, "settings": asdict(settings)})
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", TRIAL, job], env=environ, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict(False, f"it did not end in {MOST_SECONDS} s")
    except OSError as error:
        return Verdict(None, str(error))
    verdict = next((line for line in done.stdout.splitlines() if line.startswith(VERDICT)), None)
    if done.returncode or verdict is None:
        last = next(reversed(done.stderr.splitlines()), "without a word")
        return Verdict(False, f"the process that tried it ended with status {done.returncode}: {last}")
    return Verdict(**json.loads(verdict.removeprefix(VERDICT)))


def _tried_here(kind: Kind, device: str, settings: Config) -> Verdict:
    """In a thread: what compiles now has its modes and its context in this one."""
    verdicts: list[Verdict] = []
    tried = pkgutil.resolve_name(f"{TRIAL}:tried")  # by name: it stands above
    thread = threading.Thread(target=lambda: verdicts.append(tried(kind, device, settings)))
    thread.start()
    thread.join()
    return verdicts[0] if verdicts and verdicts[0].fit is not None else Verdict(False, "it could not be tried")
