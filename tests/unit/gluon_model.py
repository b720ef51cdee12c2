"""Runs a Gluon kernel's source on the CPU: its CTAs and partitions interleaved at random, its asynchronous work early or late.

Gluon has no interpreter. This stands in for the names that the Gluon kernel in templates/ uses, on torch tensors. What it holds
a kernel to: mbarriers with counts, phases and bytes; named barriers with the threads that arrive; TMA that arrives at any time
after it was issued; matmuls that read shared memory at any time until they are waited for; a fence and then a barrier between a
store to shared memory and an asynchronous reader of it, and a barrier between that reader and the next store; TMA's stores and
additions to global memory, which are performed at any time until they are waited for. What it does not see: layouts, the warps of
one partition running apart, fences between proxies in global memory, and the order of memory that releases and acquires give.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import greenlet
import torch
from torch import Tensor


class Deadlock(RuntimeError):
    """No partition can go on and nothing is in flight."""


class Partition(greenlet.greenlet):
    """Warps that run one function; `condition` is what it waits for."""

    def __init__(self, function: Callable[..., None], arguments: Sequence[Any], cta: Cta) -> None:
        super().__init__(lambda: function(*arguments))
        self.cta = cta
        self.condition: Callable[[], bool] = lambda: True
        self.matmuls: list[Matmul] = []
        self.bulk: list[Bulk] = []  # stores and additions of TMA that were not waited for
        self.stored: list[Tile] = []
        self.read: list[Tile] = []  # by matmuls that this partition's warps have waited for, each by itself

    @staticmethod
    def running() -> Partition:
        current = greenlet.getcurrent()
        assert isinstance(current, Partition)
        return current


class Cta:
    """What the partitions of a CTA have in common: named barriers, by number."""

    def __init__(self) -> None:
        self.named: dict[int, NamedBarrier] = defaultdict(lambda: NamedBarrier(288))


class Machine:
    """Partitions and the events in flight; a seed says who goes on."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.speed = self.random.choice((0.02, 0.2, 0.8))  # how soon memory answers
        self.partitions: list[Partition] = []
        self.events: list[Callable[[], None]] = []

    def run(self) -> None:
        while True:
            self.partitions = [partition for partition in self.partitions if not partition.dead]
            ready: list[Callable[[], Any]] = [p.switch for p in self.partitions if p.condition()]
            if self.events and (not ready or self.random.random() < self.speed):
                self.events.pop(self.random.randrange(len(self.events)))()
            elif ready:
                self.random.choice(ready)()
            else:
                break
        if self.partitions:
            raise Deadlock(f"{len(self.partitions)} partitions wait for ever")


machine = Machine(0)


def wait_until(condition: Callable[[], bool] = lambda: True) -> None:
    """Gives the turn away, and takes it when `condition` holds."""
    partition = Partition.running()
    partition.condition = condition
    partition.parent.switch()
    partition.condition = lambda: True


