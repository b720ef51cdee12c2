"""How one shape is measured, with a clock and an allocator that are pretended: the logic, not the device."""

import itertools
import math

import pytest
import torch

from benchmarks.attention import clock, measure
from benchmarks.attention import contenders as who
from benchmarks.attention.inputs import random_inputs
from benchmarks.attention.rows import OK
from benchmarks.attention.shapes import Shape

TINY = Shape("tiny", "causal", 2, 4, 2, 37, 16)
STOCK = who.contenders()


class Device:
    """A stream that is done with its spin after `busy` cycles' worth of the host's time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
        self.busy, self.spins, self.log = busy, [], []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                device.log.append("event")

            def query(self) -> bool:
                return device.spins[-1] < device.busy

            def synchronize(self) -> None:
                device.log.append("synchronize")

            def elapsed_time(self, end: object) -> float:
                return 1.5

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (self.spins.append(cycles), self.log.append("spin")))

    def zero_(self) -> None:
        self.log.append("flush")

    def launch(self) -> None:
        self.log.append("launch")


def test_clock(monkeypatch):
    device = Device(monkeypatch, busy=0)
    assert clock.Clock(device).milliseconds(device.launch) == 1.5
    assert device.log == ["flush", "spin", "event", "launch", "event", "synchronize"]


def test_clock_spins_until_the_host_is_done(monkeypatch):
    device = Device(monkeypatch, busy=3 * clock.SPIN)
    watch = clock.Clock(device)
    for _ in range(2):
        watch.milliseconds(device.launch)
    assert device.spins == [clock.SPIN, 2 * clock.SPIN, 4 * clock.SPIN, 4 * clock.SPIN]  # and remembers how long
    assert watch.late == 0


def test_clock_that_is_always_late(monkeypatch):
    device = Device(monkeypatch, busy=1 << 60)
    watch = clock.Clock(device)
    assert watch.milliseconds(device.launch) == 1.5
    assert (len(device.spins), watch.late) == (clock.ATTEMPTS, 1)


def test_poison_fills_what_is_free(monkeypatch):
    blocks = [("inactive", 512), ("active_allocated", 1024), ("inactive", 2 << 20)]
    segments = [{"blocks": [{"state": state, "size": size}]} for state, size in blocks]
    filled = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch, "full", lambda size, value, dtype, device: filled.append((size, value, dtype, device)))
    clock.poison()
    assert filled == [((2 << 20,), 0xFF, torch.uint8, "cuda"), ((512,), 0xFF, torch.uint8, "cuda")]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.tensor([0xFF] * 8, dtype=torch.uint8).view(dtype).isnan().all()


def test_a_shape(monkeypatch):
    """Stock attention for the CPU, a contender that is wrong, one whose bits change, and one that refuses."""
    ticks = itertools.count(1.0)

    class Watch:
        late = 2

        def __init__(self, flushed: object) -> None:
            pass

        def milliseconds(self, launch) -> float:
            launch()
            return next(ticks)

    def changed(by):
        def prepare(shape, inputs):
            exact = STOCK[who.BASELINE].prepare(shape, inputs).launch
            return who.Prepared(lambda: tuple(grad + by() for grad in exact()))

        return prepare

    def refuse(shape, inputs):
        raise who.RefusedError("no")

    drift = itertools.count()
    chosen = {
        who.BASELINE: STOCK[who.BASELINE],
        "wrong": who.Contender("wrong", False, changed(lambda: 1), lambda device: None),
        "drifting": who.Contender("drifting", True, changed(lambda: 1e-7 * next(drift)), lambda device: None),
        "refusing": who.Contender("refusing", True, refuse, lambda device: None),
        "absent": who.Contender("absent", True, refuse, lambda device: "not here"),
    }
    monkeypatch.setattr(measure, "random_inputs", lambda shape, device, dtype: random_inputs(shape, "cpu", dtype))
    monkeypatch.setattr(clock, "flushed", lambda: None)
    monkeypatch.setattr(clock, "Clock", Watch)
    said: list[str] = []
    found = {result.contender.name: result for result in measure.measure(TINY, chosen, 3, who.BASELINE, said.append)}
    assert list(found) == list(chosen)
    baseline, wrong, drifting, refusing, absent = found.values()
    assert baseline.status == OK and 0 < baseline.error < measure.FIXED_ERROR
    assert wrong.status.startswith("wrong: dq ")
    assert not drifting.same_bits and drifting.status.startswith("not deterministic: ")
    assert (refusing.status, absent.status) == ("refused: no", "not available: not here")
    assert said == ["  refusing: refused: no", "  absent: not available: not here"]
    timed = (baseline, wrong, drifting)
    assert sorted(time for result in timed for time in result.times_ms) == [1.0 + 3 * measure.WARM_UP + n for n in range(9)]
    assert {result.note for result in timed} == {"the host was late 2 times"}
    assert refusing.times_ms == absent.times_ms == () and math.isnan(refusing.error)


class Watch:
    """Every launch takes 2 ms."""

    late = 0

    def __init__(self, flushed: object) -> None:
        pass

    def milliseconds(self, launch) -> float:
        launch()
        return 2.0


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Tensors are on the CPU; the device's own checks and clocks are pretended."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(measure, "random_inputs", lambda shape, device, dtype: random_inputs(shape, cpu, dtype))
    for name in ("flushed", "poison"):
        monkeypatch.setattr(clock, name, lambda: None)
    monkeypatch.setattr(clock, "Clock", Watch)
    monkeypatch.setattr(clock, "peak_bytes", lambda launch: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    attempt = measure._checked
    monkeypatch.setattr(measure, "_checked", lambda *arguments: attempt(*arguments[:3], "cuda", *arguments[4:]))


def counting(name: str, ms: float, launches: list[str], **options) -> who.Contender:
    """Right, and `ms` long by the host's clock: it moves it."""

    def prepare(shape, inputs):
        exact = STOCK[who.BASELINE].prepare(shape, inputs).launch

        def launch():
            launches.append(name)
            HOST.seconds += ms / 1000
            return exact()

        return who.Prepared(launch)

    return who.Contender(name, True, prepare, lambda device: None, **options)


