from __future__ import annotations

import csv
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.schedules.simulator import simulate
from dash_inductor.config import GLUON, TRITON, Config
from dash_inductor.devices import DEVICES, LIMITS, key_for
from dash_inductor.devices.cost_files import (
    BY_HEAD_DIM,
    FOLDER,
    GLUON_BY_HEAD_DIM,
    OPTIONAL,
    arch_of,
    known_devices,
    load_costs,
    mean_steps,
    numbers_of,
    tomllib,
    two_pass_percent,
)
from dash_inductor.devices.target import Target
from dash_inductor.problem import Problem
from dash_inductor.resolve import Resolution, resolve
from dash_inductor.schedule import MASKS
from dash_inductor.schedule.candidates import CandidateBuilder
from dash_inductor.schedule.families import MONOTONE
from dash_inductor.schedule.placement import place_heads

ROOT = Path(__file__).parents[2]


def test_a_gpu_is_its_file() -> None:
    """A name, an architecture and memory, all with a source; one file of each architecture serves GPUs that have none."""
    assert set(known_devices()) == {*DEVICES, "emulated"}
    serving = [known.arch for known in DEVICES.values() if numbers_of(known.key).get("stands_in")]
    assert sorted(serving) == sorted({known.arch for known in DEVICES.values()})
    for known in DEVICES.values():
        assert key_for(known.name, known.arch) == known.key and known.arch in LIMITS


@pytest.mark.parametrize("device", known_devices())
def test_every_number_has_a_source(device: str) -> None:
    numbers = tomllib.loads((FOLDER / f"{device}.toml").read_text())
    assert isinstance(numbers.pop("arch"), str)
    assert isinstance(numbers.pop("gpu", ""), str) and isinstance(numbers.pop("stands_in", True), bool)
    for per_head_dim in (*BY_HEAD_DIM, *GLUON_BY_HEAD_DIM, *OPTIONAL):
        numbers.update({f"{per_head_dim}.{d}": entry for d, entry in numbers.pop(per_head_dim, {}).items()})
    for name, entry in numbers.items():
        assert set(entry) == {"value", "source", "estimate"}, name
        assert isinstance(entry["value"], int) and isinstance(entry["estimate"], bool) and entry["source"], name
    costs = load_costs(device, block_m=64, block_n=128, head_dim=64)
    assert costs.estimate  # until someone measures: then this test and the file change together


@pytest.mark.parametrize(
    ("head_dim", "step_ns", "causal_ns", "small_ns"),
    [(16, 907, 927, 1171), (32, 1885, 1993, 2413), (64, 1709, 1801, 2189), (128, 3334, 3295, 3334)],
)
def test_h100_steps(head_dim: int, step_ns: int, causal_ns: int, small_ns: int) -> None:
    """1.7 us at d = 64 and 3.3 us at d = 128; smaller head dims have a price of their own, and a step of 16 half of that of 32."""
    sizes = {"block_m": 64, "block_n": 128, "head_dim": head_dim}
    costs = load_costs("h100", **sizes)
    assert (costs.step_ns, costs.hop_ns, costs.workers, costs.l2_bytes) == (step_ns, 2590, 132, 50 * 2**20)
    assert costs.shifted_step_ns == step_ns * 107 // 100
    for mask in ("causal", "block_mask"):
        assert load_costs("h100", **sizes, mask=mask).step_ns == causal_ns
    assert load_costs("h100", **sizes, small=True).step_ns == small_ns


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize(
    ("head_dim", "block_m", "block_n", "step_ns", "hop_ns"),
    [(64, 128, 128, 2545, 1990), (128, 64, 128, 2041, 2300), (256, 64, 64, 2973, 2087)],
)
def test_steps_of_the_gluon_kernel(device: str, head_dim: int, block_m: int, block_n: int, step_ns: int, hop_ns: int) -> None:
    """What it has no numbers of its own for is as of the Triton kernel, which takes no head dim above 128."""
    blocks = {"block_m": block_m, "block_n": block_n, "head_dim": head_dim}
    triton, gluon = (load_costs(device, **blocks, kernel=each) for each in (TRITON, GLUON))
    assert (gluon.step_ns, gluon.hop_ns) == (step_ns, hop_ns)
    assert head_dim > 128 or gluon.step_ns < triton.step_ns
    own = {name: getattr(triton, name) for name in ("step_ns", "hop_ns", "shift_percent", "sweep_percent", "chain_ns")}
    assert replace(gluon, **own) == triton