class Barrier:
    """An mbarrier."""

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        assert self.pending >= count, "more arrivals than the barrier counts"
        self.pending -= count
        self.flip()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive(1)

    def arrived(self, size: int) -> None:
        self.bytes -= size
        self.flip()

    def flip(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count

    def wait(self, phase: int) -> None:
        wait_until(lambda: self.phase != phase)


def arrive(bar: Barrier, count: int) -> None:
    bar.arrive(count)
    wait_until()


class NamedBarrier:
    """bar.arrive and bar.sync of one barrier, which completes when `threads` have come."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.come = self.completions = 0

    def arrive(self, threads: int) -> None:
        self.come += threads
        assert self.come <= self.threads, "a second arrival at a named barrier before it has completed"
        publish(Partition.running())
        if self.come == self.threads:
            self.come = 0
            self.completions += 1

    def sync(self, threads: int) -> None:
        before = self.completions
        self.arrive(threads)
        wait_until(lambda: self.completions > before)


def arrive_at(number: int) -> None:
    Partition.running().cta.named[number].arrive(256)
    wait_until()


def meet_at(number: int) -> None:
    Partition.running().cta.named[number].sync(32)


class Ring:
    """What is allocated with one item per stage."""

    def __init__(self, items: Sequence[Any], shape: Sequence[int] = ()) -> None:
        self.items = items
        self.shape = shape

    def index(self, stage: int) -> Any:
        return self.items[stage]


class Tile:
    """Shared memory. `clean`: no store of a thread is in it that an asynchronous reader might miss."""

    def __init__(self, data: Tensor, owner: Tile | None = None) -> None:
        self.data = data
        self.owner = owner or self
        self.clean = self.fenced = True
        self.readers = 0  # matmuls that read it, until every warp is known to have waited for them
        self.shape, self.dtype = data.shape, data.dtype

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.data.view(*shape), self.owner)

    def slice(self, start: int, length: int, dim: int = 0) -> Tile:
        return Tile(self.data.narrow(dim, start, length), self.owner)

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.data.permute(*order), self.owner)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype and value.shape == self.shape
        assert self.owner.readers == 0, "a store over what another warp's matmul, or TMA, may still read"
        self.data.copy_(value)
        self.owner.clean = self.owner.fenced = False
        Partition.running().stored.append(self.owner)

    def read_asynchronously(self) -> Tensor:
        assert self.owner.clean, "an asynchronous reader without a fence and a barrier before it"
        return self.data


def fence_async_shared() -> None:
    for tile in Partition.running().stored:
        tile.fenced = True


def publish(partition: Partition) -> None:
    """What a partition has stored and fenced is clean for who meets it at a barrier."""
    for tile in partition.stored:
        tile.clean = tile.fenced
    partition.stored[:] = [tile for tile in partition.stored if not tile.clean]


def barrier() -> None:
    partition = Partition.running()
    publish(partition)
    for tile in partition.read:
        tile.readers -= 1
    partition.read.clear()


class Matmul:
    """An asynchronous matmul; `result` is None until it is waited for. It may add to what one before it, in flight, leaves."""

    def __init__(self, a: Tile | Tensor, b: Tile, acc: Tensor | Matmul, use_acc: bool) -> None:
        assert use_acc or isinstance(acc, Tensor)
        self.a, self.b = a, b
        self.acc = acc if use_acc else None
        self.tiles = [x.owner for x in (a, b) if isinstance(x, Tile)]
        for tile in self.tiles:
            tile.readers += 1
        self.result: Tensor | None = None
        self.early = self.product() if machine.random.random() < 0.5 else None

    def product(self) -> Tensor:
        a, b = (x.read_asynchronously() if isinstance(x, Tile) else x for x in (self.a, self.b))
        return a.float() @ b.float()

    def complete(self) -> None:
        result = self.product() if self.early is None else self.early
        if self.acc is not None:
            result = result + (self.acc if isinstance(self.acc, Tensor) else self.acc.result)
        self.result = result.as_subclass(Registers)
        Partition.running().read += self.tiles


class Registers(Tensor):
    """What a matmul leaves. As in Gluon, its type has a layout."""

    type = SimpleNamespace(layout=None)


def warpgroup_mma(a: Any, b: Tile, acc: Tensor | Matmul, *, use_acc: bool = True, is_async: bool = False) -> Matmul:
    assert is_async
    matmul = Matmul(a, b, acc, use_acc)
    Partition.running().matmuls.append(matmul)
    return matmul


def await_matmuls(outstanding: int, deps: Sequence[Matmul]) -> Any:
    wait_until()
    matmuls = Partition.running().matmuls
    while len(matmuls) > outstanding:
        matmuls.pop(0).complete()
    results = [matmul.result for matmul in deps]
    assert None not in map(type, results) and all(x is not None for x in results), "a result that is still in flight"
    return results[0] if len(results) == 1 else tuple(results)


class Descriptor:
    """A TMA descriptor: a strided tensor in boxes, 0 outside."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self.tensor = base.as_strided(shape, strides)
        self.block_shape, self.layout, self.dtype = block_shape, layout, base.dtype

    def inside(self, corner: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of the box at `corner` that the tensor has, and where it lies in the box."""
        assert all(0 <= c < size for c, size in zip(corner, self.tensor.shape, strict=True))
        part = self.tensor[tuple(slice(c, c + size) for c, size in zip(corner, self.block_shape, strict=True))]
        return part, tuple(slice(0, size) for size in part.shape)

    def load(self, corner: Sequence[int]) -> Tensor:
        part, place = self.inside(corner)
        box = torch.zeros(self.block_shape, dtype=self.dtype)
        box[place] = part
        return box


def async_load(descriptor: Descriptor, corner: Sequence[int], full: Barrier, tile: Tile) -> None:
    tile.data.fill_(float("nan"))

    def arrive() -> None:
        tile.data.copy_(descriptor.load(corner))
        full.arrived(tile.data.numel() * tile.data.element_size())

    machine.events.append(arrive)
    wait_until()


class Bulk:
    """A tile that TMA stores, or adds, to global memory: it is read at any time after it was issued, and performed after that."""

    def __init__(self, descriptor: Descriptor, corner: Sequence[int], tile: Tile, add: bool) -> None:
        self.target, self.place = descriptor.inside(corner)
        self.tile, self.add = tile, add
        self.was_read = self.performed = False
        tile.owner.readers += 1
        machine.events.append(self.read)
        Partition.running().bulk.append(self)
        wait_until()

    def read(self) -> None:
        self.value = self.tile.read_asynchronously()[self.place].clone()
        self.tile.owner.readers -= 1
        self.was_read = True
        machine.events.append(self.perform)

    def perform(self) -> None:
        self.target.copy_(self.target + self.value if self.add else self.value)
        self.performed = True


def async_store(descriptor: Descriptor, corner: Sequence[int], tile: Tile) -> None:
    Bulk(descriptor, corner, tile, add=False)


def async_atomic_add(descriptor: Descriptor, corner: Sequence[int], tile: Tile) -> None:
    Bulk(descriptor, corner, tile, add=True)


def await_additions() -> None:
    issued = Partition.running().bulk
    wait_until(lambda: all(bulk.performed for bulk in issued))
    issued.clear()


def await_all_read() -> None:
    issued = Partition.running().bulk
    wait_until(lambda: all(bulk.was_read for bulk in issued))


def await_all_but_last_read() -> None:
    issued = Partition.running().bulk[:-1]
    wait_until(lambda: all(bulk.was_read for bulk in issued))


def release(semaphore: Pointer) -> None:
    semaphore.memory[semaphore.offset] += 1
    wait_until()


def release_by_warps(semaphore: Pointer) -> None:
    semaphore.memory[semaphore.offset] += 8
    wait_until()


def wait_for_rank(semaphores: Pointer, index: int, rank: int, q_tiles: int, report: Pointer) -> None:
    wait_until(lambda: load(semaphores + index) == rank)


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def to(self, of: torch.dtype, bitcast: bool) -> Pointer:
        assert bitcast and self.memory.dtype.itemsize == 2 * of.itemsize
        return Pointer(self.memory.view(of), 2 * self.offset)


def load(pointer: Pointer, mask: Tensor | None = None, other: int = 0, cache_modifier: str = "") -> Any:
    offset = pointer.offset
    if isinstance(offset, Tensor):
        return pointer.memory[offset] if mask is None else torch.where(mask, pointer.memory[torch.where(mask, offset, 0)], other)
    assert 0 <= offset < len(pointer.memory)
    return int(pointer.memory[offset])


def store(pointers: Pointer, value: Tensor, mask: Tensor | None = None, cache_modifier: str = "") -> None:
    kept = torch.ones(value.shape, dtype=torch.bool) if mask is None else mask.broadcast_to(value.shape)
    pointers.memory[pointers.offset.broadcast_to(value.shape)[kept]] = value.as_subclass(Tensor)[kept]


def atomic_add(pointer: Pointer, value: int, sem: str) -> int:
    wait_until()
    before = load(pointer)
    pointer.memory[pointer.offset] += value
    return before


def where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        return Ring([Barrier() for _ in range(shape[0])]) if len(shape) > 1 else Barrier()
    # A ring is what has a stage, of at most three, before a row or more; K and V have a 1 before three dimensions.
    if shape[0] <= 3 and len(shape) != 4:
        return Ring([Tile(torch.full(shape[1:], float("nan"), dtype=dtype)) for _ in range(shape[0])], shape)
    return Tile(torch.full(shape, float("nan"), dtype=dtype))


def warp_specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    assert len(warps) == len(registers) == len(partitions) - 1
    cta = Partition.running().cta
    started = [Partition(function, arguments, cta) for function, arguments in partitions]
    for partition in started:
        partition.parent = Partition.running().parent
    machine.partitions += started
    wait_until(lambda: all(partition.dead for partition in started))


def anything(*_: Any, **__: Any) -> None:
    """In the place of a layout."""


OURS = (load, store, atomic_add, where, allocate_shared_memory, warp_specialize, barrier)
LAYOUTS = ("NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout")
gl = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("bfloat16", "float32", "int16", "int32", "int64", "full_like", "exp2")},
    **{function.__name__: function for function in OURS},
    **dict.fromkeys(LAYOUTS, anything),
    constexpr=lambda value: value,
    shared_memory_descriptor=None,
    pointer_type=lambda of: of,
    static_range=range,
    int1=torch.bool,
    cast=lambda x, dtype: x.to(dtype) if isinstance(x, Tensor) else x,
    cdiv=lambda a, b: -(-a // b),
    arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    expand_dims=torch.unsqueeze,
    convert_layout=lambda x, layout: x,
    minimum=min,
    split=lambda x: x.unbind(-1),
    max=lambda x, axis: int(x.amax(axis)),
    full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    fma=lambda a, b, c: a * b + c,
)
tl = SimpleNamespace(
    constexpr=None,
    where=where,
    minimum=lambda a, b: where(a < b, a, b),
    maximum=lambda a, b: where(a > b, a, b),
)
mbarrier = SimpleNamespace(
    MBarrierLayout=anything,
    init=lambda bar, count: bar.init(count),
    expect=lambda bar, size: bar.expect(size),
    arrive=arrive,
    wait=lambda bar, phase: bar.wait(phase),
)
tma = SimpleNamespace(**{function.__name__: function for function in (async_load, async_store, async_atomic_add)})
asynchronous = {function.__name__: function for function in (fence_async_shared, warpgroup_mma)}
hopper = SimpleNamespace(mbarrier=mbarrier, tma=tma, warpgroup_mma_wait=await_matmuls, **asynchronous)
gluon = SimpleNamespace(jit=lambda function: function, constexpr_function=lambda function: function, language=gl)
MODULES: dict[str, Any] = {
    "triton": SimpleNamespace(jit=lambda function: function, language=tl),
    "triton.language": tl,
    "triton.language.core": SimpleNamespace(_aggregate=lambda cls: cls),
    "triton._C.libtriton": SimpleNamespace(ir=None),
    "triton.experimental": SimpleNamespace(gluon=gluon),
    "triton.experimental.gluon": gluon,
    "triton.experimental.gluon.language": gl,
    "triton.experimental.gluon.language._core": SimpleNamespace(builtin=lambda function: function),
    "triton.experimental.gluon.language.nvidia.hopper": hopper,
    "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=Descriptor),
}


def thread() -> Tensor:
    return torch.arange(256)


def of_first_lane(value: int) -> int:
    return value  # the model's partition has one value where a warp's lanes have the same


def load_bits(words: Pointer) -> Tensor:
    return words.memory[words.offset]


def hide(s_t: Tensor, word: Tensor, layout: Any) -> Tensor:
    keys, queries = s_t.shape
    n, m = torch.arange(keys)[:, None], torch.arange(queries)
    if keys == 64:  # two warpgroups have half of the queries each
        threads, bits = words_and_bits(n, m % 32)
        threads = threads + m // 32 * 128
    else:
        threads, bits = words_and_bits(n, m)
    return torch.where(word[threads] >> bits & 1 == 0, -torch.inf, s_t)


def words_and_bits(n: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Which thread has the element of key n and query m of a part of S^T, and in which of its registers."""
    return n // 16 * 32 + n % 8 * 4 + m % 8 // 2, m // 8 * 4 + n // 8 % 2 * 2 + m % 2


# They are PTX in the kernel's source, or ask Triton for what Gluon does not offer.
OF_TRITON = (wait_for_rank, release, release_by_warps, arrive_at, meet_at, await_additions, await_matmuls)
OF_TRITON += (thread, of_first_lane, load_bits, hide, await_all_read, await_all_but_last_read)


def module_of(source: str, **others: Callable[..., None]) -> SimpleNamespace:
    """The names that a kernel's source defines, on the CPU; `others` take the place of its functions."""
    namespace: dict[str, Any] = {"__name__": "kernel"}
    with mock.patch.dict(sys.modules, MODULES):
        exec(compile(source, "kernel", "exec"), namespace)
    namespace.update({function.__name__: function for function in OF_TRITON}, load_16_bits=load_bits, **others)
    return SimpleNamespace(**namespace)


def pointer(x: Any) -> Any:
    """What a kernel is given for an argument."""
    if isinstance(x, tuple):
        values = map(pointer, x)
        return x._make(values) if hasattr(x, "_make") else tuple(values)
    if not isinstance(x, Tensor):
        return x
    return Pointer(x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0), x.storage_offset())


def launch(kernel: Callable[..., None], seed: int, programs: int, arguments: Sequence[Any]) -> None:
    """Runs `programs` programs of a kernel in the interleaving of `seed`; raises Deadlock, or what a program raises."""
    global machine
    machine = Machine(seed)
    for _ in range(programs):
        machine.partitions.append(Partition(lambda: kernel(*map(pointer, arguments)), (), Cta()))
    machine.run()
