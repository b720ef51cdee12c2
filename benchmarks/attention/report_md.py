"""The report of a first run on a GPU in Markdown: what to look at first stands first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.red_throughput import Row as Addition
from dash_inductor.devices import key_for
from dash_inductor.devices.cost_files import numbers_of, tomllib

from .report import has_order, targets
from .rows import Row

EXPECTED = ("ok", "not available: ", "refused: ", "left out: ")  # what needs nobody's attention
# run -> (title, what it is asked for)
RUNS = {
    "order": (
        "The price of order",
        "`ours` against itself without waits and releases, whose gradients are wrong: 1.03 is the target.",
    ),
    "tuning": (
        "Tuning",
        "Variants of the one-pass kernel. Where one is faster at every shape by more than p20 .. p80 are apart, the tile table, "
        "RELEASE_AFTER or `kernel` should follow.",
    ),
    "glance": ("Against stock kernels, at a glance", "Five shapes."),
    "table": ("Against all others", "Pictures: attention.png, models.png."),
    "placement": ("Placement", "Schedules that a setting forces: what the cost model should have chosen is the fastest."),
    "two-pass": ("One pass or two", "`ours` should be the faster of the two."),
    "gluon": ("Gluon", "Where it is faster at every shape it may become the default of its head dims."),
}


def report(
    *,
    environments: Mapping[str, Mapping[str, Any]],
    summary: str,
    rows: Sequence[Row],
    additions: Sequence[Addition],
    costs: str | None,
) -> str:
    """The text. `costs` is a cost file."""
    gpu = next(iter(environments.values()))["gpu"]
    parts = [f"# First run on {gpu}", _wrong(rows), _stages(summary), _targets(rows)]
    labels = [*RUNS, *dict.fromkeys(row.run for row in rows if row.run not in RUNS)]
    for label in labels:
        own = [row for row in rows if row.run == label]
        if own:
            parts.append(_run(label, own))
    parts += [_predictions(rows), _costs(gpu, environments, costs), _additions(additions), _environments(environments)]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(lines: Sequence[Mapping[str, object]]) -> str:
    """A table of rows that share their keys.

    >>> print(markdown([{"a": 1, "b": "x|y"}]))
    | a | b |
    | --- | --- |
    | 1 | x\\|y |
    """
    names = list(lines[0])
    cells = [names, ["---"] * len(names), *([str(line[name]).replace("|", "\\|") for name in names] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _wrong(rows: Sequence[Row]) -> str:
    """Statuses that need attention: the same one of several shapes in one line."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if not row.status.startswith(EXPECTED):
            found.setdefault((row.run, row.contender, row.status), []).append(row.shape)
    # What is wrong before what could not run, and that before what there was no time for.
    order = ("wrong", "not deterministic", "failed", "not run")
    lines = [
        {"run": run, "contender": contender, "status": status, "shapes": ", ".join(shapes)}
        for (run, contender, status), shapes in sorted(
            found.items(), key=lambda item: next((n for n, start in enumerate(order) if item[0][2].startswith(start)), -1)
        )
    ]
    return "## What went wrong\n\n" + (markdown(lines) if lines else "No row says so.")


def _stages(summary: str) -> str:
    return f"## Stages\n\n```\n{summary.rstrip()}\n```\n\nWhich tests failed stands in the log.txt of the stage's folder."


def _targets(rows: Sequence[Row]) -> str:
    """Those of the table, or of a glance where there is none."""
    label = next((label for label in ("table", "glance") if any(row.run == label and row.ok for row in rows)), None)
    if label is None:
        return ""
    held = [{**line, "": line[""] or "-"} for line in targets([row for row in rows if row.run == label])]
    return f"## Targets, by the run `{label}`\n\n{markdown(held)}"


def _run(label: str, rows: Sequence[Row]) -> str:
    title, asked = RUNS.get(label, (label, ""))
    baseline = rows[0].baseline
    names = [
        name for name in dict.fromkeys(row.contender for row in rows) if any(_timed(row) for row in rows if row.contender == name)
    ]
    parts = [f"## {title}", asked]
    if not names:
        return "\n\n".join(filter(None, [*parts, "Nothing was timed."]))
    parts.append(
        f"TFLOPS, and how many times as fast as `{baseline}` in the same rounds; * marks the fastest whose gradients are right."
    )
    parts.append(markdown([_line(shape, rows, names) for shape in dict.fromkeys(row.shape for row in rows)]))
    prices = [{"shape": row.shape, "price": _ratio(row, "price"), "schedule": row.schedule} for row in rows if _price(row)]
    if prices:
        parts.append("Time of `ours` over that of `ours-unordered` (median, p20 .. p80):")
        parts.append(markdown(prices))
    return "\n\n".join(filter(None, parts))


