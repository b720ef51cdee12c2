"""The page: a table of suites, what failed in all settings, and what differs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from ..markdown import markdown
from .compare import DIFFERS, FAILED_THE_SAME, PASSED, REWRITTEN, SAME, verdicts
from .settings import PAIRS, SETTINGS
from .suites import SUITES

Outcomes = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]  # by suite and setting

INTRODUCTION = """\
# No harm

Written by `python -m benchmarks.harm{every} --out docs/no_harm.md`, with torch {torch}, on a CPU.

Each case is compiled by `torch.compile` in a process without the package (`DASH_INDUCTOR=0`, `TORCH_DEVICE_BACKEND_AUTOLOAD=0`)
and in one where it is installed. It passes if outputs and gradients are those of the uncompiled function, within a tolerance.

- *the same*: passed in both; the bits of all outputs and gradients are equal, and so are the generated code but for its
  comments, how often Inductor fused attention, and the hits and misses of its caches.
- *rewritten, passed*: passed in both, and the package rewrote an attention: bits may differ, the tolerance holds.
- *failed the same*: the same type of exception in both, or, of a result that is not within the tolerance, an AssertionError.
- *differs*: anything else.

Under *emulated*, a CPU runs the Triton code that a GPU would; deterministic mode is on.
On a CPU without emulation nothing is rewritten."""


def page(outcomes: Outcomes, every: int = 1) -> str:
    """The page in Markdown; `every`: one case of so many was run."""
    rows = lines(outcomes)
    parts = [INTRODUCTION.format(torch=version("torch").partition("+")[0], every="" if every == 1 else f" --every {every}")]
    if every > 1:
        parts.append(f"This page was written of one case of {every} in each suite, not of all.")
    parts.append(markdown(rows))
    found = {(row["suite"], row["compared"]) for row in rows}
    missing = [
        f"{name}, {pair}"
        for name, suite in SUITES.items()
        for pair, (without, _) in PAIRS.items()
        if (suite.emulated or not SETTINGS[without].emulated) and (name, pair) not in found
    ]
    if missing:
        parts.append(f"Not run yet: {'; '.join(missing)}.")
    parts.append("\n".join(f"- *{name}*: {suite.text}." for name, suite in SUITES.items()))
    parts += ["## What failed the same", _failures(outcomes), "## What differs", _differences(outcomes)]
    return "\n\n".join(parts) + "\n"


def lines(outcomes: Outcomes) -> list[dict[str, Any]]:
    """A row per suite and comparison."""
    rows = []
    for suite, pair, found in _compared(outcomes):
        counts = Counter(found.values())
        row = {"suite": suite, "compared": pair, DIFFERS: counts[DIFFERS], "cases": len(found)}
        rows.append(row | {kind: counts[kind] for kind in (SAME, REWRITTEN, FAILED_THE_SAME)})
    return rows


def _compared(outcomes: Outcomes) -> list[tuple[str, str, dict[str, str]]]:
    """(suite, comparison, verdicts), suites in the order of SUITES and torch's test files behind them."""
    names = sorted(outcomes, key=lambda name: list(SUITES).index(name) if name in SUITES else len(SUITES))
    return [
        (name, pair, verdicts(outcomes[name][without], outcomes[name][with_package]))
        for name in names
        for pair, (without, with_package) in PAIRS.items()
        if without in outcomes[name] and with_package in outcomes[name]
    ]


def _failures(outcomes: Outcomes) -> str:
    """By suite and what was raised: in which comparisons, and of how many cases."""
    found: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for suite, pair, said in _compared(outcomes):
        for outcome in outcomes[suite][PAIRS[pair][0]]:
            if said[outcome["case"]] == FAILED_THE_SAME:
                found[suite, outcome["outcome"], outcome.get("message", "")[:100]][pair].append(outcome["case"])
    rows = [
        {"suite": suite, "exception": kind, "says": message, "compared": ", ".join(pairs), "cases": _names(pairs)}
        for (suite, kind, message), pairs in found.items()
    ]
    return markdown(rows) if rows else "Nothing."


def _names(pairs: Mapping[str, Sequence[str]]) -> str:
    names = list(dict.fromkeys(name for cases in pairs.values() for name in cases))
    return ", ".join(names) if len(names) <= 4 else f"{len(names)}, such as {names[0]}"


def _differences(outcomes: Outcomes) -> str:
    rows = []
    for suite, pair, said in _compared(outcomes):
        sides = [{one["case"]: one["outcome"] for one in outcomes[suite][setting]} for setting in PAIRS[pair]]
        for case in (case for case, verdict in said.items() if verdict == DIFFERS):
            without, with_package = (side.get(case, "nothing came of it") for side in sides)
            other = f"{with_package}, otherwise" if without == with_package == PASSED else with_package
            rows.append({"suite": suite, "compared": pair, "case": case, "without": without, "with": other})
    return markdown(rows) if rows else "Nothing."
