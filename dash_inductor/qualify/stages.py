"""The stages of a qualification, and how one is run: a process with a time limit, its output in a log, its findings in a folder.

A folder is flat, but for its report:

    environment.json  GPU, versions, clocks            summary.txt         what became of each stage
    kernels.jsonl     whether our kernels are right    log.txt             all output
    attention.csv     times, told apart by `run`       red_throughput.csv  additions in L2
    gluon_tables.csv  the Gluon kernel by schedule     kernel_times.csv    each kernel of a backward
    loop_samples.csv  main loops under Nsight Compute  profiler.txt         its account of the launches
    overlaps.csv      work beside matmuls, in cycles   marks.csv            chains, by the GPU's clock
    training.csv      steps of a layer, seconds of a trial
    timings.jsonl     launches for the cost file       costs.toml          a cost file fitted to them
    report/           pictures, and all of this in one page
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from ..config import PREFIX, variable
from . import gpu_tests
from .gpu_tests import NOT_AVAILABLE
from .runner import Job, child
from .shapes import KINDS, TUNED

BUDGET = 540  # seconds of a part of a full run
DEFAULT_BUDGET = 180
GRACE = 5  # seconds that a stage has to end after its limit
MOST_JOBS = 14
SUMMARY, LOG = "summary.txt", "log.txt"
ROOT = Path(__file__).parents[2]
OK, NO_TESTS, TIME_LIMIT, INTERRUPTED = "ok", "not available", "time limit", "interrupted"
SAID = {0: OK, NOT_AVAILABLE: NO_TESTS, gpu_tests.TIME_LIMIT: TIME_LIMIT}  # of exit codes


@dataclass(frozen=True)
class Stage:
    """seconds: its limit; a process takes some of it to import torch, before its own time, in `arguments`, begins. task, arguments:
    of `child.py`; `job` is what the task "measure" takes."""

    name: str
    seconds: int
    purpose: str
    task: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    job: Job | None = None
    part: int = 0


def _measured(name: str, seconds: int, purpose: str, within: float, part: int = 0, **job: Any) -> Stage:
    """A stage that measures backwards; it begins nothing after `within` seconds."""
    return Stage(name, seconds, purpose, "measure", job=Job(label=name, seconds=within, **job), part=part)


GLANCE = "ours,ours-triton,ours-gluon,sdpa-flash,sdpa-cudnn,flex,fa*"
ENVIRONMENT = Stage("environment", 20, "GPU, versions, clocks", "environment")
PLOTS = Stage("plots", 10, "pictures and a report of this part", "plots")
COSTS = Stage("costs", 165, "constants of the cost model", "costs", {"seconds": 150})
DEFAULT = (
    ENVIRONMENT,
    Stage("kernels", 70, "gradients against float64, equal bits, beside other work", "kernels", {"seconds": 55}),
    _measured("glance", 75, "ours beside stock and what is installed", 60, contenders=GLANCE, rounds=10),
)
# Three parts that need nothing from each other, most important first, for a GPU that is there for a short time.
FULL = (
    replace(ENVIRONMENT, part=1),
    Stage("kernels", 170, "gradients against float64, equal bits in up to 1,000 launches", "kernels", {"seconds": 155}, part=1),
    _measured(
        *("kinds", 195, "FlexAttention by mask and function, fp16: one pass, two, Gluon, stock", 180, 1),
        rounds=8, shapes="d128-causal-8192," + ",".join(shape.name for shape in KINDS),
        contenders="flex,ours-triton,ours-two-pass,ours-gluon",
    ),
    _measured("glance", 115, "five shapes against the stock kernels", 100, 1, contenders=GLANCE, rounds=10),
    replace(PLOTS, part=1),
    replace(ENVIRONMENT, part=2),
    Stage("schedules", 120, "the Gluon kernel alone, by every schedule", "schedules", {"seconds": 95}, part=2),
    Stage("tests", 190, "the repository's tests of a GPU", "tests", {"seconds": 165}, part=2),
    Stage("additions", 40, "what L2 takes", "additions", part=2),
    Stage("kernel times", 40, "each kernel of a backward", "kernel_times", {"seconds": 25}, part=2),
    _measured("order", 40, "what determinism costs", 30, 2, tuned=True, shapes=TUNED, contenders="ours-unordered"),
    _measured(
        *("two-pass", 35, "one pass or two", 23, 2),
        rounds=10, shapes="d64-causal-8192,d128-*-8192,d256-causal-8192,vit-h-14,qwen2.5-7b-alone",
        contenders="ours,ours-one-pass,ours-two-pass",
    ),
    replace(PLOTS, part=2),
    replace(ENVIRONMENT, part=3),
    Stage("profile", 75, "Nsight Compute: where warps wait, ours and FlashAttention 4's", "profile", {"seconds": 55}, part=3),
    Stage("marks", 25, "the clock at the ends of chains", "marks", part=3),
    Stage("overlaps", 25, "work on shared memory beside matmuls", "overlaps", part=3),
    Stage("training", 80, "a layer's training step, by CUDA graphs and by lengths too", "training", {"seconds": 65}, part=3),
    _measured(
        *("lengths", 110, "512 to 32k tokens, varlen, shared heads, other head dims", 95, 3),
        shapes="d128-causal-*,llama3-8b-packed,mistral-7b-v0.3,causal:2x20x20x8192x96,d256-causal-8192", rounds=10,
        contenders="ours,ours-varlen,varlen*,sdpa-flash,flex,fa*",
    ),
    Stage("costs", 85, "constants of the cost model", "costs", {"seconds": 70}, part=3),
    _measured(
        *("table", 35, "all shapes, ours against the others", 20, 3), shapes="*", rounds=15, contenders="ours,sdpa-*,flex,fa*"
    ),
    _measured(
        *("tuning", 25, "stages, release positions, tiles", 15, 3),
        tuned=True, shapes=TUNED, contenders="ours-*-stages,ours-release-*,ours-two-per-sm,ours-half-q",
    ),
    replace(PLOTS, part=3),
)  # fmt: skip


def seconds_of(stages: Sequence[Stage]) -> int:
    """The most that they take, one after another."""
    return sum(stage.seconds + GRACE for stage in stages)


def with_spare(stage: Stage, seconds: int) -> Stage:
    """The stage with more time, which those before it left."""
    arguments, job = dict(stage.arguments), stage.job
    if "seconds" in arguments:
        arguments["seconds"] += seconds
    if job is not None:
        job = replace(job, seconds=job.seconds + seconds)
    return replace(stage, seconds=stage.seconds + seconds, arguments=arguments, job=job)


@dataclass(frozen=True)
class Outcome:
    """What became of a stage. said: OK, NO_TESTS, TIME_LIMIT, INTERRUPTED, or that it failed."""

    stage: str
    said: str
    seconds: int
    code: int | None = None


def run(stage: Stage, folder: Path, environ: Mapping[str, str], jobs: int, echo: Callable[[str], None]) -> Outcome:
    """Runs a stage, and notes what became of it in SUMMARY. `echo` gets the lines that it prints.

    It is interrupted at its limit, and killed GRACE seconds later, with all that it has started.
    """
    arguments: dict[str, Any] = {**stage.arguments, "folder": str(folder)}
    if stage.job is not None:
        arguments["job"] = asdict(replace(stage.job, jobs=jobs))
    if stage.task in ("kernels", "costs"):
        arguments["jobs"] = jobs
    started = time.monotonic()
    with (folder / LOG).open("a", encoding="utf-8") as log:
        print(f"=== stage {stage.name} (at most {stage.seconds} s): {stage.purpose}", file=log, flush=True)
        said, code = _ended(child(stage.task, **arguments), stage.seconds, environ, log, echo)
    outcome = Outcome(stage.name, said, round(time.monotonic() - started), code)
    with (folder / SUMMARY).open("a", encoding="utf-8") as file:
        print(f"stage {outcome.stage}: {outcome.said}, {outcome.seconds} s", file=file)
    return outcome


def _ended(
    command: list[str], seconds: float, environ: Mapping[str, str], log: IO[str], echo: Callable[[str], None]
) -> tuple[str, int | None]:
    process = subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    )
    assert process.stdout
    reader = threading.Thread(target=_passed_on, args=(process.stdout, log, echo), daemon=True)
    reader.start()
    try:
        code = process.wait(seconds)
        reader.join(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as ended:
        _end(process)
        reader.join(GRACE)
        return (INTERRUPTED if isinstance(ended, KeyboardInterrupt) else TIME_LIMIT), None
    return SAID.get(code, f"failed (exit code {code})"), code


def _passed_on(lines: IO[str], log: IO[str], echo: Callable[[str], None]) -> None:
    for line in lines:
        print(line, end="", file=log, flush=True)
        echo(line.rstrip("\n"))


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it has started, which is of its session."""
    for sent in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def environ_of(outer: Mapping[str, str], caches: Path) -> dict[str, str]:
    """The variables of every stage: caches of this run alone, no emulation, and of the settings the cost file alone."""
    ours = {name for name in outer if name == PREFIX or name.startswith(f"{PREFIX}_")} - {variable("costs")}
    kept = {name: value for name, value in outer.items() if name not in ours and name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # strict deterministic mode asks for it
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }


def jobs_of(compute_mode: str) -> int:
    """Processes that may use the GPU at a time, by what nvidia-smi calls its compute mode."""
    return 1 if compute_mode.startswith("Exclusive") else max(1, min(MOST_JOBS, os.cpu_count() or 1))
