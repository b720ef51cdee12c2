"""Kinds of kernels, each of which is tried as one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import GLUON, OFF, TRITON, Config
from ..problem import BLOCK_MASK, GluonFunction
from ..resolve import Resolution
from ..schedule.packing import shares_row
from ..schedule.parts import parts_for
from ..templates.tiles import EMULATED, Template, Tile, tile


@dataclass(frozen=True)
class Kind:
    """What is tried as one: kernels of a kind differ in sizes and schedules alone, Triton's in the user's functions too."""

    template: str  # one_pass or two_pass
    kernel: str  # triton or gluon
    launch: str
    arch: int | str  # 90 for sm_90
    dtype: str
    head_dim: int
    value_dim: int
    mask: str  # full, causal or block_mask
    block_m: int
    block_n: int
    block: int | None = None  # rows and keys of a block of the mask, at most
    long_schedule: str | None = None  # the family, where one row of its table serves all chains: where sequences are long
    dropout: str | None = None  # whose random bits drop elements
    bands: bool = False  # whether chains are cut into bands, and the query heads of a group into sets: schedule/parts.py
    sets: bool = False
    function: GluonFunction | None = None  # of the scores, in the Gluon kernel
    sliced: bool = False  # whether a launch has a slice of the KV tiles

    def __post_init__(self) -> None:
        if isinstance(self.function, dict):  # out of JSON
            found: dict[str, Any] = self.function
            tuples = {name: tuple(x) for name, x in found.items() if isinstance(x, list)}
            object.__setattr__(self, "function", GluonFunction(**found | tuples))

    @property
    def is_flex(self) -> bool:
        """Whether it takes a FlexAttention to try it."""
        return self.dropout is None and (self.mask == BLOCK_MASK or self.function is not None)

    def text(self) -> str:
        """The fields, as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: str) -> Kind:
        """The kind whose text this is."""
        return Kind(**json.loads(text))

    def __str__(self) -> str:
        dims = self.head_dim if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        kernel = self.template if self.kernel == TRITON else f"{self.template} in {self.kernel}"
        arch = f"sm_{self.arch}" if isinstance(self.arch, int) else self.arch
        more = f", long, {self.long_schedule}" if self.long_schedule else ""
        more += f", {self.dropout} dropout" if self.dropout else ""
        more += ", in bands" * self.bands + ", in sets" * self.sets + ", in slices" * self.sliced
        more += f", function {hashlib.sha256(self.function.source.encode()).hexdigest()[:12]}" if self.function else ""
        return f"{kernel} ({self.launch}, {self.mask} mask{more}, {self.dtype}, head dim {dims}) on {arch}"


def kinds_of(resolution: Resolution) -> list[Kind]:
    """One for each kernel that an attention may take, at sizes known at run time too."""
    problem = resolution.problem
    tiles = (Template.ONE_PASS, resolution.one_pass), (Template.TWO_PASS, resolution.two_pass)
    return [
        Kind(
            template.value,
            resolution.kernel if template is Template.ONE_PASS else TRITON,
            "plain" if template is Template.TWO_PASS else "chained" if resolution.chained else "grouped",
            resolution.target.arch,
            problem.dtype,
            *problem.head_dims,
            problem.mask,
            used.block_m,
            used.block_n,
            max(problem.block_size) if problem.block_size else None,
            _long_schedule(resolution) if template is Template.ONE_PASS else None,
            problem.dropout and problem.dropout.generator,
            *parts,
            problem.gluon_function if template is Template.ONE_PASS and resolution.kernel == GLUON else None,
            template is Template.ONE_PASS and resolution.slices > 1,
        )
        for template, used in tiles
        if used
        for parts in (_parts(resolution, used) if isinstance(used, Tile) else [(False, False)])
    ]


def _parts(resolution: Resolution, tile: Tile) -> list[tuple[bool, bool]]:
    """Whether chains are in bands, and in sets: each that the lowering may launch (lowering/listed.py)."""
    problem = resolution.problem
    if problem.mask != BLOCK_MASK:
        return [(False, False)]
    by_head = problem.group > 1 and not (isinstance(problem.masks, int) and problem.masks == 1)
    # The Gluon kernel walks one row of a mask: each query head of a group that has its own is a set.
    found = {(False, resolution.kernel == GLUON)} if by_head else set()
    if not resolution.may_cut_chains:
        found.add((False, False))
    elif problem.is_static:
        parts = parts_for(resolution.turn.kv_heads_total, problem.group, -(-problem.kv_len // tile.block_n))
        found.add((parts.bands > 1, parts.sets > 1))
    else:
        found |= {(bands, sets) for bands in (False, True) for sets in {False, problem.group > 1}}
    return sorted(found)


def _long_schedule(resolution: Resolution) -> str | None:
    problem = resolution.problem
    shares = problem.mask != BLOCK_MASK and problem.is_static and shares_row(resolution.schedule[0])
    return resolution.schedule[0].family if shares else None


def is_small(kind: Kind) -> bool:
    """Whether it has the smaller tile, or there is one alone."""
    if kind.template != Template.ONE_PASS.value or kind.kernel != TRITON:
        return False
    return kind.block_m == tile(kind.arch, kind.dtype, kind.head_dim, kind.value_dim, small=True).block_m


def settings_for(kind: Kind, settings: Config) -> Config:
    """Those under which an attention of any size is of this kind, where it is compiled under `settings`."""
    forced: dict[str, Any] = {"template": kind.template, "kernel": kind.kernel, "guard": OFF, "on_unsupported": "error"}
    forced["emulate"] = kind.arch == EMULATED
    if kind.template == Template.TWO_PASS.value:
        forced |= {"schedule": "auto", "sm_reserve": 0}
    if kind.long_schedule:
        forced["schedule"] = kind.long_schedule  # of a small attention another might be chosen, which shares no row
    return replace(settings, **forced)
