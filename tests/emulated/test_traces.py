"""Every interleaving of small launches ends, with the specification's bits; the search for them is held against brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx
import numpy as np
import pytest
from attention import backward, compiled, differing, mutate
from recorded_launches import Recorded, Recorder, recording
from tensors import CAUSAL, FULL, TILE, exact
from test_mutants import RELEASE as RELEASES
from test_mutants import WAIT as WAITS
from traces import ADD, END, RELEASE, START, STORE, WAIT, Event, Launch, Operation, State, conflicts, count_orders, normal_form

from dash_inductor import enabled
from dash_inductor.emulation import emulate
from dash_inductor.lowering import table
from dash_inductor.schedule import pack_plan

Programs = list[list[Operation]]


def bits(state: State) -> bytes:
    """Those of all tiles of dq."""
    return b"".join(np.asarray(state.tiles[place]).tobytes() for place in sorted(state.tiles))


@dataclass
class Found:
    """Of a search: traces, those that end in a deadlock, and the bits of dq that the others leave."""

    traces: int = 0
    deadlocks: int = 0
    bits: frozenset[bytes] = frozenset()


def search(launch: Launch) -> Found:
    found = Found()
    for _, state in launch.traces():
        found.traces += 1
        if launch.ended(state):
            found.bits |= {bits(state)}
        else:
            found.deadlocks += 1
    return found


def assert_complete(launch: Launch) -> None:
    """The traces are all different, and their interleavings are as many as there are in all."""
    traces = [events for events, _ in launch.traces()]
    assert len({normal_form(events) for events in traces}) == len(traces)
    assert sum(map(count_orders, traces)) == launch.count_interleavings()


# The search itself, on operations written by hand.


def chain(*ranks: int, value: float) -> list[Operation]:
    """A program that contributes `value` to tiles 0, 1, ... with these ranks."""
    operations = [Operation(START)]
    for tile, rank in enumerate(ranks):
        operations += [Operation(WAIT, tile, rank), Operation(ADD if rank else STORE, tile, part=value), Operation(RELEASE, tile)]
    return [*operations, Operation(END)]


ASCENDING = [chain(rank, rank, value=value) for rank, value in enumerate((1.0, 2.0**53, -(2.0**53)))]
SHIFTED = [chain(0, 1, value=1.0), chain(1, 0, value=2.0)]
SHIFTED[1][1:-1] = [*SHIFTED[1][4:7], *SHIFTED[1][1:4]]


def without_waits(programs: Programs) -> Programs:
    return [[op for op in program if op.kind != WAIT] for program in programs]


def with_early_releases(programs: Programs) -> Programs:
    """Each before its addition."""
    moved = [list(program) for program in programs]
    for program in moved:
        for at in range(1, len(program)):
            if program[at].kind == RELEASE and program[at - 1].kind in (STORE, ADD):
                program[at - 1 : at + 1] = program[at], program[at - 1]
    return moved


def with_swapped_ranks(programs: Programs) -> Programs:
    """1 and 2, of the last Q tile."""
    last = max(op.place for program in programs for op in program if op.kind == WAIT)
    swap = {1: 2, 2: 1}
    return [
        [replace(op, rank=swap.get(op.rank, op.rank)) if op.kind == WAIT and op.place == last else op for op in program]
        for program in programs
    ]


@pytest.mark.parametrize("resident", [None, 1, 2])
@pytest.mark.parametrize("programs", [ASCENDING[:2], SHIFTED, without_waits(SHIFTED), with_early_releases(ASCENDING[:2])])
def test_the_search_finds_the_traces_that_brute_force_finds(programs, resident):
    launch = Launch(programs, resident)
    every = list(launch.interleavings())
    traces: dict[Any, tuple[list[Event], int]] = {}
    for events, _ in every:
        first, count = traces.get(normal_form(events), (events, 0))
        traces[normal_form(events)] = first, count + 1
    found = list(launch.traces())
    assert sorted(map(repr, traces)) == sorted(repr(normal_form(events)) for events, _ in found)
    assert {(bits(state), launch.ended(state)) for _, state in found} == {(bits(state), launch.ended(state)) for _, state in every}
    assert launch.count_interleavings() == len(every)
    for events, count in list(traces.values())[:5]:
        assert count_orders(events) == count
        graph = networkx.DiGraph(conflicts(events))
        graph.add_nodes_from(range(len(events)))
        assert sum(1 for _ in networkx.all_topological_sorts(graph)) == count


def test_a_search_of_three_programs_is_complete():
    for resident in (None, 2):
        assert_complete(Launch(ASCENDING, resident))


def test_interleavings_that_matter_are_found():
    """A deadlock and another sum, each of them in few interleavings, and neither where nothing is broken."""
    right = search(Launch(ASCENDING))
    assert (right.deadlocks, len(right.bits)) == (0, 1)
    assert len(search(Launch(without_waits(ASCENDING))).bits) > 1
    assert len(search(Launch(with_early_releases(ASCENDING))).bits) > 1
    late = [chain(1, value=1.0), chain(0, value=1.0)]  # program 0 waits for program 1
    assert search(Launch(late)).deadlocks == 0
    assert search(Launch(late, resident=1)).deadlocks == 1
    assert len(search(Launch(with_swapped_ranks(ASCENDING))).bits - right.bits) == 1


# The kernel.

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


def recorded_in(recorder: Recorder, run: Run, residents: Sequence[int | None], seeds: Sequence[int]) -> tuple[Programs, bytes]:
    """Operations of the programs, and dq's bits, the same in all of these emulated launches."""
    recorder.launches.clear()
    states = []
    for resident in residents:
        for seed in seeds:
            run(seed, resident)
            states.append(bits(replayed(recorder.launches[-1], resident)))
    first, *others = recorder.launches
    assert len(recorder.launches) == len(states) == len(residents) * len(seeds)
    assert all(same(first.programs, other.programs) for other in others)
    assert len(set(states)) == 1
    return first.programs, states[0]


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


