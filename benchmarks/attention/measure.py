"""Measures one shape: who can run, whether the gradients are right and their bits the same, memory, and times in turns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from . import clock
from .contenders import Contender, Prepared, RefusedError, first_line
from .inputs import Inputs, Reference, random_inputs
from .rows import OK
from .samples import interleaved
from .shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

LAUNCHES = 4  # whose bits are compared
ERROR_FACTOR = 2  # how far from fp32 a contender may be, in errors of the baseline in the same dtype
FIXED_ERROR = 0.01  # where there is no baseline: bf16 gradients are a few thousandths off
WARM_UP = 3

Say = Callable[[str], None]


class LostDeviceError(RuntimeError):
    """A kernel faulted: nothing more can run on the device in this process."""


@dataclass(frozen=True)
class Result:
    """What is known of a contender at one shape; `status` is "ok" or why there is no time, or no trust in it."""

    contender: Contender
    status: str
    prepared: Prepared | None = None
    same_bits: bool | None = None
    errors: Mapping[str, float] = field(default_factory=dict)  # of dq, dk, dv against fp32
    peak_bytes: int | None = None
    note: str = ""
    times_ms: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """The worst of errors; NaN is worse than any number."""
        return max(self.errors.values(), key=lambda error: (error != error, error), default=math.nan)


@contextmanager
def settings() -> Iterator[None]:
    """What every contender is compiled and run under.

    Graphs are kept between backwards, so that no buffer may be donated; what torch fills with NaN in deterministic mode, for
    whoever reads memory that was never written, would be time that no kernel needs.
    """
    from torch._functorch import config as functorch_config
    from torch.utils import deterministic

    filling = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with functorch_config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True):
            yield
    finally:
        deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


def measure(shape: Shape, contenders: Mapping[str, Contender], rounds: int, baseline: str, say: Say) -> list[Result]:
    """One result per contender, timed in turns; LostDeviceError when a kernel faulted. Needs a GPU."""
    import torch

    torch.cuda.empty_cache()
    with settings():
        inputs = random_inputs(shape, "cuda", torch.bfloat16)
        reference = Reference.of(shape, inputs, torch.float32)
        results = {}
        for name, contender in contenders.items():
            results[name] = attempt(contender, shape, inputs, reference)
            if results[name].prepared is None:
                say(f"  {name}: {results[name].status}")
        _time(results, rounds)
    allowed = allowed_error(results.get(baseline))
    return [judged(result, allowed) for result in results.values()]


def _time(results: dict[str, Result], rounds: int) -> None:
    """Puts times into the results that are ready."""
    ready = {name: result.prepared for name, result in results.items() if result.prepared is not None}
    flushed = clock.flushed()
    clocks = {name: clock.Clock(flushed) for name in ready}
    timers = {name: functools.partial(clocks[name].milliseconds, prepared.launch) for name, prepared in ready.items()}
    try:
        times = interleaved(timers, rounds, WARM_UP)
    except RuntimeError as error:
        _still_there(error)
        raise
    for name, own in times.items():
        note = f"the host was late {clocks[name].late} times" if clocks[name].late else ""
        note = "; ".join(filter(None, (results[name].note, note)))
        results[name] = replace(results[name], times_ms=tuple(own), note=note)


def allowed_error(baseline: Result | None) -> float:
    """How far from fp32 gradients may be."""
    trusted = baseline is not None and baseline.prepared is not None and baseline.error < FIXED_ERROR
    return ERROR_FACTOR * baseline.error if baseline is not None and trusted else FIXED_ERROR


def judged(result: Result, allowed: float) -> Result:
    """The result with a verdict on its gradients and bits, times kept."""
    status = result.status
    if status == OK and result.contender.valid:
        wrong = [f"{name} {error:.1e}" for name, error in result.errors.items() if not error <= allowed]
        if wrong:
            status = f"wrong: {', '.join(wrong)} off, allowed {allowed:.1e}"
        elif result.contender.deterministic and not result.same_bits:
            status = f"not deterministic: bits differ within {LAUNCHES} launches"
    return replace(result, status=status)


def attempt(contender: Contender, shape: Shape, inputs: Inputs, reference: Reference) -> Result:
    """The contender, ready and checked, or the reason why not; on any device that it takes."""
    device = inputs.query.device.type
    reason = contender.unavailable(device)
    if reason is not None:
        return Result(contender, f"not available: {reason}")
    try:
        return _checked(contender, contender.prepare(shape, inputs), reference, device)
    except RefusedError as refused:
        return Result(contender, f"refused: {refused}")
    except Exception as error:
        if device == "cuda":
            _still_there(error)
        return Result(contender, f"failed: {type(error).__name__}: {first_line(error)}")


def _checked(contender: Contender, prepared: Prepared, reference: Reference, device: str) -> Result:
    """Launches on poisoned memory: right gradients that come again bit for bit were written, all of them, each time."""
    peak = None
    on_gpu = device == "cuda"
    if on_gpu:
        held = prepared.launch()  # compiles what is left, and lets the allocator keep enough for two launches
        peak = clock.peak_bytes(prepared.launch)
        del held
    first: tuple[Tensor, ...] = ()
    same = True
    for _ in range(LAUNCHES):
        if on_gpu:
            clock.poison()
        grads = prepared.launch()
        same = same and all(same_bits(a, b) for a, b in zip(grads, first or grads, strict=True))
        first = first or grads
    return Result(contender, OK, prepared, same, reference.errors(first), peak, prepared.note)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: NaN equals itself, and -0.0 is not 0.0."""
    import torch

    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def attempt_to_compile(shape: Shape, contenders: Mapping[str, Contender]) -> None:
    """Prepares every contender and drops it: what is left of that are the compilers' caches."""
    import torch

    with settings():
        inputs = random_inputs(shape, "cuda", torch.bfloat16)
        for contender in contenders.values():
            if contender.unavailable("cuda") is None:
                with suppress(Exception):
                    contender.prepare(shape, inputs)


def _still_there(error: Exception) -> None:
    """LostDeviceError if the device is in error, as it stays after a fault."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as fault:
        raise LostDeviceError(first_line(error)) from fault
