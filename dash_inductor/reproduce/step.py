"""A training step: found by name, run, and what it leaves compared with the first run's."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..import_hook import has_triton
from . import StepError, compare, settings, source, split
from .compiled import recording

Step = Callable[[], Any]
RETURN = "step must return the model whose gradients count, or a dict of tensors"
NAMES = "names.json"


def run(step: Step) -> dict[str, Tensor | None]:
    """One step: its gradients by parameter, or its tensors by name.

    Raises:
        StepError: it raises, or returns something else.
    """
    try:
        returned = step()
    except (Exception, SystemExit) as error:
        message = str(error).strip().splitlines() or [""]
        line = source.of_error(error)
        where = f" at {line}" if line else ""
        raise StepError(f"step raised {type(error).__name__}{where}: {message[0]}", traceback.format_exc()) from error
    return dict(_tensors(returned))


def _tensors(returned: Any) -> Iterator[tuple[str, Tensor | None]]:
    if isinstance(returned, nn.Module):
        parameters = [(name, each) for name, each in returned.named_parameters() if each.requires_grad]
        if all(parameter.grad is None for _, parameter in parameters):
            raise StepError(
                f"step returned a {type(returned).__name__} without gradients: call backward() in step, "
                "and leave out optimizer.zero_grad() after it"
            )
        for name, parameter in parameters:
            yield from _pieces(name.replace("_orig_mod.", ""), parameter.grad)
        return
    if not isinstance(returned, Mapping):
        raise StepError(f"{RETURN}; it returned {_kind(returned)}")
    if not returned:
        raise StepError(f"{RETURN}; it returned an empty dict")
    for name, tensor in returned.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise StepError(f"{RETURN}; its {name!r} is {_kind(tensor)}")
        yield from _pieces(str(name), tensor)


def _pieces(name: str, tensor: Tensor | None) -> Iterator[tuple[str, Tensor | None]]:
    """What one consists of: of a distributed tensor this process's part, of a sparse one indices and values."""
    if tensor is not None and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor is None:
        yield name, None
    else:
        yield from ((f"{name}, {part}" if part else name, each) for part, each in compare.parts(tensor).items())


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"one of type {type(value).__name__}"


def save(tensors: Mapping[str, Tensor | None], folder: Path) -> None:
    """Write what the first run left, a file for each tensor."""
    for number, tensor in enumerate(tensors.values()):
        torch.save(None if tensor is None else tensor.detach().cpu().clone(), folder / f"{number}.pt")
    (folder / NAMES).write_text(json.dumps(list(tensors)))


def differences(tensors: Mapping[str, Tensor | None], folder: Path) -> dict[str, compare.TensorDifference]:
    """By name, how tensors differ from those that were saved; one of them at a time is in memory."""
    saved = {name: number for number, name in enumerate(json.loads((folder / NAMES).read_text()))}
    found = {}
    for name in dict.fromkeys([*saved, *tensors]):
        if name not in saved or name not in tensors:
            which = "the first run" if name not in tensors else "this run"
            found[name] = compare.TensorDifference(f"only {which} has it")
        elif (each := compare.difference(torch.load(folder / f"{saved[name]}.pt", mmap=True), tensors[name])) is not None:
            found[name] = each
    return found


def results(step: Step, job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the step as often as `runs` of the job says.

    Yields for each run how many tensors it left, how many differ, and how the first of them does; at last `of_process`. Under
    `trace` the operations of all runs alone; under `split` what `split` compares, in the place of a run.

    Under `first` nothing ran before: what the first run leaves is saved in `folder`, which has the first run's tensors otherwise.
    """
    if job["trace"]:
        yield {"traces": trace(step, job["runs"])}
        return
    folder = Path(job["folder"])
    if job["split"]:
        run(step)
        yield split.of_this_process()
        yield of_process()
        return
    for number in range(job["runs"]):
        tensors = run(step)
        if job["first"] and number == 0:
            save(tensors, folder)
            found = {}
        else:
            found = differences(tensors, folder)
        parameter, difference = next(iter(found.items()), (None, None))
        yield {
            "tensors": len(tensors),
            "differing": len(found),
            "parameter": parameter,
            "difference": difference and asdict(difference),
        }
    yield of_process()


def of_process() -> dict[str, Any]:
    """What a report knows of the process: facts for its hints, and the manifest, None where there is no Triton."""
    written = None
    if has_triton():
        from ..contract import manifest

        written = manifest().to_json()
    return {"facts": settings.facts(), "manifest": written}


def trace(step: Step, runs: int) -> list[list[dict[str, Any]]]:
    """The operations of each of so many runs, which are compiled anew."""
    traces = []
    with recording() as recorder:
        for _ in range(runs):
            run(step)
            traces.append([asdict(operation) for operation in recorder.operations])
            recorder.operations.clear()
    return traces
