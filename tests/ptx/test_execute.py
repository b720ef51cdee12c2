"""PTX of compiled backwards executed: right, the same bits under every interleaving, no race, and weakened kernels are seen."""

import contextlib
import copy
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from dash_inductor.codegen.mods import SCORE_MODS
from dash_inductor.schedule import packing

from . import __main__ as command
from . import machine as executor
from . import mutants
from .cases import LEAVES_OUT_FENCE, Case, Prepared, same_bits, unexplained
from .lower import Program, Unknown
from .machine import Machine
from .memory import Fault, Global
from .parse import Kernel, Memory, parse

ONE_PASS = {"template": "one_pass", "kernel": "triton"}
BY_GLUON = {"kernel": "gluon", "template": "one_pass"}
IN_GLUON = {"kernel": "gluon", "guarantee": "batch", "sm_reserve": 130}
CAUSAL_SLOPES: dict[str, Any] = {"mask_mod": "causal", "score_mod": "alibi", "trained": True}
CASES = {
    # Two SMs are left to one pass: one of two workers has two chains.
    "sm_80": Case("a100", 384, 384, heads=1, mask="causal", settings=ONE_PASS | {"sm_reserve": 106}),
    "sm_90": Case("h100", 384, 384, heads=1, mask="causal", settings=ONE_PASS | {"sm_reserve": 130}),
    "parts": Case("a100", 384, 384, kv_heads=1, mask_mod="causal", in_bands=True, settings=ONE_PASS),
    "FlexAttention": Case("h100", 256, 256, heads=1, mask_mod="documents", score_mod="alibi", settings=ONE_PASS),
    # Four tiles: Q has three stages, and each of two warps that add uses its place again.
    "Gluon": Case("h100", 512, 512, heads=1, mask="causal", settings=IN_GLUON),
    # Three blocks of two tiles in bands, of which the first has four steps: the last waits for a stage of Q that was read. The last
    # KV tile is the first of two Q tiles' ranks, so both warps that add store.
    "Gluon in parts": Case("h100", 640, 640, heads=1, mask_mod="causal", block=256, in_bands=True, settings=BY_GLUON),
    "Gluon of 256": Case("h100", 192, 192, heads=1, head_dim=256, mask="causal", settings=IN_GLUON),
    # Shares in fp32 at head dim 128: a step stores them in halves, by way of one place. A chain has four steps, and Q two stages.
    "Gluon with shares": Case("h100", 256, 256, heads=1, head_dim=128, **(CAUSAL_SLOPES | {"settings": BY_GLUON})),
}
PREPARED: dict[str, Prepared] = {}


def prepared(name: str) -> Prepared:
    """The case, unbroken and executed."""
    if name not in PREPARED:
        PREPARED[name] = Prepared(CASES[name])
        unbroken = PREPARED[name].run()
        assert not unexplained(unbroken.races) and not unbroken.fault and not mutants.is_wrong(PREPARED[name], unbroken)
    return PREPARED[name]


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick) if x.startswith("Gluon") else x for x in CASES])
def test_right_in_one_order(name: str) -> None:
    right_in_one_order(prepared(name))


def right_in_one_order(case: Prepared) -> None:
    first, second = case.run(seed=1), case.run(seed=2, check=False)
    for result in (first, second):
        assert result.fault is None and unexplained(result.races) == []
        assert max(result.errors.values()) < mutants.LIMITS[case.case.dtype]
    assert same_bits([first, second])


@pytest.mark.parametrize("name", CASES)
def test_triton_has_its_fences(name: str) -> None:
    """But for Hopper's before 3.7.1, of which users are warned."""
    assert bool(prepared(name).run(seed=1).races) == (LEAVES_OUT_FENCE and name in ("sm_90", "FlexAttention"))


