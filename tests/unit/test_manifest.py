"""Manifests: a file is read whole or not at all, and each field that changes is named with its consequence for bits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dash_inductor
from dash_inductor import Manifest, ManifestError, config, manifest
from dash_inductor.cli.main import main
from dash_inductor.contract import ManifestFileError, document, facts, graphs, live
from dash_inductor.contract.comparison import differences, never_met
from dash_inductor.decision import Decision, Declined
from dash_inductor.first_use import verdict
from dash_inductor.first_use.kind import Kind
from dash_inductor.rewrite.declined import decision_of_call
from dash_inductor.schedule.choice import RunTimeChoice
from dash_inductor.text import digest

KIND = Kind("one_pass", "gluon", "grouped", 90, "bf16", 64, 64, "causal", 128, 128)
DECISION = Decision(
    *("sdpa", "h100", "bf16", "causal", 1, 8, 8, 512, 512, 64),
    family="shift",
    roles=4,
    heads_in_flight=8,
    kernel="gluon",
    tile="128x128x64",
    launch="grouped",
    guarantee="run",
    source="/home/user/train.py:7",
    module="blocks.0",
    kinds=(KIND.text(),),
    order="ab",
    code="cd",
    joint="ef",
)
PROCESS = {
    **{"dash_inductor": "12", "torch": "2.13.0", "triton": "3.7.1", "device": "NVIDIA H100", "SMs": "132", "driver": "580"},
    **{"cost file": "the package's", "guarantee": "run", "schedule": "auto", "sm_reserve": "0", "mode": "strict"},
    "flash attention": "torch's",
}
REST = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "float32 matmul precision": "highest", "torch._inductor.config.max_autotune": "False"}
CODE = "call(buf0)\n"
BACKWARD = graphs.graph_of(CODE, [DECISION], "graph 0/0 of GPT (backward)", "2 <= s0 and s0 <= 9")
FORWARD = graphs.graph_of("buf0 = mm(a, b)\n", [], "graph 0/0 of GPT (forward)", None)
RECORDED = Manifest(PROCESS, REST, (BACKWARD, FORWARD), {})


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of other tests, whose process holds to nothing afterwards."""
    monkeypatch.setattr(graphs, "_graphs", {})
    yield
    for held in tuple(live._held):
        held.release()


def with_graph(**fields: Any) -> Manifest:
    """The same, but for fields of the decision."""
    return replace(
        RECORDED, graphs=(graphs.graph_of(CODE, [replace(DECISION, **fields)], BACKWARD["graph"], "2 <= s0 and s0 <= 9"), FORWARD)
    )


OTHER_FACTS = {
    **{"dash_inductor": "34", "torch": "2.14.0", "triton": "3.8.0", "device": "NVIDIA H200", "SMs": "114", "cost file": "ab12"},
    **{"guarantee": "device", "schedule": "shift", "sm_reserve": "8", "mode": "warn_only", "flash attention": "FA4"},
}


@pytest.mark.parametrize("name", OTHER_FACTS)
def test_a_fact_on_which_attention_hangs(name: str) -> None:
    found = replace(RECORDED, attention=PROCESS | {name: OTHER_FACTS[name]})
    (line,) = map(str, differences(RECORDED, found))
    assert line == (
        f"the process: {name} is {OTHER_FACTS[name]}, and {PROCESS[name]} in the manifest: "
        f"bits of blocks.0 may differ: other {name} at level run"
    )


@pytest.mark.parametrize("name", REST)
def test_a_fact_of_everything_else(name: str) -> None:
    (line,) = map(str, differences(RECORDED, replace(RECORDED, rest=REST | {name: "x"})))
    assert line == f"the process: {name} is x, and {REST[name]} in the manifest: bits of what is not attention may differ"


def test_what_the_level_promises_changes_nothing() -> None:
    """Under `device` the number of SMs chooses no order. The driver never does."""
    recorded = with_graph(guarantee="device")
    found = replace(recorded, attention=PROCESS | {"SMs": "114", "driver": "590"})
    assert [(each.field, each.may_change_bits) for each in differences(recorded, found)] == [("SMs", False), ("driver", False)]


OTHER_FIELDS = {
    **{"dtype": "fp16", "mask": "full", "q_len": 1024, "kv_heads": 2, "head_dim": 128, "family": "descending", "roles": 2},
    **{"heads_in_flight": 4, "kernel": "triton", "tile": "64x128x128", "launch": "chained", "order": "xx", "code": "yy"},
    "dropout": 0.1,
}


@pytest.mark.parametrize("name", OTHER_FIELDS)
def test_a_field_of_an_attention(name: str) -> None:
    lines = [str(each) for each in differences(RECORDED, with_graph(**{name: OTHER_FIELDS[name]}))]
    was = getattr(DECISION, name)
    assert (
        f"blocks.0, attention 0 of {BACKWARD['graph']}: {name} is {OTHER_FIELDS[name]}, and {'nothing' if was is None else was} in "
        "the manifest: bits of blocks.0 may differ"
    ) in lines
    assert len(lines) == 1


