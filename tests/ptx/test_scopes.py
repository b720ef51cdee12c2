"""Scopes: kernels of a few lines, by hand, in which one CTA tells another that its data are there; and those of ours, narrowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from . import mutants
from .lower import Program
from .machine import Machine
from .memory import Global
from .parse import parse
from .test_execute import prepared


def executed(text: str, tensors: Sequence[torch.Tensor], ctas: int, seed: int = 0, shared: int = 0) -> list[dict[str, Any]]:
    """The races of one kernel, whose parameters are the tensors; they have what it wrote."""
    memory = Global(1 << 14)
    placed = [memory.put(tensor) for tensor in tensors]
    machine = Machine(
        Program(parse(text)), memory, [tensor.data_ptr() for tensor in placed], (ctas, 1, 1), shared_bytes=shared, seed=seed
    )
    machine.run()
    for tensor, result in zip(tensors, placed, strict=True):
        tensor.copy_(result)
    found: list[dict[str, Any]] = machine.races.listed()
    return found


# Whoever is 0 writes a word and tells so at the next one. Who is {reader} waits there for {count}, and reads the word.
TOLD = """.visible .entry k(
.param .u64 .ptr .global .align 1 k_param_0
)
.reqntid {threads}
.reqnctapercluster {cluster}
{{
.reg .pred %p<4>;
.reg .b32 %r<6>;
.reg .b64 %rd<2>;
ld.param.b64 %rd1, [k_param_0];
mov.u32 %r1, {who};
mov.u32 %r2, %laneid;
setp.eq.u32 %p1, %r2, 0;
mov.b32 %r3, 1;
setp.eq.u32 %p2, %r1, {reader};
@%p2 bra POLL;
setp.ne.u32 %p2, %r1, 0;
@%p2 bra BETWEEN;
@%p1 st.global.b32 [%rd1], %r3;
bar.warp.sync -1;
{tell};
ret;
BETWEEN:
{between};
ret;
POLL:
{ask};
setp.ne.s32 %p3, %r4, {count};
@%p3 bra POLL;
{behind};
ld.global.b32 %r5, [%rd1];
ret;
}}
"""
NOTHING = "nanosleep.u32 0"
RELEASE, ACQUIRE = "@%p1 st.release.{}.global.b32 [%rd1+4], %r3", "ld.acquire.{}.global.b32 %r4, [%rd1+4]"
RELAXED, SEEN = "@%p1 red.relaxed.{}.global.add.u32 [%rd1+4], %r3", "ld.relaxed.{}.global.b32 %r4, [%rd1+4]"
# Waits for the first, and then writes at its word itself.
SECOND = f"WAIT:\n{SEEN.format('gpu')};\nsetp.eq.s32 %p3, %r4, 0;\n@%p3 bra WAIT;\n{{}}"


def told(tell: str, ask: str, **given: Any) -> set[str]:
    """Where races were found, in five interleavings: at the data, or where they are told."""
    fields: dict[str, Any] = {"who": "%ctaid.x", "reader": 1, "count": 1, "threads": 32, "cluster": 1}
    fields |= {"between": NOTHING, "behind": NOTHING} | given
    ctas = -(-(fields["reader"] + 1) // fields["cluster"]) * fields["cluster"] if "cta" in fields["who"] else 1
    text = TOLD.format(tell=tell, ask=ask, **fields)
    races = [race for seed in range(5) for race in executed(text, [torch.zeros(2, dtype=torch.int32)], ctas, seed)]
    return {"data" if race["at"].startswith("ld.global.b32") else "flag" for race in races}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("release", "acquire", "passes"),
    [
        *((scope, scope, scope in ("gpu", "sys")) for scope in ("cta", "cluster", "gpu", "sys")),
        ("gpu", "sys", True),
        ("cta", "gpu", False),
        ("gpu", "cta", False),
    ],
)
def test_release_and_acquire_need_scopes_with_both_ctas(release: str, acquire: str, passes: bool) -> None:
    assert told(RELEASE.format(release), ACQUIRE.format(acquire)) == (set() if passes else {"data", "flag"})


@pytest.mark.every_case
@pytest.mark.parametrize(("reader", "passes"), [(1, True), (2, False), (3, False)])
def test_a_cluster_is_a_scope(reader: int, passes: bool) -> None:
    """Two CTAs, of which the first tells CTA 1, and CTAs 2 and 3 of another one."""
    found = told(RELEASE.format("cluster"), ACQUIRE.format("cluster"), cluster=2, reader=reader)
    assert found == (set() if passes else {"data", "flag"})


def test_the_scope_of_a_cta_is_enough_for_its_warps() -> None:
    fields = {"who": "%warpid", "threads": 64}
    assert told(RELEASE.format("cta"), ACQUIRE.format("cta"), **fields) == set()
    assert told(RELAXED.format("cta"), ACQUIRE.format("cta"), **fields) == {"data"}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("fence", "flag", "passes"),
    [
        ("fence.acq_rel.gpu", "gpu", {"gpu"}),
        ("fence.acq_rel.cta", "gpu", ()),
        ("fence.acq_rel.cluster", "gpu", ()),
        ("fence.acq_rel.gpu", "cta", ()),
        ("fence.sc.sys", "sys", {"gpu"}),
        ("membar.gl", "gpu", {"gpu"}),
        ("membar.cta", "gpu", ()),
    ],
)
def test_fences_and_what_they_order_need_scopes(fence: str, flag: str, passes: set[str]) -> None:
    found = told(f"{fence};\n{RELAXED.format(flag)}", SEEN.format(flag), behind=fence)
    assert found == (set() if passes else {"data"} if flag != "cta" else {"data", "flag"})


def test_each_of_two_fences_needs_the_scope() -> None:
    for fences in (("cta", "gpu"), ("gpu", "cta")):
        before, behind = map("fence.acq_rel.{}".format, fences)
        assert told(f"{before};\n{RELAXED.format('gpu')}", SEEN.format("gpu"), behind=behind) == {"data"}


def test_volatile_accesses_have_a_scope_with_all_ctas() -> None:
    tell, ask = "fence.sc.gpu;\n@%p1 st.volatile.global.b32 [%rd1+4], %r3", "ld.volatile.global.b32 %r4, [%rd1+4]"
    assert told(tell, ask, behind="fence.sc.gpu") == set()
    assert told(tell, ask) == {"data"}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("write", "found"),
    [
        (RELAXED.format("gpu"), set()),
        (RELAXED.format("cta"), {"data", "flag"}),
        ("@%p1 st.relaxed.gpu.global.b32 [%rd1+4], 2", {"data"}),
    ],
)
def test_what_was_released_goes_through_atomics_of_enough_scope(write: str, found: set[str]) -> None:
    """A third CTA writes between the two. A store hides from the reader what stood there."""
    assert told(RELEASE.format("gpu"), ACQUIRE.format("gpu"), reader=2, count=2, between=SECOND.format(write)) == found


@pytest.mark.every_case
@pytest.mark.parametrize(("first", "second", "races"), [(".gpu", "", 0), ("", ".sys", 0), (".cta", ".gpu", 1), (".cta", ".cta", 1)])
def test_atomics_of_two_ctas_need_scopes(first: str, second: str, races: int) -> None:
    """Without a scope an atomic has the GPU's."""
    add = "@%p1 atom{}.relaxed.global.add.u32 %r5, [%rd1+8], %r3"
    text = TOLD.format(
        tell=add.format(first), ask=f"{add.format(second)};\nmov.b32 %r4, 1", who="%ctaid.x", reader=1, count=1,
        threads=32, cluster=1, between=NOTHING, behind="ret",
    )  # fmt: skip
    for seed in range(5):
        found = executed(text, [torch.zeros(3, dtype=torch.int32)], 2, seed)
        assert len({race["place"].partition(",")[0] for race in found}) == races, found


