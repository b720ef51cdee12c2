"""Folders of a first run made into one, with its report: what goes together, what does not, and what is said first."""

import itertools
import json
from pathlib import Path

import pytest
from attention_results import H100, KNOWN, result
from test_calibration import pretended

from benchmarks.attention.merge import main
from benchmarks.attention.table import typed
from dash_inductor.devices.target import Target
from dash_inductor.first_use.machine import sources_digest
from dash_inductor.qualify import additions as of_l2
from dash_inductor.qualify import contenders as who
from dash_inductor.qualify import costs as calibrate
from dash_inductor.qualify.measure import Result
from dash_inductor.qualify.report import not_run, rows_of
from dash_inductor.qualify.rows import Row, append, read_cells, write
from dash_inductor.qualify.shapes import SHAPES

pytestmark = pytest.mark.nightly

SAID = H100 | {"arch": 90, "l2_bytes": 50 << 20, "sources": sources_digest(), "clocks.sm": "1980"}
FLAGSHIP, LLAMA = SHAPES[:2]


def timed(run: str, shape, *results: Result, baseline: str = who.BASELINE) -> list[Row]:
    return rows_of(shape, results, run=run, environment=H100, baseline=baseline, mhz=1980)


def keep(folder: Path, head_dim: int) -> None:
    session = calibrate.Session("h100", H100["gpu"], 90, 132, 50 << 20, SAID["sources"])
    for launch in calibrate.launches_of(Target("h100", 90, 132), head_dim):
        calibrate.keep(folder / "timings.jsonl", session, launch, float(pretended(launch)))
    fitted, _ = calibrate.fits(calibrate.read_timings(folder / "timings.jsonl")[1], session)
    (folder / "costs.toml").write_text(calibrate.cost_file(session, fitted))


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    """Three folders: order and additions; tuning, with a variant that is wrong, and costs; the table, which ran out of time."""
    folders = [tmp_path / f"part{n}" for n in (1, 2, 3)]
    for n, folder in enumerate(folders, 1):
        folder.mkdir()
        (folder / "environment.json").write_text(json.dumps({**SAID, "driver": f"580.{n}"}))
        (folder / "summary.txt").write_text(f"stage number {n}: ok, 5 s\n")
    one, two, three = (folder / "attention.csv" for folder in folders)
    append(one, timed("order", FLAGSHIP, result("ours", 2.6), result("ours-unordered", 2.5), baseline="ours"))
    additions = {case: [1.0, 1.0] for case in of_l2.cases()}
    write(folders[0] / "red_throughput.csv", of_l2.Addition, of_l2.table_of(additions, H100["gpu"], 132))
    slower, wrong = result("ours-two-stages", 3.0), result("ours-release-after-s", 2.0, status="wrong: dq 1.0 off")
    append(two, timed("tuning", FLAGSHIP, result("ours", 2.5), slower, wrong, baseline="ours"))
    keep(folders[1], 128)
    append(three, timed("table", FLAGSHIP, result(who.BASELINE, 6.0), result("ours", 2.5)))
    chosen = [KNOWN[who.BASELINE], KNOWN["ours"]]
    append(three, not_run(LLAMA, chosen, "not run: the time limit", run="table", environment=H100, baseline=who.BASELINE))
    return folders


def merged(folders: list[Path]) -> Path:
    out = folders[0].parent / "merged"
    assert main([*map(str, folders), "--out", str(out)]) == 0
    return out


def refused(folders: list[Path], capsys) -> str:
    out = folders[0].parent / "merged"
    with pytest.raises(SystemExit) as ended:
        main([*map(str, folders), "--out", str(out)])
    assert ended.value.code == 2 and not out.exists()
    return capsys.readouterr().err.splitlines()[-1]


def test_everything_is_there(parts):
    pytest.importorskip("matplotlib")
    out = merged(parts)
    assert {path.name for path in out.iterdir()} == {
        "attention.csv", "attention.png", "costs.toml", "environment.json", "red_throughput.csv", "report.md", "summary.txt",
        "timings.jsonl",
    }  # fmt: skip
    assert read_cells(out / "attention.csv") == [cells for folder in parts for cells in read_cells(folder / "attention.csv")]
    for name, folder in (("red_throughput.csv", parts[0]), ("costs.toml", parts[1]), ("timings.jsonl", parts[1])):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert (out / "summary.txt").read_text().splitlines()[:2] == ["part1:", "stage number 1: ok, 5 s"]
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".png"}
    merged(parts)  # once more, over what is there
    assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".png"}


