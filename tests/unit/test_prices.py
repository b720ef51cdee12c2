"""Who gets which kernel: nothing is rewritten whose stock backward is deterministic and faster by price, and the page says so."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import prices
from dash_inductor.config import Config
from dash_inductor.decision import Kernel, LeftToStock, Stock
from dash_inductor.devices import DEVICES, device
from dash_inductor.devices.stock_kernels import FLEX, PUBLISHED
from dash_inductor.devices.target import Target
from dash_inductor.dropout import BITS_CYCLES, EFFICIENT, FLASH, OPERATIONS, Dropout
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.resolve.prices import GLUON_CYCLES_WITHOUT, GLUON_DROPOUT_CYCLES, TIE, of_one_pass, of_stock, of_two_passes
from dash_inductor.rewrite.score_function import operations

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200"
TARGETS = {key: Target(key, device(key).arch, device(key).sms) for key in DEVICES}


def ratio(row: prices.Row) -> float:
    return row.ratio or 0.0


@pytest.mark.parametrize("key", DEVICES)
def test_no_row_of_the_table_is_taken_where_stock_is_faster(key: str) -> None:
    rows = list(prices.rows(key))
    assert len(rows) == sum(len(kind.head_dims) for kind in prices.KINDS)
    for row in rows:
        assert (ratio(row) > TIE) == row.is_left, row


@pytest.mark.parametrize("key", ["h100", "h200"])
def test_no_shape_is_taken_where_stock_is_faster(key: str) -> None:
    """Shapes are a grid of torch's own attentions: few chains, too, of which `resolve` has a rule."""
    kinds = [kind for kind in prices.KINDS if kind.stock.implementation is None]
    for kind, heads, length in itertools.product(kinds, (1, 4, 32), (1024, 8192)):
        for head_dim in kind.head_dims:
            row = prices.row(kind.name, kind.problem(head_dim, heads, length), TARGETS[key])
            assert row.is_left or ratio(row) <= TIE, (row, heads, length)


@pytest.mark.parametrize(
    "settings", [{"guarantee": "device"}, {"guarantee": "batch"}, {"kernel": "triton"}, {"template": "one_pass"}]
)
def test_who_asks_for_ours_gets_it(settings: dict[str, str]) -> None:
    for key, kind in itertools.product(("h100", "a100"), prices.KINDS):
        for head_dim in kind.head_dims:
            resolve(kind.problem(head_dim), Config(**settings), TARGETS[key])  # raises no LeftToStock


def test_a_price_depends_on_no_size() -> None:
    """Nor on the blocks of a mask, or how many masks there are."""
    for kind in prices.KINDS:
        one, other = (kind.problem(64, *sizes) for sizes in ((1, 128, 1), (64, 65536, 8)))
        other = replace(other, block_size=other.block_size and (256, 128), masks=16)
        assert of_stock(one, TARGETS["h100"]) == of_stock(other, TARGETS["h100"])
        assert of_two_passes(one, TARGETS["h100"]) == of_two_passes(other, TARGETS["h100"])


def test_functions_cost_all_of_them_time() -> None:
    few = Problem("full", 1, 8, 8, 4096, 4096, 128, "bf16", is_flex=True, stock=Stock(Kernel.FLEX, strict=False))
    found = resolve(few, Config(template="one_pass"), TARGETS["h100"])
    assert found.one_pass
    times = []
    for problem in (few, replace(few, function_ops=50)):
        speeds = [of_one_pass(problem, TARGETS["h100"], found.one_pass, "triton"), of_two_passes(problem, TARGETS["h100"])]
        times.append([1 / each.tflops for each in (*speeds, of_stock(problem, TARGETS["h100"])) if each])
    more = [with_ - without for without, with_ in zip(*times, strict=True)]
    assert more == pytest.approx([more[0]] * 3) and more[0] > 0


