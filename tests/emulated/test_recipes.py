"""The recipes of docs/recipes, at toy size: every attention is rewritten, and the digest is the same in another interleaving."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Iterator
from unittest import mock

import pytest
from processes import ROOT, script
from torch._dynamo.utils import counters

import dash_inductor
from dash_inductor import emulation
from dash_inductor.contract import live

RECIPES = {path.stem: path for path in (ROOT / "docs" / "recipes").glob("*.py")}
OF_SEVERAL_PROCESSES = {"fsdp2_checkpointing", "bisect_loss_spike"}
AT_NIGHT = {"trainer_and_sampler"}  # it compiles for long; test_packing.py has packs at its level, through one graph too


@pytest.fixture
def as_in_a_script(as_installed: None) -> Iterator[None]:
    """The pass is on; variables that a recipe sets are unset afterwards, and it holds this process to no manifest any more."""
    with mock.patch.dict(os.environ), dash_inductor.enabled():
        yield
    for held in tuple(live._held):
        held.release()


def digest(output: str) -> str:
    """Of the last line, which also counts attentions."""
    line = re.fullmatch(r"attentions rewritten: [1-9]\d*; (.*: [0-9a-f]{16})", output.splitlines()[-1])
    assert line
    return line[1]


@pytest.mark.usefixtures("as_in_a_script")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in AT_NIGHT))
        for name in sorted(RECIPES.keys() - OF_SEVERAL_PROCESSES)
    ],
)
def test_the_same_bits_in_another_interleaving(name, capsys):
    """The first run compiles, the second takes the same graphs out of the caches."""
    digests, turns = [], []
    for seed in (0, 1):
        emulation.clear_launches()
        with emulation.emulate(seed):
            runpy.run_path(str(RECIPES[name]), run_name="__main__")
        digests.append(digest(capsys.readouterr().out))
        turns.append([launch.schedule for launch in emulation.launches()])
    assert digests[0] == digests[1]
    assert turns[0] and all(a != b for a, b in zip(*turns, strict=True))
    assert counters["inductor"]["dash_declined"] == 0


@pytest.mark.nightly
def test_as_a_script(tmp_path, as_in_a_script, capsys):
    """What a user types, in another folder: FlexAttention trains on the CPU only if emulation has begun before it is traced."""
    output = script([str(RECIPES["packed_documents"])], tmp_path, seed=2)
    runpy.run_path(str(RECIPES["packed_documents"]), run_name="__main__")
    assert digest(output) == digest(capsys.readouterr().out)


@pytest.mark.nightly
def test_two_ranks(tmp_path):
    """In two interleavings; more ways to train are in test_distributed.py, one of them in CI."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(RECIPES["fsdp2_checkpointing"])]
    (found,) = {digest(script(command, tmp_path, seed)) for seed in (1, 2)}
    assert "of all 2 ranks" in found


@pytest.mark.nightly
@pytest.mark.parametrize("kinds", [["same"], []])
def test_the_generator_that_nobody_seeds_is_found(tmp_path, kinds):
    recipe = RECIPES["bisect_loss_spike"]
    (line,) = (number for number, text in enumerate(recipe.read_text().splitlines(), 1) if "torch.rand(" in text)
    found, repaired = script([str(recipe), *kinds], tmp_path, seed=1).split("repaired_step: ")
    assert found.startswith("step: DIFFERENT") and re.search(rf"aten.rand.generator at\s+\S*{recipe.name}:{line}\n", found)
    assert repaired.startswith("identical")
