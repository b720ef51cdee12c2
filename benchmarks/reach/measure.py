"""The row of a model in a case: attentions that its forward calls, and what the package decides about each."""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import torch

import dash_inductor
from dash_inductor.decision.stock import is_of_torch
from dash_inductor.explanation.report import Explanation

from .calls import counted
from .kernels import kernel_of, resolved, why_no_gluon
from .libraries import load, version
from .model import Model

GPU = "h100"
NOT_INSTALLED = "not installed"

Row = dict[str, Any]


def measured(model: Model, case: str, limit: float) -> Row:
    """The row, by a process that ends with it; of one that fails or takes longer than `limit` seconds it says so.

    The process is a fork of this one, so that a library is imported once. This one must not have computed with several threads.
    """
    start = time.perf_counter()
    library = model.needs or model.library
    row = {"library": model.library, "model": model.name, "case": case, "better": model.better, "version": version(library)}
    if row["version"] is None:
        return row | {"failure": NOT_INSTALLED}
    load(library)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(theirs, model, case))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(limit) else {"failure": f"took longer than {limit:g} s"}
    except EOFError:
        process.join()
        found = {"failure": f"its process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return row | found | {"seconds": round(time.perf_counter() - start, 1)}


def _send(connection: Connection, model: Model, case: str) -> None:
    try:
        found = figures(model, case)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        found = {"failure": f"{type(error).__name__}: {message}"}
    connection.send(found)


def figures(model: Model, case: str) -> Row:
    """The row's figures. Tensors have no values, unless the model asks for some, and are taken to be on the GPU."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with model.context():
        with torch.device("cpu" if model.needs_values else "meta"):
            call = model.make(case)
        call.module.train()
        with torch.autocast("cpu", torch.bfloat16), resolved():
            calls = counted(call)
            report = dash_inductor.explain(call.module, *call.args, device=GPU, **call.kwargs)
    return _of(report, calls.count) | {"written_out": dict(calls.written_out)}


def _of(report: Explanation, calls: int) -> Row:
    """Rewritten ones by kernel, declined ones by reason, with the remedy of each; those of other packages are among the rest."""
    decisions = [attention.decision for attention in report]
    declined = [decision for decision in decisions if not decision.rewritten]
    rewritten = [decision for decision in decisions if decision.rewritten]
    calls = max(calls, len(decisions))
    return {
        "calls": calls,
        "rewritten": len(rewritten),
        "kernels": dict(Counter(map(kernel_of, rewritten))),
        "not_gluon": dict(Counter(filter(None, map(why_no_gluon, rewritten)))),
        "declined": len(declined),
        "not_seen": calls - len(decisions),
        "reasons": dict(Counter(str(decision.reason) for decision in declined)),
        "remedies": {str(decision.reason): decision.remedy or "" for decision in declined},
        "left_to_stock": sum(decision.left_to is not None for decision in declined),
        "third_party": sum(not is_of_torch(decision.op) for decision in decisions),
        "stopped": report.stopped,
    }
