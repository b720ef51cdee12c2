"""The choice of a schedule: the first minimum of weighted closed-form times, a pure function of sizes and costs.

One rule serves static shapes (choose, on ints) and dynamic ones (symbolic_word, on expressions), so that both take the
same decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import families, word
from .candidates import Candidate, Shape, candidates
from .costs import Costs
from .families import Schedule
from .plan import Plan
from .replay import replay
from .times import INTEGER, Arithmetic, Integer

DEFAULT_WEIGHT, OTHER_WEIGHT = 100, 102  # another than the default must be 2 % better
INDEX_RANGE = 64  # at most as many candidates
DOUBT = 2**60  # above every weight * time (ns)
REPLAY_STEPS = 20_000  # a forced family without a closed form is timed by replay up to this size


@dataclass(frozen=True)
class Choice:
    """What was resolved. time_ns is None when the family has no closed form here and is too large to replay.

    candidates: (family, roles, heads in flight, time in ns or None where it does not apply), in the order of the
    choice.
    """

    family: str
    roles: int
    heads_in_flight: int
    stride: int  # 0 unless the family is shift
    boustrophedon: bool
    time_ns: int | None
    guarantee: str
    candidates: tuple[tuple[str, int, int, int | None], ...]

    def schedule(self, shape: Shape) -> Schedule:
        """The schedule for the shape that was asked."""
        return _schedule(shape, self.family, self.roles, self.stride, self.boustrophedon)

    def plan(self, shape: Shape) -> Plan:
        """The schedule placed for all heads."""
        return Plan(self.schedule(shape), shape.heads, self.heads_in_flight, shape.group)


def choose(shape: Shape, costs: Costs, guarantee: str = "run", family: str = "auto") -> Choice:
    """Decide for a static shape; family forces one. ValueError for sizes, or a family, that cannot be.

    >>> from .costs import load
    >>> costs = load("h100", block_m=64, block_n=128, head_dim=64)
    >>> choice = choose(Shape(8192, 8192, 32, 1, 64, 64, 128, "causal_top_left"), costs)
    >>> choice.family, choice.roles, choice.heads_in_flight
    ('descending', 16, 8)
    """
    for name in ("heads", "group", "head_dim"):
        value = getattr(shape, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")
    _ = shape.geometry  # checks the rest
    found = candidates(shape, costs, guarantee, INTEGER, family)
    best = min(_keyed_word(index, candidate, INTEGER) for index, candidate in enumerate(found))
    index = (best >> word.WORD_BITS) % INDEX_RANGE
    name, roles, in_flight, stride, boustrophedon = word.decode(best % 2**word.WORD_BITS)
    time_ns = found[index].time.ns
    if found[index].time.penalty:
        plan = Plan(_schedule(shape, name, roles, stride, boustrophedon), shape.heads, in_flight, shape.group)
        step_ns = costs.step_ns if name in families.MONO else costs.shifted_step_ns
        small = plan.steps <= REPLAY_STEPS
        time_ns = replay(plan, compute_ns=step_ns, reduce_ns=0, sync_ns=costs.hop_ns).makespan_ns if small else None
    return Choice(name, roles, in_flight, stride, boustrophedon, time_ns, guarantee, _report(found))


def symbolic_word(
    q_len: Integer,
    kv_len: Integer,
    heads: Integer,
    *,
    group: int,
    head_dim: int,
    block_m: int,
    block_n: int,
    mask: str,
    costs: Costs,
    arithmetic: Arithmetic,
    minimum: Callable[..., Integer],
    guarantee: str = "run",
    family: str = "auto",
) -> Integer:
    """The decision of choose() as an expression in q_len, kv_len and heads; its value is a word (word.py) below 2**47.

    minimum takes all keys at once. Keys go beyond 64 bits before the final modulus: evaluate it in integers without
    bound, as Python does.
    """
    shape = Shape(q_len, kv_len, heads, group, head_dim, block_m, block_n, mask)
    found = candidates(shape, costs, guarantee, arithmetic, family)
    keys = [
        _keyed_word(index, candidate, arithmetic)
        for index, candidate in enumerate(found)
        if index == 0 or not (isinstance(candidate.time.penalty, int) and candidate.time.penalty)  # never the minimum
    ]
    best = minimum(*keys) if len(keys) > 1 else keys[0]
    return arithmetic.mod(best, 2**word.WORD_BITS)


def _keyed_word(index: int, candidate: Candidate, ar: Arithmetic) -> Integer:
    """The candidate's word below its key: weighted time, then position.

    Doubtful candidates come last, the default first among them.
    """
    time = candidate.time
    doubtful = 1 - ar.floor_div(1, 1 + time.penalty)  # 0 or 1
    doubt = doubtful * (DOUBT if index == 0 else 2 * DOUBT)
    key = (time.ns * (DEFAULT_WEIGHT if candidate.is_default else OTHER_WEIGHT) + doubt) * INDEX_RANGE + index
    payload = word.encode(candidate.family, candidate.roles, candidate.heads_in_flight, candidate.stride, candidate.boustrophedon)
    return key * 2**word.WORD_BITS + payload


def _schedule(shape: Shape, family: str, roles: int, stride: int, boustrophedon: bool) -> Schedule:
    return families.make(family, shape.geometry, roles, stride=stride or None, boustrophedon=boustrophedon)


def _report(found: list[Candidate]) -> tuple[tuple[str, int, int, int | None], ...]:
    """One row per (family, roles, heads in flight), with the time of whichever form holds."""
    rows: dict[tuple[str, int, int], int | None] = {}
    for c in found:
        key = (c.family, c.roles, c.heads_in_flight)
        if rows.get(key) is None:
            rows[key] = None if c.time.penalty else c.time.ns
    return tuple((*key, time) for key, time in rows.items())