def test_only_sm_90_has_a_price_of_the_gluon_kernel() -> None:
    of_gluon = {
        device
        for device in known_devices()
        if set(GLUON_BY_HEAD_DIM) <= set(tomllib.loads((FOLDER / f"{device}.toml").read_text()))
    }
    assert of_gluon == {device for device in known_devices() if arch_of(device) == 90}


@pytest.mark.parametrize(
    ("device", "tflops", "bandwidth", "flop"),
    [("rtx4090", 165.2, 1.008, 512), ("l40s", 362, 0.864, 1024), ("rtx5090", 209.5, 1.792, 512)],
)
def test_proxies_without_a_figure_of_their_own(device: str, tflops: float, bandwidth: float, flop: int) -> None:
    """An H100's rates by the ratio of peaks; of two passes seven matmuls to five, and two round trips to L2 that one pass makes."""
    for head_dim, block_m, block_n, expected in ((64, 32, 128, 350), (128, 64, 64, 440)):
        sizes = 10 * block_m * block_n * head_dim
        costs = load_costs(device, block_m=block_m, block_n=block_n, head_dim=head_dim)
        with_ends_ns = costs.step_ns + costs.chain_ns / mean_steps("full", block_m, block_n)
        assert with_ends_ns == pytest.approx(sizes / (expected * tflops / 989 / costs.workers * 1e3), rel=1e-2)
        assert costs.chain_ns == pytest.approx(4 * block_n * head_dim * 2 / (bandwidth * 1e12 / costs.workers) * 1e9, rel=1e-3)
        one = sizes / flop
        assert two_pass_percent(device, head_dim) == (round(100 * 1.4 * one / (one + 1200)), True)


def test_the_emulated_device() -> None:
    costs = load_costs("emulated", block_m=16, block_n=32, head_dim=128)
    assert (costs.step_ns, costs.hop_ns, costs.workers) == (1000, 750, 6)


def test_sms_and_ctas_per_sm() -> None:
    one = load_costs("h100", block_m=64, block_n=64, head_dim=64)
    two = load_costs("h100", block_m=64, block_n=64, head_dim=64, sms=114, ctas_per_sm=2)
    assert two.workers == 228
    ends_ns = round(one.chain_ns / mean_steps("full", 64, 64))  # by the step: of what it takes these are no part
    assert abs(two.step_ns - 2 * one.step_ns - ends_ns) <= 1  # two CTAs share an SM


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=f"no cost file for device 'mi300'; known: {', '.join(known_devices())}"):
        load_costs("mi300", block_m=64, block_n=128, head_dim=64)


H200, SQUARE = Target("h200", 90, 132), 8192
RESULTS = ROOT / "benchmarks/results/h200"
SHAPES = [(head_dim, mask) for head_dim in (64, 128) for mask in MASKS]