def _line(shape: str, rows: Sequence[Row], names: Sequence[str]) -> dict[str, object]:
    own = {row.contender: row for row in rows if row.shape == shape}
    right = {name: row.tflops or 0.0 for name, row in own.items() if _timed(row) and row.ok and name != "ours-unordered"}
    best = max(right, key=right.__getitem__, default=None)

    def cell(name: str) -> str:
        row = own.get(name)
        if row is None or not _timed(row):
            return "" if row is None else row.status.partition(":")[0]
        speedup = "" if row.speedup is None else f" ({row.speedup:.2f}x)"
        tflops = row.tflops or 0.0
        marks = ("*" if name == best else "") + ("" if row.ok else " " + row.status.partition(":")[0])
        return f"{tflops:.{0 if tflops >= 10 else 2}f}{speedup}{marks}"

    return {"shape": shape, **{name: cell(name) for name in names}}


def _timed(row: Row) -> bool:
    return row.median_ms is not None


def _price(row: Row) -> bool:
    return row.contender == "ours" and row.price is not None and has_order(row)


def _ratio(row: Row, name: str) -> str:
    return "{:.3f} ({:.3f} .. {:.3f})".format(*(getattr(row, f"{name}{which}") for which in ("", "_p20", "_p80")))


def _predictions(rows: Sequence[Row]) -> str:
    """The cost model as it was, held against what was measured; the farthest off first."""
    lines: dict[tuple[str, str], tuple[float, dict[str, object]]] = {}
    for row in rows:
        if row.ok and row.median_ms and row.predicted_ms:
            off = row.median_ms / row.predicted_ms
            lines.setdefault(
                (row.shape, row.schedule),
                (off, {"shape": row.shape, "schedule": row.schedule, "measured ms": f"{row.median_ms:.3f}",
                       "predicted ms": f"{row.predicted_ms:.3f}", "measured / predicted": f"{off:.2f}"}),
            )  # fmt: skip
    if not lines:
        return ""
    farthest = sorted(lines.values(), key=lambda found: max(found[0], 1 / found[0]), reverse=True)
    return "## The cost model's predictions, the farthest off first\n\n" + markdown([line for _, line in farthest])


def _costs(gpu: str, environments: Mapping[str, Mapping[str, Any]], costs: str | None) -> str:
    """Constants beside those of the cost file that the run had."""
    if costs is None:
        return "## Cost constants\n\nNone could be fitted."
    key = key_for(gpu, next(iter(environments.values()))["arch"])
    now = {} if key is None else _flat(numbers_of(key))
    lines = [
        {"constant": name, "now": now.get(name, {}).get("value", ""), "measured": "" if entry["estimate"] else entry["value"],
         "source": entry["source"]}
        for name, entry in _flat(tomllib.loads(costs)).items()
    ]  # fmt: skip
    where = f"as dash_inductor/devices/{key}.toml" if key else "to dash_inductor/devices, under a key of its own in its __init__.py"
    return f"## Cost constants\n\ncosts.toml is a cost file: copy it {where}.\n\n{markdown(lines)}"


def _flat(numbers: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in numbers.items():
        if isinstance(entry, Mapping):
            found |= {name: entry} if "value" in entry else {f"{name}.{part}": own for part, own in entry.items()}
    return found


def _additions(additions: Sequence[Addition]) -> str:
    if not additions:
        return ""
    lines = [
        {"pattern": row.pattern, "operation": row.operation, "CTAs": f"{row.ctas_per_sm} per SM of {row.warps} warps",
         "TB/s": f"{row.tb_per_s:.2f}", "of plain stores": f"{row.ratio:.2f}"}
        for row in additions
    ]  # fmt: skip
    return "## fp32 additions in L2\n\n" + markdown(lines)


def _environments(environments: Mapping[str, Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for found in environments.values() for name in found)
    lines = [{"": name, **{folder: found.get(name, "") for folder, found in environments.items()}} for name in names]
    return "## Environment\n\n" + markdown(lines)
