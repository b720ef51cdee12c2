"""`python -m dash_inductor simulate` and `compare`, their numbers held against a replay of the printed tasks."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from dash_inductor.cli.main import main
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


def allowed(mask: str, q: int, kv: int, n_q: int, n_kv: int) -> bool:
    """The masks as the command's help and the issue define them."""
    k = Fraction(n_q, n_kv)
    if mask.startswith("window:"):
        return kv * k <= q < (kv + 1 + int(mask[7:])) * k
    return mask == "full" or q >= kv * k // 1


def replayed(workers: list[list[list[int]]], compute: int, reduce: int, sync: int, overlap: bool, group: int) -> int:
    """Makespan of the printed tasks: passes over the workers until none gets on."""
    at, turn = [0] * len(workers), [None] * len(workers)
    added: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (end, worker) of the parts of a tile
    moved = True
    while moved:
        moved = False
        for w, tasks in enumerate(workers):
            while at[w] < len(tasks):
                head, _, q, rank = tasks[at[w]]
                parts = added.setdefault((head, q), [])
                if len(parts) != rank:
                    break
                ready = compute if turn[w] is None else turn[w] + (max(reduce, compute) if overlap else reduce + compute)
                if parts:
                    ready = max(ready, parts[-1][0] + (sync if parts[-1][1] != w else 0))
                turn[w] = ready
                parts.append((ready + reduce, w))
                at[w] += 1
                moved = True
    assert at == [len(tasks) for tasks in workers]
    return max(end for parts in added.values() for end, _ in parts)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, EXAMPLE.split())
    workers = found.pop("workers")
    assert found == {
        "family": "symmetric",
        "roles": 4,
        "heads_in_flight": 2,
        "stride": None,
        "mirrored": False,
        "makespan_ns": 36000,
        "formula_ns": 36000,
        "formula": "exact",
        "lower_bound_ns": 36000,
        "residency": 4,
        "steps": 288,
        "waits": 0,
        "wait_ns": 0,
        "utilization": 1.0,
    }
    assert len(workers) == 8 and workers[0][:3] == [[0, 0, 6, 0], [0, 0, 7, 0], [0, 0, 8, 1]]


