"""One decision in five forms: the rule written out, choose(), generated code, the Piecewise, and what Inductor prints for that."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import sympy
from torch._inductor.codegen.wrapper import pexpr

from dash_inductor.devices.cost_files import load_costs
from dash_inductor.schedule import (
    INTEGER,
    Costs,
    Shape,
    TwoPass,
    candidates,
    choose,
    decision_source,
    decode,
    symbolic_choice,
)
from dash_inductor.schedule.families import MONO
from dash_inductor.schedule.symbolic import SYMBOLIC
from dash_inductor.schedule.word import WORD_BITS

BLOCKS = {"head_dim": 64, "block_m": 64, "block_n": 128}
H100 = load_costs("h100", **BLOCKS)
# Steps so cheap that times often differ by a few ns, or by the margin and a few ns.
NEAR = replace(H100, step_ns=50, hop_ns=3, shift_percent=0)
FAR = replace(H100, hop_ns=H100.step_ns + 1000)  # a hop is longer than a step, which makes other formulas
MASKS = ("full", "causal_top_left", "causal_bottom_right")

# (mask, whether lengths are known to be equal, what else is asked for)
CASES: list[tuple[str, bool, dict[str, str]]] = [
    *((mask, square, {}) for mask in MASKS for square in (True, False)),
    ("full", False, {"guarantee": "batch"}),
    ("causal_top_left", True, {"guarantee": "device"}),
    *(("full", True, {"family": family}) for family in ("descending", "shift")),
    *(("causal_top_left", True, {"family": family}) for family in ("ascending", "symmetric")),
]
# Two passes at about the price of one, which now waits: they are chosen now and then.
TWO_PASS = replace(
    H100,
    step_ns=50,
    hop_ns=38,
    two_pass=TwoPass(64, 64, 128, 128, kv_step_ns=28, q_step_ns=21, workers=132, split=False, estimate=True),
)
COSTS = {"near": NEAR, "far": FAR, "two passes": TWO_PASS}
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
SHAPES = -(-(3000 if NIGHTLY else 150) // (len(CASES) * len(COSTS)))  # of each case at each cost
MORE = 20  # times as many are drawn, to find near ties among them
NEARLY = 500  # in ns / 100, as weighted times are

Decision = tuple[str, int, int, int, bool]


class Ruled(NamedTuple):
    """A shape, its decision by the rule, and how far the next best is off: in ns / 100, 0 for a tie, None where there is none."""

    shape: Shape
    decision: Decision
    gap: int | None = None
    with_default: bool = False  # whether one of the two is the default

    @property
    def is_near(self) -> bool:
        return self.gap is not None and self.gap <= NEARLY


def ruled(shape: Shape, costs: Costs, guarantee: str = "run", family: str = "auto") -> Ruled:
    """The rule written out: the first minimum of weighted times, the default where no candidate has a time."""
    found = candidates(shape, costs, guarantee, INTEGER, family)
    decisions = [(c.family, c.roles, c.heads_in_flight, c.stride, c.boustrophedon) for c in found]
    times = [
        (c.time.ns * (100 if c.is_default else 105 if c.family == "two_pass" else 102), n)
        for n, c in enumerate(found)
        if not c.time.penalty
    ]
    if not times:
        return Ruled(shape, decisions[0])
    least, best = min(times)
    others = [(time - least, n) for time, n in times if decisions[n] != decisions[best]]
    if not others:
        return Ruled(shape, decisions[best])
    gap, second = min(others)
    return Ruled(shape, decisions[best], gap, decisions[0] in (decisions[best], decisions[second]))


def sample(count: int, seed: int, mask: str, square: bool, costs: Costs, how: dict[str, str]) -> list[Ruled]:
    """Random shapes; where there are as many, a third near ties but not ties, and a third ties, with the default first."""
    rng = random.Random(seed)
    found: list[Ruled] = []
    for _ in range(MORE * count):
        q_len = rng.choice([rng.randint(1, 1024), rng.randint(1, 25_600), 2 ** rng.randint(4, 15)])
        kv_len = q_len if square or rng.random() < 0.3 else rng.choice([rng.randint(1, 1024), rng.randint(1, 25_600)])
        found.append(ruled(Shape(q_len, kv_len, rng.randint(1, 40), 1, mask=mask, **BLOCKS), costs, **how))
    found.sort(key=lambda r: not r.with_default)
    near = [r for r in found if r.is_near and r.gap][: count // 3]
    ties = [r for r in found if r.gap == 0][: count // 3]
    rng.shuffle(found)
    return [*near, *ties, *found[: count - len(near) - len(ties)]]


class Forms:
    """The decision as a function of generated code, as a Piecewise, and as the text that Inductor's wrapper would hold for that."""

    def __init__(self, mask: str, square: bool, costs: Costs, **how: str) -> None:
        settings: dict[str, Any] = {"group": 1, "mask": mask, "costs": costs, **BLOCKS, **how}
        scope: dict[str, Any] = {}
        exec(decision_source("decision", square=square, **settings), {}, scope)  # it needs nothing else
        self.generated = scope["decision"]
        self.symbols = [sympy.Symbol(name, integer=True, positive=True) for name in ("q_len", "kv_len", "heads")]
        q_len, kv_len, heads = self.symbols
        self.piecewise = symbolic_choice(q_len, q_len if square else kv_len, heads, **settings)
        self.printed = eval(f"lambda q_len, kv_len, heads: {pexpr(self.piecewise)}", {"CeilDiv": INTEGER.ceil_div})

    def substituted(self, *sizes: int) -> int:
        """By sympy, which evaluates every function for exact integers as they are put in."""
        return int(self.piecewise.xreplace(dict(zip(self.symbols, map(sympy.Integer, sizes), strict=True))))


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize(("mask", "square", "how"), CASES)
def test_all_forms_take_the_same_decision(mask: str, square: bool, how: dict[str, str], costs: Costs) -> None:
    shapes = sample(SHAPES, 5, mask, square, costs, how)
    forms = Forms(mask, square, costs, **how)
    for shape, expected, *_ in shapes:
        chosen = choose(shape, costs, **how)
        assert (chosen.family, chosen.roles, chosen.heads_in_flight, chosen.stride, chosen.boustrophedon) == expected, shape
        sizes = shape.q_len, shape.kv_len, shape.heads
        value = forms.substituted(*sizes)
        assert 0 <= value < 2**WORD_BITS
        assert decode(value) == expected, shape
        assert forms.printed(*sizes) == value, shape
        assert forms.generated(*sizes) == value, shape


