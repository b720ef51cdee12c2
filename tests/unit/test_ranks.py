"""Ranks that compile under something else are told so by whoever comes later; nobody waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dash_inductor import config
from dash_inductor.devices import target
from dash_inductor.hooks import ranks

CPU = torch.device("cpu")


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def group(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of two, of which this process is the first."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(target, "is_there", lambda device: True)
    monkeypatch.setattr(ranks, "_told", None)
    yield


def test_the_later_one_sees_the_difference(store):
    mine, theirs = {"device": "H100", "torch": "2.13"}, {"device": "H200", "torch": "2.13", "more": "1"}
    assert ranks.compare(store, 3, 4, mine) == []  # whoever is first, and waits for nobody
    assert ranks.compare(store, 0, 4, mine) == []
    assert ranks.compare(store, 1, 4, theirs) == [
        f"{name} is {a} on rank 1 and {b} on rank {rank}"
        for rank in (0, 3)
        for name, a, b in (("device", "H200", "H100"), ("more", 1, None))
    ]


def test_facts_are_the_settings_and_the_machine():
    found = ranks.facts(CPU)
    assert {"dash_inductor", "torch", "triton", "device"} <= set(found) and found["torch"] == torch.__version__
    assert {name for name, _ in config.current().deciding()} <= set(found)
    assert (found["mode"], found["flash attention"]) == ("strict", "torch's")


@pytest.mark.parametrize("guarantee", ["run", "device", "batch"])
def test_levels(guarantee, store, group, caplog):
    """A warning under "run", once for a process group; above, an error."""
    before = config.configure(guarantee=guarantee)
    try:
        ranks.compare(store, 1, 2, ranks.facts(CPU) | {"schedule": "shift"})
        with caplog.at_level(logging.WARNING, "dash_inductor"):
            if guarantee == "run":
                ranks.compare_once(CPU)
                assert caplog.messages == [
                    "dash_inductor: ranks differ, and so may their bits: schedule is auto on rank 0 and shift on rank 1"
                ]
            else:
                for _ in range(2):  # whoever compiles once more is told once more
                    with pytest.raises(ranks.RanksDifferError, match="schedule is auto on rank 0 and shift on rank 1"):
                        ranks.compare_once(CPU)
                return
            caplog.clear()
            ranks.compare_once(CPU)
        assert not caplog.messages
    finally:
        config.configure(guarantee=before.guarantee)


def test_equal_ranks_are_silent(store, group, caplog):
    ranks.compare(store, 1, 2, ranks.facts(CPU))
    ranks.compare_once(CPU)
    assert not caplog.messages


def test_a_store_that_is_gone_changes_nothing(group, monkeypatch, caplog):
    monkeypatch.setattr(ranks, "compare", lambda *_: 1 / 0)
    ranks.compare_once(CPU)
    assert caplog.messages == ["ranks cannot be compared: division by zero"]


def test_without_a_process_group_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(ranks, "facts", lambda device: 1 / 0)
    ranks.compare_once(CPU)
