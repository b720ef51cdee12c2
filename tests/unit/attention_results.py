"""Results and rows that tests of the attention benchmark make up, as if they had been measured on an H100."""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from dash_inductor.decision import Decision
from dash_inductor.qualify import contenders as who
from dash_inductor.qualify.measure import Result
from dash_inductor.qualify.report import rows_of
from dash_inductor.qualify.rows import OK, Row
from dash_inductor.qualify.shapes import SHAPES, Shape
from dash_inductor.templates.operands import Operands

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "sms": 132, "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}
TINY = Shape("tiny", "causal", 2, 4, 2, 37, 16)
PACKED = (5, 1, 31)
TINY_FLEX = {
    "window": replace(TINY, window=9),
    "documents": replace(TINY, documents=PACKED),
    "soft-cap": replace(TINY, softcap=1.5),
    "everything": replace(TINY, window=9, documents=PACKED, softcap=1.5),
    "both directions": replace(TINY, mask="full", window=9, documents=PACKED),
    "both directions, soft-cap": replace(TINY, mask="full", softcap=1.5),
    "a window longer than some documents": replace(TINY, mask="full", kv_heads=4, window=30, documents=PACKED),
    "alibi": replace(TINY, alibi=True),
}
STOCK = who.contenders()
KNOWN = STOCK | who.tuned()
COMMON = {"run": "test", "environment": H100, "baseline": who.BASELINE}
DECISION = Decision(
    op="op", device="h100", dtype="bf16", mask="causal", batch=2, heads=16, kv_heads=16, q_len=8192, kv_len=8192, head_dim=128,
    tile="64x128x128", family="descending", roles=4, heads_in_flight=32, kernel="triton", launch="grouped", predicted_us=2500.0,
    workspace_bytes=1 << 27,
)  # fmt: skip


def result(name: str, *times: float, error: float = 0.002, **changed) -> Result:
    """Of a contender that was launched and is right; `ours` has a decision."""
    prepared = who.Prepared(lambda: (), DECISION if name == "ours" else None)
    return replace(Result(KNOWN[name], OK, prepared, True, {"dq": error, "dk": 0.001, "dv": 0.001}, 1 << 20, "", times), **changed)


def flagship_rows(ours: tuple[float, ...] = (2.0, 4.0, 2.5)) -> list[Row]:
    """Of the baseline, ours, its twin without order, and a contender that is not available."""
    results = [
        result(who.BASELINE, 6.0, 12.0, 7.0),
        result("ours", *ours),
        result("ours-unordered", 1.0, 2.0, 1.0, same_bits=False),
        Result(STOCK["fa4"], "not available: flash_attn.cute is not importable"),
    ]
    return rows_of(SHAPES[0], results, mhz=1980, **COMMON)


def empty_operands(device: str, heads: int, head_dim: int) -> Operands:
    """Of the Gluon kernel: two causal sequences of 512, as models have their tensors, and a table of 8 numbers."""
    empty = functools.partial(torch.empty, device=device)
    q, k, v, do, dk, dv = (empty(2, 512, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2) for _ in range(6))
    rows, dq, table = empty(2 * heads * 512), empty(2 * heads, 512 * head_dim), empty(8, dtype=torch.int32)
    tensors = q, k, v, do, rows, rows, table, None, None, None, dq, dk, dv
    block_m = 128 if head_dim == 64 else 64
    return Operands(*tensors, [], [], 4, cooperative=True, block_m=block_m, block_n=128, causal=True, scale=0.125)


def altered(name: str, change: Callable[[], float] = lambda: 0, before: Callable[[], object] = lambda: None) -> who.Contender:
    """The baseline on the CPU under another name; each launch calls `before`, and `change` gives what it adds to the gradients."""

    def prepare(shape: Shape, inputs) -> who.Prepared:
        exact = STOCK[who.BASELINE].prepare(shape, inputs).launch

        def launch():
            before()
            return tuple(grad + change() for grad in exact())

        return who.Prepared(launch)

    return who.Contender(name, True, prepare, lambda device: None)
