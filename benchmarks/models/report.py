"""The page of the models: a table of families and cases, and under each family what became of its attentions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from ..markdown import markdown
from ..reach.page import section
from .families import CASES, DOCUMENTS, FAMILIES, LAYERS, LENGTH, PADDING, SOURCE_LENGTH

Row = Mapping[str, Any]

INTRODUCTION = f"""\
# Models

Written by `python -m benchmarks.models --out docs/models.md`, with transformers {{transformers}} and torch {{torch}}, in the
emulation, which runs on a CPU: on a GPU, SDPA takes other ops.

[The last part](#other-libraries-and-real-head-dims) is of many libraries, at real sizes of heads. It is written by `make reach`.

Each model has {LAYERS} layers, or {LAYERS} in its encoder and {LAYERS} in its decoder. Weights and inputs are fp32. It is compiled
as a whole, with static shapes, and takes one step of training in each case: on two sequences of {LENGTH} tokens, or of
{SOURCE_LENGTH} tokens for an encoder before a decoder of {LENGTH}.

| case | |
| --- | --- |
| plain | no mask; `use_cache` as configured, which is True of decoders |
| mask of ones | `attention_mask`, and `decoder_attention_mask` where there is one |
| padded | the same with {PADDING} zeros, on the right of a sequence; in one stack of layers also on the left of another |
| packed | documents of {" and ".join(map(str, DOCUMENTS))} tokens in a row, told by `position_ids`; `use_cache=False` |
| `use_cache=False` | no mask |
| checkpointing | `activation_checkpointing_enable()`, no mask |
| dropout as configured | as the configuration's class has it; [a GPU is asked first](guarantees.md#dropout) |

- *calls*: of `F.scaled_dot_product_attention` or `flex_attention` in a forward that is not compiled.
- *decided on*: attentions in `dash_inductor.decisions()`. *by a mask*: the kernel asks the function of a mask or of a BlockMask.
- *error*: of the worst parameter's gradient against float64 with attention written out, relative to the gradient's largest element;
  in brackets, the same of fp32 with attention written out. Under dropout, against fp32 that is not compiled and drops the same.
- *bits*: of all gradients, in two interleavings of the CTAs."""

OTHERS = "## Other libraries, and real head dims"


def page(rows: Sequence[Row]) -> str:
    """The page in Markdown."""
    parts = [INTRODUCTION.format(transformers=version("transformers"), torch=version("torch").partition("+")[0])]
    parts += ["## Attentions rewritten, of those called", "A cell is empty where the case means nothing to the family."]
    parts.append(markdown(_summary(rows)))
    for name, family in FAMILIES.items():
        own = [line(row) for row in rows if row["family"] == name]
        heading = f'## {name}\n\n`{family.model}`, `attn_implementation="{family.attention}"`'
        parts.append(f"{heading}{'; ' if family.note else ''}{family.note}.")
        parts.append(
            markdown([{key: value for key, value in one.items() if key != "family"} for one in own]) if own else "Not run."
        )
    return "\n\n".join([*parts, OTHERS, "<!-- reach: models -->", section("models"), "<!-- end -->"]) + "\n"


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
        "error": f"{row['error']:.0e}" + ("" if row["eager_error"] is None else f" ({row['eager_error']:.0e})"),
        "bits": f"{different} gradients differ" if different else "equal",
    }


def _mask(mask: str) -> str:
    return "by a mask" if mask == "block_mask" else mask


def _summary(rows: Sequence[Row]) -> list[dict[str, str]]:
    """A line per family, a column per case."""
    cells = {(row["family"], row["case"]): _cell(row) for row in rows}
    return [{"": name, **{case: cells.get((name, case), "") for case in CASES}} for name in FAMILIES]


def _cell(row: Row) -> str:
    if "failure" in row:
        return "failed"
    return "no dropout" if "left_out" in row else f"{sum(row['rewritten'].values())} of {row['calls']}"
