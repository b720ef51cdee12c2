"""Processes that run a step: started with the user's environment, watched, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import StepError

# A process has the path of this one, the package itself included, and its arguments. The module named in the job has main(job).
PROGRAM = """
import importlib, json, sys
with open(sys.argv[1]) as file:
    job = json.load(file)
sys.path[:], sys.argv = job["path"], job["argv"]
importlib.import_module(job["main"]).main(job)
"""
HOG = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("busy", flush=True)
while True:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
"""
LAST_LINES = 30  # of what a process printed, in a traceback


def run(job: Mapping[str, Any], environ: Mapping[str, str], folder: Path, timeout: float | None) -> list[dict[str, Any]]:
    """What a new process wrote down, a dict for each line.

    Raises:
        StepError: it wrote an error, was killed, or took longer than `timeout` seconds.
    """
    results, log = folder / "results.jsonl", folder / "output.txt"
    results.write_text("")
    (folder / "job.json").write_text(json.dumps({**job, "path": sys.path, "argv": sys.argv, "results": str(results)}))
    command = [sys.executable, "-c", PROGRAM, str(folder / "job.json")]
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        status = child.wait(timeout)
    except subprocess.TimeoutExpired:
        raise StepError(
            f"a process that runs step took longer than {timeout:g} seconds, and was ended: give it more "
            "(--timeout SECONDS), or find where it hangs (--traceback shows what it printed last)",
            _last(log),
        ) from None
    finally:
        _end(child)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    if found and "error" in found[-1]:
        raise StepError(found[-1]["error"], found[-1]["traceback"])
    if status != 0:
        raise StepError(f"a process that runs step {_death(status)}; --traceback shows what it printed last", _last(log))
    return found


def _death(status: int) -> str:
    if status >= 0:
        return f"ended with status {status} before step returned"
    name = signal.Signals(-status).name
    reason = {"SIGKILL": ", as the kernel does when memory runs out", "SIGSEGV": ", a fault in native code"}.get(name, "")
    return f"was killed by {name}{reason}"


def _last(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process, with those that it started, such as Inductor's workers."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextmanager
def busy_gpu() -> Iterator[None]:
    """Another process multiplies matrices on the GPU meanwhile."""
    hog = subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert hog.stdout is not None
        if not hog.stdout.readline():
            raise StepError(
                "no second process can use the GPU, which is in exclusive mode or full: leave out the kind busy (--kinds)"
            )
        yield
    finally:
        _end(hog)
