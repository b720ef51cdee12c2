"""What torch's caches carry from one process, or machine, to the next: the same bits and decisions, and nothing where they differ.

Here a process is one that has forgotten everything, with a folder of its own; those of `python` are real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import caching
import pytest
import torch
from caching import COLD, WARM, Step, named, result, step, train
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

import dash_inductor
from dash_inductor.first_use import verdict as first_use
from dash_inductor.first_use.kind import Kind
from dash_inductor.first_use.known import Verdict
from dash_inductor.rewrite.declined import InternalErrorWarning

ROOT = Path(dash_inductor.__file__).parents[1]
LEVELS: list[dict[str, Any]] = [{"sms": 6, "guarantee": level} for level in ("run", "device", "batch")]
# Other machines, and other settings.
OTHERS: list[dict[str, Any]] = [{"sms": 5}, {"sms": 6, "schedule": "ascending"}, {"sms": 6, "launch": "chained"}]
OTHERS += [{"sms": 6, "template": "two_pass"}, {"sms": 6, "sm_reserve": 1}]


class Folder:
    """All processes share a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, **arguments: Any) -> Step:
        """A step of the next process."""
        return step(self.path, **arguments)


class Remote(Folder):
    """Each has a folder of its own, and they share the remote caches."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.store: dict[str, bytes] = {}
        self.processes = 0

    def own(self) -> Path:
        self.processes += 1
        return self.path / str(self.processes)

    def step(self, **arguments: Any) -> Step:
        return step(self.own(), remote=self.store, **arguments)


class Artifacts(Remote):
    """Each loads what all before it have saved, which are files."""

    def step(self, **arguments: Any) -> Step:
        folder, before = self.own(), sorted(self.path.glob("*.artifacts"))
        return step(folder, load=before, save=folder.with_suffix(".artifacts"), **arguments)


@pytest.fixture(autouse=True)
def settings(as_installed: None) -> None:
    """Deterministic mode is on, settings are the defaults."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("way", "variants"),
    [
        (Artifacts, [*LEVELS[:2], {"sms": 5}]),
        (Folder, LEVELS + OTHERS),
        (Remote, LEVELS + OTHERS),
        (Artifacts, LEVELS + OTHERS),
    ],
)
def test_each_finds_its_own(way, variants, tmp_path):
    """A guarantee, a setting or an SM count never takes what another has written; the same one takes all, bit for bit."""
    caches = way(tmp_path)
    cold = []
    for variant in variants:
        cold.append(caches.step(**variant))
        assert cold[-1].found == COLD, variant
    assert cold[0].gradient != cold[1].gradient, "levels sum in one order here: who took one for the other would not be seen"
    for variant, before in zip(variants, cold, strict=True):
        warm = caches.step(**variant)
        assert warm.found == WARM, variant
        assert warm.same(before), variant
        assert (warm.graph["compiled"], warm.graph["is_backward"], warm.graph["compile_id"]) == ("attend", True, "0/0")
        assert warm.graph["number"] > before.graph["number"]
    for variant, before in zip(variants, cold, strict=True):
        taken, biased, declined = sorted(before.decisions, key=lambda x: x["source"])
        assert taken["guarantee"] == variant.get("guarantee", "run")
        assert taken["sms"] == variant["sms"] - variant.get("sm_reserve", 0)
        assert "head dim 272" in declined["reason"]
        if "schedule" in variant:
            assert "takes no BlockMask" in biased["reason"]
        else:
            assert (biased["mask"], biased["reason"]) == ("block_mask", None)


