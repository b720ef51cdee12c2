"""Against OR-tools CP-SAT, on cases small enough to be solved."""

from __future__ import annotations

import pytest
from ortools.sat.python import cp_model

from benchmarks.schedules.bounds import lower_bound
from benchmarks.schedules.simulator import simulate
from dash_inductor.schedule import Geometry, GroupedPlan, Shift, Symmetric

STEP = 4


def optimum(g: Geometry, workers: int, hop: int, known: int) -> tuple[int, int]:
    """(What has been proven to be least, the least found) of the makespans of one head, steps of STEP; at most `known`.

    A worker runs a chain to its end before the next. Parts of a Q tile end a hop apart, or a step if on one worker.
    """
    model = cp_model.CpModel()
    chains = [j for j in range(g.n_kv) if g.steps(j)]
    makespan = model.new_int_var(0, known, "makespan")
    end = {(i, j): model.new_int_var(STEP, known, f"end {i} {j}") for j in chains for i in g.tiles(j)}
    runs = {(j, w): model.new_bool_var(f"worker {w} runs {j}") for j in chains for w in range(workers)}
    held: list[list[cp_model.IntervalVar]] = [[] for _ in range(workers)]
    for position, j in enumerate(chains):
        model.add_no_overlap([model.new_fixed_size_interval_var(end[i, j] - STEP, STEP, "") for i in g.tiles(j)])
        first, last = (model.new_int_var(0, known, "") for _ in range(2))
        for i in g.tiles(j):
            model.add(first <= end[i, j] - STEP)
            model.add(last >= end[i, j])
        model.add(makespan >= last)
        model.add_exactly_one(runs[j, w] for w in range(workers))
        for w in range(workers):
            held[w].append(model.new_optional_interval_var(first, model.new_int_var(0, known, ""), last, runs[j, w], ""))
            if w > position:  # workers are alike
                model.add(runs[j, w] == 0)
    for intervals in held:
        model.add_no_overlap(intervals)
    for i in range(g.n_q):
        line = g.contributors(i)
        if hop <= STEP:  # what one worker does is a step apart anyway
            model.add_no_overlap([model.new_fixed_size_interval_var(end[i, j], hop, "") for j in line])
            continue
        for position, j in enumerate(line):
            for other in line[:position]:
                same, before = model.new_bool_var(""), model.new_bool_var("")
                for w in range(workers):
                    model.add(runs[j, w] == runs[other, w]).only_enforce_if(same)
                model.add(end[i, j] >= end[i, other] + hop).only_enforce_if([before, ~same])
                model.add(end[i, other] >= end[i, j] + hop).only_enforce_if([~before, ~same])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = 20  # all but one in thousands take a fraction of a second
    solver.solve(model)
    return round(solver.best_objective_bound), round(solver.objective_value)


def time_of(schedule, hop: int) -> int:
    reduce = min(STEP, hop) // 2
    costs = {"compute_ns": STEP - reduce, "reduce_ns": reduce, "sync_ns": hop - reduce}
    return simulate(GroupedPlan(schedule, 1, 1), **costs).makespan_ns


FULL = [(n, n_q, roles) for n in range(1, 5) for n_q in range(1, 6) for roles in range(1, min(n, n_q) + 1)]


@pytest.mark.parametrize(("n", "n_q", "roles"), FULL)
def test_shift_is_optimal_on_the_full_mask(n: int, n_q: int, roles: int) -> None:
    """With a hop as long as its stride in steps, and a shorter one."""
    g = Geometry(n_q, n, 1, 1, "full")
    schedule = Shift(g, roles)
    for hop in {STEP, schedule.stride * STEP, STEP // 2}:
        found = time_of(schedule, hop)
        assert found == -(-n // roles) * n_q * STEP
        if found > lower_bound(g, heads=1, workers=roles, step_ns=STEP, hop_ns=hop):
            assert (found, found) == optimum(g, roles, hop, found)


@pytest.mark.parametrize("n", [2, 4])
def test_symmetric_is_optimal_where_pairs_fit_the_workers(n: int) -> None:
    for k in (1, 2):
        g = Geometry(n * k, n * k, 1, k, "causal")
        found = time_of(Symmetric(g, n // 2), STEP)
        assert found == lower_bound(g, heads=1, workers=n // 2, step_ns=STEP, hop_ns=STEP)
        assert (found, found) == optimum(g, n // 2, STEP, found)


def test_symmetric_is_not_where_they_do_not() -> None:
    g = Geometry(6, 6, 1, 1, "causal")  # three pairs of seven steps on two workers
    found = time_of(Symmetric(g, 2), STEP)
    assert found == 14 * STEP > optimum(g, 2, STEP, found)[1]
