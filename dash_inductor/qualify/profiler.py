"""Nsight Compute's view of main kernels: where their warps wait, instruction by instruction, and its own account of the launch.

`ncu` starts a process that launches one kernel, and replays that launch for each group of counters.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..templates import gluon_kernel
from . import schedules
from .contenders import prepared
from .gpu_tests import NOT_AVAILABLE
from .rows import write
from .runner import child

SAMPLES, ACCOUNT = "loop_samples.csv", "profiler.txt"
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis_Tables", "SchedulerStats", "WarpStateStats", "SourceCounters")
LAUNCHES = 3  # of which the last is profiled: the first compiles
WITHOUT = "profiling was not run"  # begins the line where it cannot be
# Kernel -> contender, or "" for ours, and a pattern for the name of its main kernel.
KERNELS = {"ours": ("", "^sdpa_backward$"), "fa4-deterministic": ("fa4-deterministic", "BackwardSm90")}
SHAPES = ((128, "causal"), (64, "full"), (128, "full"))
ALL_SAMPLES, NO_SAMPLES = "Warp Stall Sampling (All Samples)", "Nsight Compute gave no samples"
STALLS = re.compile(r"(?:stall_|smsp__pcsamp_warps_issue_stalled_)(\w+)")  # columns, but for those of samples that did not issue
ABSOLUTE = re.compile(r"\b0x([0-9a-f]+)\b")


@dataclass(frozen=True)
class Sampled:
    """An instruction of a main loop. percent: of all samples of the kernel; place: from the loop's first instruction on."""

    kernel: str
    mask: str
    head_dim: int
    place: int
    instruction: str
    samples: int
    percent: float
    most_samples_wait_for: str


def run(folder: Path, seconds: float) -> int:
    """Appends to SAMPLES and ACCOUNT; NOT_AVAILABLE where there is no ncu or it may not profile, 1 if a kernel has no samples."""
    ncu, deadline, wrong = shutil.which("ncu"), time.monotonic() + seconds, False
    if ncu is None:
        print(f"{WITHOUT}: there is no program ncu (Nsight Compute) on the path")
        return NOT_AVAILABLE
    for head_dim, mask in SHAPES:
        for kernel, (contender, pattern) in KERNELS.items():
            name = f"{kernel}, d = {head_dim}, {mask}"
            if time.monotonic() >= deadline:
                print(f"{name}: not run: the time limit")
                continue
            command = child("launch", head_dim=head_dim, mask=mask, contender=contender, launches=LAUNCHES)
            try:
                rows, account = profiled(ncu, command, pattern)
            except PermissionError as error:
                print(f"{WITHOUT}: {error}")
                return NOT_AVAILABLE
            except (ValueError, subprocess.SubprocessError) as error:
                print(f"{name}: {error}")
                wrong = wrong or kernel == "ours"
                continue
            found = main_loop(rows, kernel, mask, head_dim)
            write(folder / SAMPLES, Sampled, found, "a")
            with (folder / ACCOUNT).open("a", encoding="utf-8") as file:
                file.write(f"{name}\n{account}\n")
            most = sorted(found, key=lambda each: -each.samples)[:3]
            print(f"{name}: {'; '.join(f'{each.percent:.1f} % at {each.instruction}' for each in most)}")
    return int(wrong)


def launch(head_dim: int, mask: str, contender: str, launches: int) -> int:
    """Launches ours, without Inductor, or the backward of a contender; 1 where that is not there."""
    if contender:
        backward = prepared(contender, schedules.shape_of(head_dim, mask), "cuda").launch
        for _ in range(launches):
            backward()
    else:
        _, operands = next(schedules.schedules(schedules.resolution(head_dim, mask), "cuda"))
        for _ in range(launches):
            schedules.launched(gluon_kernel(), operands)
    torch.cuda.synchronize()
    return 0


def profiled(ncu: str, command: Sequence[str], pattern: str) -> tuple[list[dict[str, str]], str]:
    """The rows of Nsight Compute's source page, SASS alone, and its details page, of the last of LAUNCHES.

    Raises:
        PermissionError: who runs this may not read the GPU's counters.
        ValueError: there is no such kernel, or the process failed; the message is the last line of what was said.
    """
    with tempfile.TemporaryDirectory() as temporary:
        report = str(Path(temporary, "report.ncu-rep"))
        sections = [word for section in SECTIONS for word in ("--section", section)]
        chosen = ["--kernel-name", f"regex:{pattern}", "--launch-skip", str(LAUNCHES - 1), "--launch-count", "1"]
        done = subprocess.run([ncu, *sections, *chosen, "--export", report, *command], capture_output=True, text=True)
        said = done.stdout + done.stderr
        if "ERR_NVGPUCTRPERM" in said:
            raise PermissionError("the GPU's counters may be read by its administrator alone (ERR_NVGPUCTRPERM)")
        if not Path(report).exists():
            raise ValueError(next(reversed(said.strip().splitlines()), "ncu said nothing"))
        page, account = (_page(ncu, report, *asked) for asked in (("source", "--csv", "--print-source", "sass"), ("details",)))
    lines = page.splitlines()
    begin = next((n for n, line in enumerate(lines) if '"Source"' in line), len(lines))  # below the kernel's name
    return list(csv.DictReader(lines[begin:])), account


def _page(ncu: str, report: str, page: str, *options: str) -> str:
    return subprocess.run([ncu, "--import", report, "--page", page, *options], capture_output=True, text=True, check=True).stdout


def main_loop(rows: Sequence[Mapping[str, str]], kernel: str, mask: str, head_dim: int) -> list[Sampled]:
    """The instructions of the innermost loop that has matmuls; of several that with most samples.

    Raises:
        ValueError: there are no samples, or there is no such loop.
    """
    samples = [_count(row.get(ALL_SAMPLES, "")) for row in rows]
    total = sum(samples)
    if not total:
        raise ValueError(NO_SAMPLES)
    sources, addresses = [row["Source"].strip() for row in rows], [int(row["Address"], 16) for row in rows]
    loops = []
    for end, source in enumerate(sources):
        target = ABSOLUTE.search(source) if "BRA" in source else None
        begin = addresses.index(int(target[1], 16)) if target and int(target[1], 16) in addresses else end + 1
        if begin <= end and any("HGMMA" in each for each in sources[begin:end]):
            loops.append(range(begin, end + 1))
    innermost = [
        loop for loop in loops if not any(other != loop and other[0] >= loop[0] and other[-1] <= loop[-1] for other in loops)
    ]
    if not innermost:
        raise ValueError("no loop of the kernel has matmuls")
    loop = max(innermost, key=lambda each: sum(samples[n] for n in each))
    found = []
    for place, n in enumerate(loop):
        waits = {
            stall[1]: _count(value) for name, value in rows[n].items() if (stall := STALLS.fullmatch(name)) and "issued" not in name
        }
        most = max(waits, key=waits.__getitem__) if samples[n] and waits else ""
        percent = round(100 * samples[n] / total, 2)
        found.append(Sampled(kernel, mask, head_dim, place, sources[n], samples[n], percent, most))
    return found


def _count(text: str) -> int:
    return int(float(text.replace(",", ""))) if re.fullmatch(r"[\d,]+(\.\d+)?", text) else 0
