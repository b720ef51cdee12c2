"""SPT, tickets from the last KV tile down and Q tiles upwards: how fast it is with a CTA per chain, and that fewer are enough.

The band lemma: a chain's next step has a higher i, the next part of a dq tile a lower j. So each link of a critical path raises
i - j, and a path has no more steps than the mask has diagonals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.block_masks.grid import order_of, plan_of
from benchmarks.schedules.simulator import Deadlock, Simulation, simulate
from dash_inductor.schedule import Ascending, Descending, Geometry, GroupedPlan

from .strategies import block_masks

STEPS = st.integers(1, 9)
STEPS_AND_HOPS = STEPS.flatmap(lambda step: st.tuples(st.just(step), st.integers(0, step)))  # lam <= tau


def simulated(g: Geometry, step: int, hop: int, heads: int = 1, resident: int | None = None) -> Simulation:
    reduce = min(step, hop) // 2
    costs = {"compute_ns": step - reduce, "reduce_ns": reduce, "sync_ns": hop - reduce}
    return simulate(plan_of("spt", g, heads), **costs, resident=resident)


def square(n: int, sees: Callable[[int, int], bool]) -> Geometry:
    return Geometry.of_blocks([[sees(i, j) for i in range(n)] for j in range(n)])


def band(g: Geometry) -> int:
    """Diagonals i - j from the first to the last of a connected part of the mask, at most."""
    graph = nx.Graph((i, -j - 1) for j in range(g.n_kv) for i in g.tiles(j))  # KV tile j is the node -j - 1
    parts = [[sum(edge) for edge in graph.subgraph(part).edges] for part in nx.connected_components(graph)]
    return max(max(diagonals) - min(diagonals) + 1 for diagonals in parts)


@given(block_masks(), STEPS, st.integers(0, 30))
def test_no_path_is_longer_than_the_band(g: Geometry, step: int, hop: int) -> None:
    """So while a hop is within a step the makespan is at most the band's width in steps."""
    assert simulated(g, step, hop).makespan_ns <= step + (band(g) - 1) * max(step, hop)
    assert band(g) <= g.n_q + g.n_kv - 1


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), STEPS_AND_HOPS)
def test_causal_documents_take_the_longest_of_them(lengths: list[int], costs: tuple[int, int]) -> None:
    """One of them is the plain causal mask."""
    document = [d for d, length in enumerate(lengths) for _ in range(length)]
    g = square(len(document), lambda i, j: i >= j and document[i] == document[j])
    assert simulated(g, *costs).makespan_ns == max(lengths) * costs[0] == band(g) * costs[0]


@pytest.mark.parametrize("before", [0, 1])
@given(st.integers(0, 5), st.integers(0, 9), STEPS_AND_HOPS)
def test_windows_take_their_width(before: int, w: int, more: int, costs: tuple[int, int]) -> None:
    """Of one side and of two."""
    g = square(2 * w + 1 + more, lambda i, j: -before * w <= i - j <= w)
    assert simulated(g, *costs).makespan_ns == (w + 1 + before * w) * costs[0] == band(g) * costs[0]


@given(st.integers(1, 9), st.integers(1, 9), STEPS, st.integers(0, 30))
def test_the_full_mask_reaches_the_lemma_where_a_hop_takes_a_step(n_q: int, n_kv: int, step: int, hop: int) -> None:
    g = Geometry.of_blocks([[True] * n_q] * n_kv)
    assert simulated(g, step, hop).makespan_ns == n_q * step + (n_kv - 1) * hop
    assert simulated(g, step, step).makespan_ns == band(g) * step


@given(block_masks(), st.integers(1, 3), st.integers(1, 9), STEPS, st.integers(0, 30))
def test_it_ends_with_any_number_of_resident_ctas(g: Geometry, heads: int, resident: int, step: int, hop: int) -> None:
    assert simulated(g, step, hop, heads, resident).residency == 1


@pytest.mark.parametrize("resident", [1, 2])
def test_ranks_against_the_tickets_do_not(resident: int) -> None:
    causal = square(3, lambda i, j: i >= j)
    mutant = replace(order_of("ascending_up", causal), slots=order_of("spt", causal).slots)
    assert mutant.ranks(2) == (2,)
    costs = {"compute_ns": 2, "reduce_ns": 1, "sync_ns": 1}
    with pytest.raises(Deadlock, match=f"{resident} CTAs are resident, and each of them waits"):
        simulate(GroupedPlan(mutant, 3, 3), **costs, resident=resident)
    simulate(GroupedPlan(mutant, 3, 3), **costs, resident=3)


@given(block_masks())
def test_two_of_the_benchmarks_orders_are_families(g: Geometry) -> None:
    for name, family in (("ascending_up", Ascending(g, g.n_kv)), ("ascending_down", Descending(g, g.n_kv))):
        order = order_of(name, g)
        assert order.slots == family.slots
        for j in range(g.n_kv):
            assert (order.visits(j), order.ranks(j)) == (family.visits(j), family.ranks(j))