@pytest.mark.parametrize("generator", [EFFICIENT, FLASH])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dropout_takes_steps_time_and_its_bits_more(head_dim: int, generator: str) -> None:
    """A step has the bits made; a price is for all."""
    plain = Problem("full", 8, 16, 16, 4096, 4096, head_dim, "bf16")
    dropping = replace(plain, dropout=Dropout(0.1, generator), function_ops=OPERATIONS[generator])
    with_, without = (resolve(problem, Config(), TARGETS["h100"]) for problem in (dropping, plain))
    assert with_.kernel == without.kernel == "gluon" and with_.one_pass and without.one_pass and with_.costs and without.costs
    in_steps = with_.costs.step_ns / without.costs.step_ns
    slower = of_one_pass(plain, TARGETS["h100"], without.one_pass, "gluon").tflops
    slower /= of_one_pass(dropping, TARGETS["h100"], with_.one_pass, "gluon").tflops
    own = GLUON_DROPOUT_CYCLES[head_dim], BITS_CYCLES[generator]
    assert [in_steps - 1, slower - in_steps] == [pytest.approx(x / GLUON_CYCLES_WITHOUT[head_dim], abs=0.01) for x in own]


def test_both_prices_are_in_the_reason() -> None:
    functions: dict[str, Any] = {"function_ops": 10, "changes_scores": True, "gluon_fails": "is not there"}
    alibi = Problem("full", 2, 8, 8, 4096, 4096, 128, "bf16", stock=Stock(Kernel.FLEX, strict=False), **functions)
    target = replace(TARGETS["h100"], sms=128, reserved_sms=4)  # which two passes would take
    with pytest.raises(LeftToStock) as refused:
        resolve(alibi, Config(), target)
    stock, found = of_stock(alibi, target), resolve(alibi, Config(template="one_pass"), target)
    assert stock and found.one_pass
    ours = of_one_pass(alibi, target, found.one_pass, "triton")
    assert str(stock) in str(refused.value) and str(refused.value).endswith(f"ours {ours}")
    assert refused.value.remedy.startswith("none needed")


def test_flex_attentions_figures_are_those_of_the_gpu() -> None:
    """Whole backwards less 94 us for a copy of grad_out and 37 for delta, over the steps of 128 x 128 that a mask leaves."""
    with (RESULTS / "triton/attention.csv").open(newline="") as file:
        ms = {
            row["shape"]: float(row["median_ms"]) for row in csv.DictReader(file) if row["contender"] == "flex" and row["median_ms"]
        }
    for shape, masked, tiles in (("d128-full-8192", False, 64 * 64), ("d128-causal-8192", True, 64 * 65 // 2)):
        flop = 10 * 128 * 128 * 128 * tiles * 2 * 16
        assert flop / (ms[shape] - 0.131) * 1e3 / 1e12 == pytest.approx(FLEX[128, masked].tflops, rel=0.005)


def test_flash_attention_4s_figures_are_those_of_the_gpu() -> None:
    with (RESULTS / "kernel_times.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["contender"] == "fa4-deterministic" and "bwd_sm90" in row["kernel"]]
    us = {row["shape"]: float(row["median_us"]) for row in rows}
    for figure in (each for each in PUBLISHED if each.gpu == "H200"):
        tiles = 64 * 64 if figure.mask == "full" else 64 * 65 // 2
        flop = 10 * 128 * 128 * figure.head_dim * tiles * 2 * 2048 // figure.head_dim
        shape = f"d{figure.head_dim}-{figure.mask}-{figure.length}"
        assert flop / us[shape] * 1e6 / 1e12 == pytest.approx(figure.tflops, rel=0.001)


@pytest.mark.parametrize(("index", "counted"), [("h", 2), ("n", 2), ("m", 45), ("m - n", 46)])
def test_loads_that_change_with_the_query_count_as_what_they_take(index: str, counted: int) -> None:
    """Others stand before the loop. An addition, and what the index takes."""

    def function(score: Any, b: Any, h: Any, m: Any, n: Any, table: Any) -> Any:
        with TransformGetItemToIndex():
            return score + table[eval(index, {"h": h, "m": m, "n": n})]

    places = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    module = make_fx(function)(torch.zeros(()), *places, torch.zeros(8))
    assert operations(module, loads=True) == counted and operations(module) == 2 + ("-" in index)
