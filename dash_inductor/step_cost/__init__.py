"""What deterministic mode costs of a training step: measured on the GPU that is there, or predicted for one that is not.

A step is a forward and a backward of a model; the optimizer is no part of it. It is looked at in three ways: not deterministic,
in torch's strict mode, and in that mode with this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..text import paragraph, rendered

OFF, STRICT, OURS = WAYS = "not deterministic", "strict mode", "dash-inductor"
FORWARD, BACKWARD, MATMULS, OTHERS = "attention, forward", "attention, backward", "matmuls", "other kernels"


@dataclass(frozen=True)
class Group:
    """Operators of a kind. count: calls, None where kernels were measured. ms: by way, None where that is not known."""

    name: str
    count: int | None
    tflop: float | None
    ms: Mapping[str, float | None]


@dataclass(frozen=True)
class Changed:
    """An operator that strict mode changes beside attention. what: it does with that."""

    op: str
    count: int
    what: str


@dataclass(frozen=True)
class StepCost:
    """A step on a device. step_ms: whole, where it was measured. notes: sentences on how figures are known."""

    device: str
    groups: Sequence[Group]
    changed: Sequence[Changed] = ()
    step_ms: Mapping[str, float] | None = None
    notes: Sequence[str] = ()

    def ms(self, way: str) -> float:
        """The sum of the groups, as far as it is known."""
        return sum(group.ms[way] or 0 for group in self.groups)

    def more_percent(self, way: str) -> float | None:
        """How much longer a step takes than one that is not deterministic; None where a group's time is known in one way alone."""
        if self.step_ms is not None:
            return 100 * (self.step_ms[way] / self.step_ms[OFF] - 1)
        known = all((group.ms[way] is None) == (group.ms[OFF] is None) for group in self.groups)
        return 100 * (self.ms(way) / self.ms(OFF) - 1) if known and self.ms(OFF) else None

    def to_json(self) -> str:
        """All of it, and by way the percentage that a step takes longer."""
        return json.dumps({**asdict(self), "more_percent": {way: self.more_percent(way) for way in WAYS}}, indent=2)

    def __str__(self) -> str:
        rows = [_row(group.name, group.ms, group.count, group.tflop) for group in self.groups]
        whole = dict(self.step_ms or {way: self.ms(way) for way in WAYS})
        rows.append(_row("a whole step" if self.step_ms else "together", whole))
        more = {way: self.more_percent(way) for way in WAYS[1:]}
        rows.append({**_row("longer than not deterministic", {}), **{way: _percent(x) for way, x in more.items()}})
        drop = [name for name in ("count", "TFLOP") if all(row[name] == "" for row in rows)]
        rows = [{name: cell for name, cell in row.items() if name not in drop} for row in rows]
        how = "measured" if self.step_ms else "predicted"
        parts = [rendered(f"A training step on {self.device}, {how}, ms", rows)]
        if self.changed:
            parts.append(rendered("What else strict mode changes, without a time", [asdict(each) for each in self.changed]))
        parts += [paragraph(f"Note: {note}") for note in self.notes]
        return "\n\n".join(parts)


def _row(name: str, ms: Mapping[str, float | None], count: int | None = None, tflop: float | None = None) -> dict[str, str]:
    cells = {"group": name, "count": "" if count is None else str(count), "TFLOP": "" if tflop is None else _figure(tflop)}
    return cells | {way: "" if way not in ms else "?" if (x := ms[way]) is None else _figure(x) for way in WAYS}


def _figure(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f} %"