def test_an_attention_that_keeps_its_stock_kernel_now() -> None:
    declined = Decision(*("sdpa", "cuda", "bf16", "causal", 1, 8, 8, 512, 512, 64), reason="unfit", module="blocks.0", joint="ef")
    found = replace(RECORDED, graphs=(graphs.graph_of(CODE, [declined], BACKWARD["graph"], "2 <= s0 and s0 <= 9"), FORWARD))
    assert {"family", "kernel", "code", "template"} <= {each.field for each in differences(RECORDED, found)}


def test_guards_and_code_of_a_graph() -> None:
    other = graphs.graph_of("call(buf1)\n", [DECISION], BACKWARD["graph"], "2 <= s0 and s0 <= 8")
    lines = {each.field: each for each in differences(RECORDED, replace(RECORDED, graphs=(other, FORWARD)))}
    assert (lines["guards"].recorded, lines["guards"].found) == ("s0 <= 9", "s0 <= 8")
    assert lines["code"].consequence == "bits of what is not attention may differ: other code"
    assert len(lines) == 2


def test_graphs_are_told_by_what_they_were_before_the_pass() -> None:
    """And not by torch's numbers, which other compilations before them move."""
    moved = BACKWARD | {"graph": "graph 3/1 of GPT (backward)"}
    assert differences(RECORDED, replace(RECORDED, graphs=(moved, FORWARD))) == []
    new = graphs.graph_of("other", [], "graph 7/0 of loss (forward)", None)
    (line,) = differences(RECORDED, replace(RECORDED, graphs=(moved, FORWARD, new)))
    assert (line.subject, line.consequence) == (new["graph"], "its bits were never recorded")
    assert never_met(RECORDED.graphs, [moved]) == [FORWARD["graph"]]


def test_what_is_left_out_of_code() -> None:
    of_one_rank = """
# AOT ID: ['3_backward']
# kernel path: /tmp/torchinductor_me/ab/cab.py
dash_table_ab = None  # device(type='cuda', index=1) torch.int32 7f07dc29f160
k = async_compile.cpp('k', '''#include "/tmp/torchinductor_me/2b/c2b.h"
#pragma omp parallel
''')
with torch.cuda._DeviceGuard(1):
    torch.cuda.set_device(1)
    buf = empty_strided_cuda((96, 1), device='cuda:1')
    stream1 = get_raw_stream(1)
    meta = DeviceProperties(type='cuda', index=1, multi_processor_count=132)
"""
    of_another = (
        of_one_rank.replace("1)", "0)").replace("index=1", "index=0").replace("cuda:1", "cuda:0").replace("stream1", "stream0")
    )
    of_another = (
        of_another.replace("(96, 0)", "(96, 1)").replace("_me/", "_you/").replace("7f07dc29f160", "8").replace("3_back", "4_back")
    )
    assert of_another != of_one_rank and graphs.normalised(of_another) == graphs.normalised(of_one_rank)
    assert "#pragma" in graphs.normalised(of_one_rank) and "AOT" not in graphs.normalised(of_one_rank)
    for number in ("96", "132", "omp"):
        assert graphs.normalised(of_one_rank.replace(number, "7")) != graphs.normalised(of_one_rank)


def test_what_an_attention_says() -> None:
    (found,) = BACKWARD["attentions"]
    assert found["place"] == "train.py:7" and found["module"] == "blocks.0" and BACKWARD["joint"] == "ef"
    assert (found["template"], found["order"], found["code"], found["guarantee"]) == ("one_pass", "ab", "cd", "run")
    assert found["trials"] == {str(KIND): "not asked"} and {"SMs", "cost file", "device"} <= {*found["hangs on"]}


