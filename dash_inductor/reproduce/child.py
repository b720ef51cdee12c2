"""What a process started by `check` does: it runs the step, and writes a line for each run."""

from __future__ import annotations

import importlib.util
import json
import operator
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401 (before the step's module: it may switch on the package, and emulation)

from . import StepError, check, settings, step
from .function import load


def main(job: dict[str, Any]) -> None:
    """Run the job: `function` names the step, `trace` says to write operations down, `first` that no run came before."""
    check.in_child = True
    with open(job["results"], "a") as file:

        def tell(result: dict[str, Any]) -> None:
            print(json.dumps(result), file=file, flush=True)

        try:
            if job["settings"] is not None:
                settings.apply(job["settings"])
            function = _function(job["function"])
            if job["trace"]:
                tell({"traces": step.trace(function, job["runs"])})
                return
            for result in step.measure(function, job["runs"], Path(job["folder"]), first=job["first"]):
                tell(result)
            tell({"facts": settings.facts()})
        except StepError as error:
            tell({"error": str(error), "traceback": error.traceback})
        except (ValueError, OSError, SystemExit) as error:
            tell({"error": " ".join(str(error).split()), "traceback": traceback.format_exc()})


def _function(name: dict[str, str]) -> Callable[..., Any]:
    """The step: of a module, or of a script that was run itself."""
    if "file" not in name:
        return load(f"{name['module']}:{name['name']}")
    spec = importlib.util.spec_from_file_location("__mp_main__", name["file"])  # as multiprocessing names it
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = operator.attrgetter(name["name"])(module)
    return function
