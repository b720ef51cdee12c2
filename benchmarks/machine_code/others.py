"""Main loops of other packages' attention on an H100, replayed: FlashAttention 4's and stock FlexAttention's backwards.

`python -m benchmarks.machine_code measured --others` keeps their figures in benchmarks/results/published/loops.csv. The kernel of
FlashAttention 4 compiles without a GPU where the package flash-attn-4 is installed; FlexAttention's is that of the installed torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .replay import Replay, loops_of, replay_loop

PACKAGE = "flash-attn-4"
# Compiles a backward for a GPU that is not there. FlashAttention has fake tensors for all of its arguments but the semaphores.
COMPILE = """
import sys, cutlass, torch
import cutlass.cute as cute
from torch._subclasses.fake_tensor import FakeTensorMode
from flash_attn.cute import interface, utils

def semaphores(x, leading_dim, alignment=16, static_modes=None, stride_order=None):
    shape = tuple(x.shape[i] if i == leading_dim else cute.sym_int() for i in range(x.ndim))
    rank = {dim: place for place, dim in enumerate(reversed(stride_order or x.dim_order()))}
    order = tuple(rank[dim] for dim in range(x.ndim))
    return cute.runtime.make_fake_compact_tensor(cutlass.Int32, shape, stride_order=order, assumed_align=alignment)

utils.convert_from_dlpack_leading_static = semaphores
head_dim, causal, deterministic = map(int, sys.argv[1:])
with FakeTensorMode():
    sizes = 2, 8192, 2048 // head_dim
    tensors = [torch.empty(*sizes, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(5)]
    logsumexp = torch.empty(2, 2048 // head_dim, 8192, device="cuda")
    interface._flash_attn_bwd(*tensors, logsumexp, causal=bool(causal), deterministic=bool(deterministic))
"""


def replayed(tma_bytes: dict[int, int]) -> Iterator[dict[str, Any]]:
    """A row of loops.csv for each loop of what is installed."""
    for head_dim in (64, 128):
        for mask in ("full", "causal"):
            for deterministic in (True, False):
                rows = 80 if (head_dim, mask) == (128, "full") else 128 if head_dim == 64 else 64
                # Tiles of Q, dO and dQ, and rows of statistics: in proportion to the rows, which are 128 or 64 with us.
                moved = tma_bytes[head_dim] * rows // (128 if head_dim == 64 else 64)
                (loop,) = loops_of(flash_attention_4(head_dim, mask == "causal", deterministic), 1)
                name = f"FlashAttention 4{', deterministic' if deterministic else ''} backward d{head_dim} {mask}"
                yield row(name, f"{PACKAGE} {version(PACKAGE)}", len(loop), replay_loop(loop, tma_bytes=moved))


def flash_attention_4(head_dim: int, causal: bool, deterministic: bool) -> bytes:
    """The cubin of its main kernel; ValueError where it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        names = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
        kept = {"CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": folder}
        command = [sys.executable, "-c", COMPILE, *map(str, map(int, (head_dim, causal, deterministic)))]
        done = subprocess.run(command, env=os.environ | names | kept, capture_output=True, text=True)
        found = [*Path(folder).glob("*BackwardSm90*.cubin")]
        if done.returncode or len(found) != 1:
            raise ValueError(f"{PACKAGE} did not compile: {done.stderr[-500:]}")
        return found[0].read_bytes()


def flex_attention() -> Iterator[dict[str, Any]]:
    """A row for each loop of stock FlexAttention's backward, head dim 128, without a mask and under a causal one."""
    from .gates import Cell, stock_kernel

    packages = f"torch {version('torch').partition('+')[0]}, triton {version('triton')}"
    for mask, parts in (("full", ("keys", "queries")), ("causal", ("keys, partial", "keys", "queries, partial", "queries"))):
        kernel = stock_kernel(Cell("sm_90", "one_pass", "bf16", 128, "flex" if mask == "full" else "flex-causal"))
        loops: Sequence[Any] = loops_of(kernel.cubin, len(parts))
        for part, loop in zip(parts, loops, strict=True):
            yield row(f"FlexAttention backward d128 {mask}, {part}", packages, len(loop), replay_loop(loop))


def row(name: str, package: str, instructions: int, replay: Replay) -> dict[str, Any]:
    """What is kept of a loop."""
    figures = {"instructions": instructions, "flop": replay.flop, "cycles": round(replay.cycles)}
    return {"kernel": name, "package": package} | figures