def test_near_ties_are_among_the_shapes() -> None:
    """Most of them at costs that are made for it: ties, and times that are a ns apart or a few, the default's on either side."""
    drawn = [r for mask, square, how in CASES[:6] for r in sample(30, 5, mask, square, NEAR, how)]
    near = [r for r in drawn if r.is_near]
    assert len(near) > len(drawn) / 2
    assert any(r.gap and r.gap <= 100 for r in near)
    assert any(r.gap == 0 and r.with_default for r in near)
    assert {r.decision[0] in MONO for r in near if r.gap and r.with_default} == {True, False}


@pytest.mark.parametrize("mask", MASKS)
def test_two_passes_are_chosen_for_some_of_the_shapes(mask: str) -> None:
    drawn = [r.decision[0] for r in sample(60, 5, mask, True, TWO_PASS, {})]
    assert 3 < drawn.count("two_pass") < 57


@pytest.mark.parametrize("operation", ["ceil_div", "floor_div", "mod", "max", "min"])
def test_symbolic_operations_are_those_of_integers(operation: str) -> None:
    x = sympy.Symbol("x", integer=True)
    for a in range(6):
        for b in range(1, 5):
            symbolic = getattr(SYMBOLIC, operation)(x, b)
            assert symbolic.subs(x, a) == getattr(INTEGER, operation)(a, b)


def test_the_piecewise_has_no_piecewise_in_its_conditions() -> None:
    for mask in MASKS:
        piecewise = Forms(mask, False, H100).piecewise
        assert isinstance(piecewise, sympy.Piecewise) and len(piecewise.args) > 10
        for value, condition in piecewise.args:
            assert not value.has(sympy.Piecewise) and not condition.has(sympy.Piecewise, sympy.ITE, sympy.ceiling, sympy.floor)
