"""The attention benchmark on a real GPU: its clock, its poison, and one small table."""

from dataclasses import replace

import pytest
import torch

from dash_inductor.qualify import clock, contenders, kernels, measure
from dash_inductor.qualify.environment import environment
from dash_inductor.qualify.report import rows_of
from dash_inductor.qualify.rows import OK
from dash_inductor.qualify.shapes import Shape

SHAPE = Shape("small", "causal", 2, 8, 4, 1024, 64)
FLEX = replace(SHAPE, heads=16, kv_heads=16, window=300, documents=(700, 33, 291), softcap=2.0)


def test_poison(monkeypatch):
    """Freed memory, large and small, is full of NaN; without poison it is what it was."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # deterministic mode would write NaN
    for size in (100, 1 << 24):
        zeros = torch.zeros(size, device="cuda")
        place = zeros.data_ptr()
        del zeros
        untouched = torch.empty(size, device="cuda")
        assert untouched.data_ptr() == place
        assert not untouched.any()
        del untouched
        clock.poison()
        again = torch.empty(size, device="cuda")
        assert again.data_ptr() == place
        assert again.isnan().all()


def test_clock():
    """Twice the work takes twice the time; what the host does meanwhile does not count."""
    watch = clock.Clock(clock.flushed())

    def spin(cycles):
        def launch():
            torch.cuda._sleep(cycles)
            sum(range(100_000))  # a millisecond or so of the host

        return min(watch.milliseconds(launch) for _ in range(5))

    assert 1.8 < spin(4_000_000) / spin(2_000_000) < 2.2
    assert watch.late == 0


def test_peak_bytes():
    x = torch.ones(1 << 20, device="cuda")

    def launch():
        return ((x + 1) * (x + 2),)

    launch()
    assert clock.peak_bytes(launch) == 2 * 4 << 20


def test_table():
    chosen = {
        name: contender
        for name, contender in contenders.contenders().items()
        if name in (contenders.BASELINE, "sdpa-flash", "ours", "ours-unordered", "ours-shift", "flex")
    }
    said: list[str] = []
    results = measure.measure(SHAPE, chosen, 5, contenders.BASELINE, said.append)
    rows = {
        row.contender: row
        for row in rows_of(SHAPE, results, run="test", environment=environment(), baseline=contenders.BASELINE, mhz=None)
    }
    assert list(rows) == list(chosen)
    assert rows.pop("ours-shift").status.startswith("refused: declined")
    for name, row in rows.items():
        assert row.status == OK, f"{name}: {row.status}"
        assert row.rounds == 5 and 0 < row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.speedup is not None and row.peak_bytes is not None
    ours = rows["ours"]
    assert ours.same_bits and ours.price is not None and ours.price > 0.5
    assert ours.error <= 2 * rows[contenders.BASELINE].error
    assert ours.peak_bytes <= ours.workspace_bytes + (1 << 20)


def test_table_of_flex_attention():
    """Ours against stock's kernel, and why there is nothing else."""
    known = contenders.contenders()
    chosen = {name: known[name] for name in ("sdpa-flash", "flex", "ours", "sdpa-efficient")}
    flash, flex, ours, efficient = measure.measure(FLEX, chosen, 3, contenders.FLEX_BASELINE, print)
    assert [result.status for result in (flex, ours)] == [OK, OK]
    assert [result.status for result in (flash, efficient)] == ["refused: scaled_dot_product_attention has no soft-cap"] * 2
    assert flex.same_bits and ours.same_bits and ours.error <= 2 * flex.error
    sdpa = {name: chosen[name] for name in ("sdpa-flash", "sdpa-efficient")}
    dense = measure.measure(replace(FLEX, softcap=None), sdpa, 3, contenders.FLEX_BASELINE, print)
    assert [result.status.partition(":")[0] for result in dense] == ["refused", OK]


@pytest.mark.parametrize("name", kernels.CASES)
def test_what_qualify_checks(name):
    found = kernels.check(kernels.CASES[name])
    assert found.status == OK and found.launches == kernels.LAUNCHES