def test_threads_that_compile_one_graph(tmp_path, monkeypatch):
    """The first writes what the others find; each has the bits, and entries of its own in the record."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    names = ["first", "second", "third"]
    barrier = Barrier(len(names))

    def run(name: str) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        barrier.wait(60)
        return train(named(name))

    dash_inductor.enable()
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            steps = [result(gradient, name) for gradient, name in zip(pool.map(run, names), names, strict=True)]
    finally:
        dash_inductor.disable()
    assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (2, 4)
    assert all(each.same(steps[0]) for each in steps)
    assert len({each.graph["number"] for each in steps}) == len(names)
    assert len(steps[0].decisions) == 3


def python(*steps: dict[str, Any], root: Path = ROOT, meeting: Path | None = None, **environ: str) -> Callable[[], list[Step]]:
    """Starts a process that takes the steps with the package in `root`; two that have a `meeting` wait there for each other.

    Returns what waits for its end, and returns what the steps gave.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DASH_INDUCTOR")}
    environ = {"PYTHONPATH": str(root), "DASH_INDUCTOR_EMULATE": "1", "DASH_INDUCTOR_SMS": "6", **environ}
    arguments = [json.dumps(steps), *([] if meeting is None else [str(meeting), "2"])]
    process = subprocess.Popen(
        [sys.executable, caching.__file__, *arguments],
        env=inherited | environ,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def finish() -> list[Step]:
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode == 0, errors
        return [Step(**each) for each in json.loads(output)]

    return finish


@pytest.mark.nightly
def test_from_machine_to_machine(tmp_path):
    """By artifacts, and by remote caches: the same device takes them, one with another SM count or another cost file does not."""
    artifacts, remote = str(tmp_path / "artifacts"), str(tmp_path / "remote")

    def both(machine: str, **settings: str) -> list[dict[str, Any]]:
        folders = [str(tmp_path / f"{machine}_{way}") for way in ("artifacts", "remote")]
        return [{"folder": folders[0], "load": [artifacts], **settings}, {"folder": folders[1], "remote": remote, **settings}]

    cold, into_remote = python(
        {"folder": str(tmp_path / "cold"), "save": artifacts}, {"folder": str(tmp_path / "cold_remote"), "remote": remote}
    )()
    assert cold.found == into_remote.found == COLD
    assert cold.same(into_remote)
    *alike, device, device_remote = python(*both("alike"), *both("other_level", guarantee="device"), DASH_INDUCTOR_SEED="7")()
    for warm in alike:
        assert warm.found == WARM
        assert warm.same(cold)
        assert warm.graph["compile_id"] == "0/0"
    for other in (device, device_remote):
        assert other.found == COLD
        assert other.gradient != cold.gradient
        assert other.decisions[-1]["guarantee"] == "device"

    for other in python(*both("fewer_sms"), DASH_INDUCTOR_SMS="5")():
        assert other.found == COLD
        assert other.gradient != cold.gradient
        assert other.decisions[-1]["sms"] == 5

    tree = tmp_path / "tree"
    for package in ("dash_inductor", "lowering", "templates"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    costs = tree / "dash_inductor/devices/emulated.toml"
    costs.write_text(costs.read_text().replace("step_ns = { value = 1000", "step_ns = { value = 2000"))
    assert costs.read_text() != (ROOT / "dash_inductor/devices/emulated.toml").read_text()
    for other in python(*both("other_costs"), root=tree)():
        assert other.found == COLD
        assert other.decisions[-1]["predicted_us"] != cold.decisions[-1]["predicted_us"]


@pytest.mark.nightly
def test_two_processes_that_write_one_folder_at_once(tmp_path):
    """Whoever of them writes, both have the bits, and a third finds all of it."""
    folder, meeting = tmp_path / "caches", tmp_path / "meeting"
    meeting.mkdir()
    started = [python({"folder": str(folder)}, meeting=meeting) for _ in range(2)]
    (first,), (second,) = (finish() for finish in started)
    assert first.same(second)
    (third,) = python({"folder": str(folder)})()
    assert third.found == WARM
    assert third.same(first)


class GraphsAlone(Folder):
    """The cache of joint graphs is off."""

    def step(self, **arguments: Any) -> Step:
        with functorch_config.patch(enable_autograd_cache=False):
            return super().step(**arguments)


class Anew(Remote):
    """None finds anything."""

    def step(self, **arguments: Any) -> Step:
        return step(self.own(), **arguments)


@pytest.mark.parametrize(("way", "hits"), [(Folder, 1), (Anew, 0), (GraphsAlone, 0), (Remote, 1), (Artifacts, 1)])
def test_the_guard_holds_on_every_way_in(way, hits, tmp_path, monkeypatch):
    """What was compiled untried is tried by a process that asks for it; if it is unfit, the process has stock's gradients."""
    tried = []

    def comes_to(fit: bool) -> None:
        def trial(kind: Kind, *_: object) -> Verdict:
            tried.append(kind)
            return Verdict(fit, "it is wrong here")

        tried.clear()
        first_use._verdict.cache_clear()
        monkeypatch.setattr(first_use, "_tried", trial)

    comes_to(False)
    found = way(tmp_path)
    untried = found.step(sms=6)
    assert tried == []
    comes_to(True)
    right = found.step(sms=6, guard="always")
    assert len(tried) == len(set(tried)) >= 1 and right.same(untried) and right.autograd_hits == hits
    comes_to(False)
    with pytest.warns(InternalErrorWarning, match="failed its trial on this GPU: it is wrong here"):
        wrong = found.step(sms=6, guard="always")
    assert tried and not any(decision["family"] for decision in wrong.decisions)
    with dash_inductor.config.within(replace(dash_inductor.config.current(), enabled=False)):
        stock = train(named("stock"))
    assert wrong.gradient == stock.flatten().tolist() != right.gradient
    comes_to(False)
    with pytest.raises(BackendCompilerFailed, match="it is wrong here"):
        found.step(sms=6, guard="always", on_unsupported="error")
    comes_to(False)
    assert found.step(sms=6).same(untried) and tried == []
