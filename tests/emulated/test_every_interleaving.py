"""Every interleaving of launches of up to 3 x 3 tiles ends, with one and the same dq.

The programs' operations are recorded from the emulated kernel, and depend on the ticket alone. Every trace of them is searched
(traces.py); the emulation is held against the search event by event, in launches at random and led through every trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from attention import backward, compiled, differing, mutate
from flex import Attention, backward_of, documents, everything
from recorded_launches import Recorded, Recorder, recording
from tensors import CAUSAL, FULL, TILE, exact
from test_mutants import RELEASE, RELEASES, WAIT, with_two_ranks_swapped
from test_varlen import Packed
from traces import Launch, Operation, State, assert_complete, search

from dash_inductor import enabled
from dash_inductor.emulation import emulate
from dash_inductor.lowering import table

pytestmark = pytest.mark.usefixtures("rewriting")

Programs = list[list[Operation]]
Run = Callable[..., Any]


def same(a: Programs, b: Programs) -> bool:
    """Operation by operation, the bits of what is added included."""

    def plain(programs: Programs) -> list[Any]:
        return [[(x.kind, x.place, x.rank, np.asarray(x.part, np.float32).tobytes()) for x in program] for program in programs]

    return plain(a) == plain(b)


def replayed(recorded: Recorded, resident: int | None = None) -> State:
    """What a recorded launch leaves, by the model, in which every event of it must happen as it did."""
    launch = Launch(recorded.programs, resident)
    state = launch.start()
    for event in recorded.events:
        assert launch.can_move(state, event.program)
        state, modelled = launch.step(state, event.program)
        assert modelled == event
    assert launch.ended(state)
    return state


def recorded_in(recorder: Recorder, run: Run, *, launches: int = 3, resident: int | None = None) -> tuple[Programs, bytes]:
    """Operations of the programs, and dq's bits, the same in so many launches at random."""
    recorder.launches.clear()
    for seed in range(launches):
        run(seed, resident)
    first, *others = recorder.launches
    assert len(others) == launches - 1
    assert all(same(first.programs, other.programs) for other in others)
    (dq,) = {replayed(launch, resident).bits() for launch in recorder.launches}
    return first.programs, dq


def of_the_op(mask: str, q_len: int, kv_len: int, sms: int, heads: int = 1) -> Run:
    """A launch of the compiled op, on inputs for which the order of dq's sum decides its bits."""
    args = exact(1, heads, q_len, kv_len, 16)
    op = backward(mask, scale=0.25)
    function = compiled(op)
    with emulate(sms=sms):
        right = op(*args)

    def run(seed: int = 0, resident: int | None = None, check: bool = True) -> None:
        with emulate(seed, sms=sms, resident=resident):
            gradients = function(*args)
        assert not check or differing(gradients, right) == []

    return run


def assert_every_trace(launch: Launch, right: bytes) -> int:
    """Each ends and has these bits; how many there are."""
    found = search(launch)
    assert (found.deadlocks, found.bits) == (0, {right})
    return found.traces


def assert_emulated(recorder: Recorder, run: Run, launch: Launch) -> None:
    """The emulation can be led through all traces: event by event as the search has them, and to the right gradients."""
    for events, _ in launch.traces():
        recorder.script = events
        run(resident=launch.resident)
        assert recorder.launches.pop().events == events
    recorder.script = None


def test_every_interleaving_of_two_by_two_tiles_on_the_emulated_kernel():
    with recording() as recorder, enabled(schedule="ascending"):
        run = of_the_op(FULL, 32, 64, sms=2)
        programs, right = recorded_in(recorder, run)
        launch = Launch(programs)
        assert assert_every_trace(launch, right) == 4
        assert_complete(launch)
        assert_emulated(recorder, run, launch)


@pytest.mark.nightly
def test_the_search_finds_the_deadlock_of_a_grouped_launch():
    """One CTA of two is resident, and waits in its second chain for the first one of the other."""
    with recording() as recorder, enabled(schedule="descending"):
        programs, _ = recorded_in(recorder, of_the_op(CAUSAL, 128, 128, sms=2))
    assert search(Launch(programs, 2)).deadlocks == 0
    assert search(Launch(programs, 1)).deadlocks > 0


