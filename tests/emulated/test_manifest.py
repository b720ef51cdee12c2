"""Equal runs write equal manifests, whichever process, folder, rank or cache they have; another one is held to them by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import ranks, script
from tensors import normal
from torch import Tensor

import dash_inductor
from dash_inductor import ManifestError, emulation, manifest
from dash_inductor.cli.main import main
from dash_inductor.contract import graphs, live

WORKER = Path(__file__).with_name("manifest_worker.py")


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    """Of cold caches, and in another folder of warm ones."""
    other = tmp_path / "other"
    other.mkdir()
    (other / WORKER.name).write_text(WORKER.read_text())
    (other / "cache").symlink_to(tmp_path / "cache", target_is_directory=True)
    script([str(WORKER), "cold.json"], tmp_path, seed=0)
    script([str(other / WORKER.name), "warm.json"], other, seed=1)
    cold, warm = tmp_path / "cold.json", other / "warm.json"
    assert cold.read_bytes() == warm.read_bytes()
    found = dash_inductor.Manifest.read(cold)
    assert sorted(len(graph["attentions"]) for graph in found.graphs) == [0, 0, 2, 2]
    assert [*map(len, (found.choices or {}).values())] == [2]  # sizes


@pytest.mark.nightly
def test_ranks_write_equal_bytes(tmp_path: Path) -> None:
    ranks(2, [str(WORKER), "rank"], tmp_path)
    script([str(WORKER), "alone.json"], tmp_path, seed=0)
    (found,) = {(tmp_path / name).read_bytes() for name in ("rank0.json", "rank1.json", "alone.json")}
    assert found


@pytest.fixture(autouse=True)
def held_to_nothing() -> Iterator[None]:
    graphs.clear()
    yield
    for held in tuple(live._held):
        held.release()


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def train(length: int = 40) -> None:
    torch._dynamo.reset()
    graphs.clear()
    with emulation.emulate():
        torch.compile(attend)(normal(1, 2, length, 16).requires_grad_()).sum().backward()


OTHERS: dict[str, tuple[dict[str, Any], int, str]] = {
    "a schedule": ({"schedule": "ascending"}, 40, "schedule"),
    "a level": ({"guarantee": "device"}, 40, "guarantee"),
    "SMs": ({"sm_reserve": 3}, 40, "sm_reserve"),
    "a kernel": ({"template": "two_pass"}, 40, "template"),
    "a length": ({}, 80, "q_len"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("rewriting")
def test_another_run_is_told_and_ends_under_error(name: str) -> None:
    """Its attention by name; an equal run is not."""
    settings, length, field = OTHERS[name]
    train()
    recorded = manifest()
    assert any(attention["order"] for graph in recorded.graphs for attention in graph["attentions"])
    graphs.clear()
    held = manifest(check=recorded)
    train()
    assert held and held.never_met == []
    held.release()
    with dash_inductor.enabled(**settings):
        held = manifest(check=recorded)
        train(length)
    told = [each for each in held.differences if each.field == field]
    assert told and f"bits of {Path(__file__).name}:" in told[0].consequence and not held
    held.release()
    with dash_inductor.enabled(**settings, on_unsupported="error"), pytest.raises(Exception, match="in the manifest: ") as raised:
        manifest(check=recorded)
        train(length)
    assert isinstance(raised.value, ManifestError) or isinstance(raised.value.__cause__, ManifestError)


def train_twice() -> None:
    train()
    train()


@pytest.mark.usefixtures("rewriting")
def test_the_command_of_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is ended by on_unsupported="error" is compared as far as it came."""
    file = tmp_path / "run.json"
    train()
    manifest().write(file)
    assert main(["manifest", str(file), "test_manifest:train_twice"]) == 0
    capsys.readouterr()
    with dash_inductor.enabled(schedule="ascending", on_unsupported="error"):
        assert main(["manifest", str(file), "test_manifest:train_twice"]) == 1
    assert "bits of test_manifest.py:" in capsys.readouterr().out and not live._held
