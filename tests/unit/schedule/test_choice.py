from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.schedules.simulator import simulate
from dash_inductor.config import Config
from dash_inductor.devices.cost_files import load_costs, load_two_pass
from dash_inductor.devices.target import Target
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.schedule import MASKS, MONOTONE, Costs, GroupedPlan, TiledProblem, place_heads
from dash_inductor.schedule.candidates import candidates
from dash_inductor.schedule.choice import RunTimeChoice, choose
from dash_inductor.schedule.costs import Launches
from dash_inductor.schedule.families import REGISTER
from dash_inductor.schedule.formulas.chained import monotone_makespan
from dash_inductor.schedule.packing import FAMILY_CODES

from .strategies import check

H100 = load_costs("h100", block_m=64, block_n=128, head_dim=64)
EMULATED = load_costs("emulated", block_m=16, block_n=32, head_dim=64)
FREE = replace(EMULATED, hop_ns=0, shift_percent=0)  # many candidates tie
WIDE = replace(EMULATED, workers=40)  # room for more heads than there are
FAR = replace(EMULATED, hop_ns=50_000)  # no hop is within its bound
# Steps so cheap that times often differ by a few ns, or by the margin and a few ns.
NEAR = replace(H100, step_ns=50, hop_ns=3, shift_percent=0)
TWO_PASS = replace(H100, two_pass=load_two_pass("h100", block_m=64, block_n=64, kv_rows=128, q_rows=128, head_dim=64))
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
FORCED = [("full", f) for f in ("ascending", "descending", "shift", "shift_round_robin")] + [
    ("causal", f) for f in ("ascending", "descending", "symmetric", "symmetric_round_robin")
]