def test_narrowed_scopes_of_our_kernels_are_seen(record_property: Callable[[str, object], None]) -> None:
    """Each wait, release and ticket."""
    seen = 0
    for name in ("sm_80", "sm_90", "Gluon of 256"):
        for site in mutants.sites(mutants.main_kernel(prepared(name))):
            if site.way == "narrow" and site.text.startswith(
                ("ld.global.acquire", "red.release", "atom.global.gpu.relaxed.add.u32")
            ):
                verdict = mutants.judged([prepared(name)], [site])
                assert verdict.races, verdict.line()
                seen += 1
    record_property("narrowed scopes seen", seen)
    assert seen >= 10


# As flash attention 3 adds dQ, but for the pipeline around it. Each CTA waits for its turn at a semaphore, has the copy engine add
# its part, waits, and counts itself there. The fence of global memory is ours: so the wait is all that is judged.
IN_TURN = """.visible .entry k(
.param .u64 .ptr .global .align 1 k_param_0,
.param .u64 .ptr .global .align 1 k_param_1,
.param .u64 .ptr .global .align 1 k_param_2
)
.reqntid 32
{{
.reg .pred %p<3>;
.reg .b32 %r<7>;
.reg .b64 %rd<6>;
ld.param.b64 %rd1, [k_param_0];
ld.param.b64 %rd2, [k_param_1];
ld.param.b64 %rd3, [k_param_2];
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %laneid;
setp.eq.u32 %p1, %r2, 0;
shl.b32 %r3, %r1, 5;
add.s32 %r3, %r3, %r2;
mul.wide.u32 %rd4, %r3, 4;
add.s64 %rd5, %rd1, %rd4;
ld.global.b32 %r4, [%rd5];
shl.b32 %r5, %r2, 2;
add.s32 %r5, %r5, global_smem;
st.shared.b32 [%r5], %r4;
fence.proxy.async.shared::cta;
bar.warp.sync -1;
TURN:
ld.global.acquire.gpu.b32 %r6, [%rd3];
setp.ne.s32 %p2, %r6, %r1;
@%p2 bra TURN;
fence.proxy.async.global;
bar.warp.sync -1;
@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2], [%r5], 128;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group{read} 0;
bar.warp.sync -1;
@%p1 fence.acq_rel.gpu;
@%p1 red.relaxed.gpu.global.add.s32 [%rd3], 1;
ret;
}}
"""


@pytest.mark.every_case
@pytest.mark.parametrize("read", ["", ".read"])
def test_a_wait_until_the_copy_engine_has_read_is_not_one_until_it_has_added(read: str) -> None:
    """The wait of flash attention 3 is `.read`: the next CTA's addition may come before this one's."""
    parts = torch.tensor([2.0**25, 1.0, -(2.0**25), 1.0])[:, None].repeat(1, 32)
    races, sums = set(), set()
    for seed in range(10):
        total = torch.zeros(32)
        found = executed(IN_TURN.format(read=read), [parts, total, torch.zeros(1, dtype=torch.int32)], 4, seed, shared=128)
        races |= {(race["kind"], race["at"].partition(" ")[0], race["earlier"].partition(" ")[0]) for race in found}
        sums |= set(total.tolist())
    in_turn = float(parts[0, 0] + parts[1, 0] + parts[2, 0] + parts[3, 0])
    add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    if read:
        assert {("read after write", add, add), ("write after write", add, add)} <= races and len(sums) > 1
    else:
        assert not races and sums == {in_turn}
