from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from dash_inductor.schedule import INTEGER, Costs, Shape, check, choose, decode, load_costs, replay, symbolic_word
from dash_inductor.schedule.candidates import candidates
from dash_inductor.schedule.word import WORD_BITS, encode

H100 = load_costs("h100", block_m=64, block_n=128, head_dim=64)
EMULATED = load_costs("emulated", block_m=16, block_n=32, head_dim=64)
FREE = replace(EMULATED, hop_ns=0, shift_percent=0)  # many candidates tie
WIDE = replace(EMULATED, workers=40)  # room for more heads than there are
FAR = replace(EMULATED, hop_ns=50_000)  # no hop is within its bound
MASKS = ("full", "causal_top_left", "causal_bottom_right")
FORCED = [("full", f) for f in ("ascending", "descending", "shift")] + [
    (mask, f) for mask in MASKS[1:] for f in ("ascending", "descending", "symmetric")
]


def decision(shape: Shape, costs: Costs, **how: str) -> tuple[str, int, int, int, bool]:
    c = choose(shape, costs, **how)
    return c.family, c.roles, c.heads_in_flight, c.stride, c.boustrophedon


def shapes(count: int, seed: int, block_m: int, block_n: int, mask: str, *, square: bool) -> list[Shape]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        q_len = rng.choice([rng.randint(1, 8 * block_n), rng.randint(1, 200 * block_n), 2 ** rng.randint(4, 15)])
        kv_len = q_len if square or rng.random() < 0.3 else rng.randint(1, 8 * block_n)
        heads, group = rng.randint(1, 40), rng.choice([1, 1, 4])
        found.append(Shape(q_len, kv_len, heads, group, 64, block_m, block_n, mask))
    return found


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("costs", [EMULATED, FREE, FAR, WIDE])
def test_what_is_chosen_can_run_in_the_time_it_says(mask: str, costs: Costs) -> None:
    rng = random.Random(1)
    for _ in range(20):
        q_len = rng.randint(1, 300)
        kv_len = rng.choice([q_len, rng.randint(1, 300)])
        shape = Shape(q_len, kv_len, rng.randint(1, 9), rng.choice([1, 2]), 64, 16, 32, mask)
        for family in ("auto", *(f for m, f in FORCED if m == mask)):
            choice = choose(shape, costs, family=family)
            plan = choice.plan(shape)
            check(plan, resident=costs.workers)
            assert plan.workers <= costs.workers
            assert family in ("auto", choice.family)
            step_ns = costs.step_ns if choice.family in ("ascending", "descending") else costs.shifted_step_ns
            found = replay(plan, compute_ns=step_ns, reduce_ns=0, sync_ns=costs.hop_ns).makespan_ns
            is_bound = choice.family == "symmetric" or mask == "full"
            assert choice.time_ns is not None
            assert choice.time_ns == found or (is_bound and choice.time_ns > found)


def test_the_rule_is_the_first_minimum_of_weighted_times() -> None:
    """Held against the rule written out, on the report's rows."""
    for mask in MASKS[:2]:
        for shape in shapes(60, 2, 64, 128, mask, square=True):
            choice = choose(shape, H100)
            found = candidates(shape, H100, "run", INTEGER)
            first = found[0].family, found[0].roles, found[0].heads_in_flight
            weighted = [
                (time * (100 if row == first else 102), position)
                for position, (*row_list, time) in enumerate(choice.candidates)
                if time is not None and (row := tuple(row_list))
            ]
            best = choice.candidates[min(weighted)[1]]
            assert best == (choice.family, choice.roles, choice.heads_in_flight, choice.time_ns)


def test_the_default_wins_unless_beaten_by_two_percent() -> None:
    shape = Shape(4096, 4096, 1, 1, 64, 64, 128, "full")  # 64 Q and 32 KV tiles: 64 steps against 64 shifted and no hop
    near, far = replace(H100, shift_percent=0, hop_ns=50), replace(H100, shift_percent=0, hop_ns=100)
    ascending, shift = 64 * H100.step_ns + 31 * 50, 64 * H100.step_ns
    assert ascending * 100 < shift * 102 and choose(shape, near).family == "ascending"
    assert (ascending + 31 * 50) * 100 > shift * 102 and choose(shape, far).family == "shift"


def test_every_family_is_chosen_somewhere() -> None:
    seen = Counter(choose(shape, H100).family for mask in MASKS[:2] for shape in shapes(80, 3, 64, 128, mask, square=True))
    assert set(seen) == {"ascending", "shift", "descending", "symmetric"}


@pytest.mark.parametrize("guarantee", ["device", "batch"])
@pytest.mark.parametrize("mask", MASKS)
def test_stronger_guarantees_do_not_depend_on_heads_or_device(guarantee: str, mask: str) -> None:
    """The family, hence the order of every sum, is a function of lengths, mask and tiles alone."""
    for q_len in (100, 1000, 9000):
        found = {
            choose(Shape(q_len, q_len, heads, 1, 64, 64, 128, mask), replace(H100, workers=workers), guarantee).family
            for heads in (1, 7, 64)
            for workers in (1, 13, 114, 132, 296)
        }
        assert found == {"ascending" if mask == "full" else "descending"}


def test_a_forced_family_without_a_closed_form_is_replayed_while_small() -> None:
    small, large = (Shape(s, s, 4, 1, 64, 16, 32, "causal_top_left") for s in (256, 8192))
    choice = choose(small, EMULATED, family="ascending")
    plan = choice.plan(small)
    assert choice.time_ns == replay(plan, compute_ns=1000, reduce_ns=0, sync_ns=750).makespan_ns
    assert (choice.roles, choice.heads_in_flight) == (4, 1)  # 8 chains in two passes
    assert choose(large, EMULATED, family="ascending").time_ns is None


