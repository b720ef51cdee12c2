"""A trial in a process of its own, which gets nothing of this one but the places of packages, and ends with it.

It says on its standard output how far it came. What ends before it launches a kernel says nothing of the kernel.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from ..config import PREFIX
from .known import Verdict

TRIAL = "dash_inductor.reproduce.trial"
STAGE, VERDICT = "stage: ", "verdict: "  # begin the trial's lines; libraries may print others
LAUNCHED = "launched"  # the last stage, before the first kernel
LINE = 4096  # letters of a line that are looked at
SECONDS_TO_END = 5
PACKAGES = ("dash_inductor", "dash_inductor.lowering", "dash_inductor.templates", "torch", "triton")
# Isolated mode leaves the working directory, the user's packages and PYTHON* variables out. Packages come from where this process
# has them; what those import comes from beside them, behind the standard library.
BOOT = """
import importlib.util, json, os, runpy, signal, sys, threading, time
places, folders, module, job = json.loads(sys.argv[1])
class Places:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in places:
            folder = places[name]
            return importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.meta_path.insert(0, Places)
sys.path += [folder for folder in folders if folder not in sys.path]
parent = os.getppid()
def end_with_parent():
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_parent, daemon=True).start()
sys.argv = [module, job]
runpy.run_module(module, run_name="__main__")
"""


def why_not() -> str | None:
    """Why no Python can be started from this one; None where it can."""
    if getattr(sys, "frozen", False):
        return "this is a frozen application, and to start its executable again would start the application"
    return None if sys.executable else "sys.executable does not say where Python is"


def command(job: str) -> list[str]:
    """What starts the trial of a job."""
    places = {name: str(Path(spec.origin).parent) for name in PACKAGES if (spec := find_spec(name)) and spec.origin}
    folders = [str(Path(place).parent) for name, place in places.items() if "." not in name]
    return [sys.executable, "-I", "-c", BOOT, json.dumps([places, folders, TRIAL, job])]


def environ() -> dict[str, str]:
    """This process's variables without the package's settings, which the job has; kernels are few, and compiled by the trial."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return kept | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def tried_by_another(job: str, seconds: float) -> Verdict:
    """What the trial of a job says, which gets so long."""
    if why := why_not():
        return Verdict(None, why)
    piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(command(job), env=environ(), start_new_session=True, **piped)  # type: ignore[call-overload]
    except OSError as error:
        return Verdict(None, str(error))
    said, errors = _Said(process.stdout), _Said(process.stderr)
    in_time = True
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.wait()
    said.wait()
    errors.wait()
    if in_time and process.returncode == 0 and said.verdict:
        return said.verdict
    status = f"the process that tried it ended with status {process.returncode}: {errors.last or 'without a word'}"
    ended = status if in_time else f"it did not end in {seconds:.0f} s"
    return Verdict(False if said.stage == LAUNCHED else None, f"{ended}, {said.stage}" if said.stage else ended)


class _Said:
    """Reads a pipe to its end, and keeps of it what counts, however much it is."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.stage = self.last = ""
        self.verdict: Verdict | None = None
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the pipe is closed, or not much longer: another process may have it still."""
        self._thread.join(SECONDS_TO_END)

    def _read(self, pipe: IO[bytes]) -> None:
        for read in iter(lambda: pipe.readline(LINE), b""):
            line = read.decode("utf-8", "replace").strip()
            self.last = line or self.last
            if line.startswith(STAGE):
                self.stage = line.removeprefix(STAGE)
            elif line.startswith(VERDICT):
                self.verdict = Verdict.of_text(line.removeprefix(VERDICT))