@pytest.mark.parametrize("seed", range(150))
def test_anyone_can_replay_what_it_prints(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    n_q, n_kv, group = rng.randint(1, 9), rng.randint(1, 7), rng.choice([1, 1, 2, 3])
    mask = rng.choice(["full", "causal", f"window:{rng.randint(0, 3)}"])
    families = ["ascending", "descending", *{"f": ["shift"], "c": ["symmetric"]}.get(mask[0], [])]
    families += [f"{family}_round_robin" for family in families[2:]]
    family = rng.choice(families)
    most = {"symmetric": -(-n_kv // 2), "shift": min(n_q, n_kv), "symmetric_round_robin": 9}.get(family, n_kv)
    if family == "shift_round_robin":
        most = 9 if n_kv <= n_q else n_q
    roles = rng.randint(1, most)
    heads, spare = group * rng.randint(1, 5), rng.randint(0, 9)
    costs = {"compute": rng.randint(1, 9), "reduce": rng.randint(0, 9), "sync": rng.randint(0, 20)}
    overlap = rng.random() < 0.3
    words = f"simulate --mask {mask} --q-tiles {n_q} --kv-tiles {n_kv} --heads {heads} --workers {roles + spare}"
    words += f" --kv-group {group} --family {family} --roles {roles}" + " --overlap" * overlap
    words += "".join(f" --{name}-ns {value}" for name, value in costs.items())
    if family == "shift" and rng.random() < 0.5:
        words += f" --stride {rng.randint(1, n_q // roles)}"
    if family in ("ascending", "descending"):
        words += rng.choice(["", " --mirrored", " --no-mirrored"])
    found = printed(capsys, words.split())

    workers = found["workers"]
    assert len(workers) == roles + spare
    lines = 1 if family.endswith("round_robin") else (roles + spare) // roles
    assert found["heads_in_flight"] == min(heads // group, lines)
    tasks = sorted(tuple(task) for row in workers for task in row)
    tiles = {(q, kv) for q in range(n_q) for kv in range(n_kv) if allowed(mask, q, kv, n_q, n_kv)}
    assert [(head, kv, q) for head, kv, q, _ in tasks] == sorted((head, kv, q) for head in range(heads) for q, kv in tiles)
    for head in range(heads):
        for q in range(n_q):
            ranks = sorted(rank for h, _, i, rank in tasks if (h, i) == (head, q))
            assert ranks == list(range(len(ranks)))
    for row in workers:  # query heads of a group are innermost
        for at in range(0, len(row), group):
            head, kv, q, rank = row[at]
            assert head % group == 0
            assert row[at : at + group] == [[head + x, kv, q, rank] for x in range(group)]
    assert found["makespan_ns"] == replayed(workers, **costs, overlap=overlap, group=group)
    assert found["lower_bound_ns"] <= found["makespan_ns"]
    assert 1 <= found["residency"] <= roles
    if found["formula"] == "exact":
        assert found["formula_ns"] == found["makespan_ns"]
    elif found["formula"] == "upper bound":
        assert found["formula_ns"] >= found["makespan_ns"]
    else:
        assert found["formula_ns"] is found["formula"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roles": 9, "workers": 8, "kv_tiles": 16, "family": "ascending"}, "roles must be in 1..8 (workers), got 9"),
        ({"roles": 5}, "roles must be in 1..4 (one per pair of KV tiles at most), got 5"),
        ({"roles": 0}, "argument --roles: must be at least 1, got 0"),
        ({"heads": 0}, "argument --heads: must be at least 1, got 0"),
        ({"kv_group": 3}, "kv-group must divide heads, got 3 and 4"),
        ({"kv_group": 0}, "argument --kv-group: must be at least 1, got 0"),
        ({"workers": -1}, "argument --workers: must be at least 1, got -1"),
        ({"workers": 65537}, "argument --workers: must be at most 65536, got 65537"),
        ({"q_tiles": 10**9}, "q-tiles x kv-tiles x heads must be at most 1048576, got 1000000000 x 8 x 4 = 32000000000"),
        ({"mask": "window:3", "kv_tiles": 10**9}, "q-tiles x kv-tiles x heads must be at most 1048576, got 16 x 1000000000"),
        ({"heads": 2**20}, "q-tiles x kv-tiles x heads must be at most 1048576, got 16 x 8 x 1048576"),
        ({"q_tiles": 0}, "argument --q-tiles: must be at least 1, got 0"),
        ({"kv_tiles": "many"}, "argument --kv-tiles: must be an integer, got 'many'"),
        ({"compute_ns": 0}, "argument --compute-ns: must be at least 1, got 0"),
        ({"compute_ns": 0.5}, "argument --compute-ns: must be an integer, got '0.5'"),
        ({"reduce_ns": -1}, "argument --reduce-ns: must be at least 0, got -1"),
        ({"sync_ns": "1e3"}, "argument --sync-ns: must be an integer, got '1e3'"),
        ({"sync_ns": None}, "the following arguments are required: --sync-ns"),
        ({"mask": "window"}, "argument --mask: must be full, causal or window:N, got 'window'"),
        ({"mask": "window:-1"}, "argument --mask: must be full, causal or window:N, got 'window:-1'"),
        ({"mask": "full"}, "family symmetric needs a causal mask, got mask='full': use shift"),
        ({"mask": "window:2"}, "family symmetric needs a causal mask, got mask='blocks': use descending"),
        ({"family": "shift"}, "family shift needs mask='full', got 'causal': use symmetric or descending"),
        ({"family": "zigzag"}, "argument --family: invalid choice: 'zigzag'"),
        ({"stride": 1}, "stride is for shift, not for symmetric"),
        ({"mask": "full", "family": "shift", "stride": 5}, "stride must be in 1..4 (n_q // roles), got 5"),
        ({"mirrored": True}, "mirrored is for ascending and descending, not for symmetric"),
        ({"family": "symmetric_round_robin", "roles": 9}, "roles must be in 1..8 (workers), got 9"),
        ({"family": "symmetric_round_robin", "stride": 1}, "stride is for shift, not for symmetric"),
        (
            {"family": "symmetric_round_robin", "mirrored": True},
            "mirrored is for ascending and descending, not for",
        ),
        ({"family": "shift_round_robin"}, "family shift needs mask='full', got 'causal'"),
        ({"from_ns": 9, "to_ns": 9}, "to-ns must be more than from-ns, got 9 and 9"),
        ({"plot": "/nowhere/chart.png"}, "plot '/nowhere/chart.png' cannot be written"),
        ({"plot": "chart.xyz"}, "plot 'chart.xyz' cannot be written"),
        ({"plot": "chart"}, "plot 'chart' must end in .png or .svg"),
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
    assert re.fullmatch(rf"python -m dash_inductor simulate: error: {re.escape(message)}.*\n", captured.err), captured.err


def test_it_runs_as_a_module_without_torch(tmp_path: Path) -> None:
    """As a laptop would; the plot apart, nothing but the standard library and sympy is needed."""
    for name in ("torch", "triton", "numpy", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    environment = {"PYTHONPATH": f"{tmp_path}:."}
    command = [sys.executable, "-m", "dash_inductor", *EXAMPLE.split()]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["makespan_ns"] == 36000
    done = subprocess.run(
        [*command, "--plot", "x.png"], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3]
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m dash_inductor simulate: error: plot needs matplotlib: pip install 'dash-inductor[cli]'\n"


def test_whoever_reads_may_stop_early() -> None:
    """As `head` does, which closes the pipe."""
    command = [sys.executable, "-m", "dash_inductor", *EXAMPLE.split(), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 1)


def test_the_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(EXAMPLE, family="ascending")) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "Schedule"
    figures = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    assert figures["makespan ns"] == "57,000" and figures["formula ns"] == "-" and "workers" not in figures


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


def test_compare_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(COMPARE, mask="causal", every=3)) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("KV tiles", "bound, us", "symmetric", "1.0")) and "shift" not in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every": 7}, "every must be at most kv-tiles, got 7 and 6"),
        ({"kv_group": 3}, "kv-group must divide heads, got 3 and 8"),
        (
            {"kv_tiles": 100_000},
            "heads x q-tiles x kv-tiles of all lengths must be at most 1048576, got 5333413333600000: take a larger every",
        ),
    ],
)
def test_compare_names_what_cannot_be(change: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments(COMPARE, mask="causal", **change))
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"python -m dash_inductor compare: error: {message}\n"
