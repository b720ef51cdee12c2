"""Tables of benchmarks/results: what was measured on a GPU, what ran there, and what was executed on a CPU."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.kept import RESULTS, of_newest_torch, rows_of
from benchmarks.markdown import markdown
from dash_inductor.devices import DEVICES, NamedDevice

ROOT = Path(__file__).parents[2]
RAN = ROOT / "dash_inductor" / "first_use" / "ran.json"
Row = dict[str, str]

# The backwards of the first page: what it calls them, and what `qualify` does.
COMPARED = {
    "PyTorch, strict mode": "sdpa-flash-strict",
    "FlexAttention": "flex",
    "dash-inductor": "ours-gluon",
    "FlashAttention 4, deterministic": "fa4-deterministic",
    "FlashAttention 4, not deterministic": "fa4",
}
COMPARED_SHAPE = "d128-causal-8192"
RUNS = ("gluon", "triton")  # folders of h200; a backward is of the first that has it


class Kind(NamedTuple):
    """What shares a kernel's code: template and language, mask, dtype and head dim."""

    kernel: str
    mask: str
    dtype: str
    head_dim: int


KERNELS = {
    "one pass, Gluon": ("one_pass", "gluon"),
    "one pass, Triton": ("one_pass", "triton"),
    "two passes, Triton": ("two_pass", "triton"),
}
BY_NAME = {names: kernel for kernel, names in KERNELS.items()}
MASKS = {"full": "full", "causal": "causal", "block_mask": "in blocks"}
# A kind with dropout or functions of the scores has more words, which this refuses: LEGEND says that there is none.
RAN_TEXT = re.compile(r"(\w+) in (\w+), (\w+) mask, (\w+), head dim (\d+)")
LEGEND = """\
- *timed*: gradients were right on that GPU, bits were equal from launch to launch, and the time was taken.
- *ran*: the same, without a time.
- *executed*: compiled kernels for that GPU's architecture, as PTX, were executed on a CPU by `make execute`: gradients were right,
  and there was no data race. On the GPU itself they are unverified.
- *unverified*: compiled at most.

Masks are full, causal, or *in blocks*, which is any other. Numbers are head dims. Nothing that is timed or ran had dropout or a
function of the scores."""


def ran(_: str) -> str:
    """A row per GPU, a column per kernel: how far it was tried there."""
    timed, known, executed = _timed(), tried(), never_bad()
    rows = []
    for gpu in sorted(DEVICES.values(), key=lambda gpu: gpu.name not in known):
        cells = [_how_far(kernel, gpu, timed.get(gpu.name, set()), known.get(gpu.name, set()), executed) for kernel in KERNELS]
        rows.append({"GPU": gpu.key.upper(), **dict(zip(KERNELS, cells, strict=True))})
    rows.append({"GPU": "any other", **dict.fromkeys(KERNELS, "unverified")})
    return f"{markdown(rows)}\n\n{LEGEND}"


def _how_far(kernel: str, gpu: NamedDevice, timed: set[Kind], tried: set[Kind], executed: set[tuple[str, int]]) -> str:
    """A cell of the table of what ran."""
    if kernel == "one pass, Gluon" and gpu.arch != 90:
        return "not made for it"
    known = {"timed": timed, "ran": tried - timed}
    said = [f"{word}: {_named(kind for kind in kinds if kind.kernel == kernel)}" for word, kinds in known.items()]
    said = [text for text in said if not text.endswith(": ")]
    rest = "executed" if (KERNELS[kernel][1], gpu.arch) in executed else "unverified"
    return "; ".join([*said, f"the rest {rest}"]) if said else rest


def _named(kinds: Iterable[Kind]) -> str:
    """Kinds of one kernel in words: masks and dtypes that share their head dims stand together."""
    dims: dict[tuple[str, str], list[int]] = defaultdict(list)
    for kind in sorted(kinds, key=lambda kind: (kind.dtype, list(MASKS.values()).index(kind.mask), kind.head_dim)):
        dims[kind.mask, kind.dtype].append(kind.head_dim)
    together: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (mask, dtype), heads in dims.items():
        together[dtype, tuple(heads)].append(mask)
    return ", ".join(
        f"{' and '.join(masks)} {' and '.join(map(str, heads))} in {dtype}" for (dtype, heads), masks in together.items()
    )


