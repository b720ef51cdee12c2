"""Ranks tell a store what decides their bits, and whoever differs writes that down for all; nobody waits."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dash_inductor import config
from dash_inductor.decision import Decision
from dash_inductor.devices import target
from dash_inductor.first_use import verdict
from dash_inductor.first_use.kind import Kind
from dash_inductor.hooks import ranks, told
from dash_inductor.hooks.told import Rank

CPU = torch.device("cpu")
ATTENTION = Decision("sdpa", "h200", "bf16", "causal", 1, 8, 8, 512, 512, 64, family="shift", roles=4, joint="ab12")
KIND = Kind("one_pass", "gluon", "grouped", 90, "bf16", 64, 64, "causal", 128, 128)


class Job:
    """Ranks that share a store, of which this process is one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.store = dist.HashStore()
        self.ranks = [Rank(self.store, rank, count) for rank in range(count)]
        self._monkeypatch = monkeypatch

    def compile(self, rank: int, *found: Decision, **has: dict[Any, Any]) -> None:
        """What a rank does when it takes a graph with these attentions into use. has: its own facts, and kinds."""
        self._monkeypatch.setattr(ranks, "facts", lambda device: FACTS | has.get("facts", {}))
        self._monkeypatch.setattr(verdict, "is_used", has.get("used", {}))
        self._monkeypatch.setattr(ranks, "this_rank", lambda: self.ranks[rank])
        ranks.compare(found)


