"""`python -m dash_inductor choose`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dash_inductor.cli import main
from dash_inductor.schedule import INTEGER, Shape, choose, decode, load_costs, load_two_pass

EXAMPLE = (
    "choose --mask causal --q-len 8192 --kv-len 8192 --batch 2 --heads 16 --kv-heads 16 --head-dim 128 --dtype bf16 --device h100"
)
OPERATIONS = {
    "CeilDiv": INTEGER.ceil_div,
    "FloorDiv": INTEGER.floor_div,
    "Mod": INTEGER.mod,
    "Max": max,
    "Min": min,
    "Piecewise": lambda *branches: next(value for value, condition in branches if condition),
    "true": True,
}


def printed(capsys: pytest.CaptureFixture[str], text: str):
    assert main([*text.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("change", ["", " --guarantee device", " --mask full", " --kv-heads 4", " --kv-len 4096", " --head-dim 64"])
def test_json_says_what_was_chosen_and_why(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, EXAMPLE + change)
    kv_heads, kv_len, d = 4 if "kv-heads 4" in change else 16, 4096 if "4096" in change else 8192, 64 if "64" in change else 128
    mask = "full" if "full" in change else "causal_top_left"
    shape = Shape(8192, kv_len, 2 * kv_heads, 16 // kv_heads, d, 64, 128, mask)
    costs = load_costs("h100", block_m=64, block_n=128, head_dim=d)
    if "device" not in change:
        two = load_two_pass("h100", block_m=64, block_n=64, kv_rows=128, q_rows=128, head_dim=d)
        costs = replace(costs, two_pass=two)
    choice = choose(shape, costs, "device" if "device" in change else "run")
    assert (found["family"], found["roles"], found["heads_in_flight"]) == (choice.family, choice.roles, choice.heads_in_flight)
    chains = max(len(list(choice.plan().tasks(worker))) for worker in range(choice.plan().workers))
    assert found["overhead_us"] == (choice.costs.launch_ns + chains * choice.costs.chain_ns) / 1000
    assert found["predicted_us"] == (None if choice.time_ns is None else choice.time_ns / 1000)
    if "device" in change:
        assert {row["family"] for row in found["candidates"]} == {"descending"}

    sizes = {"q_len": 8192, "kv_len": kv_len, "heads": 2 * kv_heads}
    word = eval(found["piecewise"], OPERATIONS, sizes)
    assert decode(word) == (choice.family, choice.roles, choice.heads_in_flight, choice.stride, choice.boustrophedon)
    for row in found["candidates"]:
        assert eval(row["applies_if"], OPERATIONS, sizes) == (row["predicted_us"] is not None)
        if row["predicted_us"] is not None:
            assert eval(row["formula_ns"], OPERATIONS, sizes) == round(1000 * row["predicted_us"])


def test_the_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of one head (64 chains of up to 128 steps), fp32 dq, delta, lse, and semaphores."""
    found = printed(capsys, EXAMPLE)
    slots = 64
    ints = 8 + slots + 64 + 64 * 128 + 2 + 32 * 128
    assert found["workspace_bytes"] == 4 * (32 * 8192 * (128 + 2) + ints)


@pytest.mark.parametrize(
    ("change", "template", "family"),
    [
        ("", "by size", "descending"),
        (" --heads 16 --kv-heads 1", "by size", "two_pass"),
        (" --guarantee device", "one_pass", "descending"),
        (" --guarantee device --device a100", "two_pass", "two_pass"),
        (" --head-dim 192", "two_pass", "two_pass"),
    ],
)
def test_the_template(change: str, template: str, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two passes that were chosen the times and steps are printed too, and no schedule."""
    found = printed(capsys, EXAMPLE + change)
    assert (found["template"], found["family"]) == (template, family)
    assert ("two_pass" in [row["family"] for row in found["candidates"]]) == (template == "by size")
    assert (found["candidates"] == []) == (template == "two_pass")
    if family == "two_pass":
        assert found["roles"] is None and len(found["step_ns"]) == 2
        assert found["workspace_bytes"] == 4 * 2 * 2 * 16 * 8192  # delta and lse
        row = next((row for row in found["candidates"] if row["family"] == family), found)
        assert found["predicted_us"] == row["predicted_us"] > 1000


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXAMPLE.split()) == 0
    out = capsys.readouterr().out
    assert "predicted us" in out and "descending" in out and "symmetric" in out and "Candidates" in out
    assert main([*EXAMPLE.split(), "--head-dim", "256"]) == 0
    out = capsys.readouterr().out
    assert "two_pass" in out and "Candidates" not in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--kv-heads 3", "kv-heads must divide heads, and 3 does not divide 16"),
        ("--head-dim 512", "head dim 512 is outside 16..256"),
        ("--q-len 0", "argument --q-len: must be at least 1, got 0"),
    ],
)
def test_bad_arguments(change: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(f"{EXAMPLE} {change}".split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
