"""Whether our kernels are right on the GPU that is there: gradients against float64, equal bits, also beside other work.

Each case is compiled with the first-use guard on, which tries its kind of kernel in a process of its own beforehand.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from .contenders import GLUON_ONLY, ONE_PASS_ONLY, RefusedError, first_line, ours
from .inputs import Reference, random_inputs
from .measure import launched, settings, what_is_wrong
from .rows import OK
from .runner import child
from .shapes import Shape

FILE = "kernels.jsonl"
LAUNCHES, MANY = 20, 1000  # whose bits are compared, half of them beside work on another stream
ALLOWED = {"bf16": 0.01, "fp16": 0.002}  # errors against float64 over the gradient's norm; of bf16 as in `measure.FIXED_ERROR`
TRIAL_FAILED = "failed its trial"
BUSY_SIZE, BUSY_MATMULS = 4096, 50
LINE = 150  # letters of an error


@dataclass(frozen=True)
class Case:
    """An attention and the settings that lead to one of our kernels, launched so often."""

    name: str
    shape: Shape
    settings: Mapping[str, Any] = field(default_factory=dict)
    launches: int = LAUNCHES


def _cases() -> Iterator[Case]:
    """Kinds of kernels that `auto` may take on some GPU, those first that a Hopper takes by Gluon, now or next."""
    one, two, gluon = ONE_PASS_ONLY, {"template": "two_pass"}, GLUON_ONLY
    ragged = Shape("case", "causal", 1, 8, 2, 1000, 128)
    documents = Shape("case", "causal", 2, 8, 8, 2048, 128, window=500, documents=(700, 33, 1315))
    whole = replace(documents, batch=8, heads=16, kv_heads=16)  # so many chains that none is cut into parts
    sets = replace(documents, batch=1, heads=8, kv_heads=1)
    for d in (128, 64):
        for mask in ("causal", "full"):
            yield Case(f"Gluon, {mask}, d = {d}", Shape("case", mask, 2, 4, 4, 512, d), gluon, MANY)
    yield Case("Gluon, kv heads shared, ragged", ragged, gluon)
    for d in (128, 64):
        yield Case(f"Gluon, masks in blocks, whole chains, d = {d}", replace(whole, head_dim=d), gluon)
        yield Case(f"Gluon, masks in blocks, bands, d = {d}", replace(documents, head_dim=d), gluon, MANY)
        yield Case(f"Gluon, masks in blocks, sets of heads, d = {d}", replace(sets, head_dim=d), gluon)
    yield Case("Gluon, fp16", Shape("case", "causal", 2, 4, 4, 512, 128, dtype="fp16"), gluon)
    yield Case("as chosen", Shape("case", "causal", 2, 16, 16, 4096, 128), {}, MANY)
    yield Case("as chosen, masks in blocks", whole, {}, MANY)
    yield Case("two passes, masks in blocks", documents, two)
    yield Case("two passes, soft-cap", replace(documents, softcap=30.0), two)
    yield Case("two passes, ALiBi", replace(documents, alibi=True), two)
    yield Case("two passes, kv heads shared, ragged", ragged, two)
    yield Case("two passes, fp16", Shape("case", "causal", 2, 4, 4, 512, 128, dtype="fp16"), two)
    yield Case("two passes, full, d = 64", Shape("case", "full", 2, 4, 4, 512, 64), two)
    yield Case("two passes, d = 256", Shape("case", "causal", 1, 2, 2, 512, 256), two)
    yield Case("one pass, masks in blocks, d = 64", replace(documents, head_dim=64), one)
    yield Case("one pass, soft-cap", replace(documents, softcap=30.0), one)
    for d in (64, 128):
        for mask in ("full", "causal"):
            yield Case(f"one pass, {mask}, d = {d}", Shape("case", mask, 2, 4, 4, 512, d), one)
    yield Case("one pass, kv heads shared, ragged", ragged, one)
    yield Case("one pass, fp16", Shape("case", "causal", 2, 4, 4, 512, 128, dtype="fp16"), one)
    yield Case("one pass, chained", Shape("case", "causal", 4, 16, 16, 2048, 128), {**one, "launch": "chained"})
    yield Case("one pass, shift", Shape("case", "full", 2, 8, 8, 2048, 128), {**one, "schedule": "shift"})
    yield Case("one pass, symmetric", Shape("case", "causal", 2, 8, 8, 2048, 128), {**one, "schedule": "symmetric"})


CASES = {case.name: case for case in _cases()}


@dataclass(frozen=True)
class Finding:
    """What came of a case. status: "ok", or what is wrong; errors: of dq, dk, dv against float64."""

    case: str
    status: str
    errors: Mapping[str, float] = field(default_factory=dict)
    allowed: float | None = None
    launches: int = 0
    schedule: str = ""
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether it speaks against our kernels; that a GPU has no such kernel does not."""
        return self.status != OK and (TRIAL_FAILED in self.status or not self.status.startswith(("refused: ", "not run: ")))


