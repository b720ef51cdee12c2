"""Nsight Compute's pages, by a program that pretends to be it: the main loop, its samples, and what stands in their way."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dash_inductor.qualify import profiler
from dash_inductor.qualify.gpu_tests import NOT_AVAILABLE

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/gluon"
# Address, instruction, samples, of them for a barrier, of them that were selected. Two loops have matmuls; one holds the other.
KERNEL = [
    (0x7F00, "MOV R1, c[0x0][0x28]", 3, 3, 0),
    (0x7F10, "UIADD3 UR4, UR4, 0x1, URZ", 5, 1, 4),
    (0x7F20, "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", 40, 10, 30),
    (0x7F30, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R0", 70, 60, 10),
    (0x7F40, "@P0   BRA 0x7f10", 2, 0, 2),
    (0x7F50, "@!P1  BRA 0x7f00", 10, 4, 6),
    (0x7F60, "LDG.E R2, [R2.64]", 50, 0, 50),
    (0x7F70, "@P2   BRA 0x7f60", 20, 0, 20),
    (0x7F80, "EXIT", 0, 0, 0),
]
NAMES = ["#", "Address", "Source", profiler.ALL_SAMPLES, "stall_barrier", "stall_selected", "stall_barrier (Not Issued)"]
NCU = """#!/usr/bin/env python3
import pathlib, sys
folder = pathlib.Path(__file__).parent
if "--import" in sys.argv:
    page = sys.argv[sys.argv.index("--page") + 1]
    sys.stdout.write((folder / page).read_text())
elif (folder / "said").exists():
    print((folder / "said").read_text())
else:
    pathlib.Path(sys.argv[sys.argv.index("--export") + 1]).write_text(" ".join(sys.argv))
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the program, which is all that the path has besides Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ncu").write_text(NCU)
    (folder / "ncu").chmod(0o755)
    lines = [["Kernel Name", "sdpa_backward"], NAMES]
    lines += [
        [n, hex(at), what, samples, barrier, selected, 9999] for n, (at, what, samples, barrier, selected) in enumerate(KERNEL)
    ]
    with (folder / "source").open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(lines)
    (folder / "details").write_text("Duration ms 4.39\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(profiler, "SHAPES", ((128, "causal"),))
    return folder


def samples(folder: Path) -> list[dict[str, str]]:
    with (folder / profiler.SAMPLES).open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_those_of_the_innermost_loop_with_matmuls(ncu: Path, tmp_path: Path) -> None:
    assert profiler.run(tmp_path, 60.0) == 0
    rows = samples(tmp_path)
    ours = [row for row in rows if row["kernel"] == "ours"]
    assert [(row["place"], row["instruction"]) for row in ours] == [(str(n), KERNEL[n + 1][1]) for n in range(4)]
    assert [row["samples"] for row in ours] == ["5", "40", "70", "2"]
    assert [float(row["percent"]) for row in ours] == [2.5, 20.0, 35.0, 1.0]  # of 200
    assert [row["most_samples_wait_for"] for row in ours] == ["selected", "selected", "barrier", "selected"]
    assert len(rows) == len(ours) * len(profiler.KERNELS)
    account = (tmp_path / profiler.ACCOUNT).read_text()
    assert account.count("Duration ms 4.39") == len(profiler.KERNELS) and "ours, d = 128, causal" in account


@pytest.mark.parametrize(
    ("said", "status", "printed"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", NOT_AVAILABLE, "administrator alone"),
        ("==WARNING== No kernels were profiled.", 1, "ours, d = 128, causal: ==WARNING== No kernels were profiled."),
    ],
)
def test_what_ncu_cannot_do_is_said(
    ncu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, status: int, printed: str
) -> None:
    (ncu / "said").write_text(said)
    assert profiler.run(tmp_path, 60.0) == status
    assert printed in capsys.readouterr().out and not (tmp_path / profiler.SAMPLES).exists()


def test_without_ncu_or_time_nothing_is_profiled(
    ncu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profiler.run(tmp_path, 0.0) == 0 and "not run: the time limit" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "")
    assert profiler.run(tmp_path, 60.0) == NOT_AVAILABLE
    assert "there is no program ncu" in capsys.readouterr().out


def test_a_kernel_without_samples_or_matmuls_is_an_error() -> None:
    rows = [{"Address": hex(at), "Source": what, profiler.ALL_SAMPLES: "0"} for at, what, *_ in KERNEL]
    with pytest.raises(ValueError, match="no samples"):
        profiler.main_loop(rows, "ours", "full", 128)
    rows = [row | {profiler.ALL_SAMPLES: "1"} for row in rows if "HGMMA" not in row["Source"]]
    with pytest.raises(ValueError, match="no loop of the kernel has matmuls"):
        profiler.main_loop(rows, "ours", "full", 128)
