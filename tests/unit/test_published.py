"""The replay against published speeds: its errors, and the clock law that follows from them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import extract, loops
from benchmarks.published.__main__ import main, summaries
from benchmarks.published.errors import errors, rows
from benchmarks.published.kernels import KERNELS
from benchmarks.published.model import (
    Figure,
    chains,
    clocks,
    figures,
    fit,
    makespan,
    splits,
)
from dash_inductor.sass.replay.pricing import LAW

pytestmark = pytest.mark.nightly
KNOWN = loops.read()
ROWS = rows(figures(), KNOWN)


def test_every_kernel_has_a_loop_and_every_figure_a_kernel():
    assert set(KNOWN) == set(KERNELS)
    assert {figure.kernel.package for figure in figures()} == {loop.package for loop in KNOWN.values()}
    assert all(figure.source and figure.tflops > 0 for figure in figures())


def test_errors():
    """From 8,192 positions on. What is in no fit is in none of these errors, and is not far off either."""
    by_title = summaries(ROWS)
    long, left_out, *_, held_out = map(errors, by_title.values())
    assert long.count == left_out.count == 25
    assert long.mean_absolute <= 0.04 and abs(long.worst) <= 0.12
    assert left_out.mean_absolute <= 0.05 and abs(left_out.worst) <= 0.18
    assert held_out.count == 4 and abs(held_out.worst) <= 0.12


def test_the_law_is_the_fit():
    fitted = fit([figure for figure in figures() if not figure.is_held_out], KNOWN)
    assert (fitted.idle, fitted.slope) == (pytest.approx(LAW.idle, abs=0.001), pytest.approx(LAW.slope, abs=0.001))


def test_a_kernel_counts_once():
    """A figure said twice changes nothing, if all figures of its kernel are."""
    known = [figure for figure in figures() if not figure.is_held_out]
    twice = [*known, *(figure for figure in known if figure.kernel.name == "Triton tutorial")]
    assert fit(twice, KNOWN).idle == pytest.approx(fit(known, KNOWN).idle)


def test_what_is_held_out_moves_no_law():
    changed = [replace(figure, tflops=figure.tflops * (2 if figure.is_held_out else 1)) for figure in figures()]
    before, after = ({row.figure.source: row.left_out for row in rows(each, KNOWN)} for each in (figures(), changed))
    assert before == after


@pytest.mark.parametrize(
    ("label", "length", "steps"),
    [
        ("FlashAttention-3 backward d128 causal", 512, [8, 6, 4, 2]),  # rows of 64 below the diagonal of columns of 128
        ("FlashAttention-2 backward d128 full", 256, [4, 4]),
        ("FlashAttention-2 forward d128 causal", 512, [2, 4, 6, 8]),
        ("FlashAttention-3 forward d128 full", 256, [2, 2]),  # columns of 176
    ],
)
def test_chains(label, length, steps):
    assert chains(KERNELS[label], length) == steps


def test_deterministic_flash_attention_2_has_few_ctas_of_several_chains():
    figure = Figure(KERNELS["FlashAttention-2 backward d128 causal"], 2, 16, 8192, 166.0, "", deterministic=True)
    assert splits(figure) == 5  # 160 CTAs
    other = replace(figure, deterministic=False)
    loop = KNOWN[figure.kernel.label]
    assert clocks(figure, loop) > 1.5 * clocks(other, loop)  # 132 SMs have 160 long jobs in place of 2,048 short ones
    assert makespan([1.0] * 160, 132) == 2.0


@pytest.mark.parametrize(
    ("label", "symbols", "expected"),
    [
        (
            "FlashAttention-2 backward d64 causal",
            [
                "_ZN13pytorch_flash44flash_bwd_dq_dk_dv_loop_seqk_parallel_kernelI23Flash_bwd_kernel_traitsILi64ELi128ELi128ELi8ELi4ELi4E"
                f"Li4ELb0ELb0EN7cutlass6half_tE19Flash_kernel_traitsILi64ELi128ELi128ELi8ES3_EE{flags}EEvNS_16Flash_bwd_paramsE"
                for flags in ("Lb0ELb0ELb0ELb0ELb1ELb1ELb0E", "Lb0ELb1ELb0ELb0ELb1ELb1ELb0E", "Lb1ELb1ELb0ELb0ELb1ELb1ELb0E")
            ],
            1,
        ),
        (
            "FlashAttention-3 forward d128 full",
            [
                "_ZN7cutlass13device_kernelIN5flash11enable_sm90INS1_16FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90ILi2EN4cute5tuple"
                f"IJNS5_1CILi1EEES8_S8_EEENS6_IJNS7_ILi128EEENS7_ILi{columns}EEESA_EEELi128EN7cutlass6half_tEfNSD_4arch4Sm90E{flags}EEE"
                for columns, flags in (("176", "Lb0E" * 3 + "Lb1E" + "Lb0E" * 3), ("176", "Lb0E" * 7), ("128", "Lb0E" * 7))
            ],
            1,
        ),
    ],
)
def test_symbols(label, symbols, expected):
    """Mangled names as in the wheels: without dropout, windows, packed sequences."""
    assert [index for index, symbol in enumerate(symbols) if re.search(KERNELS[label].symbol, symbol)] == [expected]


def test_bad_input(tmp_path, capsys, monkeypatch):
    wheel = tmp_path / "numpy-2.0.0-cp311.whl"
    with pytest.raises(SystemExit, match="2"):
        extract.main([str(wheel)])
    assert "no wheel of torch 2.13.0 or flash_attn3_jax 0.2.3" in capsys.readouterr().err
    monkeypatch.setattr("benchmarks.published.__main__.SASS", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["--replay"])
    assert "benchmarks.published.extract makes them" in capsys.readouterr().err


def test_the_command_and_its_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["--plot", str(tmp_path / "published.png")]) == 0
    assert Path(tmp_path / "published.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "From 8192 positions on: 25 figures" in printed and "in no error" in printed
