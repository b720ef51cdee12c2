"""`python -m benchmarks.schedules simulate` and `compare`: what they print, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.schedules.__main__ import main
from dash_inductor.schedule import FAMILIES, ROUND_ROBIN

EXAMPLE = (
    "simulate --mask causal --q-tiles 16 --kv-tiles 8 --heads 4 --workers 8 --family symmetric --roles 4 "
    "--compute-ns 800 --reduce-ns 200 --sync-ns 550"
)


def arguments(text: str, **change: object) -> list[str]:
    """The words of a command, some of its options changed (True: a flag, None: left out)."""
    words = text.split()
    for name, value in change.items():
        option = f"--{name.replace('_', '-')}"
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
        if value is not None:
            words += [option] if value is True else [option, str(value)]
    return words


def printed(capsys: pytest.CaptureFixture[str], words: list[str]):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """What test_simulator.py holds against the longest path, printed worker by worker: head, KV tile, Q tile and rank."""
    found = printed(capsys, EXAMPLE.split())
    workers = found["workers"]
    assert (found["makespan_ns"], found["formula_ns"], found["lower_bound_ns"]) == (36000, 36000, 36000)
    assert (found["formula"], found["steps"], found["waits"], found["residency"]) == ("exact", 288, 0, 4)
    assert len(workers) == 8 and workers[0][:3] == [[0, 0, 6, 0], [0, 0, 7, 0], [0, 0, 8, 1]]
    tiles = {(head, kv, q) for row in workers for head, kv, q, _ in row}
    assert tiles == {(head, kv, q) for head in range(4) for kv in range(8) for q in range(2 * kv, 16)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roles": 9, "workers": 8, "kv_tiles": 16, "family": "ascending"}, "roles must be in 1..8 (workers), got 9"),
        ({"kv_group": 3}, "kv-group must divide heads, got 3 and 4"),
        ({"workers": 65537}, "argument --workers: must be at most 65536, got 65537"),
        ({"q_tiles": 10**9}, "q-tiles x kv-tiles x heads must be at most 1048576, got 1000000000 x 8 x 4 = 32000000000"),
        ({"kv_tiles": "many"}, "argument --kv-tiles: must be an integer, got 'many'"),
        ({"sync_ns": None}, "the following arguments are required: --sync-ns"),
        ({"mask": "window"}, "argument --mask: must be full, causal or window:N, got 'window'"),
        ({"mask": "full"}, "family symmetric needs a causal mask, got mask='full': use shift"),
        ({"mirrored": True}, "mirrored is for ascending and descending, not for symmetric"),
        ({"family": "symmetric_round_robin", "roles": 9}, "roles must be in 1..8 (workers), got 9"),
        ({"from_ns": 9, "to_ns": 9}, "to-ns must be more than from-ns, got 9 and 9"),
        ({"plot": "/nowhere/chart.png"}, "plot '/nowhere/chart.png' cannot be written"),
        ({"plot": ""}, "plot '' must end in .png or .svg"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    change: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments(EXAMPLE, **change))
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == ""
    assert re.fullmatch(rf"python -m benchmarks.schedules simulate: error: {re.escape(message)}.*\n", captured.err), captured.err


def test_it_runs_as_a_module_without_torch(tmp_path: Path) -> None:
    """A laptop can run it: the plot apart, nothing but the standard library and sympy is needed."""
    for name in ("torch", "triton", "numpy", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    environment = {"PYTHONPATH": f"{tmp_path}:."}
    command = [sys.executable, "-m", "benchmarks.schedules", *EXAMPLE.split()]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["makespan_ns"] == 36000
    done = subprocess.run(
        [*command, "--plot", "x.png"], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3]
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m benchmarks.schedules simulate: error: plot needs matplotlib: pip install matplotlib\n"


def test_whoever_reads_may_stop_early() -> None:
    """`head` does, which closes the pipe."""
    command = [sys.executable, "-m", "benchmarks.schedules", *EXAMPLE.split(), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 1)


COMPARE = "compare --heads 8 --kv-tiles 6 --workers 12 --compute-ns 800 --reduce-ns 200 --sync-ns 550"


@pytest.mark.parametrize("mask", ["full", "causal", "window:1"])
def test_compare_has_every_family_that_serves_the_mask(mask: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, arguments(COMPARE, mask=mask, every=2, ratio=3))
    assert [(row["kv_tiles"], row["q_tiles"], row["kv_heads"]) for row in rows] == [(2, 6, 8), (4, 12, 8), (6, 18, 8)]
    missing = {"full": ("symmetric",), "causal": ("shift",), "window:1": ("shift", "symmetric")}[mask]
    for row in rows:
        assert set(row["families"]) == {f for f in (*FAMILIES, *ROUND_ROBIN) if not f.startswith(missing)}
        for family, best in row["families"].items():
            words = arguments(EXAMPLE, mask=mask, q_tiles=row["q_tiles"], kv_tiles=row["kv_tiles"], heads=8, workers=12)
            one = printed(capsys, arguments(" ".join(words), family=family, roles=best["roles"]))
            assert {name: one[name] for name in best} == best and one["lower_bound_ns"] == row["lower_bound_ns"]
            for roles in () if family in ROUND_ROBIN else (1, row["kv_tiles"] // 2):
                other = printed(capsys, arguments(" ".join(words), family=family, roles=roles))
                assert best["makespan_ns"] <= other["makespan_ns"]
