"""Measures one shape: who can run, whether the gradients are right and their bits the same, memory, and times in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils import deterministic

from ..reproduce.bits import same_bits
from . import clock
from .contenders import Contender, Prepared, RefusedError, first_line
from .inputs import Inputs, Reference, random_inputs
from .rows import OK
from .samples import interleaved
from .shapes import Shape

LAUNCHES = 4  # whose bits are compared
ERROR_FACTOR = 2  # how far from fp32 a contender may be, in errors of the baseline in the same dtype
FIXED_ERROR = 0.01  # where there is no baseline: bf16 gradients are a few thousandths off
WARM_UP = 3
# A contender whose launch takes longer than both takes no turns: its one time is its row.
SLOW_MS, SLOWER_THAN_BASELINE = 100, 4
SKIPPED_MS = 2000  # and one that would take so long, by its rate at another shape, is not launched
TIME_LIMIT = "not run: the time limit"

Say = Callable[[str], None]


class LostDeviceError(RuntimeError):
    """A kernel of `contender` faulted: nothing more can run on the device in this process."""

    def __init__(self, contender: str, error: Exception) -> None:
        super().__init__(first_line(error))
        self.contender = contender


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
    launch_ms: float | None = None  # of one launch, by the host's clock

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
    filling = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with functorch_config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True):
            yield
    finally:
        deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


@dataclass
class Pace:
    """How long one command may go on, and what it knows of slow contenders: the FLOP per ms of their last shape."""

    deadline: float = math.inf  # of time.monotonic
    slow: dict[str, tuple[float, str]] = field(default_factory=dict)

    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def left_out(self, name: str, shape: Shape) -> str | None:
        """Why a contender is not launched at a shape, or None."""
        if self.is_over():
            return TIME_LIMIT
        if name in self.slow:
            rate, where = self.slow[name]
            if shape.flop / rate > SKIPPED_MS:
                return f"left out: about {shape.flop / rate / 1000:.0f} s a launch, by its rate at {where}"
        return None

    def note(self, result: Result, shape: Shape) -> None:
        """Remembers what took no turns."""
        if result.times_ms:
            self.slow[result.contender.name] = shape.flop / result.times_ms[0], shape.name


def measure(
    shape: Shape, contenders: Mapping[str, Contender], rounds: int, baseline: str, say: Say, pace: Pace | None = None
) -> list[Result]:
    """One result per contender, timed in turns; LostDeviceError when a kernel faulted. Needs a GPU.

    Time is looked at before each contender is tried and after each round: what is ready by then is timed once at least.
    """
    pace = pace or Pace()
    torch.cuda.empty_cache()
    with settings():
        inputs = random_inputs(shape, "cuda")
        reference = Reference.of(shape, inputs, torch.float32)
        results: dict[str, Result] = {}
        for name, contender in contenders.items():
            why = pace.left_out(name, shape)
            known = results.get(baseline)
            limit = math.inf if name == baseline else max(SLOW_MS, SLOWER_THAN_BASELINE * ((known and known.launch_ms) or 0))
            results[name] = attempt(contender, shape, inputs, reference, limit) if why is None else Result(contender, why)
            pace.note(results[name], shape)
            if results[name].prepared is None:
                say(f"  {name}: {results[name].status}")
        _time(results, rounds, pace)
    allowed = allowed_error(results.get(baseline))
    return [judged(result, allowed) for result in results.values()]


def _time(results: dict[str, Result], rounds: int, pace: Pace) -> None:
    """Puts times into the results that are ready and have none."""
    ready = {name: r.prepared for name, r in results.items() if r.prepared is not None and not r.times_ms}
    flushed = clock.flushed()
    clocks = {name: clock.Clock(flushed) for name in ready}

    def timer(name: str, prepared: Prepared) -> Callable[[], float]:
        def milliseconds() -> float:
            try:
                return clocks[name].milliseconds(prepared.launch)
            except RuntimeError as error:
                _still_there(name, error)
                raise

        return milliseconds

    times = interleaved({name: timer(name, prepared) for name, prepared in ready.items()}, rounds, WARM_UP, pace.is_over)
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
        status = what_is_wrong(result.errors, allowed) or OK
        if status == OK and result.contender.deterministic and result.same_bits is False:
            status = f"not deterministic: bits differ within {LAUNCHES} launches"
    return replace(result, status=status)


def what_is_wrong(errors: Mapping[str, float], allowed: float) -> str:
    """Which gradients are too far off, or ""."""
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= allowed]  # a NaN is wrong
    return f"wrong: {', '.join(wrong)} off, allowed {allowed:.1e}" if wrong else ""


def attempt(contender: Contender, shape: Shape, inputs: Inputs, reference: Reference, limit_ms: float = math.inf) -> Result:
    """The contender, ready and checked, or the reason why not; on any device that it takes.

    On a GPU one whose launch takes longer than `limit_ms` is launched no more: it has that time, and its bits are not compared.
    """
    device = inputs.query.device.type
    reason = contender.unavailable(device)
    if reason is not None:
        return Result(contender, f"not available: {reason}")
    try:
        return _checked(contender, contender.prepare(shape, inputs), reference, device, limit_ms)
    except RefusedError as refused:
        return Result(contender, f"refused: {refused}")
    except Exception as error:
        if device == "cuda":
            _still_there(contender.name, error)
        return Result(contender, f"failed: {type(error).__name__}: {first_line(error)}")


def _checked(contender: Contender, prepared: Prepared, reference: Reference, device: str, limit_ms: float) -> Result:
    """Launches on poisoned memory: right gradients that come again bit for bit were written, all of them, each time."""
    peak = launch_ms = None
    on_gpu = device == "cuda"
    if on_gpu:
        launch_ms, held = clock.host_milliseconds(prepared.launch)  # compiles and loads what is left
        if launch_ms > limit_ms:
            launch_ms, held = clock.host_milliseconds(prepared.launch)
        if launch_ms > limit_ms:
            note = "; ".join(filter(None, (prepared.note, "one launch by the host's clock, too slow for turns; bits not compared")))
            return Result(contender, OK, prepared, None, reference.errors(held), None, note, (launch_ms,), launch_ms)
        peak = clock.peak_bytes(prepared.launch)  # while the allocator keeps enough for two launches
        del held
    first, differing = launched(prepared, LAUNCHES, on_gpu)
    return Result(contender, OK, prepared, not differing, reference.errors(first), peak, prepared.note, launch_ms=launch_ms)


def launched(
    prepared: Prepared, launches: int, on_gpu: bool, beside: Callable[[int], AbstractContextManager[None]] = lambda n: nullcontext()
) -> tuple[tuple[Tensor, ...], int]:
    """The gradients of the first launch, and the number of a later one that differs from it, 0 if none does.

    On a GPU memory is full of NaN before each. The n-th, from 1 on, runs inside of beside(n).
    """
    first: tuple[Tensor, ...] = ()
    for n in range(1, launches + 1):
        if on_gpu:
            clock.poison()
        with beside(n):
            grads = prepared.launch()
        first = first or grads
        if not all(same_bits(a, b) for a, b in zip(grads, first, strict=True)):
            return first, n
    return first, 0


def _still_there(name: str, error: Exception) -> None:
    """LostDeviceError if the device is in error, as it stays after a fault."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as fault:
        raise LostDeviceError(name, error) from fault