class Host:
    """A clock that stands still unless somebody moves it."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


HOST = Host()


def test_a_slow_contender_takes_no_turns(pretended_gpu, monkeypatch):
    """Two launches at most; at a shape where it would take seconds, none."""
    monkeypatch.setattr(clock.time, "perf_counter", HOST)
    launches: list[str] = []
    chosen = {name: counting(name, ms, launches) for name, ms in ((who.BASELINE, 3), ("quick", 99), ("slow", 500), ("never", 4000))}
    pace = measure.Pace()
    found = {result.contender.name: result for result in measure.measure(TINY, chosen, 5, who.BASELINE, print, pace)}
    assert [len(found[name].times_ms) for name in chosen] == [5, 5, 1, 1]
    assert (launches.count("slow"), launches.count("never")) == (2, 2)
    assert found["slow"].times_ms[0] == pytest.approx(500) and found["slow"].same_bits is None and 0 < found["slow"].error < 0.01
    assert found["slow"].status == OK and "too slow for turns" in found["slow"].note and not found["quick"].note
    launches.clear()
    longer = Shape("longer", "causal", 2, 4, 2, 74, 16)  # four times the FLOP
    again = {result.contender.name: result for result in measure.measure(longer, chosen, 5, who.BASELINE, print, pace)}
    assert again["never"].status == "left out: about 16 s a launch, by its rate at tiny"
    assert launches.count("never") == 0 and launches.count("slow") == 2  # which would take 2 s, not more


def test_a_slow_baseline_makes_others_no_slower_than_it_is(pretended_gpu, monkeypatch):
    monkeypatch.setattr(clock.time, "perf_counter", HOST)
    chosen = {name: counting(name, ms, []) for name, ms in ((who.BASELINE, 200), ("ours", 790), ("slow", 810))}
    found = measure.measure(TINY, chosen, 5, who.BASELINE, print)
    assert [len(result.times_ms) for result in found] == [5, 5, 1]


def test_what_is_ready_at_the_time_limit_is_timed(pretended_gpu, monkeypatch):
    """Time is up while the second of three is tried: two have one round, the third is not tried."""
    monkeypatch.setattr(measure.time, "monotonic", HOST)
    HOST.seconds = 0.0
    launches: list[str] = []
    chosen = {name: counting(name, 10, launches) for name in (who.BASELINE, "ours", "third")}
    found = measure.measure(TINY, chosen, 5, who.BASELINE, print, measure.Pace(deadline=0.06))
    assert [(len(result.times_ms), result.status) for result in found] == [(1, OK), (1, OK), (0, measure.TIME_LIMIT)]
    assert "third" not in launches


def test_a_contender_that_is_wrong_or_does_not_compile_fails_alone(pretended_gpu):
    def no_compiler(shape, inputs):
        raise RuntimeError("ptxas failed\nwith a lot of output")

    def off_by_one(shape, inputs):
        exact = STOCK[who.BASELINE].prepare(shape, inputs).launch
        return who.Prepared(lambda: tuple(grad + 1 for grad in exact()))

    chosen = {
        who.BASELINE: STOCK[who.BASELINE],
        "broken": who.Contender("broken", True, no_compiler, lambda device: None),
        "wrong": who.Contender("wrong", True, off_by_one, lambda device: None),
        "right": counting("right", 1, []),
    }
    found = measure.measure(TINY, chosen, 3, who.BASELINE, print)
    assert [result.status.split(":")[0] for result in found] == [OK, "failed", "wrong", OK]
    assert found[1].status == "failed: RuntimeError: ptxas failed"


def test_settings():
    from torch._functorch import config
    from torch.utils import deterministic

    before = config.donated_buffer, deterministic.fill_uninitialized_memory
    with measure.settings():
        assert (config.donated_buffer, deterministic.fill_uninitialized_memory) == (False, False)
    assert (config.donated_buffer, deterministic.fill_uninitialized_memory) == before == (True, True)


def test_a_kernel_that_faults(monkeypatch):
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might be ...")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(measure.LostDeviceError, match=r"^launch failed$") as lost:
        measure._still_there("ours", RuntimeError("launch failed\nmore"))
    assert lost.value.contender == "ours"
