"""Main loops of other packages' attention on an H100, replayed: FlashAttention 4's and stock FlexAttention's backwards.

`python -m benchmarks.machine_code measured --others` keeps their figures in benchmarks/results/published/loops.csv, of the versions
that an H200 timed. Both compile without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .measured import MASKS, TMA_BYTES, rows_of_flash_attention_4, rows_of_ours
from .replay import Replay, loops_of, replay_loop

FLASH_ATTENTION_4 = {"flash-attn-4": "4.0.0b36"}
FLEX_ATTENTION = {"torch": "2.11.0", "triton": "3.6.0"}
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


def replayed() -> list[dict[str, Any]]:
    """Rows of loops.csv, of what is installed; ValueError where that is nothing."""
    rows = [*(flex_attention_rows() if is_installed(FLEX_ATTENTION) else ())]
    rows += flash_attention_4_rows() if is_installed(FLASH_ATTENTION_4) else ()
    if not rows:
        raise ValueError(f"nothing that was timed is installed: {text_of(FLEX_ATTENTION)}, or {text_of(FLASH_ATTENTION_4)}")
    return rows


def is_installed(packages: Mapping[str, str]) -> bool:
    """Whether all of them are, in these versions."""
    try:
        return all(version(name).partition("+")[0] == wanted for name, wanted in packages.items())
    except PackageNotFoundError:
        return False


def text_of(packages: Mapping[str, str]) -> str:
    """What the column `package` says of them.

    >>> text_of({"torch": "2.11.0", "triton": "3.6.0"})
    'torch 2.11.0, triton 3.6.0'
    """
    return ", ".join(f"{name} {wanted}" for name, wanted in packages.items())


def flash_attention_4_rows() -> Iterator[dict[str, Any]]:
    """A row of loops.csv for each loop of FlashAttention 4's backward."""
    for head_dim in TMA_BYTES:
        for mask in MASKS:
            for deterministic in (True, False):
                # Tiles of Q, dO and dQ, and rows of statistics: in proportion to the rows.
                moved = TMA_BYTES[head_dim] * rows_of_flash_attention_4(head_dim, mask) // rows_of_ours(head_dim)
                (loop,) = loops_of(flash_attention_4_cubin(head_dim, mask == "causal", deterministic), 1)
                name = f"FlashAttention 4{', deterministic' if deterministic else ''} backward d{head_dim} {mask}"
                yield row(name, text_of(FLASH_ATTENTION_4), len(loop), replay_loop(loop, tma_bytes=moved))


def flash_attention_4_cubin(head_dim: int, causal: bool, deterministic: bool) -> bytes:
    """The cubin of its main kernel; ValueError where it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        names = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
        kept = {"CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": folder}
        command = [sys.executable, "-c", COMPILE, *map(str, map(int, (head_dim, causal, deterministic)))]
        done = subprocess.run(command, env=os.environ | names | kept, capture_output=True, text=True)
        found = [*Path(folder).glob("*BackwardSm90*.cubin")]
        if done.returncode or len(found) != 1:
            raise ValueError(f"{text_of(FLASH_ATTENTION_4)} did not compile: {done.stderr[-500:]}")
        return found[0].read_bytes()


def flex_attention_rows() -> Iterator[dict[str, Any]]:
    """A row of loops.csv for each loop of stock FlexAttention's backward, head dim 128, without a mask and under a causal one."""
    from .gates import Cell, stock_kernel

    for mask, parts in (("full", ("keys", "queries")), ("causal", ("keys, partial", "keys", "queries, partial", "queries"))):
        kernel = stock_kernel(Cell("sm_90", "one_pass", "bf16", 128, "flex" if mask == "full" else "flex-causal"))
        loops: Sequence[Any] = loops_of(kernel.cubin, len(parts))
        for part, loop in zip(parts, loops, strict=True):
            yield row(f"FlexAttention backward d128 {mask}, {part}", text_of(FLEX_ATTENTION), len(loop), replay_loop(loop))


def row(name: str, package: str, instructions: int, replay: Replay) -> dict[str, Any]:
    """What is kept of a loop."""
    figures = {"instructions": instructions, "flop": replay.flop, "cycles": round(replay.cycles)}
    return {"kernel": name, "package": package} | figures
