"""On what a table was measured."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "environment.json"
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "power.draw", "temperature.gpu", "utilization.gpu")


@dataclass(frozen=True)
class Environment:
    """As rows say it."""

    gpu: str
    sms: int
    driver: str
    torch: str
    triton: str


def environment() -> Environment:
    """Of the current CUDA device."""
    import torch
    import triton

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Environment(
        gpu=properties.name,
        sms=properties.multi_processor_count,
        driver=nvidia_smi("driver_version")[0],
        torch=torch.__version__,
        triton=triton.__version__,
    )


def everything() -> dict[str, Any]:
    """What may matter beside, too: sizes in bytes, clocks in MHz, power in W, and a digest of the package's sources."""
    import torch

    from dash_inductor.first_use.machine import sources_digest

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        **asdict(environment()),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Prints everything that may matter and writes it down; the exit code is 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention.environment", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder of {FILE}")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU", file=sys.stderr)
        return 2
    found = everything()
    for name, value in found.items():
        print(f"{name}: {value}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / FILE).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
