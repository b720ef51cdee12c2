"""The choice of a schedule: the first minimum of weighted closed-form times, a pure function of sizes and costs.

One rule, on one definition of the candidates, serves ints (choose), generated code (decision_source) and symbolic sizes
(symbolic_choice), so that all take the same decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from . import word
from .by_name import place
from .candidates import Candidate, Shape, candidates
from .costs import Costs, TwoPass
from .families import MONO, TWO_PASS, Ascending
from .geometry import Geometry, check_count
from .plan import Plan, Straddling
from .simulator import simulate
from .times import INTEGER, Arithmetic, Integer
from .traced import TRACED, Trace

INDEX_RANGE = 64  # at most as many candidates
DOUBT = 2**60  # above every weight * time (ns)
SIMULATED_STEPS = 20_000  # a forced family without a closed form is simulated up to this size
SIZES = ("q_len", "kv_len", "heads")


@dataclass(frozen=True)
class Choice:
    """What was resolved for a shape and the costs of a device."""

    family: str
    roles: int
    heads_in_flight: int
    stride: int  # 0 unless the family is shift or shift_round_robin
    boustrophedon: bool
    guarantee: str
    shape: Shape
    costs: Costs
    forced: str = "auto"

    @cached_property
    def considered(self) -> tuple[Candidate, ...]:
        """The candidates in the order of the choice."""
        return tuple(candidates(self.shape, self.costs, self.guarantee, INTEGER, self.forced))

    @cached_property
    def time_ns(self) -> int | None:
        """By the closed form, else by simulation; None when it has none here and is too large to simulate."""
        best = min(range(len(self.considered)), key=lambda index: _key(index, self.considered[index], self.costs, INTEGER))
        if not self.considered[best].time.penalty:
            return self.considered[best].time.ns
        plan = self.plan()
        if plan.steps > SIMULATED_STEPS:
            return None
        step_ns = self.costs.step_ns if self.family in MONO else self.costs.shifted_step_ns
        return simulate(plan, compute_ns=step_ns, reduce_ns=0, sync_ns=self.costs.hop_ns).makespan_ns

    def plan(self) -> Plan | Straddling:
        """The schedule placed for all heads; of two passes the order of their sums."""
        if self.family == TWO_PASS:
            assert self.costs.two_pass
            return two_pass_plan(self.shape, self.costs.two_pass)
        return place(
            self.family,
            self.shape.geometry,
            self.roles,
            stride=self.stride or None,
            boustrophedon=self.boustrophedon,
            heads=self.shape.heads,
            heads_in_flight=self.heads_in_flight,
            group=self.shape.group,
        )


def two_pass_plan(shape: Shape, two: TwoPass) -> Plan:
    """Two passes as a schedule: every sum in ascending order of the tiles they take, and nobody waits."""
    geometry = Geometry(shape.q_len, shape.kv_len, two.block_m, two.block_n, shape.mask)
    return Plan(Ascending(geometry, roles=1), shape.heads, shape.heads, shape.group)


def choose(shape: Shape, costs: Costs, guarantee: str = "run", family: str = "auto") -> Choice:
    """Decide for a static shape; family forces one. ValueError for sizes, or a family, that cannot be.

    >>> from dash_inductor.devices.cost_files import load_costs
    >>> costs = load_costs("h100", block_m=64, block_n=128, head_dim=64)
    >>> choice = choose(Shape(8192, 8192, 32, 1, 64, 64, 128, "causal_top_left"), costs)
    >>> choice.family, choice.roles, choice.heads_in_flight
    ('descending', 4, 32)
    """
    for name in ("q_len", "kv_len", "heads"):
        check_count(name, getattr(shape, name))
    square = shape.q_len == shape.kv_len
    how = shape.group, shape.head_dim, shape.block_m, shape.block_n, shape.mask
    found = _decision(square, *how, costs, guarantee, family)(shape.q_len, shape.kv_len, shape.heads)
    return Choice(*word.decode(found), guarantee, shape, costs, family)


@cache
def _decision(
    square: bool, group: int, head_dim: int, block_m: int, block_n: int, mask: str, costs: Costs, guarantee: str, family: str
) -> Callable[[int, int, int], int]:
    for name, value in (("group", group), ("head_dim", head_dim), ("block_m", block_m), ("block_n", block_n)):
        check_count(name, value)
    source = decision_source(
        "decision",
        square=square,
        group=group,
        head_dim=head_dim,
        block_m=block_m,
        block_n=block_n,
        mask=mask,
        costs=costs,
        guarantee=guarantee,
        family=family,
    )
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["decision"]


def decision_source(
    name: str,
    *,
    group: int,
    head_dim: int,
    block_m: int,
    block_n: int,
    mask: str,
    costs: Costs,
    guarantee: str = "run",
    family: str = "auto",
    square: bool = False,
) -> str:
    """Python source of a function of (q_len, kv_len, heads), ints, to the word of the decision of choose().

    It needs nothing else. square: q_len and kv_len are always the same.
    """
    trace = Trace()
    q_len, kv_len, heads = map(trace.parameter, SIZES)
    shape = Shape(q_len, q_len if square else kv_len, heads, group, head_dim, block_m, block_n, mask)
    found = _possible(candidates(shape, costs, guarantee, TRACED, family))
    keys = [_key(index, candidate, costs, TRACED) for index, candidate in enumerate(found)]

    def chosen(values: list[Integer]) -> Integer:
        """One of the values, by position."""
        if all(isinstance(value, int) and value == values[0] for value in values):
            return values[0]
        return trace.term(f"({', '.join(map(str, values))},)[{position}]")

    position = trace.term(f"min({', '.join(map(str, keys))}) % {INDEX_RANGE}") if len(keys) > 1 else 0
    constant = chosen([word.encode(c.family, 0, 0, 0, c.boustrophedon) for c in found])
    roles, in_flight, stride = (chosen([getattr(c, field) for c in found]) for field in ("roles", "heads_in_flight", "stride"))
    return trace.source(name, SIZES, constant + word.fields(roles, in_flight, stride))


def symbolic_choice(
    q_len: Any,
    kv_len: Any,
    heads: Any,
    *,
    group: int,
    head_dim: int,
    block_m: int,
    block_n: int,
    mask: str,
    costs: Costs,
    guarantee: str = "run",
    family: str = "auto",
) -> Any:
    """The decision of choose() as one sympy Piecewise in q_len, kv_len and heads, whose value is a word (word.py).

    One branch per candidate, taken by the first whose key is no larger than those of all candidates after it. The
    conditions compare integers; no Piecewise stands in another.
    """
    import sympy

    from .symbolic import SYMBOLIC

    shape = Shape(q_len, kv_len, heads, group, head_dim, block_m, block_n, mask)
    found = _possible(candidates(shape, costs, guarantee, SYMBOLIC, family))
    keys = [_key(index, candidate, costs, SYMBOLIC) for index, candidate in enumerate(found)]
    words = [word.encode(c.family, c.roles, c.heads_in_flight, c.stride, c.boustrophedon) for c in found]
    later = [keys[index + 1 :] for index in range(len(keys) - 1)]
    least = [SYMBOLIC.min(*rest) if len(rest) > 1 else rest[0] for rest in later]
    conditions = [sympy.Le(key, bound) for key, bound in zip(keys, least, strict=False)]
    return sympy.Piecewise(*zip(words, [*conditions, True], strict=True), evaluate=False)


def _possible(found: list[Candidate]) -> list[Candidate]:
    """Without those that apply to no size; the first stays."""
    return [c for index, c in enumerate(found) if index == 0 or not (isinstance(c.time.penalty, int) and c.time.penalty)]


def _weight(candidate: Candidate, costs: Costs) -> int:
    """In percent: candidates other than the default must be faster by a margin."""
    if candidate.is_default:
        return 100
    of_two = candidate.family == TWO_PASS and costs.two_pass
    return 100 + (of_two.margin_percent if of_two else costs.margin_percent)


def _key(index: int, candidate: Candidate, costs: Costs, ar: Arithmetic) -> Integer:
    """What is least for the candidate that is chosen: its weighted time, then its position.

    Doubtful candidates come last, the default first among them.
    """
    time = candidate.time
    doubt = time.penalty * (2 * DOUBT)
    if index == 0:
        doubt = (1 - ar.floor_div(1, 1 + time.penalty)) * DOUBT
    return (time.ns * _weight(candidate, costs) + doubt) * INDEX_RANGE + index