@pytest.mark.parametrize("kernel", ["triton", "gluon"])
def test_one_row_for_all_chains(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of sequences too long for a row of each chain."""
    monkeypatch.setattr(packing, "MOST_CONSTANT_INTS", 0)
    settings = ONE_PASS | {"guarantee": "device", "sm_reserve": 130, "kernel": kernel}
    long = Prepared(replace(CASES["sm_90"], settings=settings))
    (table,) = long.constants.values()
    roles, _, slots, _, n_kv = table[:5].tolist()
    assert len(table) == 8 + slots * roles + n_kv + 3  # one row, of three Q tiles
    right_in_one_order(long)


SLOPES: dict[str, Any] = CAUSAL_SLOPES | {"settings": ONE_PASS}
SLOPES_BY_GLUON: dict[str, Any] = CAUSAL_SLOPES | {"settings": BY_GLUON}
MOVED = {"guarantee": "batch"}
IN_A_QUEUE = {"kernel": "gluon", "schedule": "symmetric_round_robin", "sm_reserve": 129}
OTHERS = {
    "varlen": Case("rtx5090", 160, 160, kv_heads=1, head_dim=128, mask="causal", attention="varlen", settings=ONE_PASS),
    "masked": Case("rtx4090", 160, 160, batch=2, kv_heads=1, mask="causal", attention="masked", settings=ONE_PASS),
    "varlen of lengths that are symbols": Case(
        "h100", 200, 200, mask="causal", attention="varlen", dynamic=True, settings=ONE_PASS
    ),
    "mask that is given": Case("a100", 160, 160, batch=2, kv_heads=1, mask="causal", attention="mask", settings=ONE_PASS),
    "bias that is given": Case("h100", 160, 200, batch=2, kv_heads=1, attention="bias", settings=ONE_PASS),
    "bias that is learnt": Case("h100", 160, 200, batch=2, attention="learnt", settings=ONE_PASS),
    "bias that is learnt on sm_80": Case("a100", 160, 200, batch=2, attention="learnt", settings=ONE_PASS),
    "bias that is learnt in two passes": Case("h100", 160, 200, attention="learnt", settings={"template": "two_pass"}),
    "slopes that are learnt": Case("h100", 160, 160, batch=2, kv_heads=1, **SLOPES),
    "slopes that are learnt on sm_80": Case("a100", 160, 160, batch=2, **SLOPES),
    "dropout": Case("h100", 160, 160, batch=2, mask="causal", dropout=0.3, attention="efficient", settings=ONE_PASS),
    "dropout of flash attention on sm_80": Case("a100", 160, 160, batch=2, kv_heads=1, dropout=0.3, settings=ONE_PASS),
    "dropout under a bias in two passes": Case("h100", 160, 200, attention="bias", dropout=0.3, settings={"template": "two_pass"}),
    "masked on sm_100": Case("b200", 200, 200, batch=2, attention="masked", settings=ONE_PASS),
    "varlen on sm_80": Case("a100", 200, 200, kv_heads=1, attention="varlen", settings=ONE_PASS),
    "varlen, each sequence moved": Case("h100", 200, 200, mask="causal", attention="varlen", settings=MOVED),
    "varlen, each sequence moved, on sm_80": Case("a100", 200, 200, kv_heads=1, attention="varlen", settings=MOVED),
    "ragged GQA on sm_89": Case("rtx4090", 200, 200, heads=2, kv_heads=1, mask="causal", dtype="fp16"),
    "chains in parts on sm_90": Case("h100", 384, 384, kv_heads=1, mask_mod="causal", in_bands=True, settings=ONE_PASS),
    "Gluon of 128": Case("h100", 384, 384, heads=1, head_dim=128, mask="causal", settings=IN_GLUON),
    "Gluon, heads that straddle rounds": Case("h100", 384, 384, heads=3, mask="causal", settings=IN_A_QUEUE),
    "Gluon, ragged GQA": Case("h100", 200, 300, heads=2, kv_heads=1, settings=BY_GLUON),
    "Gluon, documents": Case("h100", 300, 300, heads=1, mask_mod="documents", settings=BY_GLUON),
    "Gluon, blocks of 256": Case("h100", 600, 600, heads=1, head_dim=128, mask_mod="documents", block=256, settings=BY_GLUON),
    "Gluon, varlen": Case("h100", 300, 300, kv_heads=1, mask="causal", attention="varlen", dynamic=True, settings=BY_GLUON),
    "Gluon, varlen, each sequence moved": Case(
        "h100", 200, 200, mask="causal", attention="varlen", settings=BY_GLUON | {"guarantee": "batch"}
    ),
    "Gluon, masked": Case("h100", 200, 200, batch=2, kv_heads=1, head_dim=128, attention="masked", settings=BY_GLUON),
    "Gluon, mask that is given": Case("h100", 160, 200, batch=2, kv_heads=1, attention="mask", settings=BY_GLUON),
    "Gluon of 256, ragged GQA": Case("h100", 130, 200, heads=4, kv_heads=2, head_dim=256, dtype="fp16", settings=BY_GLUON),
    "Gluon of 256, heads that straddle rounds": Case(
        "h100", 320, 320, heads=3, head_dim=256, mask="causal", settings=IN_A_QUEUE | {"sm_reserve": 130}
    ),
    "Gluon of 256, a mask in blocks": Case("h100", 300, 300, kv_heads=1, head_dim=256, mask_mod="window", settings=BY_GLUON),
    "Gluon, chains in sets alone": Case("h100", 200, 200, heads=4, kv_heads=1, head_dim=128, mask_mod="window", settings=BY_GLUON),
    "Gluon, masks of query heads that share keys": Case(
        "h100", 200, 200, heads=4, kv_heads=2, attention="head-mask", settings=BY_GLUON | {"guarantee": "batch"}
    ),
    "Gluon of 96, ragged GQA": Case("h100", 200, 200, heads=2, kv_heads=1, head_dim=96, mask="causal", settings=BY_GLUON),
    "Gluon of 80 and 40": Case("h100", 200, 200, heads=1, head_dim=80, value_dim=40, dtype="fp16", settings=BY_GLUON),
    "Gluon of 160, a mask in blocks": Case("h100", 200, 200, head_dim=160, mask_mod="documents", settings=BY_GLUON),
    "Gluon, soft-cap": Case("h100", 256, 256, heads=1, head_dim=128, score_mod="soft-cap", settings=BY_GLUON),
    "Gluon, ALiBi, ragged GQA": Case("h100", 200, 200, kv_heads=1, mask_mod="window", score_mod="alibi", settings=BY_GLUON),
    "Gluon of 256, ALiBi": Case("h100", 200, 200, kv_heads=1, head_dim=256, score_mod="alibi", settings=BY_GLUON),
    "Gluon, bias that is learnt": Case("h100", 160, 200, batch=2, attention="learnt", settings=BY_GLUON),
    "Gluon of 96, bias that is learnt": Case(
        "h100", 136, 264, kv_heads=1, head_dim=96, dtype="fp16", attention="learnt", settings=BY_GLUON
    ),
    "Gluon of 128, bias that is learnt": Case("h100", 160, 200, head_dim=128, attention="learnt", settings=BY_GLUON),
    "Gluon, slopes that are learnt": Case("h100", 296, 296, heads=4, kv_heads=2, **(SLOPES_BY_GLUON | {"mask_mod": "documents"})),
    "Gluon of 80, slopes that are learnt": Case(
        "h100", 200, 200, heads=1, head_dim=80, dtype="fp16", **(SLOPES_BY_GLUON | {"mask_mod": "window"})
    ),
    "Gluon, slopes that are learnt, chains in parts": Case("h100", 384, 384, kv_heads=1, in_bands=True, **SLOPES_BY_GLUON),
    "Gluon of 128, slopes that are learnt, heads that straddle rounds": Case(
        *("h100", 384, 384),
        heads=3,
        head_dim=128,
        score_mod="alibi",
        trained=True,
        settings=IN_A_QUEUE | {"schedule": "shift_round_robin"},
    ),
    "Gluon, bias that is given": Case("h100", 160, 200, batch=2, kv_heads=1, attention="bias", settings=BY_GLUON),
    "Gluon, dropout": Case("h100", 261, 261, batch=2, dropout=0.3, attention="efficient", mask="causal", settings=BY_GLUON),
    "Gluon of 128, dropout, ragged GQA": Case(
        "h100", 200, 331, heads=4, kv_heads=2, head_dim=128, dtype="fp16", dropout=0.3, settings=BY_GLUON
    ),
    "Gluon of 128, dropout, masked": Case(
        "h100", 300, 300, batch=2, head_dim=128, mask="causal", dropout=0.3, attention="masked", settings=BY_GLUON
    ),
    "Gluon of 256, dropout": Case("h100", 200, 200, kv_heads=1, head_dim=256, mask="causal", dropout=0.3, settings=BY_GLUON),
    "Gluon of 256, dropout, masked": Case(
        "h100", 200, 330, batch=2, kv_heads=1, head_dim=256, dropout=0.3, attention="masked", settings=BY_GLUON
    ),
    "Gluon, dropout of lengths that are symbols": Case(
        "h100", 300, 300, heads=4, kv_heads=1, mask="causal", dynamic=True, dropout=0.3, settings=BY_GLUON
    ),
    "table": Case("h100", 384, 384, heads=1, mask="causal", dynamic=True, settings=ONE_PASS),
    "two passes on sm_120": Case("rtx5090", 200, 200, mask="causal", settings={"template": "two_pass"}),
}


QUICK = (
    *("varlen", "dropout", "Gluon of 128", "Gluon, heads that straddle rounds", "Gluon of 256, a mask in blocks"),
    "Gluon, masks of query heads that share keys",
    *("Gluon, dropout", "Gluon of 128, dropout, masked", "Gluon of 256, dropout"),
    *("Gluon of 96, ragged GQA", "Gluon of 160, a mask in blocks", "Gluon, soft-cap", "Gluon, ALiBi, ragged GQA"),
)


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.quick if x in QUICK else pytest.mark.nightly) for x in OTHERS])
def test_other_attentions(name: str) -> None:
    right_in_one_order(Prepared(OTHERS[name]))


@pytest.mark.parametrize(
    ("device", "head_dim", "settings"),
    [
        ("h100", 64, ONE_PASS),
        pytest.param("a100", 64, ONE_PASS, marks=pytest.mark.nightly),
        pytest.param("h100", 64, BY_GLUON, marks=pytest.mark.nightly),
        ("h100", 128, BY_GLUON),
    ],
)
def test_a_learnt_table_by_distance(device: str, head_dim: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums walk the places of an index in the order of a sort. A part of a tile at another's place is seen in them."""

    def by_distance(score: Any, b: Any, h: Any, m: Any, n: Any, table: Any) -> Any:
        with TransformGetItemToIndex():
            return score + table[((n - m).abs() >> 5) % 2]

    monkeypatch.setitem(SCORE_MODS, "by distance", by_distance)
    options = SLOPES | {"score_mod": "by distance", "settings": settings}
    case = Prepared(Case(device, 160, 160, batch=2, head_dim=head_dim, **options))
    assert {decision.kernel for decision in case.generated.decisions} == {settings["kernel"]}
    assert any("SORTED : tl.constexpr = True" in source for source in case.generated.kernels.values())
    right_in_one_order(case)
    assert case.run(check=False).errors["dslopes"] < 1e-3


# (case, the opcode's beginning, which of them, how): one of each rule.
MUTANTS = [
    ("sm_80", "cp.async.wait_group", -1, "delete", "copy that was not waited for"),
    ("sm_80", "ld.global.acquire", 0, "relax", "read after write"),
    ("parts", "ld.global.acquire", -1, "relax", "read after write"),
    ("parts", "red.release", -1, "relax", "read after write"),
    ("parts", "red.release", -2, "relax", "read after write"),
    ("sm_90", "wgmma.wait_group", 1, "delete", "registers of a wgmma in flight"),
    ("sm_90", "wgmma.wait_group", 1, "one later", "registers of a wgmma in flight"),
    ("sm_90", "fence.proxy.async", -1, "delete", "fence.proxy.async"),
    ("sm_90", "red.release", -1, "relax", "read after write"),
    ("sm_90", "cp.async.wait_group", -1, "one later", "not waited for"),
    # At a chain's end, of a place of dQ; of K and V; of Q.
    ("Gluon", "mbarrier.try_wait", 0, "pass", "write after read"),
    ("Gluon", "mbarrier.try_wait", 2, "pass", "no barrier passed on"),
    ("Gluon", "mbarrier.try_wait", 4, "pass", "asynchronous read"),
    ("Gluon", "ld.global.acquire", 0, "relax", "read after write"),
    ("Gluon", "red.release", 0, "relax", "read after write"),
    # TMA has read dK and dV. Of each warp that adds: it has read dQ, and has added it.
    ("Gluon", "cp.async.bulk.wait_group", 0, "delete", "write while it is read asynchronously"),
    ("Gluon", "cp.async.bulk.wait_group", 1, "delete", "write after read"),
    ("Gluon", "cp.async.bulk.wait_group", 2, "delete", "read after write"),
    ("Gluon", "cp.async.bulk.wait_group", 3, "delete", "write after read"),
    ("Gluon", "cp.async.bulk.wait_group", 4, "delete", "reads what nobody wrote"),
    ("Gluon", "fence.proxy.async.global", 0, "delete", "read after write"),
    ("Gluon", "fence.proxy.async.shared", -1, "delete", "asynchronous read"),
    ("Gluon", "mbarrier.init", 0, "one more", "deadlock"),
    # Both halves of dQ are read; the first place is. TMA has read dK and dV, and K and V may be loaded. Of the warp that adds the
    # second half, and of that of the first.
    ("Gluon of 256", "mbarrier.try_wait", 1, "pass", "write after read"),
    ("Gluon of 256", "mbarrier.try_wait", 2, "pass", "asynchronous read that no barrier passed on"),
    ("Gluon of 256", "mbarrier.init", 3, "one more", "deadlock"),
    ("Gluon of 256", "cp.async.bulk.wait_group", 0, "delete", "write while it is read asynchronously"),
    ("Gluon of 256", "bar.sync", 8, "delete", "512 threads at barrier 7"),
    ("Gluon of 256", "cp.async.bulk.wait_group", 1, "delete", "write after read"),
    ("Gluon of 256", "cp.async.bulk.wait_group", 2, "delete", "read after write"),
    ("Gluon of 256", "cp.async.bulk.wait_group", 3, "delete", "write after read"),
    ("Gluon of 256", "cp.async.bulk.wait_group", 4, "delete", "write after read"),
    ("Gluon of 256", "cp.async.bulk.wait_group", 5, "delete", "reads what nobody wrote"),
    # Of each half of a step's shares: its place is free, the store is seen, and TMA has read it.
    ("Gluon with shares", "mbarrier.try_wait", 1, "pass", "512 threads at barrier 15"),
    ("Gluon with shares", "mbarrier.try_wait", 3, "pass", "no barrier passed on"),
    ("Gluon with shares", "fence.proxy.async.shared", 1, "delete", "no fence.proxy.async passed on"),
    ("Gluon with shares", "fence.proxy.async.shared", 2, "delete", "no fence.proxy.async passed on"),
    ("Gluon with shares", "cp.async.bulk.wait_group.read", 1, "delete", "read asynchronously"),
    ("Gluon with shares", "cp.async.bulk.wait_group.read", 2, "delete", "read asynchronously"),
    ("Gluon with shares", "mbarrier.init", 0, "one more", "deadlock"),
]


@pytest.mark.parametrize(("name", "opcode", "which", "way", "seen"), MUTANTS)
def test_mutants(name: str, opcode: str, which: int, way: str, seen: str) -> None:
    case = prepared(name)
    kernel = mutants.main_kernel(case)
    sites = [
        site for site in mutants.sites(kernel) if kernel.instructions[site.number].opcode.startswith(opcode) and site.way == way
    ]
    verdict = mutants.judged([case], [sites[which]])
    assert seen in " ".join([verdict.fault or "", *(kind for kind, _, _ in verdict.races)]), verdict.line()


# Triton's dispatch of partitions has a branch for numbers that no partition of the kernel has: nobody comes to its two barriers.
# Nor does anybody give up a wait, and report to the host where it stood.
# In Triton's kernels more than one other orders what each of these does: the first copies of Q and of grad_out are waited for at
# once, and barriers and fences of copies stand near those of semaphores and of matmuls.
# Under a block mask a CTA has one chain. After its loop nothing is read or written where copies go: the last wait for them, after
# which shared memory could be used again, orders nothing, nor does a wait of Gluon's warp that loads for the chain's end, nor the
# last wait of TMA's stores. Nor does the fence between proxies in the wait for the part before, whose sums TMA does not touch.
# Before waits at an mbarrier Triton puts barriers, but each thread waits by itself for both places of dQ at a chain's end, where
# the barrier behind them is for chains without a step. At head dim 256 a barrier stands between stores to one place of dQ, which
# the barrier of the warp that adds orders, as the end of grad_out does P's: Triton would put one there. With shares a fence stands
# behind the last dQ, where that of the second half of shares stands too.
NO_BRANCH = ["delete: barrier.sync: no thread comes there"] * 2
NO_REPORT = [f"narrow: {opcode}: no thread comes there" for opcode in ("st.relaxed.sys.global.v4.b32", "ld.relaxed.sys.global.b32")]
BARRIER, FIRST_COPY = "delete: bar.sync: SILENT", "delete: cp.async.commit_group: SILENT"
HOLES = {
    "sm_80": [FIRST_COPY, BARRIER, *NO_REPORT],
    "sm_90": [FIRST_COPY, *[BARRIER] * 2, "delete: fence.proxy.async.shared::cta: SILENT", *NO_REPORT],
    "parts": [
        *[FIRST_COPY, BARRIER, BARRIER],
        *["delete: cp.async.wait_group: SILENT", "one later: cp.async.wait_group: SILENT"],
        *NO_REPORT * 2,
    ],
    "Gluon": [*[BARRIER] * 3, *NO_BRANCH, *NO_REPORT * 2],
    "Gluon in parts": [
        *[BARRIER] * 3,
        *NO_BRANCH,
        "delete: fence.proxy.async.global: SILENT",
        "delete: cp.async.bulk.wait_group.read: SILENT",
        *NO_REPORT * 3,
    ],
    "Gluon of 256": [BARRIER, *NO_BRANCH, *NO_REPORT * 2],
    "Gluon with shares": [BARRIER, "delete: fence.proxy.async.shared::cta: SILENT", *NO_BRANCH, *NO_REPORT * 2],
}
# Of the kernels that run before: for preprocess, tables and lists. The one that reads a block mask ends with a barrier.
HOLES_BEFORE = {
    "sm_80": [],
    "sm_90": [],
    "table": [],
    "masked": [],
    "parts": ["delete: bar.sync: SILENT"],
    "Gluon in parts": ["delete: bar.sync: SILENT"],
}


def in_two_orders(case: Case) -> list[Prepared]:
    """Unbroken and executed, in two schedules: under one of them the last addition of a chain has no successor. Under a block mask
    there is one alone."""
    orders = ("auto",) if case.is_flex else ("ascending", "descending")
    cases = [Prepared(replace(case, settings=case.settings | {"schedule": order})) for order in orders]
    assert not any(unexplained(unbroken.races) or unbroken.fault for unbroken in (each.run() for each in cases))
    return cases


@pytest.mark.nightly
@pytest.mark.parametrize("name", HOLES)
def test_every_mutant_is_seen_or_redundant(name: str, record_property: Callable[[str, object], None]) -> None:
    """Of the main kernel."""
    verdicts = list(mutants.all_judged(in_two_orders(CASES[name])))
    assert holes(verdicts) == sorted(HOLES[name])
    record_property(f"mutants of {name} seen", sum(not verdict.silent for verdict in verdicts))
    record_property(f"mutants of {name} redundant", sum(verdict.silent for verdict in verdicts))


def holes(verdicts: Iterable[mutants.Verdict]) -> list[str]:
    """Without lines of PTX."""
    return sorted(re.sub(r" \(.*?\)", "", verdict.line()) for verdict in verdicts if verdict.is_hole)


def with_blocks_listed_twice(case: Prepared) -> Prepared:
    """Blocks that are listed as full stand among the partial ones too: nothing changes, but two threads write one place."""
    made = copy.copy(case)
    made.inputs = case.inputs | {name: tensor.clone() for name, tensor in case.inputs.items() if name in ("list4", "list5")}
    count, listed, full_count, full = (made.inputs[f"list{n}"] for n in range(4, 8))
    for at in itertools.product(*map(range, count.shape)):
        end = int(count[at] + full_count[at])
        listed[at][int(count[at]) : end] = full[at][: int(full_count[at])]
        count[at] = end
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("name", HOLES_BEFORE)
def test_every_mutant_of_the_kernels_before_is_seen_or_redundant(name: str) -> None:
    first = Prepared((CASES | OTHERS)[name])
    cases = [first, with_blocks_listed_twice(first)] if first.case.is_flex else [first]
    assert not any(unexplained(unbroken.races) or unbroken.fault for unbroken in (each.run() for each in cases))
    before = [kernel for kernel in mutants.kernels(first)[:-1] if kernel.name.startswith("triton_tem")]  # not Inductor's own
    assert holes(verdict for kernel in before for verdict in mutants.all_judged(cases, kernel)) == HOLES_BEFORE[name]


@pytest.fixture(scope="module")
def queue() -> Prepared:
    """One head, by two workers."""
    settings = IN_A_QUEUE | {"sm_reserve": 130}
    made = Prepared(Case("h100", 384, 384, heads=1, mask="causal", settings=settings))
    assert not made.run().races
    return made


def barriers_of_chain_in_queue(case: Prepared, remark: str) -> list[mutants.Site]:
    """For each partition of the Gluon kernel, the one that this remark stands behind."""
    source = (Path(__file__).parents[2] / "templates" / "gluon" / "walk.py").read_text()
    line = source.partition(f"barrier()  # {remark}")[0].count("\n") + 1
    found = [site for site in mutants.sites(mutants.main_kernel(case)) if f"walk.py:{line})" in site.text]
    assert len(found) == 4
    return found


# A partition reads behind the second barrier the row that it wrote before. The warp that loads comes to three barriers of Triton's
# first, the others to none.
@pytest.mark.every_case
@pytest.mark.parametrize(("partition", "others"), [(0, 0), (1, 3), (2, 0), (3, 0)])
def test_the_second_barrier_of_a_queue(partition: int, others: int, queue: Prepared) -> None:
    site = barriers_of_chain_in_queue(queue, "all of them read what each has written")[partition]
    behind = [other for other in mutants.sites(mutants.main_kernel(queue)) if other.number > site.number and other.way == "delete"]
    alike = [other for other in behind if other.text.split()[0] == site.text.split()[0]][:others]
    races = mutants.judged([queue], [site, *alike]).races
    assert any(kind == "read after write" and at.startswith("ld.global.b32") for kind, at, _ in races)
    assert not others or mutants.judged([queue], alike).silent


def test_the_first_barrier_of_a_queue_is_a_hole(queue: Prepared) -> None:
    """Before it a partition read the row of its last chain. The executor finds nothing of a write to global memory that comes
    behind a read by the same CTA."""
    assert mutants.judged([queue], barriers_of_chain_in_queue(queue, "all threads have read the row of the chain before")).silent


HEAD = ".visible .entry k(\n.param .u64 .ptr .global .align 1 k_param_0\n)\n.reqntid 32\n{\n.reg .b32 %r<4>;\n"


@pytest.mark.parametrize("statement", ["add.sat.s32 %r1, %r2, %r3;", "ld.weird.global.b32 %r1, [%r2];", "frobnicate.b32 %r1, %r2;"])
def test_unknown_opcodes_and_modifiers_raise_by_name(statement: str) -> None:
    Program(parse(f"{HEAD}add.s32 %r1, %r2, %r3;\nret;\n}}\n"))
    with pytest.raises(Unknown, match=statement.split()[0]):
        Program(parse(f"{HEAD}{statement}\nret;\n}}\n"))


ASSERTION = """@%p1 bra FINE;
{ // callseq 0, 0
.param .b64 param0;
st.param.b64 [param0], %rd1;
call.uni __assertfail, (param0);
} // callseq 0
trap;
FINE:
ret;
}
"""


@pytest.mark.parametrize("last_lane", [31, 30])
def test_a_failed_assertion_is_a_fault(last_lane: int) -> None:
    """Of lanes up to the last."""
    compared = f".reg .pred %p<2>;\nmov.u32 %r1, %tid.x;\nsetp.le.u32 %p1, %r1, {last_lane};\n"
    machine = Machine(Program(parse(f"{HEAD}{compared}{ASSERTION}")), Global(1024), [0], (1, 1, 1), shared_bytes=0)
    with contextlib.nullcontext() if last_lane == 31 else pytest.raises(Fault, match=r"k, CTA 0, .*: an assertion of the kernel"):
        machine.run()


def test_a_loop_that_nothing_ends_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp that waits for nothing would keep the others from running for ever."""
    monkeypatch.setattr(executor, "ENDLESS", 100)
    machine = Machine(
        Program(parse(f"{HEAD}AGAIN:\nmov.u32 %r1, %tid.x;\nbra AGAIN;\n}}\n")), Global(1024), [0], (1, 1, 1), shared_bytes=0
    )
    with pytest.raises(Fault, match=r"k, CTA 0, mov.u32 .*: warp 0 ran 100 blocks without a barrier or poll"):
        machine.run()


NEIGHBOURS = """mov.u32 %r1, %laneid;
shl.b32 %r2, %r1, 2;
add.s32 %r2, %r2, global_smem;
st.shared.b32 [%r2], %r1;
bar.warp.sync -1;
xor.b32 %r2, %r2, 4;
ld.shared.b32 %r3, [%r2];
ret;
}
"""


@pytest.mark.parametrize("barrier", [True, False])
def test_lanes_that_read_what_others_wrote_need_a_barrier_of_their_warp(barrier: bool) -> None:
    text = NEIGHBOURS if barrier else NEIGHBOURS.replace("bar.warp.sync -1;", "")
    machine = Machine(Program(parse(HEAD + text)), Global(1024), [0], (1, 1, 1), shared_bytes=128)
    machine.run()
    assert [race["kind"] for race in machine.races.listed()] == ([] if barrier else ["read after write"])


def test_faults_name_kernel_cta_and_line() -> None:
    """A load a gigabyte off, in every thread."""
    case = prepared("sm_90")
    kernel = mutants.main_kernel(case)
    number = next(n for n, found in enumerate(kernel.instructions) if found.opcode.startswith("cp.async.cg"))

    def change(found: Kernel) -> None:
        source = found.instructions[number].operands[1]
        assert isinstance(source, Memory)
        found.instructions[number].operands[1] = source._replace(offset=1 << 30)

    before = copy.copy(kernel.instructions[number])
    result = case.run(edited=mutants.edited(case, change))
    assert result.fault is not None
    assert all(part in result.fault for part in (kernel.name, "CTA", before.opcode, ".py:", "outside of every tensor"))
    assert kernel.instructions[number].operands == before.operands


def test_a_wait_that_gives_up_says_where() -> None:
    """Of a head, only the second tile of dQ has two additions: without a release, the second is waited for in vain."""
    case = Prepared(Case("h100", 192, 192, heads=2, mask="causal", settings=ONE_PASS))
    assert case.run().fault is None
    bound = "33554432"

    def change(kernel: Kernel) -> None:
        assert any(bound in found.operands for found in kernel.instructions)
        for found in kernel.instructions:
            found.operands = ["50" if operand == bound else operand for operand in found.operands]
            if found.opcode.startswith("red.release"):
                found.opcode, found.operands, found.guard = mutants.NOTHING, [], ""

    said, programs = set(), mutants.edited(case, change)
    for seed in range(8):
        fault = case.run(seed, edited=programs, patience=50, check=False).fault
        assert fault is not None and "st.global.b32" in fault and "outside of every tensor" in fault
        said.add(fault.split("; ")[-1])
    assert {re.sub(r".*(tile \d of dQ in query head \d).*: (.*)", r"\1, \2", line) for line in said} == {
        f"tile 1 of dQ in query head {head}, its rank is 1, and the tile had 0 additions" for head in (0, 1)
    }


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tests.ptx", *arguments])
    return command.main()


def sizes(length: int) -> list[str]:
    return ["--q-len", str(length), "--kv-len", str(length), "--batch", "1", "--heads", "1", "--head-dim", "64"]


SIZES = sizes(256)


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, "--device", "h100", "--template", "one_pass", "--json", *SIZES) == LEAVES_OUT_FENCE
    figures = json.loads(capsys.readouterr().out)
    assert (unexplained(figures["races"]), figures["deadlock"], figures["same_bits"]) == ([], None, True)
    assert 0 < figures["error"] < 1e-2 and figures["steps"] == 4 and len(figures["kernels"]) == 3
    assert command.is_bad(figures | {"races": [{}]}, "bf16") and command.is_bad(figures | {"error": 0.1}, "bf16")
    assert command.is_bad(figures | {"same_bits": False}, "bf16") and command.is_bad(figures, "bf16") == LEAVES_OUT_FENCE


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "rtx", *SIZES], "no cost file for 'rtx'"),
        (["--device", "h100", *sizes(32768)], "sizes out of reach"),
        (["--device", "h100", *SIZES, "--mask", "causal", "--mask-mod", "window"], "take one length"),
        (["--device", "h100", *SIZES, "--cubin", "kernel.cubin"], "unrecognized arguments: --cubin"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(monkeypatch, *arguments)
    assert ended.value.code == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if not text.startswith("[")]
    assert len(errors) == 1 and line in errors[0]
