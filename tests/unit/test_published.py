"""The replay against published speeds: the errors that docs/performance.md promises, and the clock law that follows from them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published import beside, extract, loops
from benchmarks.published.__main__ import main, summaries
from benchmarks.published.attention import BLOCK, CUT, NONE, WHOLE, Attention
from benchmarks.published.errors import errors, rows
from benchmarks.published.kernels import KERNELS
from benchmarks.published.model import (
    HBM_BYTES_PER_SECOND,
    LAUNCH_SECONDS,
    Figure,
    chains,
    clocks,
    figures,
    fit,
    makespan,
    splits,
)
from benchmarks.published.steps import BANDWIDTH, GLUON, OURS, steps
from dash_inductor.sass.replay.constants import Constants
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


def test_ours_beside_others():
    """Ahead of what users have; slower additions make ours slower, and nobody else."""
    made = beside.speeds()
    assert len(made) == 12
    for each in made + beside.speeds_of_masks():
        assert each.ours[18] < each.ours[32] < each.ours[64]
        assert all(each.ours[32] > (each.others[name] or 0) for name in ("flex", "strict"))
    assert all(each.others["strict"] < each.others["FA3"] for each in made)
    assert all(each.ours[18] < each.others["Gluon"] for each in made)


def test_the_kernel_in_gluon_is_priced_as_the_other():
    """At the same main loop it is as fast; at one of half the cycles all but memory and launches take less."""
    attention = Attention(1, 32, 8192, 128, "causal")
    by_triton = [step for step in steps() if step.kernel == OURS]

    def priced(share):
        return beside.gluon(attention, [replace(step, kernel=GLUON, cycles=share * step.cycles) for step in by_triton] + by_triton)

    ours = beside.ours(attention, by_triton)[BANDWIDTH]
    assert priced(1) == pytest.approx(ours)
    assert 1.2 * ours < priced(0.5) < 2 * ours


def test_what_others_are_priced_that_is_no_main_loop_ours_is_too():
    """At a main loop that takes no time: memory and launches alone."""
    attention = Attention(1, 16, 16384, 128, "window")
    no_time = [replace(step, cycles=1e-9) for step in steps()]
    nothing = attention.flop / 1e12 / beside.ours(attention, no_time)[32]
    assert nothing == pytest.approx(10 * 16 * 16384 * 128 / HBM_BYTES_PER_SECOND + 5 * LAUNCH_SECONDS)


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
def test_flex_takes_seven_matmuls(mask):
    """Of every block that is seen, half hidden or not, in two CTAs for a row of blocks; a head for each SM."""
    at_full_rate = [replace(step, cycles=step.flop / 4096) for step in steps()]
    attention = Attention(1, 132, 16384, 128, mask)
    clocks = 7 * 2 * 128**3 / 4096 * (attention.blocks != NONE).sum() + 2 * 4000 * 128
    others = 4 * 132 * 16384 * 128 / HBM_BYTES_PER_SECOND + 2 * LAUNCH_SECONDS
    speed = attention.flop / (clocks / LAW.ghz(1) / 1e9 + others) / 1e12
    assert beside.flex(attention, at_full_rate) == pytest.approx(speed, rel=0.02)


def test_grouped_heads_share_a_block_of_keys():
    """The same work in fewer CTAs: as fast where they divide evenly, but for what a CTA takes beside its steps."""
    alone, grouped = Attention(1, 132 * 4, 4096, 128, "full"), Attention(1, 132 * 4, 4096, 128, "full", group=4)
    assert alone.kv_heads == 4 * grouped.kv_heads == 528
    assert 1 < beside.flex(grouped, steps()) / beside.flex(alone, steps()) < 1.05


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
def test_the_visible_elements(mask):
    """Of a mask that is written out; on the diagonal and at a window's end half of a block counts."""
    m, n = np.ogrid[:4096, :4096]
    visible = {
        "full": m >= 0 * n,
        "causal": m >= n,
        "window": (m >= n) & (m - n < 1024),
        "documents": (m >= n) & (m // 2048 == n // 2048),
    }[mask]
    attention = Attention(1, 1, 4096, 64, mask)
    of_blocks = visible.reshape(32, 128, 32, 128)
    expected = np.where(of_blocks.all((1, 3)), WHOLE, np.where(of_blocks.any((1, 3)), CUT, NONE))
    assert (attention.blocks == expected).all()
    assert attention.flop / 640 == pytest.approx(visible.sum(), rel=0.01)


def test_the_steps_are_of_tiles_and_bandwidths_that_are_used():
    known = [step for step in steps() if step.kernel == OURS]
    assert {step.bandwidth for step in known} == {18, 32, 64}
    assert Constants().addition_bandwidth == BANDWIDTH
    assert all(step.flop == 10 * beside.ROWS[step.head_dim] * BLOCK * step.head_dim for step in known)


def test_the_table_and_its_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert beside.main(["--plot", str(tmp_path / "beside.png")]) == 0
    assert Path(tmp_path / "beside.png").stat().st_size > 10_000
    assert "predicted" in capsys.readouterr().out
