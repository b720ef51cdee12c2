"""Which steps the Gluon kernel's CTAs take, by its own functions; and what its launch makes of tensors.

The functions that walk compute with integers and loads alone, so that their source runs as Python here. tests/ptx executes the
whole kernel.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule.positions import as_python, triton
from schedule.strategies import plans, round_robin
from schedule.walks import Walks, Work
from triton.compiler.compiler import CompiledKernel, LazyDict
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.lowering.launch.gluon import launch_of
from dash_inductor.schedule import Plan, RoundRobinPlan, pack_plan
from dash_inductor.schedule.families import REGISTER
from dash_inductor.schedule.packing import may_share_row, pack_shared, why_no_round_robin
from dash_inductor.schedule.parts import Parts
from dash_inductor.templates import gluon_kernel
from dash_inductor.templates.operands import Operands


@dataclass(frozen=True)
class Pointer:
    """An address in memory, or one for each lane."""

    memory: np.ndarray
    offset: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)


def load(pointer: Pointer, mask: Any = True, other: int = 0) -> Any:
    found = np.where(mask, pointer.memory[np.where(mask, pointer.offset, 0)], other)
    return found if found.ndim else int(found)


def store(pointer: Pointer, value: Any, mask: Any) -> None:
    pointer.memory[pointer.offset[mask]] = value[mask]


def anything(*_: Any, **__: Any) -> Any:
    """In the place of a layout or a barrier."""


gl = SimpleNamespace(
    load=load,
    store=store,
    constexpr=lambda value: value,
    static_range=range,
    cdiv=lambda a, b: -(-a // b),
    minimum=min,
    max=lambda x, axis: int(x.max()),
    arange=lambda begin, end, layout: np.arange(begin, end),
    BlockedLayout=anything,
)


@pytest.fixture(scope="module")
def walk() -> SimpleNamespace:
    """The names of templates/positions.py and templates/gluon/walk.py, as Python."""
    names = {"gluon": triton, "gl": gl, "WARPS": 8, "barrier": anything, "of_first_lane": lambda value: value}
    return as_python("positions.py", "gluon/walk.py", **names)


def sizes_of(walk: Any, plan: Plan, **others: Any) -> Any:
    """What the kernel knows of a plan's attention."""
    g = plan.order.geometry
    of_queue = g.ratio if isinstance(plan, RoundRobinPlan) else 0
    return walk.Attention(plan.heads, 1, g.n_q, g.kv_len, 1, 1, g.mask != "full", ROUND_ROBIN=of_queue, **others)


def chains(walk: Any, plan: Plan, worker: int, shared_row: bool = False) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """(Head, KV tile, (Q tile, rank) of each step) of each chain that a worker takes, by the kernel's own functions."""
    table = Pointer(np.array(pack_shared(plan) if shared_row else pack_plan(plan)))
    attention = sizes_of(walk, plan, SHARED_ROW=shared_row, BLOCKS=0, EVEN_N=False, SCALE=1.0, SCALE_LOG2E=1.0)
    own_row = Pointer(np.zeros(plan.order.geometry.n_q, dtype=np.int64))
    own = walk.Walk(table, own_row, *walk.turns_in_table(table, worker, attention), None)
    for turn in range(own.rounds):
        j, steps, row, rows, head, _, first_rank = walk.chain_of(own, turn, attention, WARPS=1)
        if head < plan.heads and j >= 0:
            taken = [walk.step_of(rows + row, step, 0) for step in range(steps)]
            yield int(head), int(j), [(int(i), int(rank) + first_rank) for i, rank in taken]


