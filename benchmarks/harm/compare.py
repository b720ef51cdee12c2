"""Holds what came of a suite with the package against what came of it without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Outcome = Mapping[str, Any]
PASSED = "passed"
SAME, REWRITTEN, FAILED_THE_SAME, DIFFERS = "the same", "rewritten, passed", "failed the same", "differs"
COMPARED = ("bits", "code", "counts")  # where no attention is rewritten


def verdicts(without: Iterable[Outcome], with_package: Iterable[Outcome]) -> dict[str, str]:
    """What is to be said of each case. One that is missing on a side, whose process died, differs."""
    one, other = ({outcome["case"]: outcome for outcome in outcomes} for outcomes in (without, with_package))
    return {name: _verdict(one.get(name), other.get(name)) for name in {**one, **other}}


def _verdict(without: Outcome | None, with_package: Outcome | None) -> str:
    if without is None or with_package is None or without["outcome"] != with_package["outcome"]:
        return DIFFERS
    if without["outcome"] != PASSED:
        return FAILED_THE_SAME
    if with_package.get("rewritten"):  # each side was held against the uncompiled function
        return REWRITTEN
    return SAME if _compared(without) == _compared(with_package) else DIFFERS


def _compared(outcome: Outcome) -> Sequence[Any]:
    return [outcome.get(name) for name in COMPARED]
