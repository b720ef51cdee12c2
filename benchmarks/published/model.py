"""From the clocks of a main loop to the time of a launch, and the clock law that a fit to published figures gives.

CTAs are dealt to 132 SMs, each to the first that is free. Before and after its steps a CTA
takes some clocks, and other kernels of the call read and write memory. Both are guesses, the same for all kernels.
"""

from __future__ import annotations

import csv
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine_code.replay.pricing import ClockLaw, tensor_share

from .kernels import KERNELS, Kernel
from .loops import Loop

FIGURES = Path(__file__).with_name("figures.csv")
SMS = 132  # H100 SXM
PROLOGUE = {True: 4000, False: 3000}  # clocks of a CTA besides its steps, of a backward and of a forward
HBM_BYTES_PER_SECOND = 2.8e12  # of 3.35e12, by small kernels
LAUNCH_SECONDS = 3e-6
LONG = 8192  # from this length on errors are asserted


@dataclass(frozen=True)
class Figure:
    """One published speed, in TFLOPS of the whole call.

    `deterministic`: of FlashAttention-2's deterministic backward, which is the same loop in another launch.
    """

    kernel: Kernel
    batch: int
    heads: int
    length: int
    tflops: float
    source: str
    deterministic: bool = False

    @property
    def flop(self) -> float:
        """As all of the sources count: half of a full mask's under a causal one."""
        full = (10 if self.kernel.backward else 4) * self.batch * self.heads * self.length**2 * self.kernel.head_dim
        return full / 2 if self.kernel.mask == "causal" else full

    @property
    def seconds(self) -> float:
        """That it took."""
        return self.flop / self.tflops / 1e12

    @property
    def is_held_out(self) -> bool:
        """Whether the law was fitted without it."""
        return self.deterministic or bool(self.kernel.marked)


def figures() -> list[Figure]:
    """figures.csv."""
    with open(FIGURES, newline="") as file:
        return [
            Figure(
                KERNELS[f"{row['kernel']} {row['pass']} d{row['head_dim']} {row['mask']}"],
                batch=int(row["batch"]),
                heads=int(row["heads"]),
                length=int(row["length"]),
                tflops=float(row["tflops"]),
                source=row["source"],
                deterministic=row["deterministic"] == "1",
            )
            for row in csv.DictReader(file)
        ]


def makespan(jobs: Iterable[float], slots: int) -> float:
    """When the last job ends, each given to the first slot that is free.

    >>> makespan([3, 2, 2], 2)
    4.0
    """
    free = [0.0] * slots
    for job in jobs:
        heapq.heappush(free, heapq.heappop(free) + job)
    return max(free)


def chains(kernel: Kernel, length: int) -> list[int]:
    """The steps of each CTA of a head: of a backward one for each KV tile, of a forward for each Q tile."""
    rows, columns, causal = kernel.rows, kernel.columns, kernel.mask == "causal"
    if kernel.backward:
        tiles = math.ceil(length / rows)
        return [tiles - (j * columns // rows if causal else 0) for j in range(math.ceil(length / columns))]
    seen = (min(length, (i + 1) * rows) if causal else length for i in range(math.ceil(length / rows)))
    return [math.ceil(each / columns) for each in seen]


def splits(figure: Figure) -> int:
    """CTAs of a head, each with a dQ of its own, in FlashAttention-2's deterministic backward."""
    return min(math.ceil(SMS / (figure.batch * figure.heads)), len(chains(figure.kernel, figure.length)))


def clocks(figure: Figure, loop: Loop) -> float:
    """Of the main kernel."""
    kernel = figure.kernel
    share = splits(figure) if figure.deterministic else 0  # there a CTA has every so-manieth chain of its head
    of_head = chains(kernel, figure.length)
    of_ctas = [of_head[first::share] for first in range(share)] if share else [[steps] for steps in of_head]
    jobs = [sum(steps * loop.cycles + PROLOGUE[kernel.backward] for steps in each) * kernel.ctas for each in of_ctas]
    jobs *= figure.batch * figure.heads
    return makespan(sorted(jobs, reverse=True) if kernel.longest_first else jobs, SMS * kernel.ctas)


def others_seconds(figure: Figure) -> float:
    """Of launches, and of what other kernels of a backward read and write: out and dO; dQ in fp32 cleared, read, and written."""
    if not figure.kernel.backward:
        return LAUNCH_SECONDS
    elements = figure.batch * figure.heads * figure.length * figure.kernel.head_dim
    buffers = splits(figure) if figure.deterministic else 1
    return elements * (6 + 8 * buffers) / HBM_BYTES_PER_SECOND + 3 * LAUNCH_SECONDS


def predicted(figure: Figure, loop: Loop, law: ClockLaw) -> float:
    """TFLOPS of the whole call."""
    ghz = law.ghz(tensor_share(loop.flop, loop.cycles))
    return figure.flop / (clocks(figure, loop) / ghz / 1e9 + others_seconds(figure)) / 1e12


def exact_ghz(figure: Figure, loop: Loop) -> float:
    """The clock at which the prediction is the published figure."""
    return clocks(figure, loop) / (figure.seconds - others_seconds(figure)) / 1e9


def fit(known: Sequence[Figure], loops: dict[str, Loop]) -> ClockLaw:
    """The law with the least squared error of clocks, in which each kernel counts once, however many figures it has."""
    import numpy

    count = Counter(figure.kernel.label for figure in known)
    shares = [tensor_share(loops[each.kernel.label].flop, loops[each.kernel.label].cycles) for each in known]
    exact = [exact_ghz(each, loops[each.kernel.label]) for each in known]
    weights = [count[each.kernel.label] ** -0.5 for each in known]  # numpy squares them
    slope, intercept = numpy.polyfit(shares, exact, 1, w=weights)
    return ClockLaw(float(intercept), -float(slope))