def gluon_ms(head_dim: int) -> dict[tuple[str, str, int, int], float]:
    """ms of the Gluon kernel by mask, family, roles and heads in flight: two sequences of 8,192, hidden size 2,048, bf16."""
    with (RESULTS / "gluon/gluon_tables.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["variant"], row["head_dim"]) == ("as committed", str(head_dim))]
    places = ((row["mask"], row["family"], int(row["roles"]), int(row["heads_in_flight"])) for row in rows)
    return dict(zip(places, (float(row["median_ms"]) for row in rows), strict=True))


def triton_ms(head_dim: int, mask: str) -> float:
    """ms of the Triton kernel's main kernel, for the same. Rows are means of it and the preprocess, known from others."""
    with (RESULTS / "kernel_times.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["shape"] == f"d{head_dim}-{mask}-{SQUARE}"]
    us = {row["contender"]: float(row["median_us"]) for row in rows if row["kernel"].startswith("triton_tem_")}
    return (2 * us["ours"] - us["ours-gluon"]) / 1000


def square(head_dim: int, mask: str) -> Problem:
    return Problem(mask, 2, 2048 // head_dim, 2048 // head_dim, SQUARE, SQUARE, head_dim, "bf16")


def main_ns(found: Resolution, ns: int | None) -> int:
    """What the main kernel has of a predicted time."""
    assert found.choice and found.costs and ns
    return ns - found.costs.launches.beside_ns(found.choice.problem.elements, two_pass=False)


@pytest.mark.parametrize(("head_dim", "mask"), SHAPES)
def test_what_is_chosen_on_an_h200_is_the_fastest_that_was_timed(head_dim: int, mask: str) -> None:
    found = resolve(square(head_dim, mask), Config(), H200)
    chosen = found.choice
    assert chosen
    ms = {place: time for place, time in gluon_ms(head_dim).items() if place[0] == mask}
    place = mask, chosen.family, chosen.candidate.roles, chosen.candidate.heads_in_flight
    assert ms[place] <= 1.02 * min(ms.values())
    assert main_ns(found, chosen.time_ns) == pytest.approx(ms[place] * 1e6, rel=0.05)


@pytest.mark.parametrize(("head_dim", "mask"), SHAPES)
def test_the_gluon_kernel_is_taken_where_it_was_the_faster_one(head_dim: int, mask: str) -> None:
    found = resolve(square(head_dim, mask), Config(), H200)
    ours = {GLUON: min(ms for place, ms in gluon_ms(head_dim).items() if place[0] == mask), TRITON: triton_ms(head_dim, mask)}
    assert found.one_pass and found.kernel == min(ours, key=lambda kernel: ours[kernel])


@pytest.mark.parametrize(("head_dim", "mask"), SHAPES)
def test_schedules_that_were_timed_are_in_their_order(head_dim: int, mask: str) -> None:
    """Any two that are more than 2 % apart, but for those that are no candidates, since L2 does not hold the heads in flight.

    None of those that were timed was mirrored, as chosen ones are.
    """
    found, predicted, ms = resolve(square(head_dim, mask), Config(template="one_pass"), H200), {}, gluon_ms(head_dim)
    assert found.choice
    tiled, costs = found.choice.problem, found.choice.costs
    held = CandidateBuilder(tiled, costs).max_heads_spread
    for place in [place for place in ms if place[0] == mask]:
        _, family, roles, heads_in_flight = place
        if family not in MONOTONE and heads_in_flight > held:
            continue
        sizes = {"heads": tiled.kv_heads_total, "heads_in_flight": heads_in_flight, "group": 1}
        plan = place_heads(family, tiled.geometry, roles, mirrored=False, **sizes)
        step_ns = costs.swept_step_ns(roles) if heads_in_flight > held else costs.step_ns
        paid = {"compute_ns": step_ns, "sync_ns": costs.hop_ns, "chain_ns": costs.chain_ns}
        predicted[place] = simulate(plan, **paid, reduce_ns=0).makespan_ns
    for one, other in combinations(predicted, 2):
        if max(ms[one], ms[other]) > 1.02 * min(ms[one], ms[other]):
            assert (ms[one] < ms[other]) == (predicted[one] < predicted[other]), (one, other, predicted[one], predicted[other])


@pytest.mark.parametrize(("head_dim", "mask"), SHAPES)
def test_the_numbers_of_the_triton_kernel_are_fitted_to_its_times(head_dim: int, mask: str) -> None:
    """By the schedule that it had then: ascending, 64 CTAs a head at head dim 64, else four CTAs a head."""
    settings = Config(kernel=TRITON, template="one_pass", schedule="ascending" if mask == "full" else "descending")
    found = resolve(square(head_dim, mask), settings, H200)
    assert found.choice
    roles = 64 if (head_dim, mask) == (64, "full") else 4
    (ns,) = (each.ns for each in found.choice.considered if each.roles == roles)
    assert main_ns(found, ns) == pytest.approx(triton_ms(head_dim, mask) * 1e6, rel=0.01)


def whole_ms(run: str, shape: str, kernel: str) -> float:
    """The whole backward of a shape by TRITON or GLUON, in a run."""
    contender = {TRITON: "ours", GLUON: "ours-gluon"}[kernel]
    with (RESULTS / run / "attention.csv").open(newline="") as file:
        (ms,) = (float(x["median_ms"]) for x in csv.DictReader(file) if (x["shape"], x["contender"]) == (shape, contender))
    return ms


def predicted_ms(problem: Problem, kernel: str, roles: int) -> float:
    """The whole backward, descending, by so many CTAs of a head and all of them."""
    found = resolve(problem, Config(kernel=kernel, template="one_pass", schedule="descending"), H200)
    assert found.choice
    return min(each.ns for each in found.choice.considered if each.roles == roles and each.ns) / 1e6


LLAMA3_8B = Problem("causal", 2, 32, 8, SQUARE, SQUARE, 128, "bf16")


@pytest.mark.parametrize("kernel", [TRITON, GLUON])
def test_the_ends_of_chains_are_fitted_to_grouped_heads(kernel: str) -> None:
    """Chains of llama3-8b have the steps of four heads, and as many ends as those of one: both shapes in one run.

    Each by itself is predicted within 7 %, though no speed was fitted to llama3-8b.
    """
    alone, grouped = (whole_ms("gluon", shape, kernel) for shape in ("d128-causal-8192", "llama3-8b"))
    predicted = predicted_ms(square(128, "causal"), kernel, 4), predicted_ms(LLAMA3_8B, kernel, 33)
    assert predicted[1] / predicted[0] == pytest.approx(grouped / alone, rel=0.005)
    assert predicted == pytest.approx((alone, grouped), rel=0.07)


def test_the_ends_of_chains_are_fitted_to_short_sequences() -> None:
    """The only ones that were timed, by the Triton kernel: with the time above of 8,192 positions both are within 2 %."""
    short = Problem("causal", 8, 32, 32, 2048, 2048, 64, "bf16")
    assert predicted_ms(short, TRITON, 4) == pytest.approx(whole_ms("triton", "d64-causal-2048", TRITON), rel=0.02)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_numbers_of_the_gluon_kernel_are_fitted_to_its_times(head_dim: int) -> None:
    """128 CTAs work: in shift and symmetric each has 2,048 or 1,040 steps of 64 x 128 rows at head dim 128."""
    ms, flop = gluon_ms(head_dim), 10 * 64 * 128 * 128 * 132
    full, causal = ms["full", "shift", 64, 2], ms["causal", "symmetric", 32, 4]
    hop_ns = (ms["full", "ascending", 64, 2] - full) / 63 * 1e6
    few = full + 3 * hop_ns * 1e-6  # ascending by four CTAs, if L2 held all heads
    fitted = {
        "gluon_tflops": flop * 2048 / (full * 1e-3) / 1e12,
        "gluon_causal_percent": 100 * causal / full * 2048 / 1040,
        "gluon_hop_ns": hop_ns,
        "gluon_sweep_percent": 100 * (ms["full", "ascending", 4, 32] / few - 1),
    }
    for device in ("h200", "h100"):
        for name, value in fitted.items():
            entry = numbers_of(device)[name][str(head_dim)]
            assert entry["value"] == pytest.approx(value, rel=0.01, abs=0.5), name
            assert entry["estimate"] == (device == "h100")
