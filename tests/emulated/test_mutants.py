"""Kernels and tables broken on purpose: the checks of bits and of poisoned memory must see each of them."""

from types import SimpleNamespace

import pytest
from attention import WAIT, backward, compiled, differing_when_compiled, mutate
from tensors import CAUSAL, FULL, exact, normal
from torch._inductor.codegen.common import WorkspaceZeroMode

from dash_inductor import enabled
from dash_inductor.emulation import emulate
from dash_inductor.emulation.deadlock import DeadlockError
from dash_inductor.lowering import table
from dash_inductor.lowering.launch import triton
from dash_inductor.schedule import pack_plan

pytestmark = pytest.mark.usefixtures("rewriting")

FAMILIES = [("ascending", FULL), ("descending", CAUSAL), ("shift", FULL), ("symmetric", CAUSAL)]
RELEASE = "release(SEMAPHORES + pending, INTERPRET)"
RELEASES = 5  # how often it stands in the template
FIRST_STORES = """    if ATOMIC_ADD:
        tl.store(ptrs, part, mask=tl.full(ptrs.shape, 1, tl.int1) & (rank == 0))
        tl.atomic_add(ptrs, part, mask=tl.full(ptrs.shape, 1, tl.int1) & (rank != 0), sem="relaxed")
"""
FIRST_ADDS = FIRST_STORES.splitlines()[0] + "\n        tl.atomic_add(ptrs, part, sem='relaxed')\n"


def as_bytes(gradients):
    return b"".join(grad.numpy().tobytes() for grad in gradients)


def outcomes(mask, args=None, seeds=range(20)):
    """What the interleavings give, up to the second different one: gradients as bytes, or a deadlock."""
    args = exact(1, 1, 128, 128, 16) if args is None else args
    results = set()
    function = compiled(backward(mask, scale=0.25))
    for seed in seeds:
        if len(results - {"deadlock"}) > 1:
            break
        with emulate(seed=seed):
            try:
                results.add(as_bytes(function(*args)))
            except DeadlockError:
                results.add("deadlock")
    return results


def with_two_ranks_swapped(plan):
    """The table with ranks 1 and 2 of the last Q tile swapped; 0 and 1 would commute."""
    ints = pack_plan(plan)
    last = plan.order.geometry.n_q - 1
    for at in range(len(ints) - ints[4] * ints[5], len(ints)):
        rank = ints[at] >> 16
        if ints[at] & 0xFFFF == last and rank in (1, 2):
            ints[at] += (3 - 2 * rank) << 16
    assert ints != pack_plan(plan)
    return ints


def specified(mask, args):
    with emulate():
        return as_bytes(backward(mask, scale=0.25)(*args))


@pytest.mark.parametrize(("family", "mask"), FAMILIES)
def test_without_the_wait_bits_change(family, mask, monkeypatch):
    mutate(monkeypatch, "ONE_PASS", f"without_wait_{family}_{mask}", {WAIT: "pass"})
    with enabled(schedule=family):
        assert len(outcomes(mask) - {"deadlock"}) > 1


