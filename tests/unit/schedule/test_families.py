"""A family is a record: one that is registered is chosen, simulated and packed, by what its record says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks.schedules.bounds import lower_bound
from benchmarks.schedules.simulator import simulate
from benchmarks.schedules.steps import unroll
from dash_inductor.config import CHOICES, Config
from dash_inductor.decision import Declined
from dash_inductor.devices.cost_files import load_costs
from dash_inductor.devices.target import Target
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.schedule import Geometry, TiledProblem, pack_plan
from dash_inductor.schedule.choice import choose
from dash_inductor.schedule.families import REGISTER, default_family, tried_families, why_impossible
from dash_inductor.schedule.family import Family
from dash_inductor.schedule.geometry import MASKS
from dash_inductor.schedule.orders.base import InPasses
from dash_inductor.schedule.packing import FAMILY_CODES


@dataclass(frozen=True)
class OutsideIn(InPasses):
    """From both ends of the Q tiles in turn."""

    name = "outside_in"

    def visits(self, j: int) -> tuple[int, ...]:
        tiles = list(self.geometry.tiles(j))
        return tuple(tiles.pop(-1 if step % 2 else 0) for step in range(len(tiles)))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Family:
    """A family that serves both masks, without formulas and without a kernel that writes its table."""
    family = Family("outside_in", OutsideIn, masks=MASKS, colour="#000000")
    monkeypatch.setitem(REGISTER, family.name, family)
    monkeypatch.setitem(CHOICES, "schedule", ("auto", *REGISTER))
    return family


@pytest.mark.parametrize("mask", MASKS)
def test_one_that_is_registered_can_be_forced(own: Family, mask: str) -> None:
    costs = load_costs("emulated", block_m=16, block_n=32, head_dim=64)
    problem = TiledProblem(256, 256, 2, 1, 64, 16, 32, mask)
    chosen = choose(problem, costs, family=own.name)
    plan = chosen.plan()
    assert [(each.family, each.ns) for each in chosen.considered] == [(own.name, None)]  # it has no formula
    geometry, workers, pace = plan.order.geometry, {"heads": 2, "workers": plan.workers}, {"step_ns": 1000, "hop_ns": 750}
    ends = simulate(plan, compute_ns=pace["step_ns"], reduce_ns=0, sync_ns=pace["hop_ns"]).makespan_ns
    assert ends >= lower_bound(geometry, **workers, **pace)
    first = plan.order.visits(0)
    assert [entry & 0xFFFF for entry in pack_plan(plan)[-geometry.n_kv * len(first) :][: len(first)]] == list(first)
    assert len(unroll(plan)) == plan.steps
    attention = Problem(mask, 1, 2, 2, 256, 256, 64, "fp32")
    assert resolve(attention, Config(schedule=own.name), Target("emulated", "emulated", 6)).schedule[0].family == own.name


def test_it_is_declined_where_a_device_would_have_to_write_its_table(own: Family) -> None:
    settings, target = Config(schedule=own.name), Target("emulated", "emulated", 6)
    long = Problem("full", 1, 1, 1, 2**17, 2**17, 64, "fp32")
    with pytest.raises(Declined, match="schedule='outside_in' has a table that is too large for a constant"):
        resolve(long, settings, target)
    length = ShapeEnv().create_unbacked_symint()
    torch._check(length == 256)
    with pytest.raises(Declined, match="no kernel writes its table"):
        resolve(replace(long, batch=length), settings, target)


def test_it_keeps_to_its_masks_and_to_the_guarantees(own: Family) -> None:
    assert why_impossible("full", "device", own.name) == (
        "family 'outside_in' adds in an order that depends on the SM count: guarantee 'device' needs ascending or descending"
    )
    REGISTER[own.name] = replace(own, masks=("causal",))
    assert why_impossible("full", "run", own.name) == (
        "family 'outside_in' serves causal masks only, this one is full: use shift or ascending"
    )


@pytest.mark.parametrize("mask", MASKS)
def test_what_auto_takes_serves_the_mask_and_is_known_to_the_device(mask: str) -> None:
    """So that a choice at run time has a code for each, and each has a time."""
    fallback = REGISTER[default_family(mask)]
    assert fallback.is_monotone
    for family in (fallback, *tried_families(mask)):
        assert mask in family.masks and family.name in FAMILY_CODES and family.formulas()[family.name, mask]


def test_a_name_is_that_of_its_order() -> None:
    for name, family in REGISTER.items():
        order = family.order(Geometry(6, 6, 1, 1, family.masks[0]), 2)
        assert name == family.name and order.name == (family.queue_of or name)
        assert len(order.slots) // order.passes == family.chains_of_unit
