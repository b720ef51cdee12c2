"""The model of the H800 measurements: its simulation against the project's own replay, its fit against the measurements."""

from __future__ import annotations

import heapq
import json
import re
from itertools import pairwise, product

import networkx as nx
import numpy as np
import pandas as pd
import pytest

from benchmarks.h800 import __main__ as command
from benchmarks.h800.constants import Constants, priors
from benchmarks.h800.evaluation import Evaluation, errors, evaluate, picks
from benchmarks.h800.fit import log_errors
from benchmarks.h800.makespan import makespan
from benchmarks.h800.measurements import LENGTHS, SCHEDULES, Cell, cells, load
from benchmarks.h800.placement import WORKERS, Placement, place
from benchmarks.h800.surface import makespans
from dash_inductor.schedule import Geometry, GroupedPlan, make_order, simulate

pytestmark = pytest.mark.nightly
FULL, CAUSAL = "full", "causal"


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluate(load())


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, float]:
    """What the command prints with --json, once it has drawn it."""
    picture = tmp_path_factory.mktemp("h800") / "h800.png"
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", printed.append)
        assert command.main(["--json", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    entries = json.loads("".join(printed))
    times = {Cell(e["schedule"], e["head_dim"], e["causal"], e["seqlen"]): e["ms"] for e in entries}
    assert len(entries) == len(times)
    return times


# The simulation.


def steps_of_plan(placement: Placement, family: str) -> float:
    """Makespan of the project's replay, in steps, of the same schedule with aligned heads; a hop is 0.75 steps."""
    roles = placement.units_per_head
    schedule = make_order(family, placement.geometry, roles, stride=1 if family == "shift" else None)
    plan = GroupedPlan(schedule, placement.heads, min(placement.heads, placement.workers // roles))
    return simulate(plan, compute_ns=800, reduce_ns=200, sync_ns=550).makespan_ns / 1000


def of_cell(schedule: str, causal: bool, seqlen: int, workers: int = WORKERS) -> Placement:
    cell = place(Cell(schedule, 64, causal, seqlen))
    return Placement(cell.family, cell.geometry, cell.heads, cell.dynamic, cell.paired, cell.section, workers)


def test_is_the_replay_where_heads_are_aligned() -> None:
    """Four KV tiles divide 132 workers, and 4,096 workers hold all chains at once."""
    for placement, family in (
        (of_cell("descending_persistent", False, 512), "descending"),
        (of_cell("shift_persistent", False, 512), "shift"),
        (of_cell("shift", False, 512), "shift"),
        (of_cell("shift_persistent", True, 512), "symmetric"),
        (of_cell("ascending", True, 2048, workers=4096), "ascending"),
        (of_cell("descending", True, 2048, workers=4096), "descending"),
    ):
        assert makespan(placement, 0.75, 0, 0) == pytest.approx(steps_of_plan(placement, family)), placement


@pytest.mark.parametrize("seqlen", (512, 2048, 8192))
@pytest.mark.parametrize("causal", (False, True))
def test_pairs_visit_tiles_as_symmetric_and_shift_do(causal: bool, seqlen: int) -> None:
    placement = of_cell("shift", causal, seqlen)
    family, stride = ("symmetric", None) if causal else ("shift", 1)
    schedule = make_order(family, placement.geometry, placement.units_per_head, stride=stride)
    assert placement.ring() == [[i for j in unit for i in schedule.visits(j)] for unit in placement.units]


def longest_path(placement: Placement, hop: float, overhead: float) -> float:
    """Makespan under static dispatch by the definition: a node per step, edges along workers and along Q tiles."""
    g, dag = placement.geometry, nx.DiGraph()
    chains = {u: placement.units[u] for u in range(placement.units_per_head)}
    last_on_worker: dict[int, object] = {}
    contributors: dict[tuple[int, int], list[tuple[object, object]]] = {}
    for head, u in product(range(placement.heads), chains):
        number = head * len(chains) + u
        if placement.family == "ring":
            tiles = placement.ring()[u]
        else:
            visited = {j: list(range(g.first_q_tile(j), g.n_q)) for j in chains[u]}
            tiles = [i for j in chains[u] for i in (visited[j] if placement.family == "ascending" else visited[j][::-1])]
        starts = np.cumsum([0, *(g.steps(j) for j in chains[u])]).tolist()
        for t, i in enumerate(tiles):
            node = (head, u, t)
            before = last_on_worker.get(number % placement.workers, "start")
            dag.add_edge(before, node, weight=1 + overhead * (t in starts))
            last_on_worker[number % placement.workers] = node
            chain = chains[u][sum(t >= s for s in starts) - 1]
            rank: object = (number // placement.workers, t) if placement.family == "ring" else chain
            contributors.setdefault((head, i), []).append((rank, node))
    for line in contributors.values():
        for a, b in pairwise(node for _, node in sorted(line)):
            dag.add_edge(a, b, weight=max(hop, dag.edges[a, b]["weight"] if dag.has_edge(a, b) else 0))
    return nx.dag_longest_path_length(dag)


@pytest.mark.parametrize("hop", (0.3, 0.9, 1.6))
@pytest.mark.parametrize("workers", (5, 8, 10))
@pytest.mark.parametrize("n_kv, ratio, heads", ((4, 1, 7), (4, 2, 5), (2, 1, 11), (8, 2, 3)))
def test_is_the_longest_path_where_heads_straddle(n_kv: int, ratio: int, heads: int, workers: int, hop: float) -> None:
    for family, mask in product(("ascending", "descending", "ring"), (FULL, CAUSAL)):
        paired = mask == CAUSAL
        if n_kv > workers and not paired:
            continue  # a head over two rounds of the same worker
        geometry = Geometry(n_kv * ratio, n_kv * ratio, 1, ratio, mask)
        placement = Placement(family, geometry, heads, dynamic=False, paired=paired, workers=workers)
        assert makespan(placement, hop, 0.7, 0)[0] == pytest.approx(longest_path(placement, hop, 0.7)), placement


@pytest.mark.parametrize("schedule, causal", (("ascending", False), ("ascending", True), ("descending", True)))
def test_dynamic_dispatch_is_the_recursion_of_the_design(schedule: str, causal: bool) -> None:
    """S[x] = max(free + 1, S[x - 1] + d + hop), with d the steps by which the chain before started earlier."""
    hop, placement = 0.8, of_cell(schedule, causal, 2048)
    g = placement.geometry
    started: dict[tuple[int, int], float] = {}
    free = [0.0] * placement.workers
    for head, j in placement.chains():
        start = free[0] + 1
        if j:
            start = max(
                start, started[head, j - 1] + hop + (g.first_q_tile(j) - g.first_q_tile(j - 1) if schedule == "ascending" else 0)
            )
        started[head, j] = start
        heapq.heapreplace(free, start + g.steps(j) - 1)
    assert makespan(placement, hop, 0, 0)[0] == pytest.approx(max(free))


@pytest.mark.parametrize("seqlen", (512, 2048))
def test_shift_has_no_stalls_while_a_hop_takes_at_most_a_step(seqlen: int) -> None:
    placement = of_cell("shift_persistent", False, seqlen)
    rounds = -(-placement.heads * placement.geometry.n_kv // WORKERS)
    assert makespan(placement, [0.0, 1.0], 0, 0).tolist() == [rounds * placement.geometry.n_q] * 2


def test_many_sets_of_constants_are_as_one_at_a_time() -> None:
    for schedule in SCHEDULES:
        placement = of_cell(schedule, True, 512)
        together = makespan(placement, [0.4, 0.8], [0.0, 1.5], [0.1, 0.2])
        assert together.tolist() == [makespan(placement, 0.4, 0, 0.1)[0], makespan(placement, 0.8, 1.5, 0.2)[0]]


def test_sections_of_heads() -> None:
    """Heads whose tiles fit 40 MiB, a power of two, under a causal mask with dynamic dispatch of single chains."""
    assert [place(Cell("descending", 128, True, s)).section for s in LENGTHS] == [64, 32, 16, 8, 4, 2]
    for schedule, causal in (("descending", False), ("shift", True), ("shift_persistent", True)):
        assert place(Cell(schedule, 128, causal, 2048)).section == 1
    order = Placement("descending", Geometry(4, 4, 1, 2, CAUSAL), heads=3, dynamic=True, paired=False, section=2).chains()
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


def test_pairs_need_an_even_number_of_tiles() -> None:
    with pytest.raises(ValueError, match="even number of KV tiles, got 3"):
        Placement("ring", Geometry(3, 3, 1, 1, CAUSAL), heads=1, dynamic=False, paired=True)


# The fit.


def error_and_regret(rows: pd.DataFrame, name: str) -> tuple[float, float]:
    """Means of the absolute relative error and of the regret."""
    return errors(rows, name).abs().mean(), picks(rows, name)["regret"].mean()


def test_errors_in_sample_and_of_lengths_left_out(evaluation: Evaluation) -> None:
    for name, most in (("in_sample", 0.025), ("left_out", 0.05)):
        error, regret = error_and_regret(evaluation.table, name)
        assert error <= most and regret <= 0.015, name
    by_length = evaluation.table.groupby("seqlen")
    by_head_dim = evaluation.table.groupby(["head_dim", "seqlen"])
    for key, rows in (*(((seqlen,), rows) for seqlen, rows in by_length), *by_head_dim):
        assert error_and_regret(rows, "left_out")[0] <= (0.03 if key[-1] == 2048 else 0.05), key
    assert len(by_length) == 3 and len(by_head_dim) == 6


def test_constants_are_near_what_is_known_of_them(evaluation: Evaluation) -> None:
    for head_dim, constants in evaluation.fits.items():
        for name, prior in priors(head_dim).items():
            assert abs(np.log(getattr(constants, name) / prior.center)) <= 2 * prior.spread, (head_dim, name)


def test_the_fit_is_a_minimum(evaluation: Evaluation) -> None:
    """A constant that is a hundredth larger or smaller makes measurements and priors together less probable."""

    def misfit(head_dim: int, changed: dict[str, float]) -> float:
        values = vars(evaluation.fits[head_dim]) | changed
        rows = evaluation.table[evaluation.table["head_dim"] == head_dim]
        distances = [np.log(values[name] / prior.center) / prior.spread for name, prior in priors(head_dim).items()]
        return float(((log_errors(rows, Constants(**values)) / 0.02) ** 2).sum() + np.square(distances).sum())

    for head_dim, constants in evaluation.fits.items():
        best = misfit(head_dim, {})
        for name, factor in product(vars(constants), (0.99, 1.01)):
            assert misfit(head_dim, {name: factor * getattr(constants, name)}) > best, (head_dim, name, factor)


def test_a_length_left_out_does_not_decide_its_own_prediction(evaluation: Evaluation) -> None:
    changed = load()
    short = changed["seqlen"] == 512
    changed.loc[short, "ms"] *= 1.5
    before, after = evaluation.table["left_out"], evaluate(changed).table["left_out"]
    assert (after[short] == before[short]).all() and (after[~short] != before[~short]).all()


def test_interpolation_is_linear_between_and_beyond_simulations() -> None:
    cells = [Cell("descending", 64, True, 512), Cell("shift", 128, True, 512)]

    def at(hop: float) -> np.ndarray:
        return makespans(cells, np.full(2, hop), np.full(2, 0.5), 0.1)

    assert at(0.7) == pytest.approx([makespan(place(cell), 0.7, 0.5, 0.1)[0] for cell in cells])
    assert at(0.6) == pytest.approx((at(0.5) + at(0.7)) / 2)
    assert at(1.3) == pytest.approx(2 * at(1.1) - at(0.9))


def test_interpolation_is_near_the_simulation(evaluation: Evaluation) -> None:
    for head_dim, rows in evaluation.table.groupby("head_dim"):
        interpolated = np.exp(log_errors(rows, evaluation.fits[head_dim]))
        assert (rows["in_sample"] / rows["ms"]).to_numpy() == pytest.approx(interpolated, rel=0.01)


def test_every_cell_is_predicted(predicted: dict[Cell, float], evaluation: Evaluation) -> None:
    assert set(predicted) == set(cells()) and len(predicted) == 120
    assert [predicted[cell] for cell in evaluation.table["cell"]] == pytest.approx(list(evaluation.table["in_sample"]), abs=1e-4)


def fastest(
    predicted: dict[Cell, float], head_dim: int, causal: bool, seqlen: int, schedules: tuple[str, ...] = SCHEDULES
) -> float:
    return min(predicted[Cell(s, head_dim, causal, seqlen)] for s in schedules)


def test_longer_sequences_run_at_a_higher_throughput(predicted: dict[Cell, float]) -> None:
    for schedule, head_dim, causal in product(SCHEDULES, (64, 128), (False, True)):
        line = [Cell(schedule, head_dim, causal, s) for s in LENGTHS]
        tflops = [cell.flop / predicted[cell] / 1e9 for cell in line]
        assert tflops == sorted(tflops) and tflops[-1] < 989  # the dense peak


def test_what_the_measurements_show(predicted: dict[Cell, float]) -> None:
    """Descending wins at d = 128 under a causal mask, shift at d = 64 under a full one."""
    shifts, monotone = ("shift", "shift_persistent"), ("ascending", "descending", "descending_persistent")
    for seqlen in (2048, 4096, 8192, 16384):
        assert predicted[Cell("descending", 128, True, seqlen)] < 0.97 * fastest(predicted, 128, True, seqlen, shifts)
    for seqlen in (1024, 2048, 4096, 8192):
        assert fastest(predicted, 64, False, seqlen, shifts) < 0.95 * fastest(predicted, 64, False, seqlen, monotone)
    for head_dim in (64, 128):
        assert fastest(predicted, head_dim, False, 16384, shifts) > 0.97 * fastest(predicted, head_dim, False, 16384, monotone)


def test_heads_as_wide_as_the_gpu_have_no_ring() -> None:
    """Round robin costs a third where two heads share the SMs, next to nothing where one fills them."""
    ideal = {s: 32 * place(Cell("descending_persistent", 64, False, s)).geometry.n_q for s in (8192, 16384)}
    lost = {s: makespan(place(Cell("descending_persistent", 64, False, s)), 0.95, 0, 0)[0] / ideal[s] - 1 for s in ideal}
    assert lost[8192] > 0.2 and lost[16384] < 0.05


# Choices, output.


def test_regret_is_the_measured_time_lost() -> None:
    keys = {"head_dim": 64, "causal": False, "seqlen": 512}
    table = pd.DataFrame(
        [{"schedule": "shift", "ms": 2.2, "model": 1.0} | keys, {"schedule": "ascending", "ms": 2.0, "model": 1.1} | keys]
    )
    (pick,) = picks(table, "model").itertuples()
    assert (pick.schedule, pick.regret) == ("shift", pytest.approx(0.1))


def test_overhead_of_a_launch() -> None:
    c = Constants(0, 4, 1, 2, 1, 1.5, 1.25, 0.5, 0, 0)
    at = {(s, causal): c.overhead_of(Cell(s, 64, causal, 512)) for s in SCHEDULES for causal in (False, True)}
    assert at["shift", True] == 4.5 and at["shift", False] == at["descending", True] == 5 and at["shift_persistent", True] == 4
    assert [c.step_of(Cell(s, 64, m, 512)) for s in ("shift", "ascending") for m in (False, True)] == [3, 1.25, 2, 1]


def test_report(capsys: pytest.CaptureFixture[str], evaluation: Evaluation) -> None:
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert "128 causal 8192" in shown and "throttle" in shown
    for _, rows in evaluation.table.groupby("seqlen"):
        assert f"{100 * error_and_regret(rows, 'left_out')[0]:.2f}" in shown
    case = evaluation.table.query("head_dim == 128 and causal and seqlen == 512").set_index("schedule").loc[list(SCHEDULES)]
    lines = [line for line in shown.splitlines() if "128 causal 512" in line]
    for name, line in zip(("in_sample", "left_out"), lines, strict=True):
        assert re.findall(r"[+-]\d+\.\d", line) == [f"{100 * error:+.1f}" for error in errors(case, name)]