def _timed() -> dict[str, set[Kind]]:
    """By the GPU's name, what has a time in benchmarks/results."""
    found: dict[str, set[Kind]] = defaultdict(set)
    for environment in sorted(RESULTS.glob("*/*/environment.json")):
        gpu = json.loads(environment.read_text())["gpu"]
        for row in rows_of(environment.with_name("attention.csv")):
            kernel = {"ours": "one pass, Triton", "ours-gluon": "one pass, Gluon"}.get(row["contender"])
            if kernel and row["median_ms"] and row["same_bits"] == "True":
                found[gpu].add(Kind(kernel, row["mask"], row["dtype"], int(row["head_dim"])))
        if (tables := environment.with_name("gluon_tables.csv")).exists():
            found[gpu] |= {Kind("one pass, Gluon", row["mask"], "bf16", int(row["head_dim"])) for row in rows_of(tables)}
    return found


def tried() -> dict[str, set[Kind]]:
    """By the GPU's name, the kinds that the package knows to have run there."""
    found = {}
    for gpu, kinds in json.loads(RAN.read_text()).items():
        matches = [RAN_TEXT.fullmatch(kind) for kind in kinds]
        found[gpu] = {
            Kind(BY_NAME[match[1], match[2]], MASKS[match[3]], match[4], int(match[5])) for match in matches if match is not None
        }
        assert len(found[gpu]) == len(kinds), kinds
    return found


def never_bad() -> set[tuple[str, int]]:
    """Language and architecture of what was executed from PTX, with no bad result."""
    bad: dict[tuple[str, int], int] = defaultdict(int)
    for row in _executions():
        arch, _, language = row["kernels"].removeprefix("sm_").partition(", ")
        bad[language.lower() or "triton", int(arch)] += int(row["bad"])
    return {key for key, count in bad.items() if not count}


def _executions() -> Iterator[Row]:
    for path in sorted((RESULTS / "executed").glob("*.csv")):
        yield from rows_of(path)


def executed(_: str) -> str:
    """A row per Triton and architecture, of benchmarks/results/executed."""
    columns = ("kernels", "triton", "bad", "cells", "with races", "fence left out", "error, bf16", "redundant", "commit")
    return markdown([{name: row[name] for name in columns} for row in _executions()])


def compared() -> list[tuple[str, Row]]:
    """The rows of COMPARED: what the page calls it, and what was measured; KeyError where benchmarks/results/h200 has no time."""
    rows = [row for run in RUNS for row in rows_of(RESULTS / "h200" / run / "attention.csv") if row["shape"] == COMPARED_SHAPE]
    first = {row["contender"]: row for row in reversed(rows) if row["median_ms"]}
    return [(shown, first[contender]) for shown, contender in COMPARED.items()]


def beside_others(_: str) -> str:
    """The table of the first page."""
    return markdown(
        [
            {
                "backward of attention": shown,
                "ms": f"{float(row['median_ms']):.2f}",
                "TFLOPS": f"{float(row['tflops']):.0f}",
                "same bits twice": _yes(row["same_bits"]),
            }
            for shown, row in compared()
        ]
    )


def measured(folder: str) -> str:
    """A row per shape and contender with a time, of a folder in benchmarks/results."""
    rows = rows_of(RESULTS / folder / "attention.csv")
    timed = [row for row in rows if row["status"] == "ok" and row["median_ms"] and row["contender"] != "ours-unordered"]

    def line(row: Row) -> dict[str, str]:
        median, low, high, tflops, speedup = (float(row[name]) for name in ("median_ms", "p20_ms", "p80_ms", "tflops", "speedup"))
        return {
            "shape": row["shape"],
            "contender": row["contender"],
            "ms": f"{median:.3f}",
            "same bits": _yes(row["same_bits"]),
            "20 % to 80 %": f"{low:.3f} to {high:.3f}",
            "TFLOPS": f"{tflops:.0f}",
            "as fast as strict mode": f"{speedup:.2f}",
        }

    return markdown(list(map(line, timed)))


def _yes(text: str) -> str:
    return {"True": "yes", "False": "no"}[text]


def families(_: str) -> str:
    """A line per family of models, a column per case, of benchmarks/results/models."""
    rows = rows_of(of_newest_torch("models"))
    cases = [*dict.fromkeys(row["case"] for row in rows)]
    cells: Mapping[tuple[str, str], str] = {(row["family"], row["case"]): row["rewritten of called"] for row in rows}
    names = [*dict.fromkeys(row["family"] for row in rows)]
    return markdown([{"": name, **{case: cells.get((name, case), "") for case in cases}} for name in names])
