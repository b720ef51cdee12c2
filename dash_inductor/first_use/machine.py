"""What caches and verdicts hold for: sources, versions, and the GPU with its driver."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

import torch
import triton

PACKAGES = ("dash_inductor", "dash_inductor.lowering", "dash_inductor.templates")
SUFFIXES = (".py", ".jinja", ".toml", ".json")


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


def machine(device: torch.device) -> dict[str, str]:
    """What a verdict holds for: versions, and the model, the SMs and the driver of a GPU."""
    versions = {"dash_inductor": sources_digest()[:16], "torch": torch.__version__, "triton": triton.__version__}
    if device.type != "cuda":
        return versions | {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return versions | {"device": properties.name, "SMs": str(properties.multi_processor_count), "driver": driver()}


@functools.cache
def driver() -> str:
    """The NVIDIA driver's version, as it says itself; "" where there is none."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return ""
