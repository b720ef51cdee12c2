"""What a process started by `check` does: it runs the step, and writes a line for each run."""

from __future__ import annotations

import functools
import importlib.util
import json
import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch  # noqa: F401 (before the step's module: it may switch on the package, and emulation)

from . import StepError, check, settings, step
from .function import load


def main(job: dict[str, Any]) -> None:
    """Run the job: `function` names the step, which gets `arguments`; `trace` says to write operations down, `first` that no run
    came before."""
    check.in_child = True
    with open(job["results"], "a") as file:
        for result in _results(job):
            print(json.dumps(result), file=file, flush=True)


def _results(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        if job["settings"] is not None:
            settings.apply(job["settings"])
        yield from step.results(functools.partial(_function(job["function"]), **job["arguments"]), job)
    except StepError as error:
        yield {"error": str(error), "traceback": error.traceback}
    except (ValueError, OSError, SystemExit) as error:
        yield {"error": " ".join(str(error).split()), "traceback": traceback.format_exc()}


def _function(name: dict[str, str]) -> Callable[..., Any]:
    """The step: of a module, or of a script that was run itself."""
    if "file" not in name:
        return load(f"{name['module']}:{name['name']}")
    spec = importlib.util.spec_from_file_location("__mp_main__", name["file"])  # as multiprocessing names it
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)
    return operator.attrgetter(name["name"])(module)  # type: ignore[no-any-return]