def problems(count: int, seed: int, mask: str, block_m: int = 64, block_n: int = 128) -> Iterator[TiledProblem]:
    """Of equal lengths, small, large and powers of two."""
    rng = random.Random(seed)
    for _ in range(count):
        length = rng.choice([rng.randint(1, 8 * block_n), rng.randint(1, 200 * block_n), 2 ** rng.randint(4, 15)])
        yield TiledProblem(length, length, rng.randint(1, 40), rng.choice([1, 1, 4]), 64, block_m, block_n, mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("costs", [EMULATED, FREE, FAR, WIDE])
def test_what_is_chosen_can_run_in_the_time_it_says(mask: str, costs: Costs) -> None:
    rng = random.Random(1)
    for _ in range(20):
        q_len = rng.randint(1, 300)
        kv_len = rng.choice([q_len, rng.randint(1, 300)])
        problem = TiledProblem(q_len, kv_len, rng.randint(1, 9), rng.choice([1, 2]), 64, 16, 32, mask)
        for family in ("auto", *(f for m, f in FORCED if m == mask)):
            choice = choose(problem, costs, family=family)
            plan = choice.plan()
            check(plan, resident=costs.workers)
            assert plan.workers <= costs.workers
            assert family in ("auto", choice.family)
            step_ns = costs.step_ns if choice.family in MONOTONE else costs.shifted_step_ns
            ns = simulate(plan, compute_ns=step_ns, reduce_ns=0, sync_ns=costs.hop_ns).makespan_ns
            if choice.time_ns is None:  # no formula
                assert mask == "causal" and (q_len != kv_len or family == "ascending")
            else:
                assert choice.time_ns >= ns  # test_formulas says when they are equal


@pytest.mark.parametrize(
    "costs", [H100, NEAR, replace(H100, hop_ns=H100.step_ns + 1000), TWO_PASS], ids=["h100", "near", "far", "two"]
)
@pytest.mark.parametrize("how", [{}, {"guarantee": "batch"}, {"family": "descending"}], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_the_rule_is_the_first_minimum_of_weighted_times(mask: str, how: dict[str, str], costs: Costs) -> None:
    """Held against the rule written out; at run time as at compile time."""
    near = 0
    for problem in problems(1000 if NIGHTLY or costs == NEAR else 60, 2, mask):
        considered = candidates(problem, costs, **{"guarantee": "run", **how})
        timed = sorted(
            (c.ns * (100 if n == 0 else 105 if c.family == "two_pass" else 102), n) for n, c in enumerate(considered) if c.ns
        )
        choice = choose(problem, costs, **how)
        best = considered[timed[0][1]]
        assert (choice.candidate, choice.considered) == (best, considered)
        assert [c.is_default for c in considered] == [True, *[False] * (len(considered) - 1)]
        assert len({(c.family, c.roles, c.heads_in_flight) for c in considered}) == len(considered)
        near += len(timed) > 1 and timed[1][0] - timed[0][0] <= 500

        settings = {"guarantee": "run", "family": "auto", "chained": False, **how}
        rule = RunTimeChoice(mask, problem.group, 64, 64, 128, costs, **settings)
        values = [rule(index, problem.q_len, problem.kv_len, problem.kv_heads_total) for index in range(len(rule.FIELDS))]
        fields = {"roles": best.roles, "heads_in_flight": best.heads_in_flight, "mirrored": best.mirrored}
        two = best.family == "two_pass"
        assert dict(zip(rule.FIELDS, values, strict=True)) == {
            **fields,
            "family": FAMILY_CODES.index(best.family),
            "is_two_pass": two,
        }
    assert near > 5 or costs != NEAR or how


def test_the_default_wins_unless_beaten_by_two_percent() -> None:
    problem = TiledProblem(4096, 4096, 1, 1, 64, 64, 128, "full")  # 64 Q and 32 KV tiles: 64 steps against 64 shifted and no hop
    near, far = replace(H100, shift_percent=0, hop_ns=50), replace(H100, shift_percent=0, hop_ns=100)
    ascending, shift = 64 * H100.step_ns + 31 * 50, 64 * H100.step_ns
    assert ascending * 100 < shift * 102 and choose(problem, near).family == "ascending"
    assert (ascending + 31 * 50) * 100 > shift * 102 and choose(problem, far).family == "shift"


def test_every_family_is_chosen_somewhere() -> None:
    """Symmetric in whole heads is never ahead of its round robin, and is chosen where it is level."""
    even = replace(H100, shift_percent=0)
    drawn = [problem for mask in MASKS for problem in problems(80, 3, mask)]
    seen = Counter(choose(problem, costs).family for problem in drawn for costs in (H100, even, TWO_PASS))
    assert set(seen) == {name for name, known in REGISTER.items() if known.default_under or known.tried_under} | {"two_pass"}
    for problem in problems(40, 4, "causal"):
        grouped, dealt = (choose(problem, even, family=family).time_ns for family in ("symmetric", "symmetric_round_robin"))
        assert grouped >= dealt


def test_heads_that_l2_does_not_hold_cost_more() -> None:
    """With four CTAs of each, by the whole percentage; with 16 by a quarter of it. Heads that L2 holds cost what they cost."""
    problem = TiledProblem(8192, 8192, 32, 1, 128, 64, 128, "full")

    def times(costs: Costs) -> dict[int, int | None]:
        found = candidates(problem, costs, "batch")
        return {each.roles: each.ns for each in found if (each.family, each.roles * each.heads_in_flight) == ("ascending", 128)}

    bare = replace(H100, hop_ns=0, chain_ns=0, launches=Launches())
    free, dear = (times(replace(bare, sweep_percent=percent)) for percent in (0, 8))
    assert {roles: round(100 * dear[roles] / free[roles] - 100) for roles in free} == {64: 0, 32: 0, 16: 2, 8: 4, 4: 8}


@pytest.mark.parametrize("guarantee", ["device", "batch"])
@pytest.mark.parametrize("mask", MASKS)
def test_stronger_guarantees_do_not_depend_on_heads_or_device(guarantee: str, mask: str) -> None:
    """The family, hence the order of every sum, is a function of lengths, mask and tiles alone."""
    for q_len in (100, 1000, 9000):
        families = {
            choose(TiledProblem(q_len, q_len, heads, 1, 64, 64, 128, mask), replace(H100, workers=workers), guarantee).family
            for heads in (1, 7, 64)
            for workers in (1, 13, 114, 132, 296)
        }
        assert families == {"ascending" if mask == "full" else "descending"}


def test_a_forced_family_without_a_formula_has_no_time() -> None:
    choice = choose(TiledProblem(256, 256, 4, 1, 64, 16, 32, "causal"), EMULATED, family="ascending")
    assert choice.time_ns is None
    assert (choice.candidate.roles, choice.candidate.heads_in_flight) == (4, 1)  # 8 chains in two passes


def test_heads_in_flight_stay_within_l2_unless_workers_would_idle() -> None:
    problem = TiledProblem(16384, 16384, 200, 4, 128, 64, 128, "causal")  # 64 MiB a kv head
    for family, most in (("symmetric", 132 // 64), ("descending", 132 // 4)):
        in_flight = {c.heads_in_flight for c in candidates(problem, H100, "run", family) if c.ns}
        assert most * 0.8 < max(in_flight) <= most, family
    short = replace(problem, q_len=128, kv_len=128)
    assert max(c.heads_in_flight for c in candidates(short, H100, "run", "symmetric")) == 132
    best = choose(TiledProblem(8192, 8192, 32, 4, 128, 64, 128, "causal"), H100).candidate  # one kv head fits
    assert best.roles * best.heads_in_flight > 120


SHORT = [
    (mask, head_dim, length, sizes)
    for mask in MASKS
    for head_dim in (64, 128)
    for length in (512, 1024, 2048, 4096)
    for sizes in ((16384 // length, 1024 // head_dim, 1), (16384 // length, 256 // head_dim, 4), (1, 12, 1))
]


def test_short_sequences_take_what_a_simulation_says() -> None:
    """48 shapes of up to 4,096 positions, by the costs of an H200: the time that decides is that of a simulation that has waits and
    the ends of chains."""
    for mask, head_dim, length, (batch, kv_heads, group) in SHORT:
        problem = Problem(mask, batch, kv_heads * group, kv_heads, length, length, head_dim, "bf16")
        found = resolve(problem, Config(template="one_pass"), Target("h200", 90, 132))
        (plan, ns), costs = found.schedule, found.costs
        assert ns and costs and found.choice
        paid = {"compute_ns": costs.step_ns, "sync_ns": costs.hop_ns, "chain_ns": costs.chain_ns}
        simulated = simulate(plan, **paid, reduce_ns=0).makespan_ns
        beside_ns = costs.launches.beside_ns(found.choice.problem.elements, two_pass=False)
        assert ns == simulated + beside_ns, (mask, head_dim, length, batch, kv_heads, group)


def test_what_runs_beside_decides_where_sequences_are_short() -> None:
    """An H200, 16 heads: by steps and hops alone two passes would be taken at 1,024 positions, of more CTAs."""
    problem = Problem("causal", 1, 16, 16, 1024, 1024, 128, "bf16")
    found = resolve(problem, Config(), Target("h200", 90, 132))
    assert found.choice and found.choice.family == "descending"
    costs = found.choice.costs
    assert costs.two_pass
    two = replace(costs.two_pass, end_ns=0, launches=Launches())
    bare = replace(costs, chain_ns=0, launches=Launches(), two_pass=two)
    assert choose(found.choice.problem, bare).family == "two_pass"


def test_regret_against_simulation() -> None:
    """Of what is chosen against the best of its candidates, both simulated, over realistic sizes."""
    rng = random.Random(7)
    regrets = []
    while len(regrets) < (1000 if NIGHTLY else 60):
        mask, head_dim = rng.choice(MASKS), rng.choice([64, 128])
        costs = load_costs("h100", block_m=64, block_n=128, head_dim=head_dim, sms=rng.choice([108, 132, 148]))
        length = rng.choice([128 * rng.randint(4, 64), 512 * rng.randint(1, 16), 2 ** rng.randint(9, 13)])
        problem = TiledProblem(length, length, rng.choice([1, 2, 4, 8, 16, 24, 32, 48, 64]), 1, head_dim, 64, 128, mask)
        if problem.kv_heads_total * (length // 128) ** 2 > (40_000 if NIGHTLY else 8_000):
            continue
        choice = choose(problem, costs)
        times = {}
        for c in choice.considered:
            how = {"heads": problem.kv_heads_total, "heads_in_flight": c.heads_in_flight, "mirrored": c.mirrored}
            plan = place_heads(c.family, problem.geometry, c.roles, stride=c.stride or None, **how)
            if isinstance(plan, GroupedPlan) and c.family in MONOTONE:
                times[c] = monotone_makespan(plan, step_ns=costs.step_ns, hop_ns=costs.hop_ns, chain_ns=costs.chain_ns)
            else:
                paid = {"compute_ns": costs.shifted_step_ns, "sync_ns": costs.hop_ns, "chain_ns": costs.chain_ns}
                times[c] = simulate(plan, **paid, reduce_ns=0).makespan_ns
        regrets.append(times[choice.candidate] / min(times.values()) - 1)
    print(f"regret: mean {sum(regrets) / len(regrets):.4f}, max {max(regrets):.4f}")
    assert sum(regrets) / len(regrets) <= 0.005
    assert max(regrets) <= 0.04
