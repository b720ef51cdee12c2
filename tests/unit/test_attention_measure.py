"""How one shape is measured, with a clock and an allocator that are pretended: the logic, not the device."""

import itertools
import math

import pytest
import torch
from attention_results import STOCK, TINY, altered

from dash_inductor.qualify import clock, measure
from dash_inductor.qualify import contenders as who
from dash_inductor.qualify.inputs import random_inputs
from dash_inductor.qualify.rows import OK
from dash_inductor.qualify.shapes import Shape


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


@pytest.mark.parametrize(
    ("busy", "spins", "late"),
    [(0, [0, 0], 0), (3 * clock.SPIN, [0, 1, 2, 2], 0), (1 << 60, 2 * [*range(clock.ATTEMPTS)], 2)],
    ids=["early", "doubles the spin and remembers", "always late"],
)
def test_clock(busy, spins, late, monkeypatch):
    """Two launches: the device spins until the host is done."""
    device = Device(monkeypatch, busy)
    watch = clock.Clock(device)
    assert [watch.milliseconds(device.launch) for _ in range(2)] == [1.5, 1.5]
    assert device.spins == [clock.SPIN << doubled for doubled in spins] and watch.late == late
    assert device.log == ["flush", "spin", "event", "launch", "event", "synchronize"] * len(spins)


def test_calls_that_compile_leave_the_spin_short(monkeypatch):
    """Each of many launches is slow the first time: without a bound the spin doubles for each, to minutes."""
    device = Device(monkeypatch, 0)
    watch = clock.Clock(device)
    for _ in range(20):
        device.busy = watch._spin + 1  # the first attempt is late, the second is not
        watch.milliseconds(device.launch)
    device.busy = 0
    watch.milliseconds(device.launch)
    assert device.spins[-1] == clock.MOST_SPIN and watch.late == 0


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
    monkeypatch.setattr(measure, "random_inputs", lambda shape, device: random_inputs(shape, "cpu", torch.bfloat16))
    for name in ("flushed", "poison"):
        monkeypatch.setattr(clock, name, lambda: None)
    monkeypatch.setattr(clock, "Clock", Watch)
    monkeypatch.setattr(clock, "peak_bytes", lambda launch: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    checked = measure._checked
    monkeypatch.setattr(measure, "_checked", lambda *arguments: checked(*arguments[:3], "cuda", *arguments[4:]))


def test_a_shape(pretended_gpu, monkeypatch):
    """Stock attention for the CPU, and contenders that are wrong, change bits, refuse, are absent or do not compile."""
    ticks, drift = itertools.count(1.0), itertools.count()
    monkeypatch.setattr(Watch, "late", 2)
    monkeypatch.setattr(Watch, "milliseconds", lambda self, launch: (launch(), next(ticks))[1])

    def refuse(shape, inputs):
        raise who.RefusedError("no")

    def no_compiler(shape, inputs):
        raise RuntimeError("\n ptxas failed \nwith a lot of output")

    chosen = {
        who.BASELINE: STOCK[who.BASELINE],
        "wrong": altered("wrong", lambda: 1),
        "drifting": altered("drifting", lambda: 1e-7 * next(drift)),
        "refusing": who.Contender("refusing", True, refuse, lambda device: None),
        "absent": who.Contender("absent", True, refuse, lambda device: "not here"),
        "broken": who.Contender("broken", True, no_compiler, lambda device: None),
        "right": altered("right"),
    }
    said: list[str] = []
    results = {result.contender.name: result for result in measure.measure(TINY, chosen, 3, who.BASELINE, said.append)}
    assert list(results) == list(chosen)
    baseline, wrong, drifting, refusing, absent, broken, right = results.values()
    assert baseline.status == right.status == OK and 0 < baseline.error < measure.FIXED_ERROR
    assert wrong.status.startswith("wrong: dq ")
    assert not drifting.same_bits and drifting.status.startswith("not deterministic: ")
    assert (refusing.status, absent.status) == ("refused: no", "not available: not here")
    assert broken.status == "failed: RuntimeError: ptxas failed"
    assert said == [f"  {result.contender.name}: {result.status}" for result in (refusing, absent, broken)]
    timed = (baseline, wrong, drifting, right)
    assert sorted(time for result in timed for time in result.times_ms) == [1.0 + 4 * measure.WARM_UP + n for n in range(12)]
    assert {result.note for result in timed} == {"the host was late 2 times"}
    assert refusing.times_ms == absent.times_ms == () and math.isnan(refusing.error)


class Host:
    """A clock that stands still unless a contender's launch moves it."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def contender(self, name: str, ms: float, launches: list[str]) -> who.Contender:
        """Right, and `ms` long by this clock; it notes its launches."""

        def move() -> None:
            launches.append(name)
            self.seconds += ms / 1000

        return altered(name, before=move)


@pytest.fixture
def host(pretended_gpu, monkeypatch) -> Host:
    host = Host()
    for module, name in ((clock, "perf_counter"), (measure, "monotonic")):
        monkeypatch.setattr(module.time, name, host)
    return host


def test_a_slow_contender_takes_no_turns(host):
    """Two launches at most; at a shape where it would take seconds, none."""
    launches: list[str] = []
    chosen = {
        name: host.contender(name, ms, launches) for name, ms in ((who.BASELINE, 3), ("quick", 99), ("slow", 500), ("never", 4000))
    }
    pace = measure.Pace()
    first = dict(zip(chosen, measure.measure(TINY, chosen, 5, who.BASELINE, print, pace), strict=True))
    assert [len(result.times_ms) for result in first.values()] == [5, 5, 1, 1]
    assert (launches.count("slow"), launches.count("never")) == (2, 2)
    slow = first["slow"]
    assert slow.times_ms[0] == pytest.approx(500) and slow.same_bits is None and 0 < slow.error < 0.01
    assert slow.status == OK and "too slow for turns" in slow.note and not first["quick"].note
    launches.clear()
    longer = Shape("longer", "causal", 2, 4, 2, 74, 16)  # four times the FLOP
    again = dict(zip(chosen, measure.measure(longer, chosen, 5, who.BASELINE, print, pace), strict=True))
    assert again["never"].status == "left out: about 16 s a launch, by its rate at tiny"
    assert launches.count("never") == 0 and launches.count("slow") == 2  # which would take 2 s, not more


def test_a_slow_baseline_makes_others_no_slower_than_it_is(host):
    chosen = {name: host.contender(name, ms, []) for name, ms in ((who.BASELINE, 200), ("ours", 790), ("slow", 810))}
    results = measure.measure(TINY, chosen, 5, who.BASELINE, print)
    assert [len(result.times_ms) for result in results] == [5, 5, 1]


def test_what_is_ready_at_the_time_limit_is_timed(host):
    """Time is up while the second of three is tried: two have one round, the third is not tried."""
    launches: list[str] = []
    chosen = {name: host.contender(name, 10, launches) for name in (who.BASELINE, "ours", "third")}
    results = measure.measure(TINY, chosen, 5, who.BASELINE, print, measure.Pace(deadline=0.06))
    assert [(len(result.times_ms), result.status) for result in results] == [(1, OK), (1, OK), (0, measure.TIME_LIMIT)]
    assert "third" not in launches


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
