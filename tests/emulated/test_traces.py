"""The search for every interleaving, held against brute force on programs written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networkx
import pytest
from traces import (
    ADD,
    END,
    RELEASE,
    START,
    STORE,
    WAIT,
    Event,
    Launch,
    Operation,
    assert_complete,
    conflicts,
    count_orders,
    normal_form,
    search,
)

Programs = list[list[Operation]]


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


@pytest.mark.parametrize("resident", [None, 1, pytest.param(2, marks=pytest.mark.nightly)])
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
    assert {(state.bits(), launch.ended(state)) for _, state in found} == {
        (state.bits(), launch.ended(state)) for _, state in every
    }
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
