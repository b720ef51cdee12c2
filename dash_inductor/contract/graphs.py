"""The graphs that this process took into use, as a manifest has them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PureWindowsPath
from typing import Any

from torch._inductor.codecache import PyCodeCache

from ..decision import NO_BITS, Decision
from ..first_use import verdict
from ..first_use.kind import Kind
from ..schedule.choice import RunTimeChoice
from ..schedule.packing import FAMILY_CODES
from ..text import digest

MOST = 10_000  # graphs that are kept
Graph = dict[str, Any]
LEFT_OUT = (*NO_BITS, "workspace_bytes", "reads_in_place", "sms")  # of a decision; a fact has the SMs, where bits hang on them
# What differs between equal graphs: paths of files, the index of a GPU, and addresses in comments, which are left out.
COMMENT = re.compile(r"^[ \t]*(?:#|//)(?: .*)?\n|  (?:#|//) .*$", re.MULTILINE)
WITHOUT = (
    (re.compile(r"""(["'])(?:/|[A-Za-z]:\\)[^"'\n]*\1"""), "<path>"),
    (re.compile(r"cuda:\d+"), "cuda"),
    (re.compile(r"(type='cuda', index=)\d+"), r"\1<index>"),
    (re.compile(r"\b((?:raw_)?stream|(?:_DeviceGuard|set_device|get_raw_stream|cuda\.device)\()\d+"), r"\1<index>"),
)

_graphs: dict[str, Graph] = {}
_lock = threading.Lock()  # threads may compile at once


def normalised(code: str) -> str:
    """Generated code without comments, paths and the index of the GPU: equal graphs of two ranks have it in common."""
    code = COMMENT.sub("", code)
    for pattern, instead in WITHOUT:
        code = pattern.sub(instead, code)
    return code


def graph_of(code: str, found: Sequence[Decision], name: str, guards: str | None) -> Graph:
    """What a manifest says of a graph. name: torch's number of it, of what it was compiled, and its direction. guards: on sizes."""
    return {
        "graph": name,
        "joint": next((decision.joint for decision in found if decision.joint), ""),
        "code": digest(normalised(code)),
        "guards": sorted(guards.split(" and ")) if guards else [],
        "attentions": [_attention(decision) for decision in found],
    }


def _attention(decision: Decision) -> dict[str, Any]:
    values = {name: value for name, value in asdict(decision).items() if name not in LEFT_OUT and value not in (None, "", ())}
    file, _, line = (decision.source or "").rpartition(":")
    kinds = [Kind.of_text(text) for text in decision.kinds]
    trials = {str(kind): _trial(kind) for kind in kinds}
    return {
        "place": f"{PureWindowsPath(file).name}:{line}" if file else "",  # which takes both slashes
        "module": decision.module,
        "reason": decision.reason,
        **values,
        "template": decision.template,
        "trials": trials,
        "hangs on": hangs_on(decision),
    }


def _trial(kind: Kind) -> str:
    return {True: "used", False: "not used", None: "not asked"}[verdict.is_used.get(kind)]


def hangs_on(decision: Decision) -> list[str]:
    """Facts of a process on which the bits of an attention hang, by their names in `facts.of_attention`."""
    always = ["dash_inductor", "torch", "triton", "device", "mode", "flash attention"]
    if not decision.rewritten:
        return [*always, "enabled", "template", "schedule", "kernel", "guarantee"]
    settings = ["cost file", "enabled", "guarantee", "schedule", "launch", "template", "kernel", "segment", "emulate"]
    # At the other levels neither the number of SMs nor those that are left to others choose the order.
    return always + settings + (["SMs", "sms", "sm_reserve"] if decision.guarantee == "run" else [])


def add(graph: Graph) -> None:
    """Keeps a graph that is taken into use; the same one again is no other."""
    with _lock:
        if len(_graphs) < MOST:
            _graphs[json.dumps(graph, sort_keys=True)] = graph


def clear() -> None:
    """Forgets them."""
    with _lock:
        _graphs.clear()


def taken() -> list[Graph]:
    """Them all, in an order that does not hang on which came first: out of a cache a backward comes with its forward."""
    with _lock:
        return [_graphs[text] for text in sorted(_graphs)]


def choices() -> dict[str, dict[str, str]]:
    """By the digest of a rule, the `order` of attentions, what it chose for each size that this process has met."""
    found: dict[str, dict[tuple[int, int, int], tuple[int, ...]]] = {}
    for module in list(PyCodeCache.modules):
        for rule in list(vars(module).values()):
            if isinstance(rule, RunTimeChoice):
                found.setdefault(digest(repr(rule)), {}).update(rule.chosen)
    return {name: {_sizes(each): _chosen(chosen[each]) for each in sorted(chosen)} for name, chosen in sorted(found.items())}


def _sizes(sizes: tuple[int, int, int]) -> str:
    q_len, kv_len, kv_heads = sizes
    return f"{q_len} x {kv_len}, {kv_heads} heads of all batches"


def _chosen(fields: tuple[int, ...]) -> str:
    family, roles, heads_in_flight, *_ = fields
    return f"{FAMILY_CODES[family]} (A={roles}, G={heads_in_flight})"
