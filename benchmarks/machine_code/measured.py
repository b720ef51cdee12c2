"""The replay held against an H200: main kernels in milliseconds at one clock, and two loops place by place.

The clock is fit to our four Gluon kernels, and holds for all. The replay's constants were chosen with all of these kernels in view.
So the errors say how well one set of constants explains them, and are no forecast of another kernel's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.kept import RESULTS, rows_of

from .cubin import parse
from .replay import Replay, replay_loop, times_by_place
from .replay.constants import Constants
from .replay.operations import ControlCode, Operation, decoded

H200 = RESULTS / "h200"
LOOPS = RESULTS / "published" / "loops.csv"
SMS, CTAS = 132, 128  # CTAs: of our kernels, which take whole heads
LENGTH, HEADS = 8192, {64: 64, 128: 32}  # of both batch entries together
KEYS = 128  # of a tile
KV_TILES = LENGTH // KEYS
CHAIN_END = 4000  # clocks of the beginning and the end of a chain, which no step overlaps: an estimate
MASKS = ("full", "causal")
TMA_BYTES = {64: 66560, 128: 66048}  # that TMA moves in a step, where kernels use it
Cycles = Sequence[float]  # of a step of each of a kernel's loops
Elapsed = Callable[[Cycles, float], float]  # clocks of the kernel, from those and the clocks of a hand-over


@dataclass(frozen=True)
class Kernel:
    """A main kernel that was timed: 2 x 8,192 tokens of hidden size 2,048, bf16."""

    name: str
    head_dim: int
    mask: str
    ms: float
    loops: tuple[str, ...]  # by name, in main_loops.csv or loops.csv
    elapsed: Elapsed
    is_ours: bool = False

    def __str__(self) -> str:
        return f"{self.name}, d{self.head_dim} {self.mask}"


def rows_of_ours(head_dim: int) -> int:
    """Queries of a step of our kernels."""
    return 128 if head_dim == 64 else 64


def rows_of_flash_attention_4(head_dim: int, mask: str) -> int:
    """Queries of a step of FlashAttention 4's."""
    return 80 if (head_dim, mask) == (128, "full") else rows_of_ours(head_dim)