def assert_every_trace(programs: Programs, right: bytes, resident: int | None) -> int:
    """Each ends and has these bits; how many there are."""
    found = search(Launch(programs, resident))
    assert (found.deadlocks, found.bits) == (0, {right})
    return found.traces


def assert_emulated(recorder: Recorder, run: Run, launch: Launch) -> None:
    """The emulation can be led through all traces: event by event as the search has them, and to the right gradients."""
    for events, _ in launch.traces():
        recorder.script = events
        run(resident=launch.resident)
        assert recorder.launches.pop().events == events
    recorder.script = None


@pytest.mark.usefixtures("rewriting")
def test_every_interleaving_of_two_by_two_tiles_on_the_emulated_kernel():
    with recording() as recorder, enabled(schedule="ascending"):
        run = of_the_op(FULL, 32, 64, sms=2)
        programs, right = recorded_in(recorder, run, [None], range(3))
        launch = Launch(programs)
        assert assert_every_trace(programs, right, None) == 4
        assert_complete(launch)
        assert_emulated(recorder, run, launch)


MUTANTS = {"no wait": {WAITS: "pass"}, "early release": {RELEASES: "pass", WAITS: f"{WAITS}; {RELEASES}"}}


def swapped(plan: Any) -> list[int]:
    """The table with ranks 1 and 2 of the last Q tile swapped."""
    ints = pack_plan(plan)
    last = plan.order.geometry.n_q - 1
    for at in range(len(ints) - ints[4] * ints[5], len(ints)):
        rank = ints[at] >> 16
        if ints[at] & 0xFFFF == last and rank in (1, 2):
            ints[at] += (3 - 2 * rank) << 16
    return ints


@pytest.mark.nightly
@pytest.mark.usefixtures("rewriting")
@pytest.mark.parametrize("family", ["ascending", "descending", "shift", "searched"])
@pytest.mark.parametrize("name", [*MUTANTS, "two ranks swapped"])
def test_the_search_finds_mutants_of_the_kernel(family, name, monkeypatch):
    with recording() as recorder, enabled(schedule=family):
        _, right = recorded_in(recorder, of_the_op(FULL, 48, 96, sms=3), [None], [0])
        if name in MUTANTS:
            mutate(monkeypatch, "ONE_PASS", f"{family}_{name.replace(' ', '_')}", MUTANTS[name], times=4)
        else:
            monkeypatch.setattr(table, "pack_plan", swapped)
        recorder.launches.clear()
        of_the_op(FULL, 48, 96, sms=3)(check=False)
        # The search without an end would be long: every mutant is seen long before it.
        launch = Launch(recorder.launches[-1].programs)
        assert any(not launch.ended(state) or bits(state) != right for _, state in launch.traces())


GRIDS = [(n_q * TILE.block_m, n_kv * TILE.block_n) for n_q in (1, 2, 3) for n_kv in (1, 2, 3)]
SQUARES = [(16, 16), (32, 32), (48, 48), (64, 64)]  # causal: 1 x 1, 2 x 1, 3 x 2 and 4 x 2 tiles
FAMILIES = [
    *((family, FULL) for family in ("ascending", "descending", "shift", "shift_round_robin", "searched")),
    *((family, CAUSAL) for family in ("ascending", "descending", "symmetric", "symmetric_round_robin", "searched")),
]


@pytest.mark.nightly
@pytest.mark.usefixtures("rewriting")
@pytest.mark.parametrize(("family", "mask"), FAMILIES)
def test_every_interleaving_of_small_grids(family, mask, record_property):
    """By as many CTAs as there are KV tiles, and by two."""
    heads = 2 if family.endswith("round_robin") else 1
    traces = interleavings = 0
    with recording() as recorder, enabled(schedule=family):
        for q_len, kv_len in GRIDS if mask == FULL else SQUARES:
            n_kv = -(-kv_len // TILE.block_n)
            for sms in sorted({min(2, n_kv), n_kv}):
                programs, right = recorded_in(recorder, of_the_op(mask, q_len, kv_len, sms, heads), [None], range(3))
                traces += assert_every_trace(programs, right, None)
                interleavings += Launch(programs).count_interleavings()
    record_property("traces", traces)
    record_property("interleavings of traces", interleavings)