def planned(plan: Plan, worker: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """The same by the plan."""
    tasks = [(head, j, plan.order_of(head)) for head, j in plan.tasks(worker)]
    return [(head, j, list(zip(order.visits(j), order.ranks(j), strict=True))) for head, j, order in tasks]


@given(plans() | round_robin(), st.data())
def test_workers_take_the_chains_of_the_plan(walk: Any, plan: Plan, data: st.DataObject) -> None:
    if isinstance(plan, RoundRobinPlan):  # a monotone one is a baseline of benchmarks
        assume(plan.family in REGISTER and why_no_round_robin(plan.order.geometry, plan.family) is None)
    worker = data.draw(st.integers(0, plan.workers - 1))
    assert list(chains(walk, plan, worker)) == planned(plan, worker)
    if may_share_row(plan):
        assert list(chains(walk, plan, worker, shared_row=True)) == planned(plan, worker)


def random_walks(seed: int) -> Walks:
    """Masks, sizes and parts at random; query heads with masks of their own are a set each."""
    draw = random.Random(seed)
    batch, kv_heads, sets, size = (draw.randint(1, 2) for _ in range(4))
    n_q, n_kv, q_tiles, kv_tiles = (draw.randint(1, most) for most in (9, 9, 3, 3))
    n_masks = draw.choice([1, batch]), draw.choice([1, kv_heads * sets]) if size == 1 else 1
    seen = draw.random()

    def mask() -> list[list[bool]]:
        return [[draw.random() < seen for _ in range(0, n_q, q_tiles)] for _ in range(0, n_kv, kv_tiles)]

    masks = [[mask() for _ in range(n_masks[1])] for _ in range(n_masks[0])]
    parts = Parts(draw.choice([1, 2, 4]), sets)
    sizes = (batch, kv_heads, sets * size, n_q, n_kv, q_tiles, kv_tiles)
    return Walks(masks, *sizes, parts, least_steps=draw.randint(0, 12), by_head=parts.bands == 1)


def listed(walk: Any, expected: Walks) -> Iterator[Work | None]:
    """Ticket by ticket, what the kernel's functions find in the lists of the masks."""
    block_n, group, parts = 64, expected.group, expected.parts
    masks = [[expected.lists(mask) for mask in of_batch] for of_batch in expected.masks]
    n_blocks = len(expected.masks[0][0][0])
    rows = np.array([[[[i | rank << 16 for i, rank in row] + [-1] * (n_blocks - len(row)) for row in x] for x in z] for z in masks])
    steps = np.array([[expected.steps(mask) for mask in of_batch] for of_batch in expected.masks])
    kv_heads = expected.batch * expected.kv_heads
    sizes = kv_heads, expected.kv_heads, expected.n_q, expected.n_kv * block_n - 1
    attention = walk.Attention(*sizes, group, parts.sets, False, False, 0, expected.q_tiles, False, 1.0, 1.0)
    lists = SimpleNamespace(
        steps=Pointer(steps.reshape(-1)),
        kv_tiles=expected.kv_tiles,
        bands=parts.bands,
        most_chains=rows.shape[2],
        least_steps=expected.least_steps,
    )
    for ticket in range(parts.units(kv_heads, expected.n_kv, expected.kv_tiles)):
        sizes = *rows.shape, parts.bands
        found = walk.chain_in_lists(Pointer(rows.reshape(-1)), lists, sizes, (), ticket, attention, block_n)
        (j, turns, row, of_row, head, of_set, first_rank), _segment, _row_of_bits, of_chain, place = found
        heads = group // parts.sets
        entries = [walk.step_of(of_row + row, turn, expected.q_tiles) for turn in range(turns)]
        taken = [(head * group + of_set * heads + n, i & 0xFFFF, rank + first_rank) for i, rank in entries for n in range(heads)]
        yield Work(head, j, tuple(taken), place, of_chain) if j >= 0 else None


def test_who_walks_which_lists(walk: Any) -> None:
    """Under masks in blocks; tests/emulated/test_flex_parts.py holds the Triton kernel against the same oracle."""
    for expected in map(random_walks, range(100)):
        assert list(listed(walk, expected)) == expected.works()


def operands(key: torch.Tensor, rows: int = 256, *, dk: torch.Tensor | None = None) -> Operands:
    """Those of a launch; key and dk [1, 2, 200, D]."""
    query, statistics = torch.zeros(key.shape, dtype=key.dtype), torch.zeros(2 * rows)
    dq, table = torch.zeros(2 * 256, key.shape[3]), torch.zeros(8, dtype=torch.int32)
    tensors = (query, key, query, query, statistics, statistics, table, None, None, None, dq, query if dk is None else dk, query)
    return Operands(*tensors, [], [], workers=1, cooperative=True, block_m=128, block_n=128, causal=False, scale=1.0)


def made_of(x: Operands) -> tuple[Any, tuple[Any, ...]]:
    return gluon_kernel().arguments(x, report=torch.zeros(4, dtype=torch.int32), most_chains=1)


def arguments(*of: Any, **others: Any) -> tuple[Any, ...]:
    return made_of(operands(*of, **others))[1]


def test_the_driver_is_given_what_triton_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By equal launches later too, which look nothing up."""
    given: list[tuple[Any, ...]] = []

    def without_driver(kernel: CompiledKernel) -> None:
        kernel._run, kernel.module, kernel.function = (lambda *all_of_them: given.append(all_of_them)), kernel, None

    monkeypatch.setattr(CompiledKernel, "_init_handles", without_driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    x = operands(torch.zeros(1, 2, 200, 64, dtype=torch.bfloat16))
    with fake_gpu("h100"):
        for launch in (launch_of(gluon_kernel(), x) for _ in range(2)):
            launch.run()
            launch.kernel.sdpa_backward[(launch.workers,)](*launch.arguments, **launch.options())
            ours, triton_s = given[-2:]
            for mine, other in zip(ours, triton_s, strict=True):
                assert mine is other or mine == other or (isinstance(mine, LazyDict) and mine.get() == other.get())
    assert len(given) == 4 and len(launch.compiled) == 1


def test_what_triton_specialises_on_is_of_a_plan() -> None:
    """The addresses' multiples of 16 bytes, dtypes and sizes: another plan has another kernel."""
    x = operands(torch.zeros(1, 2, 200, 64, dtype=torch.bfloat16))
    captured, odd = torch.zeros(8), torch.zeros(9, dtype=torch.int32)[1:]
    others: list[dict[str, Any]] = [
        *({name: odd} for name in ("table", "drop_bits", "semaphores")),
        *({"captures": [each]} for each in (captured, captured.half(), captured.view(torch.int32), odd)),
        *({"workers": 2}, {"scale": 0.5}, {"sizes": [16]}, {"sizes": [17]}),
    ]
    plans = [made_of(x._replace(**each))[0] for each in ({}, *others)]
    assert len({id(plan.compiled) for plan in plans}) == len(plans)
    assert made_of(x._replace(table=x.table.clone()))[0] is plans[0]


def test_tensors_that_tma_cannot_take_are_copied() -> None:
    key = torch.randn(1, 2, 200, 64).bfloat16()
    assert arguments(key)[1].base.data_ptr() == key.data_ptr()
    odd = torch.nn.functional.pad(key, (0, 1))[..., :-1]  # rows at odd multiples of 2 bytes
    for refused in (odd, key.mT.contiguous().mT, torch.ones((), dtype=key.dtype).expand_as(key)):
        taken = arguments(refused)[1].base
        assert taken.is_contiguous() and torch.equal(taken, refused)


def test_gradients_that_tma_cannot_store() -> None:
    """dK and dV then have strides in the place of descriptors, whatever was launched before with the same sizes and strides."""
    key = torch.zeros(1, 2, 200, 64, dtype=torch.bfloat16)
    odd = torch.nn.functional.pad(key, (0, 1))[..., :-1]
    for dk, by_tma in (
        (key, True),
        (key.float(), False),
        (key, True),
        (odd, False),
        (key.new_zeros(key.numel() + 1)[1:].view_as(key), False),
    ):
        *_, dk_target, dv_target, attention = arguments(key, dk=dk)
        assert attention.BY_TMA.value == by_tma
        assert [isinstance(each, TensorDescriptor) for each in (dk_target, dv_target)] == [by_tma] * 2
        assert not by_tma or dk_target.base.data_ptr() == dk.data_ptr()


def test_tensors_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous, with 512 rows"):
        arguments(torch.zeros(1, 2, 200, 64, dtype=torch.bfloat16), rows=200)


@pytest.mark.parametrize(("head_dim", "dtype"), [(100, torch.bfloat16), (264, torch.bfloat16), (64, torch.float32)])
def test_another_head_dim_or_dtype_is_refused(head_dim: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"at head dims of a multiple of 8, from 16 to 256, not {dtype} at {head_dim}$"):
        arguments(torch.zeros(1, 2, 200, head_dim, dtype=dtype))