FACTS = {told.SWITCH: "on", "torch": "2.13", "device": "H200", "schedule": "auto", "cost file": "the package's"}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(target, "is_there", lambda device: True)
    monkeypatch.setattr(ranks, "_warned", set())
    before = config.configure(guarantee="device")
    yield Job(monkeypatch, 3)
    config.configure(guarantee=before.guarantee)


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "schedule": ({"facts": {"schedule": "shift"}}, "schedule is auto on rank 0 and shift on rank 2"),
    "torch": ({"facts": {"torch": "2.14"}}, "torch is 2.13 on rank 0 and 2.14 on rank 2"),
    "cost file": ({"facts": {"cost file": "ab"}}, "cost file is the package's on rank 0 and ab on rank 2"),
    "verdict": ({"used": {KIND: False}}, f"that {re.escape(str(KIND))} is used is True on rank 0 and False on rank 2"),
    "off": ({"facts": {told.SWITCH: "off", "torch": "None"}}, "DASH_INDUCTOR is on on rank 0 and off on rank 2"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_rank_is_told(job: Job, name: str) -> None:
    """The one that differs at once, the others when they compile again."""
    others, said = DIFFERENCES[name]
    usual = {"used": {KIND: True}}
    job.compile(0, **usual)
    job.compile(1, **usual)
    for rank in (2, 0, 1, 2):
        with pytest.raises(ranks.RanksDifferError, match=f"bits: {said}$"):
            job.compile(rank, **(others if rank == 2 else usual))


def test_decisions_of_one_graph_are_compared(job: Job) -> None:
    job.compile(0, ATTENTION)
    job.compile(1, replace(ATTENTION, source="b.py:3", module="other", predicted_us=3.0))  # which decides nothing
    job.compile(1, replace(ATTENTION, family="descending", joint="cd34"))  # another graph
    said = "family of attention 0 .sdpa of B=1 H=8 S=512 D=64 bf16. is shift on rank 0 and descending on rank 2"
    with pytest.raises(ranks.RanksDifferError, match=said):
        job.compile(2, replace(ATTENTION, family="descending"))


def test_settings_that_ranks_change_to_are_compared(job: Job) -> None:
    for rank in range(3):
        job.compile(rank, ATTENTION)
    job.compile(0, ATTENTION, facts={"schedule": "shift"})
    with pytest.raises(ranks.RanksDifferError, match=r"bits: schedule is shift on rank 0 and descending on rank 1$"):
        job.compile(1, ATTENTION, facts={"schedule": "descending"})


@pytest.mark.parametrize("alone", [(), (replace(ATTENTION, joint="evaluated"),)])
def test_settings_of_one_rank_alone_are_not(job: Job, alone: tuple[Decision, ...]) -> None:
    """Rank 0 evaluates, or trains what others do not have, under other settings, before all ranks change to some."""
    for rank in range(3):
        job.compile(rank, ATTENTION)
    job.compile(0, *alone, facts={"schedule": "shift"})
    for rank in (1, 0, 2):
        job.compile(rank, ATTENTION, facts={"schedule": "descending"})


def test_what_is_no_difference(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Two pipeline stages, other lengths, and evaluation on rank 0, whose graphs are others; a kind that one rank alone has; a
    rank that is dead, or takes long: it has told nothing."""
    for n in range(3):
        job.compile(0, replace(ATTENTION, joint=f"stage {n}", q_len=n))
        job.compile(1, replace(ATTENTION, joint=f"other {n}", q_len=2 * n), used={KIND: True})
    # A graph that another rank had before all of them changed a setting.
    job.compile(1, replace(ATTENTION, joint="stage 0", family="descending"), facts={"schedule": "descending"})
    job.compile(0, replace(ATTENTION, joint="stage 0", family="descending"), facts={"schedule": "descending"})
    job.compile(1, facts={})
    # Of one name, and another tile.
    job.compile(0, used={replace(KIND, block_m=64): False})
    job.compile(0, replace(ATTENTION, joint=""))
    job.compile(1, replace(ATTENTION, joint="", family="descending"))
    assert not caplog.messages


def test_under_run_it_is_a_warning_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    config.configure(guarantee="run")
    with caplog.at_level(logging.WARNING, "dash_inductor"):
        job.compile(0)
        for _ in range(2):
            job.compile(1, facts={"schedule": "shift"})
    assert caplog.messages == ["dash_inductor: ranks differ, and so may their bits: schedule is auto on rank 0 and shift on rank 1"]


def test_a_rank_that_tells_nothing_is_named_once(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.compile(0)
    job.compile(1)
    assert not caplog.messages
    now = told.time.monotonic()
    monkeypatch.setattr(told.time, "monotonic", lambda: now + told.SECONDS + 1)
    job.compile(0)
    job.compile(0)
    assert [message for message in caplog.messages if message.startswith("rank 2 told nothing in 120 s")] == caplog.messages
    assert len(caplog.messages) == 1


def test_facts_are_the_settings_and_the_machine() -> None:
    found = ranks.facts(CPU)
    assert {"dash_inductor", "torch", "triton", "device", "cost file"} <= set(found) and found["torch"] == torch.__version__
    assert {name for name, _ in config.current().deciding()} - set(found) == {"on_unsupported"}  # which decides no bits
    assert (found["mode"], found["flash attention"], found[told.SWITCH]) == ("strict", "torch's", "on")


def test_a_store_that_is_gone_changes_nothing(job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Rank, "tell", lambda *_: 1 / 0)
    job.compile(0)
    job.compile(0)
    assert caplog.messages == ["ranks cannot be compared: division by zero"]


@pytest.mark.parametrize("why", ["no group", "alone", "trial", "no device"])
def test_where_there_is_nobody_to_tell_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(ranks, "facts", lambda device: 1 / 0)
    monkeypatch.setattr(ranks, "_warn_once", lambda message: 1 / 0)
    monkeypatch.setattr(target, "is_there", lambda device: why != "no device")
    monkeypatch.setattr(dist, "is_initialized", lambda: why != "no group")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1 if why == "alone" else 2)
    token = verdict.is_trial.set(why == "trial")
    try:
        ranks.compare()
    finally:
        verdict.is_trial.reset(token)


PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", "file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.barrier()
from dash_inductor.hooks.told import FACTS, this_rank
print(this_rank()._store.check([f"{FACTS}//0"]), "dash_inductor.config" in sys.modules, torch.compile is not None)
"""


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_process_where_it_is_off_tells_that(tmp_path: Any, switch: str) -> None:
    """By itself, when the job begins: nothing is compiled."""
    begin = "from dash_inductor.hooks.autoload import autoload; autoload()\n" + PROGRAM
    environ = {**os.environ, "DASH_INDUCTOR": switch, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", begin, str(tmp_path / "ranks"), str(rank)], env=environ, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=120)[0].split()[0] for process in started] == [str(switch == "0")] * 2
