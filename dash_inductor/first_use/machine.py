"""What caches and verdicts hold for: sources, versions, and the GPU with its driver."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

import torch
import triton

PACKAGES = ("dash_inductor", "dash_inductor.lowering", "dash_inductor.templates")
SUFFIXES = (".py", ".jinja", ".toml")


@functools.cache
def sources_digest() -> str:
    """SHA-256 over every source file of the three packages."""
    roots = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None
        roots.append(Path(next(iter(spec.submodule_search_locations))))
    return digest_of(roots)


def digest_of(roots: list[Path]) -> str:
    """SHA-256 over the names and bytes of the source files under `roots`."""
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES):
            for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
    return digest.hexdigest()


def machine(device: str) -> tuple[str, ...]:
    """What a verdict holds for: versions, and the driver and model of a GPU."""
    gpu: tuple[str, ...] = (device,)
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        gpu = properties.name, str(properties.multi_processor_count), driver()
    return sources_digest(), torch.__version__, triton.__version__, *gpu


@functools.cache
def driver() -> str:
    """The NVIDIA driver's version, as it says itself; "" where there is none."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return ""
