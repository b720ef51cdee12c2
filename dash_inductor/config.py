"""Settings: read once from `DASH_INDUCTOR_*`, changed by `configure`, and part of every cache key."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypedDict

from .import_hook import forget_compiled
from .schedule.costs import MOST_SMS
from .schedule.families import GUARANTEES, MONOTONE, REGISTER
from .templates.tiles import Template

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's, from Python 3.11 on

PREFIX = "DASH_INDUCTOR"
TRITON, GLUON = "triton", "gluon"
AUTO, ALWAYS, OFF = "auto", "always", "off"
BATCH_INVARIANT = "torch._inductor.config.batch_invariant"
CHOICES: dict[str, tuple[str, ...]] = {
    "on_unsupported": ("fallback", "warn", "error"),
    "guarantee": GUARANTEES,
    "schedule": ("auto", *REGISTER),
    "launch": ("grouped", "chained"),
    "template": ("auto", Template.ONE_PASS.value, Template.TWO_PASS.value),
    "kernel": (AUTO, TRITON, GLUON),
    "guard": (AUTO, ALWAYS, OFF),
}
BOUNDS = {"sm_reserve": (0, MOST_SMS), "segment": (0, 2**31 - 1), "seed": (0, 2**32 - 1), "sms": (1, MOST_SMS)}


class Settings(TypedDict, total=False):
    """The keywords of `configure`, for type checkers: a wrong name or value is an error before anything runs."""

    enabled: bool
    on_unsupported: Literal["fallback", "warn", "error"]
    guarantee: Literal["run", "device", "batch"]
    schedule: str  # the register alone lists families, so that a wrong one is an error when it runs
    launch: Literal["grouped", "chained"]
    template: Literal["auto", "one_pass", "two_pass"]
    kernel: Literal["auto", "triton", "gluon"]
    sm_reserve: int
    segment: int
    emulate: bool
    seed: int
    sms: int
    guard: Literal["auto", "always", "off"]
    costs: str
    silence: str


@dataclass(frozen=True)
class Config:
    """What a user can set; each field is also the variable `DASH_INDUCTOR_<FIELD>`, `enabled` is `DASH_INDUCTOR` itself.

    Attributes:
        enabled: False switches the package off altogether.
        on_unsupported: what happens at an attention that is not rewritten: keep the stock op silently, with a warning, or raise.
        guarantee: same bits for the same `run`, also on another SM count (`device`), also for another batch (`batch`).
        schedule: a family to force, or `auto` for the cost model's choice.
        launch: `grouped` (cooperative: all CTAs of a group resident) or `chained` (ends with any number of resident CTAs).
        template: `one_pass` (five matmuls a tile, by the schedules), `two_pass` (seven, and no CTA waits for another), or `auto`.
        sm_reserve: SMs that one pass, launched grouped, leaves to others, such as communication kernels.
        kernel: of one pass: `triton`; `gluon`, which is for sm_90; or `auto`: `gluon` where that takes the attention and is no
            slower by price, else `triton`.
        segment: queries of which dK and dV are summed apart under context parallelism, so that the number of ranks does not decide
            their bits; 0 for all that a rank has.
        emulate: run what Inductor generates on the CPU through Triton's interpreter.
        seed: which interleaving of CTAs the emulation takes.
        sms: SMs of the emulated device.
        guard: whether a kind of kernel is tried on a small attention before its first use: `auto`, once on each machine with a GPU;
            `always`, in each process, and under emulation; or `off`.
        costs: the path of a cost file of this GPU, in place of the one that the package has; "" for that. A process reads it once.
        silence: ops of other packages, or their namespaces, with commas between them: of their attention nobody is told.
    """

    enabled: bool = True
    on_unsupported: str = "fallback"
    guarantee: str = "run"
    schedule: str = "auto"
    launch: str = "grouped"
    template: str = "auto"
    kernel: str = AUTO
    sm_reserve: int = 0
    segment: int = 0
    emulate: bool = False
    seed: int = 0
    sms: int = 6
    guard: str = AUTO
    costs: str = ""
    silence: str = ""

    def silences(self, op: str) -> bool:
        """Whether an op, "namespace.name.overload", is one of those of which nobody is told."""
        parts = op.split(".")
        return any(name in (parts[0], ".".join(parts[:2]), op) for name in self.silence.replace("::", ".").split(",") if name)

    def deciding(self) -> tuple[tuple[str, object], ...]:
        """Names and values, without what decides neither bits nor code: the interleaving of an emulated run, and what is tried.

        Of a cost file that the user names, its bytes decide and not its path: `devices.cost_files.digest_of` has them.
        """
        return tuple((name, value) for name, value in asdict(self).items() if name not in ("seed", "guard", "costs", "silence"))

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if kind is not str and type(value) is not kind:  # True is no number, and 1 no bool
                must = "True or False" if kind is bool else "a whole number"
                raise ValueError(f"{field.name}={value!r} is not {must}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if not re.fullmatch(r"[\w.:,]*", self.silence):
            raise ValueError(f"silence={self.silence!r} is not names of ops or namespaces with commas between them")
        if self.costs and not self.costs.endswith(".toml"):
            raise ValueError(f"costs={self.costs!r} is not the path of a cost file, which ends in .toml")
        for name, (least, most) in BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} is not from {least} to {most}")
        for name, value in (("launch", "chained"), ("template", Template.TWO_PASS.value)):
            if self.sm_reserve and getattr(self, name) == value:
                raise ValueError(f"{name}={value!r} takes whatever SMs are free: sm_reserve={self.sm_reserve} would not be kept")
        if self.launch == "chained" and self.schedule not in ("auto", *MONOTONE):
            raise ValueError(f"launch='chained' takes schedule {' or '.join(MONOTONE)}, not {self.schedule!r}")
        if self.template == Template.TWO_PASS and self.schedule != "auto":
            raise ValueError(f"template='two_pass' takes schedule auto, not {self.schedule!r}")
        if self.kernel == GLUON and self.template == Template.TWO_PASS:
            raise ValueError("kernel='gluon' takes template one_pass or auto, not 'two_pass'")


def variable(field: str) -> str:
    """The environment variable of a field of Config."""
    return PREFIX if field == "enabled" else f"{PREFIX}_{field.upper()}"


def from_environment(environ: Mapping[str, str]) -> Config:
    """The settings that `DASH_INDUCTOR_*` variables say; ValueError with the allowed values for anything else."""
    known = {variable(f.name): f for f in fields(Config)}
    values: dict[str, object] = {}
    for name in sorted(environ):
        if name != PREFIX and not name.startswith(f"{PREFIX}_"):
            continue
        if name not in known:
            raise ValueError(f"{name} is not a setting; the settings are {', '.join(sorted(known))}")
        field = known[name]
        values[field.name] = _parse(name, environ[name], type(field.default))
    try:
        return Config(**values)  # type: ignore[arg-type]
    except ValueError as error:
        named = re.sub(rf"\b({'|'.join(f.name for f in fields(Config))})=", lambda name: f"{variable(name[1])}=", str(error))
        raise ValueError(named) from None


def _parse(name: str, text: str, kind: type) -> object:
    if kind is bool:
        if text not in ("0", "1"):
            raise ValueError(f"{name}={text!r} is not one of 0, 1")
        return text == "1"
    if kind is int:
        if not re.fullmatch("[0-9]{1,20}", text):  # of thousands of digits Python makes no number
            raise ValueError(f"{name}={text!r} is not a whole number >= 0 of at most 20 digits")
        return int(text)
    return text


_current: Config | None = None
_within: ContextVar[Config | None] = ContextVar("within", default=None)
followers: set[Callable[[], None]] = set()
"""Called when settings have changed."""


def current() -> Config:
    """The settings in force. Where torch has BATCH_INVARIANT, that asks for the level `batch`."""
    settings, (module, name) = chosen(), BATCH_INVARIANT.rsplit(".", 1)
    of_torch = getattr(sys.modules.get(module), name, False)  # not imported for this, which would take seconds
    return replace(settings, guarantee="batch") if of_torch else settings


def chosen() -> Config:
    """The settings as they were set here, whatever torch asks for."""
    global _current
    if settings := _within.get():
        return settings
    if _current is None:
        _current = from_environment(os.environ)
    return _current


@contextlib.contextmanager
def within(settings: Config) -> Iterator[None]:
    """Inside, in this thread alone, other settings are in force."""
    outer = _within.set(settings)
    try:
        yield
    finally:
        _within.reset(outer)


def configure(**settings: Unpack[Settings]) -> Config:
    """Changes settings, for graphs compiled afterwards; Dynamo forgets what it compiled. Returns the settings before.

    Raises:
        ValueError: an unknown setting or value; nothing is changed then.
    """
    global _current
    before = chosen()
    unknown = sorted(set(settings) - {f.name for f in fields(Config)})
    if unknown:
        raise ValueError(f"no setting {', '.join(unknown)}; the settings are {', '.join(f.name for f in fields(Config))}")
    _current = replace(before, **settings)
    if _current != before:
        forget_compiled()
        for follow in followers:
            follow()
    return before
