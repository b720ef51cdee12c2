"""What the pages say of the rows in benchmarks/results/reach: `python -m docs.generate` writes it."""

from __future__ import annotations

from collections.abc import Sequence

from ..kept import of_newest_torch
from ..markdown import markdown
from .report import MANY_CHAINS, Row, by_gluon, by_kernel, failed, not_gluon, read, reasons, totals

INTRODUCTION = """\
What `dash_inductor.explain(model, ..., device="h100")` says of models at the head dims that people train, with few layers and a
small vocabulary, under bf16 autocast and in strict mode. Nothing is trained. `make reach` asks it.

- *calls*: of attention in a forward that is not compiled: of SDPA, FlexAttention and `varlen_attn`, and each softmax of attention
  that is written out.
- *not seen*: calls of which `explain` says nothing; *failed*: cases without figures.
- *Gluon, of many chains*: rewritten calls of the Gluon kernel in longer sequences or larger batches. These here are short, and many
  calls take two passes for that alone.
- Names of transformers' models end with the implementation of attention: the one that transformers takes by itself, and for some a
  better one too.
- Cases are those above; *ckpt* is checkpointing."""
INTRODUCTION_OF_RECIPES = """\
What `dash_inductor.explain(model, ..., device="h100")` says of training as users write it: at the head dims of the models that are
named, with fewer layers, under bf16 autocast, and in strict mode where no other is named. Nothing is trained. The code is in
`benchmarks/reach/recipes.py`; `make reach LIBRARIES=recipes` asks it."""
RECIPES = "recipes"  # the library of recipes, as rows call it


def section(what: str) -> str:
    """The text of a block: of "models" or of "recipes", as the newest torch of the results has them."""
    file = of_newest_torch("reach")
    rows = [row for row in read(file) if (row["library"] == RECIPES) == (what == RECIPES)]
    return (of_recipes if what == RECIPES else of_models)(rows, file.stem.replace("-", " "))


def of_models(rows: Sequence[Row], torch: str) -> str:
    """Totals, reasons, the better implementations of transformers, and each library's models."""
    versions = {row["library"]: row["version"] for row in rows if row["version"]}
    named = ", ".join(f"{library} {version}" for library, version in versions.items() if library != "torch.nn")
    parts = [
        INTRODUCTION,
        f"With {torch}, {named}.",
        markdown(totals(rows)),
        "Why calls were declined:",
        markdown(reasons(rows)),
        "Rewritten calls by kernel:",
        markdown(by_kernel(rows)),
        "Why rewritten calls do not take the Gluon kernel:",
        markdown(not_gluon(rows)),
    ]
    if better := [row for row in rows if row["better"]]:
        parts += [
            "Where transformers takes by itself an implementation of which less is rewritten than of another:",
            markdown([_beside(row, rows) for row in better]),
        ]
    for library in dict.fromkeys(row["library"] for row in rows):
        parts += [f"### {library}", markdown(_models([row for row in rows if row["library"] == library]))]
    return "\n\n".join(parts)


def of_recipes(rows: Sequence[Row], torch: str) -> str:
    """A line per recipe."""
    return f"{INTRODUCTION_OF_RECIPES}\n\nWith {torch}.\n\n" + markdown([{"recipe": row["model"], **_told(row)} for row in rows])


def _told(row: Row) -> dict[str, object]:
    if failed(row):
        return {"calls": "", "rewritten": "", MANY_CHAINS: "", "declined, and what to do": row["failure"]}
    why = [f"{count}: {reason}. Remedy: {row['remedies'].get(reason) or 'none'}" for reason, count in row["reasons"].items()]
    not_seen = [f"{row['not_seen']} not seen"] if row["not_seen"] else []
    counts = {"calls": row["calls"], "rewritten": row["rewritten"], MANY_CHAINS: by_gluon(row)}
    return counts | {"declined, and what to do": "; ".join([*why, *not_seen])}


def _beside(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    others = [other for other in rows if other["model"] == row["better"] and other["library"] == row["library"]]
    best = ", ".join(map(_cell, others)) or "not measured"
    return {
        "by itself": f"{row['model']}, {row['case']}",
        "rewritten": _cell(row),
        "better": row["better"],
        "rewritten of it": best,
    }


def _models(rows: Sequence[Row]) -> list[dict[str, str]]:
    """A line per model: rewritten of called in each case, and why not all."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        why = list(dict.fromkeys(reason for row in own for reason in row["reasons"]))
        if any(row["not_seen"] for row in own if not failed(row)):
            why.append(f"not seen, in {', '.join(dict.fromkeys(place for row in own for place in row['written_out']))}")
        cells = "; ".join(f"{row['case']}: {_cell(row)}" for row in own)
        lines.append({"model": model, "rewritten of called": cells, "why not all": "; ".join(why)})
    return lines


def _cell(row: Row) -> str:
    return row["failure"] if failed(row) else f"{row['rewritten']} of {row['calls']}"
