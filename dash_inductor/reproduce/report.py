"""What `check` found: which runs gave the same bits, and what was the first that did not."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from ..text import WIDTH, paragraph, rendered

MOST_LINES = 6


@dataclass(frozen=True)
class Run:
    """One run of the step.

    Attributes:
        kind: how it differs from the first run, in words.
        process: processes are numbered from 1; number 1 had the first run.
        tensors: how many gradients, or tensors, were compared.
        differing: how many of them are not those of the first run, bit for bit.
    """

    kind: str
    process: int
    tensors: int
    differing: int

    @property
    def identical(self) -> bool:
        """Whether every bit is that of the first run."""
        return not self.differing


@dataclass(frozen=True)
class Difference:
    """The first difference of the first run that has one.

    Attributes:
        run: which run it is, counted from 0 as `Report.runs` is.
        parameter: the parameter whose gradient differs, or the tensor's name.
        index: of the first element that differs; None where shape, dtype or presence differ.
        ulps: floating-point numbers of the dtype between both values; None where one is NaN or the dtype is no float.
        what: the difference in words.
        op: the first operation or kernel that did not do the same, or None where it did not show again.
        source: the user's line that called it, "file.py:12", of a backward the line of the forward.
        lines: lines that it computes, the likeliest first, where they are not that line alone: of a kernel that fuses several
            operations, or in an installed package.
        cause: what was not the same there, in words.
    """

    run: int
    parameter: str
    index: tuple[int, ...] | None
    ulps: int | None
    what: str
    op: str | None
    source: str | None
    lines: tuple[str, ...]
    cause: str


@dataclass(frozen=True)
class Report:
    """What `check` found; true if all runs agree.

    Attributes:
        step: the name of the function.
        runs: every run, the first one included.
        first_difference: None if every run gave the bits of the first.
        notes: what a reader should know of the runs, and hints where they differ: sentences.
    """

    step: str
    runs: tuple[Run, ...]
    first_difference: Difference | None
    notes: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether every run gave the bits of the first."""
        return all(run.identical for run in self.runs)

    def __bool__(self) -> bool:
        return self.identical

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON."""
        figures: dict[str, Any] = {"identical": self.identical, **asdict(self)}
        figures["runs"] = [{**asdict(run), "identical": run.identical} for run in self.runs]
        return json.dumps(figures, indent=indent)

    def __str__(self) -> str:
        """A table of the runs; below it the difference, and the notes."""
        runs = f"{len(self.runs)} runs in {max(run.process for run in self.runs)} processes".replace(" 1 processes", " 1 process")
        title = f"{self.step}: {'identical' if self.identical else 'DIFFERENT'}, {runs}"
        rows = [
            {"run": number, "process": run.process, "how": run.kind, "bits": self._bits(number, run)}
            for number, run in enumerate(self.runs, 1)
        ]
        parts = [rendered(title, rows)]
        if self.first_difference is not None:
            parts.append(_text(self.first_difference))
        parts += [paragraph(f"Note: {note}") for note in self.notes]
        return "\n\n".join(parts)

    def _bits(self, number: int, run: Run) -> str:
        if number == 1:
            return f"{run.tensors} tensors"
        return "identical" if run.identical else f"{run.differing} of {run.tensors} tensors differ"


def _text(difference: Difference) -> str:
    index = f"[{', '.join(map(str, difference.index))}]" if difference.index is not None else ""
    ulps = "" if difference.ulps is None else f", {difference.ulps:,} ulp{'' if difference.ulps == 1 else 's'} apart"
    first = f"First difference: {difference.parameter}{index} in run {difference.run + 1}{ulps}: {difference.what}."
    if difference.op is None:
        return f"{textwrap.fill(first, WIDTH)}\n{textwrap.fill(difference.cause, WIDTH)}"
    op = f"First operation: {difference.op}" + (f" at {difference.source}" if difference.source else "")
    details = [difference.cause]
    if difference.lines:
        shown = ", ".join(difference.lines[:MOST_LINES])
        more = f", and {len(difference.lines) - MOST_LINES} more" if len(difference.lines) > MOST_LINES else ""
        details.append(f"computed at {shown}{more}")
    body = [textwrap.indent(textwrap.fill(each, WIDTH - 2, break_on_hyphens=False), "  ") for each in details]
    return "\n".join([textwrap.fill(first, WIDTH), op, *body])
