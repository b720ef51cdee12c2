"""The price of two passes, and the choice between them and one."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import replace

import pytest
import sympy
from hypothesis import example, given
from hypothesis import strategies as st

from dash_inductor.devices.cost_files import load_costs, load_tflops, load_two_pass, two_pass_percent
from dash_inductor.schedule import Costs, Geometry, TiledProblem, TwoPass
from dash_inductor.schedule.candidates import candidates, two_pass_ns
from dash_inductor.schedule.choice import RunTimeChoice, choose, choose_chained
from dash_inductor.schedule.costs import FLOP_PER_ELEMENT, Launches
from dash_inductor.schedule.formulas import two_pass
from dash_inductor.schedule.formulas.chained import MOST_CHAINS, chained_plan, chained_time, monotone_makespan
from dash_inductor.schedule.formulas.formula import Formula, eta, integers

MASKS = ("full", "causal")
BLOCKS = {"block_m": 64, "block_n": 64, "kv_rows": 128, "q_rows": 128}
ONE = {d: load_costs("h100", block_m=64, block_n=128, head_dim=d) for d in (64, 128)}
TWO = load_two_pass("h100", head_dim=64, **BLOCKS)
ALONE = replace(TWO, launches=Launches())  # the main kernel
H100 = {d: replace(ONE[d], two_pass=load_two_pass("h100", head_dim=d, **BLOCKS)) for d in (64, 128)}


def attention(length: int, heads: int, group: int = 1, mask: str = "full", head_dim: int = 64) -> TiledProblem:
    return TiledProblem(length, length, heads, group, head_dim, 64, 128, mask)


def launched(ctas: list[int], workers: int) -> int:
    """When the last of these CTAs ends, where one begins as soon as a worker is free."""
    free = [0] * workers
    for ns in ctas:
        heapq.heapreplace(free, free[0] + ns)
    return max(free)


def all_ctas(shape: TiledProblem, two: TwoPass) -> list[int]:
    """Their times, in the order of the launch."""
    keys = Geometry(shape.q_len, shape.kv_len, two.block_m, two.kv_rows, shape.mask)
    queries = Geometry(shape.q_len, shape.kv_len, two.q_rows, two.block_n, shape.mask)
    step_ns = shape.group * two.kv_step_ns
    of_keys = [keys.steps(j) * step_ns for j in range(keys.n_kv) for _ in range(shape.kv_heads_total)]
    rows = [len(queries.contributors(i)) * two.q_step_ns for i in reversed(range(queries.n_q))]
    return [two.end_ns + ns for ns in of_keys + [ns for ns in rows for _ in range(shape.kv_heads_total * shape.group)]]


SIZES = integers("count longest shrink heads step_ns")
PARTS = two_pass._triangle("cta", *SIZES, busy_ns=sympy.Integer(0))
TRIANGLE = Formula(list(PARTS)[-1], parts=PARTS, parameters=(*SIZES, two_pass.workers, eta))
ENDS = st.sampled_from([0, 3, 50, 500])


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(1, 140), ENDS)
@example(4, 2, 2, 3, 6, 0)
@example(4, 2, 2, 1, 6, 0)
def test_shrinking_ctas(count: int, shrink: int, shortest: int, heads: int, workers: int, end_ns: int) -> None:
    """Never less than the launch takes, and never more than an even share of the work and one CTA more."""
    steps = [min(shortest, shrink) + shrink * j for j in reversed(range(count)) for _ in range(heads)]
    ctas = [7 * n + end_ns for n in steps]
    bound = TRIANGLE(count, steps[0], shrink, heads, 7, workers, end_ns).ns
    assert launched(ctas, workers) <= bound <= ctas[0] + -(-sum(ctas) // workers)
    if len(ctas) <= workers:
        assert bound == ctas[0]


@given(st.integers(1, 300), st.integers(1, 50), st.integers(1, 300), st.integers(1, 50), st.integers(1, 140), ENDS)
def test_equal_ctas(first: int, first_ns: int, second: int, second_ns: int, workers: int, end_ns: int) -> None:
    """Never less than the launch takes; never more than an even share of the work and one CTA more, nor than one kind at a time."""
    bound = two_pass.FULL(second, first, 1, 1, second, first, 1, 1, first_ns, second_ns, workers, 0, end_ns).ns
    first_ns, second_ns = first_ns + end_ns, second_ns + end_ns
    end = launched([first_ns] * first + [second_ns] * second, workers)
    assert end <= bound
    share = -(-(first * first_ns + second * second_ns) // workers)
    apart = launched([first_ns] * first, workers) + launched([second_ns] * second, workers)
    assert bound <= min(share + max(first_ns, second_ns), apart)
    if first + second <= workers:
        assert bound == end


@given(
    st.integers(1, 9000),
    st.integers(1, 40),
    st.integers(1, 8),
    st.sampled_from(MASKS),
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.sampled_from([0, 10_000]),
)
@example(8192, 1, 16, "causal", 2157, 1618, 0)
@example(8192, 2, 1, "causal", 2000, 1, 0)
@example(8192, 3, 1, "causal", 1, 2000, 0)
def test_the_time_of_the_launch(
    length: int, heads: int, group: int, mask: str, kv_step_ns: int, q_step_ns: int, end_ns: int
) -> None:
    two = replace(ALONE, kv_step_ns=kv_step_ns, q_step_ns=q_step_ns, end_ns=end_ns)
    shape = attention(length, heads, group, mask)
    ns = two_pass_ns(shape, two)
    ctas = all_ctas(shape, two)
    # An upper bound; an even share and a CTA more at most, and what a last Q tile with few rows lacks.
    longest, ragged = max(ctas), 2 * heads * group * two.q_step_ns
    assert ns and launched(ctas, two.workers) <= ns <= (sum(ctas) + ragged) / two.workers + longest + 2 * two.q_step_ns


def test_the_bound_is_close() -> None:
    shapes = [attention(n, h, g, mask) for n in (700, 2048, 5000, 16384) for h in (1, 4, 16, 60) for g in (1, 4) for mask in MASKS]
    ratios = [two_pass_ns(shape, ALONE) / launched(all_ctas(shape, ALONE), ALONE.workers) for shape in shapes]
    assert sum(ratios) / len(ratios) < 1.03 and max(ratios) < 1.35


def test_unequal_lengths_under_a_causal_mask_have_no_time() -> None:
    assert two_pass_ns(replace(attention(512, 1), kv_len=100, mask="causal"), TWO) is None
    assert two_pass_ns(replace(attention(512, 1), kv_len=100), TWO)


@pytest.mark.parametrize("mask", MASKS)
def test_when_two_passes_are_a_candidate(mask: str) -> None:
    """Where the costs have them and nothing but the sizes decides; the last of all."""
    shape = attention(4096, 8, mask=mask)

    def families(costs: Costs, guarantee: str = "run", forced: str = "auto") -> list[str]:
        return [c.family for c in candidates(shape, costs, guarantee, forced)]

    assert families(H100[64])[-1] == "two_pass" and families(H100[64]).count("two_pass") == 1
    for how in ((ONE[64],), (H100[64], "device"), (H100[64], "batch"), (H100[64], "run", "descending")):
        assert "two_pass" not in families(*how)


@pytest.mark.parametrize("mask", MASKS)
def test_few_tiles_take_two_passes(mask: str) -> None:
    """With one kv head for 16 query heads half of an H100 idles in one pass. With 64 kv heads nothing does."""
    few, many = attention(8192, 1, 16, mask), attention(8192, 64, 1, mask)
    slower = replace(H100[64], two_pass=replace(TWO, kv_step_ns=TWO.kv_step_ns * 5 // 4, q_step_ns=TWO.q_step_ns * 5 // 4))
    assert choose(few, slower).family == "two_pass"
    assert choose(few, ONE[64]).time_ns > 1.05 * choose(few, slower).time_ns
    assert choose(many, slower).family != "two_pass"


def test_the_plan_of_two_passes_is_the_order_of_their_sums() -> None:
    plan = choose(attention(8192, 1, 16), H100[128]).plan()
    g = plan.order.geometry
    assert (g.block_m, g.block_n, plan.heads, plan.group) == (64, 64, 1, 16)
    assert [plan.order.rank(5, j) for j in range(g.n_kv)] == list(range(g.n_kv))


@pytest.mark.parametrize("device", ["a100", "b200", "emulated", "h100", "h200"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_steps_of_a_cost_file(device: str, head_dim: int) -> None:
    """Of seven matmuls four are dK/dV's; a step of one pass's tile costs `two_pass_percent` of that in one pass."""
    tile = {"block_m": 64, "block_n": 128}
    two = load_two_pass(device, block_m=64, block_n=64, kv_rows=128, q_rows=128, head_dim=head_dim)
    percent = two_pass_percent(device, head_dim)[0] / 100
    if device == "emulated":
        expected = load_costs(device, **tile, head_dim=head_dim).step_ns * percent
    else:
        expected = 64 * 128 * head_dim * FLOP_PER_ELEMENT * two.workers / load_tflops(device, head_dim) / 1000 * percent
    assert two.kv_step_ns + two.q_step_ns == pytest.approx(expected, abs=3)
    assert two.kv_step_ns / two.q_step_ns == pytest.approx(4 / 3, rel=1e-2)
    assert load_two_pass(device, **BLOCKS, head_dim=head_dim, sms=77).workers == 77
    split = load_two_pass(device, **BLOCKS, head_dim=head_dim, split=True)  # S, dV; S, dP, dK
    assert 2 * split.kv_step_ns / two.kv_step_ns == pytest.approx(5 / 4, rel=1e-2)
    assert split.split and not two.split


def test_a_measured_price_needs_no_wider_margin_than_others() -> None:
    assert (TWO.margin_percent, replace(TWO, estimate=False).margin_percent) == (5, 2)


# Without the promise that CTAs run together: tickets.


@given(st.integers(1, 2000), st.integers(1, 12), st.integers(1, 4), st.sampled_from(MASKS))
def test_the_time_of_a_chained_launch(length: int, heads: int, group: int, mask: str) -> None:
    shape, costs = attention(length, heads, group, mask), replace(ONE[64], workers=10)
    family = "ascending" if mask == "full" else "descending"
    plan = chained_plan(shape.geometry, family, heads, group)
    times = {"step_ns": costs.step_ns, "hop_ns": costs.hop_ns, "chain_ns": costs.chain_ns}
    exact = monotone_makespan(plan, **times, resident=costs.workers)
    assert chained_time(shape, costs, family) == exact + costs.launches.beside_ns(shape.elements, two_pass=False)


def test_many_heads_are_timed_in_proportion() -> None:
    shape = attention(8192, 2 * MOST_CHAINS // 64)
    alone = replace(ONE[64], launches=Launches())
    half = chained_time(replace(shape, kv_heads_total=shape.kv_heads_total // 2), alone, "ascending")
    assert chained_time(shape, alone, "ascending") == 2 * half


def test_the_choice_of_a_chained_launch() -> None:
    """Two passes where they are faster by the margin; heads that cross waves cost tickets much."""
    shape = attention(2048, 40)  # 16 chains a head on 132 workers
    assert choose_chained(shape, H100[64], "ascending") == "two_pass"
    assert choose_chained(shape, ONE[64], "ascending") == "ascending"
    time = chained_time(shape, ONE[64], "ascending")
    for percent, family in ((96, "ascending"), (94, "two_pass")):
        costs_ns = range(1, 10_000)  # of a step, either kind
        prices = [replace(TWO, kv_step_ns=ns, q_step_ns=ns) for ns in costs_ns]
        nearest = bisect_right(prices, time * percent, key=lambda price: 100 * two_pass_ns(shape, price))
        costs = replace(ONE[64], two_pass=prices[nearest - 1])
        assert choose_chained(shape, costs, "ascending") == family
        rule = RunTimeChoice("full", 1, 64, 64, 128, costs, "run", "ascending", chained=True)
        assert rule.FIELDS[4] == "is_two_pass" and rule(4, 2048, 2048, 40) == (family == "two_pass")
