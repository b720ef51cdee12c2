"""Runs the cases of a suite in this process, in one setting, and writes down what came of each: a line of JSON per case.

python -m benchmarks.harm.measure SUITE SETTING EVERY FILE
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import compile_fx  # noqa: F401 (so that the package, if it is there, is in)
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_leaves

from .case import Case
from .compare import PASSED
from .settings import SETTINGS, Setting
from .suites import SUITES

Outcome = dict[str, Any]

# Of the largest element: how far the compiled function may be from the uncompiled one. Samples of SDPA have scores of more than 50,
# whose logsumexp in fp32 is so far off that gradients that nearly cancel out are 8e-4 of the largest off float64, in either.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
COUNTERS = (
    *(("inductor", name) for name in ("fuse_attention", "fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")),
    *(("aot_autograd", name) for name in ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")),
)


def outcomes(cases: Iterable[Case], setting: Setting, *, twice: bool = False) -> Iterator[Outcome]:
    """What came of each case; `twice` compiles it again after torch has forgotten it, which its caches have not.

    Raises:
        RuntimeError: this process is not in the setting.
    """
    setting.require()
    before = torch.are_deterministic_algorithms_enabled()
    with _emulated(setting), inductor_config.patch(fallback_random=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.use_deterministic_algorithms(setting.deterministic)
            for case in cases:
                yield {"case": case.name, **_outcome(case, twice)}
        finally:
            torch.use_deterministic_algorithms(before)


def _emulated(setting: Setting) -> contextlib.AbstractContextManager[Any]:
    if not setting.emulated:
        return contextlib.nullcontext()
    from dash_inductor import emulation

    return emulation.emulate()


def _outcome(case: Case, twice: bool) -> Outcome:
    """The bits of what it computes, if that is right, the code that did, and counts; or the type of an exception."""
    counters.clear()
    code: list[str] = []
    try:
        torch.manual_seed(0)
        function, inputs = case.make()
        expected = _values(function, inputs)
        actual, rewritten = [], 0
        with mock.patch.object(GraphLowering, "save_output_code", code.append):
            for _ in range(1 + twice):
                torch._dynamo.reset()
                actual.append(_values(torch.compile(function, fullgraph=True), inputs))
        _require_close(actual[0], expected)
        rewritten = _rewritten(code)
    except Exception as error:
        return {"outcome": type(error).__name__, "message": str(error).strip().partition("\n")[0]}
    return {
        "outcome": PASSED,
        "bits": [_digest(values) for values in actual],
        "code": hashlib.sha256("".join(map(_without_comments, code)).encode()).hexdigest(),
        "counts": {name: counters[group][name] for group, name in COUNTERS},
        "rewritten": rewritten,
    }


def _rewritten(code: Sequence[str]) -> int:
    """How many attentions the package rewrote, by what stands in generated code."""
    if "dash_inductor" not in sys.modules:
        return 0
    from dash_inductor.decision import decisions_in

    return sum(one.rewritten for text in code for one in decisions_in(text))


def _values(function: Any, inputs: Sequence[Any]) -> list[Tensor | None]:
    """Outputs, and the gradients of all inputs that require one, None of those that the outputs do not depend on."""
    torch.manual_seed(1)
    outputs = [x for x in tree_leaves(function(*inputs)) if isinstance(x, Tensor)]
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    roots = [x for x in outputs if x.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if roots and leaves:
        generator = torch.Generator().manual_seed(2)
        tangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in roots]
        gradients = torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
    return [*(x.detach() for x in outputs), *gradients]


def _require_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            assert a is e, "a gradient is missing"
            continue
        finite = e[e.isfinite()].abs()
        atol = TOLERANCES.get(e.dtype, 0) * (finite.max().item() if finite.numel() else 0)
        torch.testing.assert_close(a, e, rtol=0, atol=atol, equal_nan=True)


def _digest(values: Sequence[Tensor | None]) -> str:
    digest = hashlib.sha256()
    for x in values:
        digest.update(b"none" if x is None else f"{x.dtype} {tuple(x.shape)} {x.stride()}".encode())
        if x is not None:
            digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _without_comments(code: str) -> str:
    """Decisions stand in comments, and are said of an attention that is left alone too."""
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))


def main(argv: Sequence[str]) -> None:
    """Run a suite; the file gets a line when a case is done, which is one of EVERY."""
    name, setting, every, file = argv
    suite = SUITES[name]
    cases = itertools.islice(pkgutil.resolve_name(f"{__package__}.{suite.cases}")(), 0, None, int(every))
    torch.set_num_threads(1)
    with Path(file).open("w") as out:
        for outcome in outcomes(cases, SETTINGS[setting], twice=suite.caches):
            print(json.dumps(outcome), file=out, flush=True)
    if "dash_inductor" in sys.modules and not (SETTINGS[setting].installed or SETTINGS[setting].emulated):
        raise RuntimeError("the package was imported, where it should not be")


if __name__ == "__main__":
    main(sys.argv[1:])
