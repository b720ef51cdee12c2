"""The report of `dash_inductor.explain`: a row for each attention, as text, JSON and HTML."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from ..decision import RING, Decision, claim_of, is_of_torch, stock_is_deterministic, stock_workspace_bytes
from ..schedule import TWO_PASS
from ..schedule.candidates import Candidate
from ..schedule.formulas import formula_for
from ..text import WIDTH, listed, paragraph, rendered

PROMISES = {
    "run": "the same bits for the same inputs, shapes, software and GPU model",
    "device": "the same bits for the same inputs, shapes and software, also on another number of SMs",
    "batch": "the same bits for the same inputs and software, also at another batch size or number of heads",
}
MASKS = {
    "block_mask": "the kernel asks the mask for each element, and skips tiles that it hides",
    "varlen": "packed sequences; the kernel skips tiles between them",
}
FIELDS = (  # of an attention in JSON
    *("module", "source", "op", "rewritten", "reason", "remedy", "shape", "dtype", "mask"),
    *("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "deterministic", "chosen_by_timing", "claim"),
    *("template", "kernel", "family", "tile", "launch", "roles", "heads_in_flight", "stride", "predicted_us", "step_ns"),
    *("formula_ns", "candidates", "workspace_bytes", "stock_workspace_bytes", "guarantee", "reads_in_place"),
)
BY_TIMING = (
    "Inductor chooses its {0} by timing, under max_autotune: set TORCHINDUCTOR_DETERMINISTIC=1, call "
    "torch.use_deterministic_algorithms(True) in the thread that trains, or switch max_autotune off"
)


@dataclass(frozen=True)
class Attention:
    """What became of one attention: a `Decision`, and what a report says beside it.

    deterministic: whether it gives the same bits in every run as it stands, by our kernel or by PyTorch's; None where that is up
        to other operations, not known, or claimed alone.
    claim: where the authors of the kernel that stays claim it: the address of why one may doubt it.
    source: the line that calls it, its file relative to the working folder or to the folder that Python imports it from.
    stock_workspace_bytes: what the stock backward would allocate in strict deterministic mode; None where that is not known.
    formula: of `predicted_us`, in ns; None where the cost model has none. Each candidate is what was chosen among.
    """

    decision: Decision
    deterministic: bool | None
    claim: str | None
    source: str | None
    stock_workspace_bytes: int | None
    formula: str | None
    candidates: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, decision: Decision, sms: int, *, warn_only: bool) -> Attention:
        """The row of a decision, on a device of `sms` SMs."""
        is_ours = decision.rewritten and decision.chosen_by_timing is None
        deterministic = is_ours or stock_is_deterministic(decision, warn_only=warn_only)
        claim = None if decision.rewritten else claim_of(decision, warn_only=warn_only)
        candidates = tuple(_candidate(candidate, decision.mask) for candidate in decision.candidates)
        formula = next((row["formula_ns"] for row in candidates if row["family"] == decision.family), None)
        stock = stock_workspace_bytes(decision, sms)
        return cls(decision, deterministic, claim, _short(decision.source), stock, formula, candidates)

    @property
    def rewritten(self) -> bool:
        """Whether it became kernels of ours."""
        return self.decision.rewritten

    @property
    def reason(self) -> str | None:
        """Why the stock op stays; None if it does not."""
        return self.decision.reason

    @property
    def remedy(self) -> str | None:
        """What to change, so that it is rewritten."""
        return self.decision.remedy

    @property
    def module(self) -> str:
        """The path of the module that calls it, in the model."""
        return self.decision.module

    @property
    def op(self) -> str:
        """The stock backward."""
        return self.decision.op

    def row(self) -> dict[str, Any]:
        """The fields, as JSON has them."""
        own = {**vars(self), "formula_ns": self.formula}
        return {name: own[name] if name in own else getattr(self.decision, name) for name in FIELDS}


@dataclass(frozen=True)
class Explanation:
    """What became of a model's attentions, in the order in which it calls them; iterating gives `Attention`s.

    device: a key such as "h100", the name of the GPU that is there, "emulated" or "cpu". guarantee: the level in force.
    warn_only: the kind of deterministic mode that it is compiled under. versions: by package. notes: sentences about the whole.
    stopped: what ended the forward before its end, so that attentions after it are not known; None if nothing did.
    """

    device: str
    attentions: tuple[Attention, ...]
    guarantee: str
    warn_only: bool
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    stopped: str | None = None

    def __iter__(self) -> Iterator[Attention]:
        return iter(self.attentions)

    def __len__(self) -> int:
        return len(self.attentions)

    def __bool__(self) -> bool:
        return True  # also without attentions

    @property
    def all_rewritten(self) -> bool:
        """Whether there are attentions, all of them known, and all became kernels of ours."""
        return bool(self.attentions) and self.stopped is None and all(row.rewritten for row in self)

    @property
    def all_deterministic(self) -> bool:
        """Whether there are attentions, all of them known, and all have the same bits in every run, whoever's the kernels are."""
        return bool(self.attentions) and self.stopped is None and all(row.deterministic for row in self)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON."""
        verdicts = {"all_rewritten": self.all_rewritten, "all_deterministic": self.all_deterministic}
        figures = {name: value for name, value in vars(self).items() if name != "attentions"}
        return json.dumps({**verdicts, **figures, "attentions": [row.row() for row in self]}, indent=indent)

    def __str__(self) -> str:
        """A table, and below it the details of each kind of attention."""
        parts = [self._title()]
        if self.attentions:
            parts += [textwrap.fill(self._summary(), WIDTH), rendered("Attentions", self._table())]
        for at in self._alike():
            row = self.attentions[at[0]]
            parts.append(f"{_numbers(at)}\n{textwrap.indent(listed(_details(row), WIDTH - 2), '  ')}")
            if row.formula:
                lines = [f"  {row.decision.family} takes, in ns:"]
                for part in row.formula.split("; "):  # the time, and what the names in it stand for
                    lines.append(textwrap.fill(part, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8))
                parts.append("\n".join(lines))
        parts += map(paragraph, self._remarks())
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = self._table()
        head = "".join(f"<th>{escape(name)}</th>" for name in rows[0]) if rows else ""
        body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row.values())}</tr>" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        details = ""
        for at in self._alike():
            row = self.attentions[at[0]]
            figures = _details(row) | ({"formula, ns": row.formula} if row.formula else {})
            lines = "".join(f"<dd>{escape(name)}: {escape(str(value))}</dd>" for name, value in figures.items())
            details += f"<dl><dt><b>{escape(_numbers(at))}</b></dt>{lines}</dl>"
        notes = "".join(f"<p>{escape(line)}.</p>" for line in self._remarks())
        return f"<p><b>{escape(self._title())}</b></p><p>{escape(self._summary())}</p>{table}{details}{notes}"

    def _remarks(self) -> list[str]:
        stopped = [] if self.stopped is None else [f"Stopped, so that what follows is not known: {self.stopped}"]
        return stopped + [f"Note: {note}" for note in self.notes]

    def _title(self) -> str:
        return f"{sum(row.rewritten for row in self)} of {len(self)} attentions rewritten for {self.device}"

    def _summary(self) -> str:
        """Under which mode, and what the model's bits are worth as it stands."""
        mode = f"torch.use_deterministic_algorithms(True{', warn_only=True' if self.warn_only else ''})"
        unsure = [number for number, row in enumerate(self) if not row.deterministic]
        verdict = f"{_numbers(unsure)} may differ from run to run" if unsure else "All of them have the same bits in every run"
        return f"Compiled, not run, under {mode}. {verdict}. Other operations were not looked at: dash_inductor.check does."

    def _table(self) -> list[dict[str, Any]]:
        """A line for each attention, or for several in a row that look the same."""
        lines = [
            {
                "module": row.module or "(the model)",
                "called at": row.source and os.path.basename(row.source),
                "shape": row.decision.shape,
                "mask": row.decision.mask,
                "backward": "rewritten" if row.rewritten else f"keeps {_owner(row.decision)}",
            }
            for row in self
        ]
        runs = ([number for number, _ in run] for _, run in itertools.groupby(enumerate(lines, start=1), lambda line: line[1]))
        return [{"#": run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}", **lines[run[0] - 1]} for run in runs]

    def _alike(self) -> list[list[int]]:
        """Positions of attentions that differ in their place alone, together."""
        kinds: dict[Any, list[int]] = {}
        for index, row in enumerate(self):
            kinds.setdefault((replace(row.decision, module="", source=None), row.deterministic), []).append(index)
        return list(kinds.values())


def _owner(decision: Decision) -> str:
    if not is_of_torch(decision.op):
        return "the package's"
    return f"{decision.implementation}'s" if decision.implementation else "PyTorch's"


def _as_it_is(row: Attention) -> str:
    """Whether a backward that stays is deterministic, in words."""
    if row.deterministic:
        return f"deterministic: the same bits in every run, by {_owner(row.decision)} kernel"
    if row.deterministic is False:
        return "not deterministic: bits may differ from run to run"
    if row.claim:
        return f"claimed to be deterministic, and not proven ({row.claim}): bits may differ from run to run"
    if is_of_torch(row.decision.op) and not row.decision.implementation:
        return "as deterministic as the matrix products that it is made of"
    return "not known: bits may differ from run to run"


def _details(row: Attention) -> dict[str, Any]:
    """What the table has no room for."""
    d = row.decision
    stock = "" if row.stock_workspace_bytes is None else f"; PyTorch's in strict mode {_bytes(row.stock_workspace_bytes)}"
    timed = BY_TIMING.format(d.chosen_by_timing) if d.chosen_by_timing else ""
    if not row.rewritten:
        figures = {"op": d.op, "why": d.reason, "to do": d.remedy or "nothing is known to help"}
        figures |= {"as it is": _as_it_is(row), "over ranks": _over_ranks(d), "by timing": timed, "extra memory": stock[2:] or "-"}
        return {name: value for name, value in figures.items() if value}
    others = ", ".join(f"{_schedule_of(c)} {c['predicted_us']:.1f}" for c in row.candidates if c["predicted_us"] is not None)
    time = (
        "known at run time: the mask decides" if d.predicted_us is None else f"{d.predicted_us:.1f} us, predicted by the cost model"
    )
    time = time if d.step_ns is None else f"{d.step_ns} ns for each visited tile of the mask, predicted by the cost model"
    in_place = ", ".join(d.reads_in_place)
    figures = {
        "op": d.op,
        "becomes": f"{d.template}, tile {d.tile}, launch {d.launch}",
        "kernel": (d.kernel or "").capitalize(),
        "by timing": timed,
        "schedule": _schedule(d),
        "guarantee": f"{PROMISES.get(str(d.guarantee), '')} (level {d.guarantee})",
        "mask": MASKS.get(d.mask, ""),
        "dropout": "" if d.dropout is None else f"{d.dropout}, by the random bits of the forward",
        "over ranks": _over_ranks(d),
        "time": time,
        "chosen among": others and f"{others} (us; A CTAs share a head, G heads at a time)",
        "extra memory": f"{_bytes(d.workspace_bytes)}{stock}",
        "reads in place": in_place and f"{in_place}: do not write to it between forward and backward",
    }
    return {name: value for name, value in figures.items() if value}


def _over_ranks(d: Decision) -> str:
    if d.over_ranks is None:
        return ""
    if d.over_ranks == RING:
        return "keys go around a ring: bits depend on the number of ranks, by which out and logsumexp are merged"
    if d.segments:
        return (
            "keys are gathered, dK and dV summed by segments: equal bits for any number of ranks, where out and logsumexp have them"
        )
    return "keys are gathered: bits of dK and dV depend on the number of ranks, unless segment is set"


def _schedule(d: Decision) -> str:
    if d.family == TWO_PASS:
        return TWO_PASS
    return f"{d.family}" if d.roles is None else f"{d.family}, A={d.roles}, G={d.heads_in_flight}"


def _schedule_of(candidate: dict[str, Any]) -> str:
    place = f" A={candidate['roles']} G={candidate['heads_in_flight']}" if candidate["roles"] else ""
    return f"{candidate['family']}{place}"


def _bytes(size: int | str | None) -> str:
    """A number of bytes as people read it."""
    if not isinstance(size, int):
        return f"{size} bytes"
    for unit, of in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= of:
            return f"{size / of:.1f} {unit}"
    return f"{size} bytes"


def _numbers(indices: Sequence[int]) -> str:
    """Numbers of rows, runs of them as "3-5".

    >>> _numbers([0, 2, 3, 4])
    '#1, #3-5'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index + 1, index + 1])
    return ", ".join(f"#{first}" if first == last else f"#{first}-{last}" for first, last in runs)


def _short(source: str | None) -> str | None:
    """The line with its file relative to the working folder, or to the folder of sys.path that it is in."""
    if source is None:
        return None
    folders = [os.path.join(os.path.abspath(folder), "") for folder in ("", *sys.path)]
    return min((source.removeprefix(folder) for folder in folders), key=len)


@functools.cache
def _candidate(candidate: Candidate, mask: str) -> dict[str, Any]:
    """What the cost model chose among: family, place, time, formula."""
    formula = formula_for(candidate.family, mask)
    return {**candidate.row(), "formula_ns": None if formula is None else str(formula)}
