"""`python -m dash_inductor choose`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dash_inductor import config
from dash_inductor.cli.main import main
from dash_inductor.devices.cost_files import load_costs, load_two_pass
from dash_inductor.schedule import TiledProblem
from dash_inductor.schedule.choice import choose
from dash_inductor.schedule.formulas import formula_for

EXAMPLE = (
    "choose --mask causal --q-len 8192 --kv-len 8192 --batch 2 --heads 16 --kv-heads 16 --head-dim 128 --dtype bf16 --device h100"
)


def printed(capsys: pytest.CaptureFixture[str], text: str):
    assert main([*text.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "change", ["", " --guarantee device", " --mask full", " --kv-heads 4", " --mask full --kv-len 4096", " --head-dim 64"]
)
def test_json_says_what_was_chosen_and_why(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, EXAMPLE + change)
    kv_heads, kv_len, d = 4 if "kv-heads 4" in change else 16, 4096 if "4096" in change else 8192, 64 if "64" in change else 128
    mask, rows = "full" if "full" in change else "causal", 128 if d == 64 else 64
    shape = TiledProblem(8192, kv_len, 2 * kv_heads, 16 // kv_heads, d, rows, 128, mask)
    costs = load_costs("h100", block_m=rows, block_n=128, head_dim=d, kernel="gluon", mask=mask)
    if "device" not in change:
        two = load_two_pass("h100", block_m=64, block_n=64, kv_rows=128, q_rows=128, head_dim=d, mask=mask)
        costs = replace(costs, two_pass=two)
    choice = choose(shape, costs, "device" if "device" in change else "run")
    assert (found["family"], found["roles"], found["heads_in_flight"]) == choice.candidate[:3]
    assert found["chain_ns"] == choice.costs.chain_ns
    assert found["predicted_us"] == (None if choice.time_ns is None else choice.time_ns / 1000)
    if "device" in change:
        assert {row["family"] for row in found["candidates"]} == {"descending"}

    assert found["declined"] is None
    assert [row["default"] for row in found["candidates"]] == [True, *[False] * (len(found["candidates"]) - 1)]
    listed = [(c.family, c.roles or None, c.heads_in_flight or None, c.stride or None) for c in choice.considered]
    assert [place(row) for row in found["candidates"]] == listed
    for row, candidate in zip(found["candidates"], choice.considered, strict=True):
        assert row["predicted_us"] == (None if candidate.ns is None else candidate.ns / 1000)
        if row["family"] != "two_pass":
            assert row["formula_ns"] == str(formula_for(row["family"], mask))
            assert row["applies_if"] == str(formula_for(row["family"], mask).applies)
    assert taken(found["piecewise"], found["candidates"]) == listed.index(place(found))


@pytest.mark.parametrize("kernel", ["triton", "gluon"])
@pytest.mark.parametrize("change", ["", " --mask full", " --head-dim 64"])
def test_the_kernel_that_is_set(
    kernel: str, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config, "_current", config.Config(kernel=kernel, template="one_pass"))
    found, d, mask = printed(capsys, EXAMPLE + change), 64 if "64" in change else 128, "full" if "full" in change else "causal"
    costs = load_costs("h100", block_m=128 if d == 64 else 64, block_n=128, head_dim=d, kernel=kernel, mask=mask)
    assert (found["step_ns"], found["hop_ns"]) == (costs.step_ns, costs.hop_ns)
    (chosen,) = (row for row in found["candidates"] if place(row) == place(found))
    assert chosen["predicted_us"] == found["predicted_us"]


def taken(rule: str, candidates: list[dict[str, Any]]) -> int:
    """The printed rule, by the printed times."""
    scope = {"Min": min, "Piecewise": lambda *branches: next(value for value, condition in branches if condition)}
    times = {f"t{i}": row["predicted_us"] for i, row in enumerate(candidates) if row["predicted_us"] is not None}
    return eval(rule, scope, times)


def place(found):
    return found["family"], found["roles"], found["heads_in_flight"], found["stride"]


@pytest.mark.parametrize(
    "change", ["", " --batch 1 --heads 1 --kv-heads 1", " --q-len 64 --kv-len 64", " --mask full --q-len 300 --kv-len 100"]
)
def test_a_candidate_is_listed_once(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds and passes may come to the same placement; what is chosen stands there with its time."""
    found = printed(capsys, EXAMPLE + change)
    times = {place(row): row["predicted_us"] for row in found["candidates"]}
    assert len(found["candidates"]) == len(times) > 1 and times[place(found)] == found["predicted_us"]


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ("--head-dim 257", "head dim 257 is outside 1..256", "use heads of 1 to 256 columns, the same of query and key"),
        (
            "--q-len 4194241 --kv-len 4194241",
            "lengths S_q=4194241, S_k=4194241 have too many tiles for a table entry",
            "use shorter sequences",
        ),
    ],
)
def test_what_the_pass_declines(change: str, reason: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No schedule, and a reason, all others of which test_declined_on_gpu.py has; the exit code is not that of an error."""
    assert main([*EXAMPLE.split(), *change.split(), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        **{"device": "h100", "guarantee": "run"},
        **{"declined": reason, "remedy": remedy},
    }
    assert main([*EXAMPLE.split(), *change.split()]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [f"  declined   {reason}", f"  remedy     {remedy}"]


def test_fp32_is_of_the_emulated_device(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, f"{EXAMPLE} --q-len 128 --kv-len 128 --dtype fp32 --device emulated")
    assert (found["declined"], found["tile"]) == (None, "16x32x128")


def test_the_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of one head (64 chains of up to 128 steps), fp32 dq, delta, lse, and semaphores."""
    found = printed(capsys, EXAMPLE)
    slots = 64
    ints = 8 + slots + 64 + 64 * 128 + 2 + 32 * 128
    assert found["workspace_bytes"] == 4 * (32 * 8192 * (128 + 2) + ints)


@pytest.mark.parametrize(
    ("change", "template", "family"),
    [
        ("", "one_pass", "symmetric"),
        (" --heads 16 --kv-heads 1", "two_pass", "two_pass"),
        (" --guarantee device", "one_pass", "descending"),
        (" --guarantee device --device a100", "two_pass", "two_pass"),
        (" --head-dim 190", "two_pass", "two_pass"),
        (" --head-dim 192", "one_pass", "symmetric"),
    ],
)
def test_the_template(change: str, template: str, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two passes that were chosen the times and steps are printed too, and no schedule."""
    found = printed(capsys, EXAMPLE + change)
    assert (found["template"], found["family"]) == (template, family)
    by_size = "--guarantee" not in change and "190" not in change
    assert ("two_pass" in [row["family"] for row in found["candidates"]]) == by_size
    assert (found["candidates"] == []) == (template == "two_pass" and not by_size)
    if family == "two_pass":
        assert found["roles"] is None and len(found["step_ns"]) == 2
        assert found["workspace_bytes"] == 4 * 2 * 2 * 16 * 8192  # delta and lse
        row = next((row for row in found["candidates"] if row["family"] == family), found)
        assert found["predicted_us"] == row["predicted_us"] > 1000


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXAMPLE.split()) == 0
    out = capsys.readouterr().out
    assert "predicted us" in out and "descending" in out and "symmetric" in out and "Candidates" in out
    assert main([*EXAMPLE.split(), "--head-dim", "250"]) == 0
    out = capsys.readouterr().out
    assert "two_pass" in out and "Candidates" not in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--batch 65537", "batch x kv-heads x KV tiles of 128 keys must be at most 4194304, got 65537 x 16 x 64 = 67109888"),
        ("--batch 1000000 --head-dim 250", "KV tiles of 32 keys must be at most 4194304, got 1000000 x 16 x 256"),
        ("--head-dim 2147483648", "argument --head-dim: must be at most 2147483647, got 2147483648"),
        ("--q-len 0", "argument --q-len: must be at least 1, got 0"),
    ],
)
def test_bad_arguments(change: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(f"{EXAMPLE} {change}".split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