def test_the_report_says_first_what_went_wrong(parts):
    text = (merged(parts) / "report.md").read_text()
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "What went wrong", "Stages", "Targets, by the run `table`", "The price of order", "Tuning", "Against all others",
        "The cost model's predictions, the farthest off first", "Cost constants", "fp32 additions in L2", "Environment",
    ]  # fmt: skip
    wrong = text[: text.index("## Stages")].splitlines()[4:]
    assert wrong[2:5] == [
        "| tuning | ours-release-after-s | wrong: dq 1.0 off | d128-causal-8192 |",
        "| table | sdpa-flash-strict | not run: the time limit | llama3-8b |",
        "| table | ours | not run: the time limit | llama3-8b |",
    ]
    tuning = text[text.index("## Tuning") : text.index("## Against all others")]
    assert "| d128-causal-8192 | 550 (1.00x)* | 458 (0.83x) | 687 (1.25x) wrong |" in tuning  # 1.374 TFLOP in 2.5, 3 and 2 ms
    assert "| d128-causal-8192 | 1.040 (1.040 .. 1.040) | descending (A=4, G=32) |" in text
    assert "| d128-causal-8192 | descending (A=4, G=32) | 2.600 | 2.500 | 1.04 |" in text
    assert "What the package ships is dash_inductor/devices/h100.toml." in text
    assert "| tflops.128 | " in text and "| driver | 580.1 | 580.2 | 580.3 |" in text
    assert "| speedup over sdpa-flash-strict, d128-causal-8192 | at least 2.5 | 2.4 | MISSED |" in text


def test_a_row_that_was_not_run_gives_way(parts):
    """The table went on in a fourth folder."""
    rest = parts[0].parent / "rest"
    rest.mkdir()
    for name in ("environment.json", "summary.txt"):
        (rest / name).write_text((parts[0] / name).read_text())
    append(rest / "attention.csv", timed("table", LLAMA, result(who.BASELINE, 9.0), result("ours", 4.0)))
    for order in ([*parts, rest], [rest, *parts]):
        table = typed(read_cells(merged(order) / "attention.csv"))
        assert [run for run, _ in itertools.groupby(table["run"])] == list(table["run"].unique())  # each run's rows together
        rows = table.query("run == 'table' and shape == @LLAMA.name")
        assert list(zip(rows["contender"], rows["median_ms"], strict=True)) == [(who.BASELINE, 9.0), ("ours", 4.0)]


@pytest.mark.parametrize("name", ["gpu", "sms", "l2_bytes", "torch", "triton", "sources"])
def test_folders_that_do_not_go_together(parts, name, capsys):
    other = "NVIDIA H200" if name == "gpu" else "2.12.0"
    (parts[1] / "environment.json").write_text(json.dumps({**SAID, name: other}))
    assert f"do not go together: {name} is {SAID[name]} and {other}" in refused(parts, capsys)


def test_folders_that_are_none(parts, capsys):
    (parts[2] / "environment.json").unlink()
    assert "part3 has no environment.json: it is no folder of" in refused(parts, capsys)
    (parts[2] / "environment.json").write_text("{}")
    assert "does not say gpu, arch, sms" in refused(parts, capsys)


def more_rows(parts: list[Path]) -> None:
    append(parts[2] / "attention.csv", timed("order", FLAGSHIP, result("ours", 2.7), baseline="ours"))


def more_additions(parts: list[Path]) -> None:
    (parts[1] / "red_throughput.csv").write_bytes((parts[0] / "red_throughput.csv").read_bytes())


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (more_rows, "ours at d128-causal-8192 of run 'order' was measured twice, in "),
        (more_additions, "measured twice: "),
        (lambda parts: keep(parts[0], 128), "holds timings of launches that another folder has as well"),
    ],
    ids=["rows", "additions", "timings"],
)
def test_what_was_measured_twice(again, message, parts, capsys):
    again(parts)
    assert message in refused(parts, capsys)


def test_rows_of_another_gpu_than_the_folder(parts, capsys):
    path = parts[0] / "attention.csv"
    path.write_text(path.read_text().replace("NVIDIA H100 80GB HBM3", "NVIDIA H20"))
    assert "has rows of gpu NVIDIA H20, and the folder is of NVIDIA H100" in refused(parts, capsys)


def test_an_output_folder_that_is_an_input(parts, capsys):
    assert "is one of the folders that are merged" in refused([*parts, parts[0].parent / "merged"], capsys)
