"""On what a table was measured."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

from ..first_use.machine import sources_digest

FILE = "environment.json"
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "power.draw", "temperature.gpu", "utilization.gpu")


def environment() -> dict[str, Any]:
    """What a `Row` says of the current CUDA device: its name, SMs, driver, and versions."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "driver": nvidia_smi("driver_version")[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def write(folder: Path) -> dict[str, Any]:
    """Writes that into FILE of a folder, and what may matter beside: sizes in bytes, clocks in MHz, power in W, and a digest of the
    package's sources. Returns all of it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {
        **environment(),
        "arch": properties.major * 10 + properties.minor,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "sources": sources_digest(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **dict(zip(CLOCKS, nvidia_smi(*CLOCKS), strict=True)),
    }
    (folder / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def read(folder: Path) -> dict[str, Any]:
    """What `write` wrote; {} where there is nothing."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def sm_mhz() -> int | None:
    """The SM clock now; None where nvidia-smi does not say."""
    (text,) = nvidia_smi("clocks.sm")
    return int(text) if text.isdecimal() else None


def nvidia_smi(*queries: str) -> list[str]:
    """Figures of the first GPU, without their units; empty where nvidia-smi is missing or does not know."""
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [""] * len(queries)
    found = [part.strip() for part in next(iter(said.splitlines()), "").split(",")]
    return found if len(found) == len(queries) else [""] * len(queries)