def persistent(head_dim: int, mask: str, hops: int = 0) -> Elapsed:
    """A CTA of ours runs so many chains one after the other, as many steps as any other."""
    rows = rows_of_ours(head_dim)
    chains = HEADS[head_dim] * KV_TILES // CTAS
    steps = HEADS[head_dim] * sum(len(range(first_row(j, rows, mask), LENGTH // rows)) for j in range(KV_TILES)) // CTAS
    return lambda cycles, hop: steps * cycles[0] + chains * CHAIN_END + hops * hop


def first_row(j: int, rows: int, mask: str) -> int:
    """The first tile of so many queries that a tile of keys sees."""
    return j * KEYS // rows if mask == "causal" else 0


def in_turn(costs: Sequence[float]) -> float:
    """Clocks until the last of these CTAs ends, each of which starts on the SM that is free first."""
    free = [0.0] * SMS
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def flash_attention_4(head_dim: int, mask: str, deterministic: bool) -> Elapsed:
    """A CTA a chain, in which one warp adds dQ.

    The deterministic one sums a tile of dQ by keys, under a causal mask from the last ones on, four heads at once. Its warp polls,
    adds, waits until the addition is acknowledged, and releases, all in series; only then its one place takes the next tile.
    """
    rows = rows_of_flash_attention_4(head_dim, mask)
    q_tiles = -(-LENGTH // rows)
    backwards = deterministic and mask == "causal"
    at_once = 4 if deterministic else 1
    order = range(KV_TILES - 1, -1, -1) if backwards else range(KV_TILES)
    heads = range(0, HEADS[head_dim], at_once)
    chains = [(head, first_row(j, rows, mask)) for first in heads for j in order for head in range(first, first + at_once)]
    c, tile = Constants(), rows * head_dim * 4
    stored = tile / c.shared_bandwidth + c.cta_fence + c.async_fence
    released = tile / c.addition_bandwidth + c.l2_latency + c.gpu_fence

    def elapsed(cycles: Cycles, _: float) -> float:
        if not deterministic:
            return in_turn([(q_tiles - first) * cycles[0] + CHAIN_END for _, first in chains])
        free, releases = [0.0] * SMS, dict[tuple[int, int], float]()
        for head, first in chains:
            now = place = free[0]
            for row in range(first, q_tiles):
                now = max(now + cycles[0], place + stored)
                turn = max(now, releases.get((head, row), 0) + c.l2_latency / 2) + c.l2_latency
                releases[head, row] = place = turn + released
            heapq.heapreplace(free, max(now, place) + CHAIN_END)
        return max(free)

    return elapsed


def flex_attention(head_dim: int, mask: str) -> Elapsed:
    """A CTA for 128 keys and one for 128 queries, by turns of all keys and all queries of a head; two loops each under a mask."""
    steps = LENGTH // 64

    def elapsed(cycles: Cycles, _: float) -> float:
        if mask == "full":
            keys, queries = ([steps * each] * KV_TILES for each in cycles)
        else:  # of a block of 128 x 128 that is partly hidden, and of the full ones
            of_keys, of_queries = cycles[:2], cycles[2:]
            keys = [2 * of_keys[0] + (steps - 2 - 2 * j) * of_keys[1] for j in range(KV_TILES)]
            queries = [2 * of_queries[0] + 2 * j * of_queries[1] for j in range(KV_TILES)]
        return in_turn([cost + CHAIN_END for cost in (keys + queries) * HEADS[head_dim]])

    return elapsed


def kernels() -> list[Kernel]:
    """All of them, ours first."""
    table = [row for row in rows_of(H200 / "gluon" / "gluon_tables.csv") if row["variant"] == "as committed"]
    times = [row for row in rows_of(H200 / "kernel_times.csv") if row["kernel_version"] == "one order warp"]

    def main_kernel_ms(head_dim: int, mask: str, contender: str, name: str) -> float:
        (row,) = (
            row
            for row in times
            if row["shape"] == f"d{head_dim}-{mask}-8192" and row["contender"] == contender and name in row["kernel"]
        )
        return float(row["median_us"]) / 1e3

    found = []
    for head_dim in (128, 64):
        for mask in MASKS:
            family = "shift" if mask == "full" else "symmetric"
            ms = min(float(row["median_ms"]) for row in table if _of(row, str(head_dim), mask, family))
            found.append(_ours("Gluon", head_dim, mask, ms, persistent(head_dim, mask)))
    for head_dim in (128, 64):
        for mask in MASKS:
            # Preprocess and main kernel have one name there, and one row: their mean.
            both = main_kernel_ms(head_dim, mask, "ours", "triton_tem")
            hops = KV_TILES - 1 if (head_dim, mask) == (64, "full") else 3
            found.append(_ours("Triton", head_dim, mask, 2 * both - 0.037, persistent(head_dim, mask, hops)))
    for head_dim in (128, 64):
        for mask in MASKS:
            for contender, name in (("fa4-deterministic", "FlashAttention 4, deterministic"), ("fa4", "FlashAttention 4")):
                ms = main_kernel_ms(head_dim, mask, contender, "bwd_sm90")
                elapsed = flash_attention_4(head_dim, mask, contender != "fa4")
                found.append(Kernel(name, head_dim, mask, ms, (f"{name} backward d{head_dim} {mask}",), elapsed))
    for mask in MASKS:
        timed = rows_of(H200 / "triton" / "attention.csv")
        (whole,) = (row["median_ms"] for row in timed if (row["shape"], row["contender"]) == (f"d128-{mask}-8192", "flex"))
        parts = ("keys", "queries") if mask == "full" else ("keys, partial", "keys", "queries, partial", "queries")
        names = tuple(f"FlexAttention backward d128 {mask}, {part}" for part in parts)
        # Without the copy of grad_out, once or twice 0.094 ms, and the preprocess, which was timed in other kernels alone.
        ms = float(whole) - 1.5 * 0.094 - 0.07
        found.append(Kernel("FlexAttention", 128, mask, ms, names, flex_attention(128, mask)))
    return found


def _of(row: Mapping[str, str], *wanted: str) -> bool:
    return (row["head_dim"], row["mask"], row["family"]) == wanted


def _ours(name: str, head_dim: int, mask: str, ms: float, elapsed: Elapsed) -> Kernel:
    return Kernel(name, head_dim, mask, ms, (f"{name} d{head_dim} {mask}",), elapsed, is_ours=True)


@cache
def main_loops() -> dict[str, list[Operation]]:
    """The loops of ours that were timed, by name: as Triton 3.6.0 compiled commit 9e2dac3."""
    lines: dict[str, list[tuple[str, ControlCode]]] = {}
    for row in rows_of(H200 / "main_loops.csv"):
        line = f"/*{row['address']}*/ {row['instruction']} ;"
        lines.setdefault(row["loop"], []).append((line, ControlCode.decode(int(row["control"], 16) << 41)))
    loops = {}
    for name, of_one in lines.items():
        instructions = parse("\n".join(line for line, _ in of_one))
        loops[name] = decoded(
            instructions, dict(zip([each.address for each in instructions], [code for _, code in of_one], strict=True))
        )
    return loops


@cache
def replay_of(name: str, constants: Constants) -> Replay:
    """One of our loops, replayed."""
    tma = TMA_BYTES[64 if "d64" in name else 128] if name.startswith("Gluon") else 0
    return replay_loop(main_loops()[name], tma_bytes=tma, constants=constants)


def compared(constants: Constants = Constants()) -> tuple[float, list[dict[str, Any]]]:  # noqa: B008 (frozen)
    """The clock in GHz, and a row per kernel with cycles of a step, predicted and measured ms, and the error in percent.

    Other packages' loops stand in loops.csv with the cycles that the replay gave them, by its own constants.
    """
    published = {row["kernel"]: float(row["cycles"]) for row in rows_of(LOOPS)}
    timed, clocks, rows = kernels(), list[float](), list[dict[str, Any]]()
    for kernel in timed:
        replays = [replay_of(name, constants) for name in kernel.loops] if kernel.is_ours else []
        cycles = [each.cycles for each in replays] or [published[name] for name in kernel.loops]
        clocks.append(kernel.elapsed(cycles, (replays[0].handover_cycles or 0) if replays else 0))
        rows.append({"kernel": str(kernel), "cycles": round(sum(cycles)), "measured ms": kernel.ms})
    ratios = [clock / kernel.ms for kernel, clock in zip(timed, clocks, strict=True) if kernel.name == "Gluon"]
    clocks_per_ms = math.exp(sum(map(math.log, ratios)) / len(ratios))
    for clock, row in zip(clocks, rows, strict=True):
        row["predicted ms"] = clock / clocks_per_ms
        row["error %"] = 100 * (row["predicted ms"] / row["measured ms"] - 1)
    return clocks_per_ms / 1e6, rows


def furthest_off(head_dim: int, constants: Constants = Constants()) -> tuple[float, float, str]:  # noqa: B008 (frozen)
    """Cycles of the loop that Nsight Compute profiled, by how much of a step the replay is ahead or behind at most, and where.

    Both are sums of the time that warps spend before an instruction, from the first of the step on, in percent of it.
    """
    samples = [row for row in rows_of(H200 / "gluon" / "loop_samples.csv") if row["head_dim"] == str(head_dim)]
    loop = main_loops()[f"Gluon d{head_dim} full"]
    cycles, times = times_by_place(loop, tma_bytes=TMA_BYTES[head_dim], constants=constants)
    measured = replayed = worst = 0.0
    place = ""
    for operation, sample in zip(loop, samples, strict=False):
        measured += float(sample["percent"])
        replayed += 100 * times[operation.address] / cycles
        if abs(replayed - measured) > abs(worst):
            worst, place = replayed - measured, sample["instruction"]
    return cycles, worst, place


def elapsed_cycles(head_dim: int) -> float:
    """Clocks a step of that loop by the profiler: those of the whole kernel, less the ends of chains."""
    texts = (H200 / "gluon" / "profiler.txt").read_text().split("Elapsed Cycles")[1:]
    cycles = {dim: float(text.split("cycle")[1].split()[0].replace(",", "")) for dim, text in zip((128, 64), texts, strict=True)}
    chains = HEADS[head_dim] * KV_TILES // CTAS
    return (cycles[head_dim] - chains * CHAIN_END) / (chains * LENGTH // rows_of_ours(head_dim))