@pytest.mark.parametrize(
    ("family", "mask"), [("shift_round_robin", FULL), pytest.param("symmetric_round_robin", CAUSAL, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("without_wait", WAIT, "pass"),
        ("every_head_begins_with_its_first_unit", "first = tl.maximum(0, begin)", "first = 0*begin"),
        ("every_head_begins_at_the_first_worker", "tl.minimum(queue, begin + roles)", "tl.minimum(queue, roles)"),
    ],
)
def test_a_round_robin_without_the_wait_or_with_other_passes_has_other_bits(family, mask, name, before, after, monkeypatch):
    args = exact(1, 2, 224, 224, 16)  # 14 chains, or 8 pairs, on 6 workers
    mutate(monkeypatch, "ONE_PASS", f"{family}_{name}", {before: after})
    with enabled(schedule=family):
        assert outcomes(mask, args, seeds=range(4)) != {specified(mask, args)}


def test_with_an_early_release_bits_change(monkeypatch):
    """Released before its additions, a tile is open to the next rank too early."""
    mutate(monkeypatch, "ONE_PASS", "early_release", {RELEASE: "pass", WAIT: f"{WAIT}; {RELEASE}"}, times=RELEASES)
    with enabled(schedule="ascending"):
        assert len(outcomes(FULL) - {"deadlock"}) > 1


@pytest.mark.parametrize(("family", "mask"), FAMILIES)
def test_with_two_ranks_swapped_bits_differ_from_the_reference(family, mask, monkeypatch):
    monkeypatch.setattr(table, "pack_plan", with_two_ranks_swapped)
    args = exact(1, 1, 128, 128, 16)
    with enabled(schedule=family):
        assert specified(mask, args) not in outcomes(mask, args, seeds=range(2))


@pytest.mark.parametrize(("cause", "wrong"), [("first adds", ["dq"]), ("semaphores", ["dq", "dk", "dv"])])
def test_old_memory_survives(cause, wrong, monkeypatch):
    """A first contributor that adds; semaphores that nobody zeroes: the ticket is then no worker's, and nothing is written."""
    if cause == "first adds":
        mutate(monkeypatch, "ONE_PASS", "first_adds", {FIRST_STORES: FIRST_ADDS})
    else:
        monkeypatch.setattr(triton, "WorkspaceZeroMode", SimpleNamespace(ZERO_ON_CALL=WorkspaceZeroMode.UNINITIALIZED))
    with emulate():
        gradients = compiled(backward())(*exact(1, 1, 64, 64, 16))
    for name, grad in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert grad.isnan().all() if name in wrong else grad.isfinite().all(), name


def test_a_delta_of_the_wrong_row_is_seen(monkeypatch):
    """The comparison with the reference is one with values too."""
    delta = "DELTA + zh*(NQ*BLOCK_M) + offs_m"
    mutate(monkeypatch, "ONE_PASS", "delta", {delta: f"{delta} // 2"})
    args = exact(1, 1, 64, 64, 16)
    assert specified(FULL, args) not in outcomes(FULL, args, seeds=range(1))


def test_nothing_is_found_where_nothing_is_broken(monkeypatch):
    mutate(monkeypatch, "ONE_PASS", "none", {WAIT: WAIT})
    args = exact(1, 1, 64, 128, 16)
    assert len(outcomes(FULL, [*args[:5], normal(1, 1, 64).abs()], seeds=range(5))) == 1
    assert outcomes(FULL, args, seeds=range(5)) == {specified(FULL, args)}


@pytest.mark.parametrize(
    ("name", "before", "after", "mask", "wrong"),
    [
        ("order_of_keys", "cols = j*BLOCK_N", "j = visible - 1 - j\n    cols = j*BLOCK_N", FULL, "dq"),
        ("order_of_rows", "i = step // GROUP", "i = NQ - 1 - step // GROUP + first", CAUSAL, "dk dv"),
        ("diagonal_of_dq", "cols[None, :] <= rows[:, None]", "cols[None, :] < rows[:, None]", CAUSAL, "dq"),
        ("diagonal", "j*KV_ROWS - i*BLOCK_M", "j*KV_ROWS - i*BLOCK_M + 1", CAUSAL, "dk dv"),
        ("last_key_tile", "tl.cdiv((i + 1)*Q_ROWS, BLOCK_N)", "tl.cdiv(i*Q_ROWS, BLOCK_N)", CAUSAL, "dq"),
        ("first_row_tile", "first = j*KV_ROWS // BLOCK_M", "first = j*KV_ROWS // BLOCK_M + 1", CAUSAL, "dk dv"),
        ("rows_of_delta", "DELTA + zh*PADDED + rows", "DELTA + zh*ROW_TILES*Q_ROWS + rows", FULL, "dq"),
        ("delta", "DELTA + zh*PADDED + offs_m", "DELTA + zh*PADDED + offs_m // 2", FULL, "dk"),
        ("kv_head", "h = hq // GROUP", "h = hq // (GROUP + 1)", FULL, "dq"),
        ("query_head", "i = step // GROUP\n    hq = h*GROUP + step % GROUP", "i = step // GROUP\n    hq = h*GROUP", FULL, "dk dv"),
        ("scale", "(dq*SCALE).to", "dq.to", FULL, "dq"),
    ],
)
def test_two_passes(monkeypatch, name, before, after, mask, wrong):
    mutate(monkeypatch, "TWO_PASS", name, {before: after})
    with enabled(template="two_pass"), emulate():
        assert differing_when_compiled(backward(mask, scale=0.25), exact(1, 4, 100, 100, 16, kv_heads=2)) == wrong.split()


@pytest.mark.parametrize(
    ("name", "before", "after", "head_dim", "wrong"),
    [
        ("not_scaled", "dk = dk*SCALE", "dk = dk*1.0", 16, "dk"),
        ("tiles_in_reverse", "index = i*(Q_ROWS*BLOCK_D)", "index = (ROW_TILES - 1 - i)*(Q_ROWS*BLOCK_D)", 16, "dq"),
        ("not_transposed", "(0, 2, 1)", "(0, 1, 2)", 128, "dq"),
        ("scaled", "part, mask=index", "part*SCALE, mask=index", 16, "dq"),
    ],
)
def test_one_graph_for_any_length(monkeypatch, cheap_passes, name, before, after, head_dim, wrong):
    """What two passes do otherwise there."""
    mutate(monkeypatch, "TWO_PASS", f"by_size_{name}", {before: after})
    args = exact(1, 3, 130, 130, head_dim, exponent=4)
    with emulate():
        assert differing_when_compiled(backward(scale=0.25), args, dynamic=True) == [wrong]