MUTANTS = {"no wait": {WAIT: "pass"}, "early release": {RELEASE: "pass", WAIT: f"{WAIT}; {RELEASE}"}}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["ascending", "descending", "shift"])
@pytest.mark.parametrize("name", [*MUTANTS, "two ranks swapped"])
def test_the_search_finds_mutants_of_the_kernel(family, name, monkeypatch):
    with recording() as recorder, enabled(schedule=family):
        _, right = recorded_in(recorder, of_the_op(FULL, 48, 96, sms=3))
        if name in MUTANTS:
            times = RELEASES if RELEASE in MUTANTS[name] else 1
            mutate(monkeypatch, "ONE_PASS", f"{family}_{name.replace(' ', '_')}", MUTANTS[name], times=times)
        else:
            monkeypatch.setattr(table, "pack_plan", with_two_ranks_swapped)
        recorder.launches.clear()
        of_the_op(FULL, 48, 96, sms=3)(check=False)
        # The search without an end would be long: every mutant is seen long before it.
        launch = Launch(recorder.launches[-1].programs)
        assert any(not launch.ended(state) or state.bits() != right for _, state in launch.traces())


GRIDS = [(n_q * TILE.block_m, n_kv * TILE.block_n) for n_q in (1, 2, 3) for n_kv in (1, 2, 3)]
SQUARES = [(16, 16), (32, 32), (48, 48), (64, 64)]  # causal: 1 x 1, 2 x 1, 3 x 2 and 4 x 2 tiles
FAMILIES = [
    *((family, FULL) for family in ("ascending", "descending", "shift", "shift_round_robin")),
    *((family, CAUSAL) for family in ("ascending", "descending", "symmetric", "symmetric_round_robin")),
]


@dataclass
class Counts:
    """Of launches."""

    launches: int = 0
    traces: int = 0
    interleavings: int = 0

    def add(self, programs: Programs, right: bytes, resident: int | None) -> None:
        """A launch in which every trace ends and has these bits."""
        launch = Launch(programs, resident)
        self.launches += 1
        self.traces += assert_every_trace(launch, right)
        self.interleavings += launch.count_interleavings()


@pytest.fixture
def counts(record_property: Callable[[str, object], None]) -> Iterator[Counts]:
    """For tests/nightly."""
    counts = Counts()
    yield counts
    for name, count in (("launches", counts.launches), ("traces", counts.traces), ("interleavings", counts.interleavings)):
        record_property(f"{name} searched to the end", count)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "mask"), FAMILIES)
def test_every_interleaving_of_small_grids(family, mask, counts):
    """By as many CTAs as there are KV tiles, and by two. Under a round robin there are two heads, since one has no queue."""
    heads = 2 if family.endswith("round_robin") else 1
    with recording() as recorder, enabled(schedule=family):
        for q_len, kv_len in GRIDS if mask == FULL else SQUARES:
            n_kv = -(-kv_len // TILE.block_n)
            for sms in sorted({min(2, n_kv), n_kv}):
                run = of_the_op(mask, q_len, kv_len, sms, heads)
                counts.add(*recorded_in(recorder, run), None)


@pytest.mark.nightly
@pytest.mark.parametrize("resident", [None, 1, 2])
@pytest.mark.parametrize(
    ("family", "mask"), [("ascending", FULL), ("descending", FULL), ("ascending", CAUSAL), ("descending", CAUSAL)]
)
def test_every_interleaving_of_a_chained_launch(family, mask, resident, counts):
    with recording() as recorder, enabled(schedule=family, launch="chained"):
        for q_len, kv_len in GRIDS if mask == FULL else SQUARES:
            counts.add(*recorded_in(recorder, of_the_op(mask, q_len, kv_len, 3), resident=resident), resident)


MASKED: dict[str, Attention | Packed] = {
    **{f"{q_len} x {kv_len}": Attention(everything, q_len=q_len, kv_len=kv_len, heads=1) for q_len, kv_len in GRIDS},
    "documents": Attention(documents(40, 56), q_len=96, heads=1),
    "varlen": Packed((40, 56), heads=1, kv_heads=1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("resident", [None, 1, 2])
@pytest.mark.parametrize("attention", MASKED.values(), ids=MASKED)
def test_every_interleaving_under_a_block_mask(attention, resident, counts):
    with recording() as recorder:
        run = backward_of(attention.function(), attention.tensors())
        counts.add(*recorded_in(recorder, run, resident=resident), resident)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["ascending", "shift"])
def test_every_interleaving_of_three_by_three_tiles_on_the_emulated_kernel(family):
    with recording() as recorder, enabled(schedule=family):
        run = of_the_op(FULL, 48, 96, sms=3)
        launch = Launch(recorded_in(recorder, run, launches=20)[0])
        assert_complete(launch)
        assert_emulated(recorder, run, launch)