def check(case: Case, device: str = "cuda") -> Finding:
    """Compiles a case, and launches it."""
    start, launches, allowed = time.monotonic(), case.launches, ALLOWED[case.shape.dtype]
    on_gpu, quiet = device == "cuda", launches // 2
    found: dict[str, Any] = {}
    try:
        with settings():
            inputs = random_inputs(case.shape, device)
            reference = Reference.of(case.shape, inputs, torch.float64)
            prepared = ours("ours", {**case.settings, "guard": "auto"}).prepare(case.shape, inputs)
            first, differing = launched(prepared, launches, on_gpu, lambda n: _beside_work(on_gpu and n > quiet))
            errors = reference.errors(first)
        status = what_is_wrong(errors, allowed) or OK
        if differing and status == OK:
            busy = ", beside other work," if differing > quiet else ""
            status = f"not deterministic: launch {differing} of {launches}{busy} has other bits than the first"
        schedule = prepared.decision.schedule if prepared.decision else ""
        found = {"errors": errors, "launches": launches, "schedule": schedule}
    except RefusedError as refused:
        status = f"refused: {refused}"
    except Exception as error:
        status = f"failed: {type(error).__name__}: {shorten(first_line(error), LINE)}"
    return Finding(case.name, status, allowed=allowed, seconds=time.monotonic() - start, **found)


@contextmanager
def _beside_work(wanted: bool) -> Iterator[None]:
    """Inside, another stream multiplies matrices, so that CTAs get their SMs at other times."""
    if not wanted:
        yield
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(BUSY_SIZE, BUSY_SIZE, device="cuda", dtype=torch.bfloat16)
        for _ in range(BUSY_MATMULS):
            torch.mm(x, x)
    yield
    stream.synchronize()


def run(folder: Path, seconds: float, jobs: int) -> int:
    """Each case in a process of its own, several at a time; appends findings to FILE as they come. 1 if one is wrong."""
    deadline, wrong = time.monotonic() + seconds, False
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        waiting = [pool.submit(_in_a_process, case, deadline) for case in CASES.values()]
        for n, future in enumerate(as_completed(waiting), 1):
            finding = future.result()
            with (folder / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(finding)) + "\n")
            print(f"[{n}/{len(waiting)}] {finding.case}: {finding.status}")
            wrong = wrong or finding.is_wrong
    return int(wrong)


def _in_a_process(case: Case, deadline: float) -> Finding:
    left = deadline - time.monotonic()
    if left <= 0:
        return Finding(case.name, "not run: the time limit")
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        done = subprocess.run(child("kernel", case=case.name), env=environ, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return Finding(case.name, f"not run: it did not end within the stage's time, {left:.0f} s before its end")
    found = next((line for line in reversed(done.stdout.splitlines()) if line.startswith('{"case": ')), None)
    if found is None:
        last = shorten(next(reversed(done.stderr.splitlines()), "without a word"), LINE)
        return Finding(case.name, f"failed: its process ended with status {done.returncode}: {last}")
    return Finding(**json.loads(found))


def read(folder: Path) -> list[Finding]:
    """The findings in a folder, in the order of CASES; of a case that is there twice, the last."""
    path = folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = {finding.case: finding for finding in (Finding(**json.loads(line)) for line in lines if line.endswith("\n"))}
    return [found[name] for name in CASES if name in found]