def test_heads_in_flight_stay_within_l2() -> None:
    shape = Shape(65536, 65536, 200, 1, 128, 64, 128, "causal_top_left")  # 64 MiB a head
    assert choose(shape, H100).heads_in_flight == 1
    assert choose(replace(shape, q_len=8192, kv_len=8192), H100).heads_in_flight <= 4


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        ({"mask": "full"}, {"family": "symmetric"}, "family 'symmetric' serves causal masks only"),
        ({}, {"family": "shift"}, "family 'shift' serves the full mask only"),
        ({}, {"family": "best"}, "family must be one of auto, ascending, descending, shift, symmetric, got 'best'"),
        ({}, {"family": "symmetric", "guarantee": "batch"}, "guarantee 'batch' needs ascending or descending"),
        ({}, {"guarantee": "always"}, "guarantee must be one of run, device, batch, got 'always'"),
        ({"mask": "window"}, {}, "mask must be one of"),
        ({"heads": 0}, {}, "heads must be a positive int, got 0"),
        ({"q_len": 0}, {}, "q_len must be a positive int, got 0"),
    ],
)
def test_the_impossible_is_refused(change: dict[str, object], how: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(replace(Shape(128, 128, 4, 1, 64, 16, 32, "causal_top_left"), **change), EMULATED, **how)


@pytest.mark.parametrize(
    "fields",
    [
        ("ascending", 1, 1, 0, False),
        ("symmetric", 2**16 - 1, 2**10 - 1, 0, False),
        ("descending", 132, 3, 0, True),
        ("shift", 7, 5, 2**17 - 1, False),
    ],
)
def test_a_word_keeps_its_fields(fields: tuple[str, int, int, int, bool]) -> None:
    assert decode(encode(*fields)) == fields
    assert encode(*fields) < 2**WORD_BITS < 2**63


class Symbolic:
    """symbolic_word in torch's arithmetic, and its value by each way in which a graph may compute it."""

    def __init__(self, shape: Shape, costs: Costs, *, square: bool, **how: str) -> None:
        sympy = pytest.importorskip("sympy")
        functions = pytest.importorskip("torch.utils._sympy.functions")
        from dash_inductor.schedule import Arithmetic

        f = functions
        self.symbols = [sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1", "s2")]
        q_len, kv_len, heads = self.symbols
        self.expr = symbolic_word(
            q_len,
            q_len if square else kv_len,
            heads,
            group=shape.group,
            head_dim=shape.head_dim,
            block_m=shape.block_m,
            block_n=shape.block_n,
            mask=shape.mask,
            costs=costs,
            minimum=f.Min,
            arithmetic=Arithmetic(f.CeilDiv, f.FloorDiv, f.Mod, f.Max, f.Min),
            **how,
        )

    def wrapper_code(self) -> object:
        """What the generated wrapper computes."""
        from torch._inductor.codegen.wrapper import pexpr

        return compile(pexpr(self.expr), "wrapper", "eval")

    def kernel_code(self) -> object:
        """What a Triton kernel's argument expression would compute, but for the width of its integers."""
        from torch._inductor.codegen.triton import texpr

        return compile(texpr(self.expr), "kernel", "eval")

    def values(self, shape: Shape) -> dict[str, int]:
        return {"s0": shape.q_len, "s1": shape.kv_len, "s2": shape.heads}

    def substituted(self, shape: Shape) -> int:
        return int(self.expr.xreplace(dict(zip(self.symbols, (shape.q_len, shape.kv_len, shape.heads), strict=True))))


CASES = [
    *((mask, mask != "causal_bottom_right", {}) for mask in MASKS),
    ("full", False, {}),
    ("causal_top_left", False, {}),
    ("causal_top_left", True, {"guarantee": "batch"}),
    *((mask, True, {"family": family}) for mask, family in FORCED[:6]),
]


@pytest.mark.parametrize("costs", [H100, FREE, FAR], ids=["h100", "ties", "far"])
@pytest.mark.parametrize(("mask", "square", "how"), CASES)
def test_the_symbolic_word_takes_the_decisions_of_choose(mask: str, square: bool, how: dict[str, str], costs: Costs) -> None:
    block_m, block_n = (64, 128) if costs is H100 else (16, 32)
    sample = [s for s in shapes(60, 5, block_m, block_n, mask, square=square) if s.group == 1][:40]
    word = Symbolic(sample[0], costs, square=square, **how)
    code = word.wrapper_code()
    for n, shape in enumerate(sample):
        value = eval(code, word.values(shape))
        assert decode(value) == decision(shape, costs, **how), shape
        assert 0 <= value < 2**WORD_BITS
        if n < 2:
            assert word.substituted(shape) == value


@pytest.mark.parametrize(
    ("mask", "how"), [("causal_top_left", {"family": "ascending"}), ("causal_top_left", {"family": "symmetric"})]
)
def test_triton_prints_the_same_word(mask: str, how: dict[str, str]) -> None:
    from types import SimpleNamespace

    sample = shapes(20, 6, 16, 32, mask, square=True)
    word = Symbolic(sample[0], EMULATED, square=True, **how)
    code = word.kernel_code()
    helpers = SimpleNamespace(div_floor_integer=lambda a, b: a // b)
    for shape in sample:
        if shape.group == sample[0].group:
            assert decode(eval(code, {**word.values(shape), "triton_helpers": helpers})) == decision(shape, EMULATED, **how)
