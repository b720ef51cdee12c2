"""What code is generated for: the device's kind, its SMs, and the tile and costs that follow from them."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import torch

from . import emulation
from .config import GLUON, ONE_PASS, current, reserved_sms
from .devices import key_for, stand_in
from .devices.cost_files import load_costs, load_two_pass
from .schedule import (
    INTEGER,
    TABLE,
    TWO_PASS,
    Blocks,
    Costs,
    Plan,
    Shape,
    Straddling,
    TwoPass,
    chained_plan,
    chained_time,
    choose,
    choose_chained,
    geometry_of,
    may_straddle,
    table_plan,
    too_weak,
    two_pass_plan,
    two_pass_time,
)
from .template_choice import template_for
from .templates.tiles import EMULATED, Tile, TwoPassTile, gluon_tile, tile, two_pass_tile

log = logging.getLogger("dash_inductor")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Target:
    """`key` names the cost file, `arch` (90 for sm_90, or "emulated") the tile; `sms` of the device's SMs are for our CTAs."""

    key: str
    arch: int | str
    sms: int


def target_of(device: torch.device) -> Target:
    """The target of a device, less the SMs that are left to others (`reserved_sms`).

    Raises:
        ValueError: with the reason why nothing can be generated for it.
    """
    whole = _device(device)
    reserved = reserved_sms()
    if reserved >= whole.sms:
        raise ValueError(f"{reserved} SMs are reserved (sm_reserve, torch's SM carve-out), and the device has {whole.sms}")
    return replace(whole, sms=whole.sms - reserved)


def _device(device: torch.device) -> Target:
    if device.type == "cpu":
        settings = emulation.settings()
        return Target(EMULATED, EMULATED, current().sms if settings is None else settings.sms)
    if torch.version.hip is not None:
        raise ValueError("ROCm is not supported")
    if device.type != "cuda":
        raise ValueError(f"device {device.type} is not supported")
    from torch._dynamo.device_interface import get_interface_for_device

    properties = get_interface_for_device("cuda").Worker.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    key = key_for(properties.name, arch) or _stand_in(properties.name, arch)
    return Target(key, arch, properties.multi_processor_count)


@functools.cache
def _stand_in(name: str, arch: int) -> str:
    """The cost file that an unknown GPU takes; the log says so once."""
    try:
        key = stand_in(arch)
    except ValueError as error:
        raise ValueError(f"no cost file for {name}, and {error}") from None
    log.warning(
        "no cost file for %s (sm_%d): its schedules are chosen with the costs of %s and its own number of SMs", name, arch, key
    )
    return key


@dataclass(frozen=True)
class Tiles:
    """The tile of one pass or that of two; both where the sizes of an attention decide between them."""

    one_pass: Tile | None
    two_pass: TwoPassTile | None

    @property
    def first(self) -> Tile | TwoPassTile:
        """By whose rows delta and logsumexp are padded; they are the same in both."""
        found = self.one_pass or self.two_pass
        assert found
        return found

    def __str__(self) -> str:
        return " or ".join(str(tile) for tile in (self.one_pass, self.two_pass) if tile)


def tiles_for(target: Target, dtype: torch.dtype, head_dim: int, mask: str = "full") -> Tiles:
    """The tiles under the settings in force; ValueError with the reason where there are none."""
    settings = current()
    template = template_for(settings, target.key, head_dim, mask, reserved_sms())
    if settings.kernel == GLUON and not chained() and may_straddle(settings.guarantee, settings.schedule):
        reason = f"with guarantee {settings.guarantee!r} and schedule {settings.schedule!r} there may be one"
        raise ValueError(f"the Gluon kernel takes no round robin, and {reason}: force a family, or guarantee device or batch")
    how = target.arch, DTYPES.get(dtype, str(dtype)), head_dim
    one_pass = gluon_tile if settings.kernel == GLUON else tile
    return Tiles(
        one_pass=None if template == TWO_PASS else one_pass(*how),
        two_pass=None if template == ONE_PASS else two_pass_tile(*how),
    )


@functools.cache
def costs_of(target: Target, tiles: Tiles) -> Costs:
    """The costs of one tile step on the target, in nanoseconds; those of two passes with them where sizes decide."""
    tile = tiles.one_pass
    assert tile
    costs = load_costs(
        target.key,
        block_m=tile.block_m,
        block_n=tile.block_n,
        head_dim=tile.block_d,
        sms=target.sms,
        ctas_per_sm=tile.ctas_per_sm,
    )
    return replace(costs, two_pass=two_pass_of(target, tiles.two_pass)) if tiles.two_pass else costs


@functools.cache
def two_pass_of(target: Target, tile: TwoPassTile) -> TwoPass:
    """What two passes cost on the target."""
    return load_two_pass(target.key, **tile.sizes(), sms=target.sms)


def chained() -> bool:
    """Whether the settings ask for one ticket per chain, which ends with any number of resident CTAs."""
    return current().launch == "chained"


def chained_family(mask: str) -> str:
    """The family of a chained launch: its chains wait for earlier tickets only, which mono orders alone allow."""
    forced = current().schedule
    return forced if forced != "auto" else "ascending" if mask == "full" else "descending"


@dataclass(frozen=True)
class Resolved:
    """What an attention gets: the tile says whether one pass or two; the time is None where the cost model has none."""

    tile: Tile | TwoPassTile
    plan: Plan | Straddling
    time_ns: int | None


def resolve(
    target: Target,
    tiles: Tiles,
    *,
    q_len: int,
    kv_len: int,
    heads: int,
    group: int,
    mask: str,
    blocks: Blocks | None = None,
) -> Resolved:
    """The schedule of an attention, placed, under the settings in force.

    heads is batch x kv heads, group the query heads of each; blocks go with the mask "table". ValueError where the settings
    cannot be met.
    """
    rows = tiles.first
    shape = Shape(q_len, kv_len, heads, group, rows.block_d, rows.block_m, rows.block_n, mask)
    if tiles.one_pass is None:
        return _in_two_passes(target, tiles, shape)
    forced, guarantee, costs = current().schedule, current().guarantee, costs_of(target, tiles)
    if chained():
        family = chained_family(mask)
        if choose_chained(shape, costs, family) == TWO_PASS:
            return _in_two_passes(target, tiles, shape)
        time_ns = None if blocks else chained_time(shape, costs, family)
        return Resolved(tiles.one_pass, chained_plan(geometry_of(shape, blocks), family, heads, group), time_ns)
    if forced == TABLE or blocks is not None:
        family = forced if forced != "auto" else TABLE if guarantee == "run" else "descending"
        if problem := too_weak(guarantee, family):
            raise ValueError(problem)
        return Resolved(tiles.one_pass, *table_plan(shape, costs, family, blocks))
    choice = choose(shape, costs, guarantee, forced)
    tile = tiles.two_pass if choice.family == TWO_PASS else tiles.one_pass
    assert tile
    return Resolved(tile, choice.plan(), choice.time_ns)


def _in_two_passes(target: Target, tiles: Tiles, shape: Shape) -> Resolved:
    assert tiles.two_pass
    two = two_pass_of(target, tiles.two_pass)
    return Resolved(tiles.two_pass, two_pass_plan(shape, two), two_pass_time(shape, two, INTEGER).ns)


__all__ = [
    "DTYPES",
    "Resolved",
    "Target",
    "Tile",
    "Tiles",
    "TwoPassTile",
    "chained",
    "chained_family",
    "costs_of",
    "resolve",
    "target_of",
    "tiles_for",
]
