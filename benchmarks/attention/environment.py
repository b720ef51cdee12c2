"""On what a table was measured."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict, dataclass


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
        driver=nvidia_smi("driver_version"),
        torch=torch.__version__,
        triton=triton.__version__,
    )


def sm_mhz() -> int | None:
    """The SM clock now; None where nvidia-smi does not say."""
    text = nvidia_smi("clocks.sm")
    return int(text) if text.isdecimal() else None


def nvidia_smi(query: str) -> str:
    """One figure of the first GPU, without its unit; empty where nvidia-smi is missing or does not know."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(said.splitlines()), "").strip()


def main() -> None:
    """Prints everything that may matter, for the head of a log."""
    import torch

    print(f"python: {platform.python_version()}, {platform.platform()}")
    if not torch.cuda.is_available():
        print(f"torch: {torch.__version__}, no GPU")
        return
    for name, value in asdict(environment()).items():
        print(f"{name}: {value}")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    print(f"cuda: {torch.version.cuda}, cudnn: {torch.backends.cudnn.version()}")
    print(f"memory: {properties.total_memory >> 20} MiB, L2: {properties.L2_cache_size >> 20} MiB")
    for query in ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "power.draw", "temperature.gpu", "utilization.gpu"):
        print(f"{query}: {nvidia_smi(query)}")


if __name__ == "__main__":
    main()
