"""When the Gluon kernel is where, chain by chain: a variant of it whose warps that multiply note clocks of the GPU.

Each chain notes when it begins, when its first S is there, when its last step is done, and when dK and dV are written: nanoseconds
of %globaltimer, which all SMs share, and cycles of its SM. The kernel as it is has nothing of this: the copy is made by edits.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import templates
from . import schedules
from .rows import write

FILE = "marks.csv"
PLACES = ("begin", "first_s", "last_step", "end")
MOST_CHAINS = 64  # that a CTA notes
PER_CTA = MOST_CHAINS * len(PLACES) * 2  # int64: nanoseconds and cycles
MARK = '''

@gluon.jit
def mark(memory, turn, place: gl.constexpr):
    # The first thread notes the GPU's nanoseconds and its SM's cycles.
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .b32 thread;
            .reg .b64 now, cycle;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.u64 now, %globaltimer;
            mov.u64 cycle, %clock64;
            @first st.global.v2.b64 [$1], {now, cycle};
            mov.b32 $0, 0;
        }
        """,
        "=r,l,~{memory}",
        [(memory + (turn * 4 + place) * 4).to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
'''
# File -> what stands there once, and what stands there instead.
EDITS: dict[str, Sequence[tuple[str, str]]] = {
    "functions.py": [("\n\n@gluon.jit\ndef thread():", f"{MARK}\n\n@gluon.jit\ndef thread():")],
    "launch.py": [
        ("x.table.new_empty(plan.own_rows)", "MEMORY[0]"),
        ("\n\nclass Lists(", "\nMEMORY: list[Any] = []\n\n\nclass Lists("),
    ],
    "kernel.py": [
        ("        ROWS += ticket * (PARTITIONS + HAS_SHARES) * attention.nq\n", f"        ROWS += ticket * {2 * PER_CTA}\n"),
    ],
    "consume.py": [
        ("            dk = gl.zeros(", "            mark(walk.own_row, turn, 0)\n            dk = gl.zeros("),
        *(
            (
                f"                        s_t = await_matmuls({in_flight}, deps=[s_t])\n",
                f"                        s_t = await_matmuls({in_flight}, deps=[s_t])\n"
                "                        if step == 0:\n                            mark(walk.own_row, turn, 1)\n",
            )
            for in_flight in (1, "PARTS")  # of 128 queries at once, and in parts of 64
        ),
        (
            "            end_chain(outputs, head, j, dk, dv, dq_tiles, attention, DKV_LAYOUT)\n",
            "            mark(walk.own_row, turn, 2)\n"
            "            end_chain(outputs, head, j, dk, dv, dq_tiles, attention, DKV_LAYOUT)\n"
            "            mark(walk.own_row, turn, 3)\n",
        ),
        ("    end_chain,\n", "    end_chain,\n    mark,\n"),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """A chain's times: ns on a clock that all CTAs share, from the first chain's begin, and cycles of its SM from its own."""

    head_dim: int
    mask: str
    family: str
    cta: int
    chain: int
    begin_ns: int
    first_s_ns: int
    last_step_ns: int
    end_ns: int
    first_s_cycles: int
    last_step_cycles: int
    end_cycles: int


def run(folder: Path) -> int:
    """Writes FILE for each shape of `schedules`, by the schedule that comes first, and prints what chains spend where."""
    with tempfile.TemporaryDirectory() as copies:
        kernel = marked(Path(copies, "marked"))
        write(folder / FILE, Mark, (mark for shape in schedules.SHAPES for mark in chains(kernel, *shape)))
    return 0


def chains(kernel: Any, head_dim: int, mask: str) -> list[Mark]:
    """Those of one launch of what `marked` has. ValueError for a table by which a CTA may have more than it can note."""
    place, operands = next(schedules.schedules(schedules.resolution(head_dim, mask), "cuda"))
    heads = operands.key.shape[0] * operands.key.shape[1]
    _roles, heads_in_flight, slots = operands.table[:3].tolist()
    if (most := -(-heads // heads_in_flight) * slots) > MOST_CHAINS:
        raise ValueError(f"a CTA has {most} chains, more than the {MOST_CHAINS} that it can note")
    memory = torch.zeros(operands.workers * PER_CTA, dtype=torch.int64, device="cuda")
    kernel.MEMORY[:] = [memory.view(torch.int32)]
    for _ in range(3):  # the last is kept: the first compiles
        schedules.launched(kernel, operands)
    found = list(marks_of(memory.cpu(), place))
    print(f"  {place}, medians in ns: {', '.join(f'{name} {value:.0f}' for name, value in spent(found).items())}")
    return found


def marked(folder: Path) -> Any:
    """The launch of a copy of templates/gluon that notes its clocks; ValueError where the kernel is not as EDITS have it."""
    shutil.copytree(Path(templates.__file__).parent / "gluon", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in EDITS.items():
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in edits:
            if text.count(old) != 1:
                raise ValueError(f"templates/gluon/{name} has {text.count(old)} times, not once: {old.strip()}")
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    return schedules.kernel_in(folder)


def marks_of(memory: Tensor, place: schedules.Timed) -> Iterator[Mark]:
    """The chains of each CTA, from the kernel's memory."""
    noted = memory.view(-1, MOST_CHAINS, len(PLACES), 2)
    first = int(noted[..., 0, 0][noted[..., 0, 0] > 0].min())
    for cta, chain in itertools.product(range(noted.shape[0]), range(MOST_CHAINS)):
        (begin, *ns), (cycle, *cycles) = noted[cta, chain].T.tolist()
        if begin:
            times = [begin - first, *(x - first for x in ns), *(x - cycle for x in cycles)]
            yield Mark(place.head_dim, place.mask, place.family, cta, chain, *times)


def spent(marks: Sequence[Mark]) -> Mapping[str, float]:
    """Medians over the chains of one launch, in ns."""
    parts = {
        "until the first S": [mark.first_s_ns - mark.begin_ns for mark in marks],
        "steps": [mark.last_step_ns - mark.first_s_ns for mark in marks],
        "dK and dV": [mark.end_ns - mark.last_step_ns for mark in marks],
        "until the CTA's next chain": [b.begin_ns - a.end_ns for a, b in itertools.pairwise(marks) if a.cta == b.cta],
    }
    return {name: statistics.median(values) for name, values in parts.items() if values}
