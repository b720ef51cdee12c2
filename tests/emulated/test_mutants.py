"""Kernels and tables broken on purpose: the checks of bits and of poisoned memory must see each of them."""

from types import SimpleNamespace

import pytest
from attention import OP, compiled, exact, normal
from torch._inductor.codegen.common import WorkspaceZeroMode

from dash_inductor import enabled, lowering
from dash_inductor.emulation import emulate
from dash_inductor.emulation.deadlock import DeadlockError
from dash_inductor.lowering import kernels, one_pass, table
from dash_inductor.schedule import pack_plan
from dash_inductor.templates import source

pytestmark = pytest.mark.usefixtures("rewriting")

assert lowering
SEEDS = range(20)
FAMILIES = [
    ("ascending", "full"),
    ("descending", "causal"),
    ("shift", "full"),
    ("symmetric", "causal"),
    ("searched", "full"),
    ("searched", "causal"),
]
WAIT = "wait(SEMAPHORES + pending, rank, INTERPRET)"
RELEASE = "release(SEMAPHORES + pending, INTERPRET)"
FIRST_STORES = """    if ATOMIC_ADD:
        tl.store(ptrs, part, mask=tl.full(ptrs.shape, 1, tl.int1) & (rank == 0))
        tl.atomic_add(ptrs, part, mask=tl.full(ptrs.shape, 1, tl.int1) & (rank != 0), sem="relaxed")
"""


def mutate(monkeypatch, name, changes):
    """Puts a kernel in the place of the template in whose source all keys of `changes` are replaced by their values."""
    text = source(*kernels.ONE_PASS_PARTS)
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    monkeypatch.setattr(kernels, "ONE_PASS", kernels.Template(f"dash_mutant_{name}", kernels.programs, text))


def outcomes(mask, args=None, seeds=SEEDS):
    """What the interleavings give, up to the second different one: gradients as bytes, or a deadlock."""
    args = exact(1, 1, 128, 128, 16) if args is None else args
    found = set()
    function = compiled(lambda *args: OP(*args, mask=mask, scale=0.25))
    for seed in seeds:
        if len(found - {"deadlock"}) > 1:
            break
        with emulate(seed=seed):
            try:
                found.add(b"".join(grad.numpy().tobytes() for grad in function(*args)))
            except DeadlockError:
                found.add("deadlock")
    return found


def specified(mask, args):
    with emulate():
        return b"".join(grad.numpy().tobytes() for grad in OP(*args, mask=mask, scale=0.25))


@pytest.mark.parametrize(("family", "mask"), FAMILIES)
def test_without_the_wait_bits_change(family, mask, monkeypatch):
    mutate(monkeypatch, f"without_wait_{family}_{mask}", {WAIT: "pass"})
    with enabled(schedule=family):
        assert len(outcomes(mask) - {"deadlock"}) > 1


ROUND_ROBIN = [("shift_round_robin", "full"), ("symmetric_round_robin", "causal")]


@pytest.mark.parametrize(("family", "mask"), ROUND_ROBIN)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (WAIT, "pass"),
        ("first = tl.maximum(0, begin)", "first = 0*begin"),  # as if every head began with its first unit in every round
        ("tl.minimum(line, begin + roles)", "tl.minimum(line, roles)"),  # as if every head began at the first worker
    ],
)
def test_a_round_robin_without_the_wait_or_with_other_passes_has_other_bits(family, mask, before, after, monkeypatch):
    args = exact(1, 2, 224, 224, 16)  # 14 chains, or 8 pairs, on 6 workers
    mutate(monkeypatch, f"{family}_{before[:5]}_{after[:9]}".translate(str.maketrans("=.*() ", "______")), {before: after})
    with enabled(schedule=family):
        assert outcomes(mask, args, seeds=range(4)) != {specified(mask, args)}


def test_with_an_early_release_bits_change(monkeypatch):
    """Released before its additions, a tile is open to the next rank too early."""
    mutate(monkeypatch, "early_release", {RELEASE: "pass", WAIT: f"{WAIT}; {RELEASE}"})
    with enabled(schedule="ascending"):
        assert len(outcomes("full") - {"deadlock"}) > 1


@pytest.mark.parametrize(("family", "mask"), FAMILIES)
def test_with_two_ranks_swapped_bits_differ_from_the_reference(family, mask, monkeypatch):
    """Ranks 1 and 2 of the last Q tile; 0 and 1 would commute."""

    def swapped(plan):
        ints = pack_plan(plan)
        last = plan.order.geometry.n_q - 1
        for at in range(len(ints) - ints[4] * ints[5], len(ints)):
            rank = ints[at] >> 16
            if ints[at] & 0xFFFF == last and rank in (1, 2):
                ints[at] += (3 - 2 * rank) << 16
        assert ints != pack_plan(plan)
        return ints

    monkeypatch.setattr(table, "pack_plan", swapped)
    args = exact(1, 1, 128, 128, 16)
    with enabled(schedule=family):
        assert specified(mask, args) not in outcomes(mask, args, seeds=range(2))


def test_a_first_contributor_that_adds_lets_old_memory_survive(monkeypatch):
    adds = FIRST_STORES.splitlines()[0] + "\n        tl.atomic_add(ptrs, part, sem='relaxed')\n"
    mutate(monkeypatch, "first_adds", {FIRST_STORES: adds})
    args = exact(1, 1, 64, 64, 16)
    with emulate():
        dq, dk, dv = compiled(lambda *args: OP(*args, mask="full"))(*args)
    assert dq.isnan().all()
    assert dk.isfinite().all() and dv.isfinite().all()


def test_semaphores_that_nobody_zeroes_are_seen(monkeypatch):
    """The ticket is then no worker's, and nothing is written."""
    monkeypatch.setattr(one_pass, "WorkspaceZeroMode", SimpleNamespace(ZERO_ON_CALL=WorkspaceZeroMode.UNINITIALIZED))
    args = exact(1, 1, 64, 64, 16)
    with emulate():
        dq, dk, dv = compiled(lambda *args: OP(*args, mask="full"))(*args)
    assert dq.isnan().all() and dk.isnan().all() and dv.isnan().all()


def test_a_delta_of_the_wrong_row_is_seen(monkeypatch):
    """The comparison with the reference is one with values too."""
    mutate(monkeypatch, "delta", {"DELTA + zh*(NQ*BLOCK_M) + offs_m": "DELTA + zh*(NQ*BLOCK_M) + offs_m // 2"})
    args = exact(1, 1, 64, 64, 16)
    assert specified("full", args) not in outcomes("full", args, seeds=range(1))


def test_nothing_is_found_where_nothing_is_broken(monkeypatch):
    mutate(monkeypatch, "none", {WAIT: WAIT})
    args = [*exact(1, 1, 64, 128, 16)[:5], normal(1, 1, 64).abs()]
    assert len(outcomes("full", args, seeds=range(5))) == 1
    args = exact(1, 1, 64, 128, 16)
    assert outcomes("full", args, seeds=range(5)) == {specified("full", args)}
