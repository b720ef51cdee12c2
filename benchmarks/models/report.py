"""The page of the models: a table of families and cases, and under each family what became of its attentions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from ..attention.report_md import markdown
from .families import CASES, DOCUMENTS, FAMILIES, LAYERS, LENGTH, PADDING, SOURCE_LENGTH

Row = Mapping[str, Any]

INTRODUCTION = f"""\
# Models of transformers

Written by `python -m benchmarks.models --out docs/models.md`: transformers {{transformers}}, torch {{torch}}, in the emulation. No GPU
was asked, where SDPA takes other ops than on a CPU.

Each model has {LAYERS} layers (of an encoder and of a decoder where there are both) and heads of 16, weights and inputs are fp32, and it is
compiled as a whole with static shapes. It takes one step of training per case, on two sequences of {LENGTH} tokens, where a decoder reads
another sequence on {SOURCE_LENGTH} of that.

| case | |
| --- | --- |
| plain | no mask, and `use_cache` as configured, which is True of decoders |
| mask of ones | `attention_mask` of ones, also `decoder_attention_mask` |
| padded | the same with {PADDING} zeros on the right of one sequence; for models that only decode, and for BERT, also on the left of the other |
| packed | one sequence of {len(DOCUMENTS)} documents, of {" and ".join(map(str, DOCUMENTS))} tokens, told by `position_ids`, with `use_cache=False` |
| `use_cache=False` | no mask |
| checkpointing | `activation_checkpointing_enable()`, no mask |
| dropout as configured | as the configuration's class has it; in all other cases there is none |

Calls are those of `F.scaled_dot_product_attention` and `flex_attention` in the forward of the model while it is not compiled, decided on
are the attentions in `dash_inductor.decisions()`. By a BlockMask means that the kernel asks the mask, which it reads out of the graph.
The error is that of the worst parameter's gradient against float64 with attention written out, relative to the largest element of
that gradient. Bits are those of all gradients in two interleavings of the CTAs."""


def page(rows: Sequence[Row]) -> str:
    """The page in Markdown."""
    parts = [INTRODUCTION.format(transformers=version("transformers"), torch=version("torch").partition("+")[0])]
    parts += ["## Attentions rewritten, of those called", markdown(_summary(rows))]
    for name, family in FAMILIES.items():
        own = [line(row) for row in rows if row["family"] == name]
        heading = f"## {name}\n\n`{family.model}`, `attn_implementation=\"{family.attention}\"`"
        parts.append(f"{heading}{'; ' if family.note else ''}{family.note}.")
        parts.append(markdown([{key: value for key, value in one.items() if key != "family"} for one in own]) if own else "Not run.")
    return "\n\n".join(parts) + "\n"


def line(row: Row) -> dict[str, str]:
    """A row as it is shown."""
    shown = {"family": row["family"], "case": row["case"]}
    rest = dict.fromkeys(("calls", "decided on", "rewritten", "declined", "error", "bits"), "")
    if said := row.get("failure", row.get("left_out")):
        return shown | rest | {"declined": f"failed: {said}" if "failure" in row else f"not run: {said}"}
    different = len(row["different_bits"])
    return shown | {
        "calls": str(row["calls"]),
        "decided on": str(row["decisions"]),
        "rewritten": ", ".join(f"{count} {_mask(mask)}" for mask, count in row["rewritten"].items()),
        "declined": "; ".join(f"{count}: {reason}" for reason, count in row["declined"].items()),
        "error": f"{row['error']:.0e} ({row['worst']})" if "error" in row else "random",
        "bits": f"{different} gradients differ" if different else "equal",
    }


def _mask(mask: str) -> str:
    return "by a BlockMask" if mask == "block_mask" else mask


def _summary(rows: Sequence[Row]) -> list[dict[str, str]]:
    """A line per family, a column per case."""
    cells = {(row["family"], row["case"]): _cell(row) for row in rows}
    return [{"": name, **{case: cells.get((name, case), "") for case in CASES}} for name in FAMILIES]


def _cell(row: Row) -> str:
    if "failure" in row:
        return "failed"
    return "none" if "left_out" in row else f"{sum(row['rewritten'].values())} of {row['calls']}"