@pytest.mark.parametrize(("is_used", "said"), [(True, "used"), (False, "not used")])
def test_the_verdict_of_a_trial(is_used: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told; bits of a kernel that was tried and of one that was not are the same."""
    monkeypatch.setattr(verdict, "is_used", {KIND: is_used})
    found = with_graph()
    assert found.graphs[0]["attentions"][0]["trials"] == {str(KIND): said}
    assert differences(RECORDED, found) == []


def test_ranks_of_a_machine_decline_alike() -> None:
    """Of a stock op the device is recorded without its index."""
    x: Any = SimpleNamespace(dim=lambda: 4, device=torch.device("cuda:1"), dtype=torch.bfloat16, shape=(1, 2, 3, 4))
    assert decision_of_call("sdpa", [x, x, x], "full", Declined("it is", "none")).device == "cuda"


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    RECORDED.write(path)
    assert Manifest.read(path) == RECORDED and [*tmp_path.iterdir()] == [path]
    shuffled = Manifest(dict(reversed(PROCESS.items())), REST, RECORDED.graphs, {})
    assert shuffled.to_json() == RECORDED.to_json()


def made_anew(change: Any) -> str:
    """A manifest that somebody edited, digest and all."""
    values = json.loads(RECORDED.to_json())
    del values["digest"]
    change(values)
    return json.dumps({"digest": document._digest(values), **values})


BAD = {
    "cut off": (RECORDED.to_json()[:-40], "is no manifest, or cut off: it is not JSON"),
    "empty": ("", "is no manifest, or cut off"),
    "a list": ("[1]", "is no manifest of dash_inductor"),
    "something else": ('{"version": 1}', "is no manifest of dash_inductor"),
    "another version": (RECORDED.to_json().replace('"version": 1', '"version": 2'), "is a manifest of version 2, and this"),
    "edited": (RECORDED.to_json().replace("132", "114"), "was edited by hand, or damaged"),
    "no attentions": (made_anew(lambda values: values["graphs"][0].pop("attentions")), "was edited by hand"),
    "a number for a text": (made_anew(lambda values: values["rest"].update(x=1)), "was edited by hand"),
    "deep": ("[" * 100_000, "is no manifest, or cut off"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = BAD[name]
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ManifestFileError, match=f"^{path} {said}"):
        manifest(check=path)
    with pytest.raises(SystemExit) as ended:
        main(["manifest", str(path)])
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_a_file_that_is_no_text_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestFileError, match="it is not text"):
        Manifest.read(path)
    monkeypatch.setattr(document, "MOST_BYTES", 2)
    with pytest.raises(ManifestFileError, match="it has more than"):
        Manifest.read(path)


def test_this_process_is_held(caplog: pytest.LogCaptureFixture) -> None:
    """Graphs of before and after are compared, and each difference is logged once."""
    graphs.add(FORWARD)
    recorded = manifest()
    held = manifest(check=replace(recorded, graphs=(FORWARD, BACKWARD)))
    assert held and held.never_met == [BACKWARD["graph"]] and not caplog.messages
    with caplog.at_level(logging.WARNING, "dash_inductor"):
        for _ in range(2):
            live.take(with_graph(family="descending").graphs[0])
    assert caplog.messages == [str(each) for each in held.differences] and [each.field for each in held.differences] == ["family"]
    assert not held and held.never_met == []
    held.log_never_met()


def test_under_error_the_first_difference_raises() -> None:
    recorded = replace(manifest(), graphs=(BACKWARD, FORWARD))
    other = replace(recorded, attention=recorded.attention | {"torch": "1.0"})
    before = config.configure(on_unsupported="error")
    try:
        with pytest.raises(ManifestError, match=r"torch is .* and 1\.0 in the manifest: bits of blocks\.0 may differ"):
            manifest(check=other)
        manifest(check=recorded)
        live.take(FORWARD)
        for graph in (with_graph(order="zz").graphs[0], FORWARD):  # nor does who catches it come further
            with pytest.raises(ManifestError, match=r"order is zz, and ab in the manifest: bits of blocks\.0 may differ"):
                live.take(graph)
    finally:
        config.configure(on_unsupported=before.on_unsupported)


def test_facts_of_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes, variables, what Inductor chooses by timing, and settings that somebody changed; no folder of this machine."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with torch._inductor.config.patch({"triton.cudagraphs": True, "aot_inductor.output_path": "/tmp/x", "max_autotune": True}):
        found = facts.of_the_rest()
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and found["torch._inductor.config.max_autotune"] == "True"
    assert found["torch._inductor.config.triton.cudagraphs"] == "True" and "/tmp" not in json.dumps(found)
    assert found["deterministic algorithms"] in ("off", "warn_only", "strict")
    assert set(dash_inductor.manifest().attention) == set(facts.of_attention(torch.device("cpu")))


def test_choices_of_sizes_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule says what it chose for each size that generated code asked for."""

    class Rule(RunTimeChoice):
        def _choose(self, *sizes: int) -> tuple[int, ...]:
            return 1, 4, 8, 0, 0

    costs: Any = None
    rule = Rule("causal", 1, 64, 64, 128, costs, "run", "auto", False)
    assert [rule(index, 512, 256, 8) for index in range(3)] == [1, 4, 8]
    module = SimpleNamespace(dash_choice=rule, other=3)
    monkeypatch.setattr(graphs, "PyCodeCache", SimpleNamespace(modules=[module]))
    assert graphs.choices() == {digest(repr(rule)): {"512 x 256, 8 heads of all batches": f"{graphs.FAMILY_CODES[1]} (A=4, G=8)"}}


def test_commands_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    RECORDED.write(one)
    with_graph(order="zz").write(other)
    assert main(["manifest", str(one)]) == 0 and capsys.readouterr().out == RECORDED.to_json()
    assert main(["manifest", str(one), str(one)]) == 0 and "Differences: none" in capsys.readouterr().out
    assert main(["manifest", str(one), str(other)]) == 1 and "bits of blocks.0 may differ" in capsys.readouterr().out
    assert main(["manifest", str(one), str(other), "--json"]) == 1
    assert [each["field"] for each in json.loads(capsys.readouterr().out)["differences"]] == ["order"]


@pytest.mark.parametrize("runs", [["a:b", "c.json"], ["a.json", "b.json", "c.json"], ["nowhere.json"], ["nowhere:main"]])
def test_bad_runs_are_one_line(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["manifest", *runs])
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
