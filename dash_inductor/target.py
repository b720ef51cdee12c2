"""What code is generated for: the device's kind, its SMs, and the tile and costs that follow from them."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import torch

from . import emulation
from .config import GLUON, TWO_PASS, current, reserved_sms
from .devices import key_for, stand_in
from .schedule import (
    TABLE,
    Blocks,
    Costs,
    Plan,
    Shape,
    Straddling,
    choose,
    geometry_of,
    load_costs,
    make,
    may_straddle,
    table_plan,
    too_weak,
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


def tile_of(target: Target, dtype: torch.dtype, head_dim: int, mask: str = "full") -> Tile | TwoPassTile:
    """The tile, which says whether one pass or two; ValueError with the reason where there is none."""
    settings = current()
    template = template_for(settings, target.key, head_dim, mask)
    if settings.kernel == GLUON and not chained() and may_straddle(settings.guarantee, settings.schedule):
        reason = f"with guarantee {settings.guarantee!r} and schedule {settings.schedule!r} there may be one"
        raise ValueError(f"the Gluon kernel takes no round robin, and {reason}: force a family, or guarantee device or batch")
    find = two_pass_tile if template == TWO_PASS else gluon_tile if settings.kernel == GLUON else tile
    return find(target.arch, DTYPES.get(dtype, str(dtype)), head_dim)


@functools.cache
def costs_of(target: Target, tile: Tile) -> Costs:
    """The costs of one tile step on the target, in nanoseconds."""
    return load_costs(
        target.key,
        block_m=tile.block_m,
        block_n=tile.block_n,
        head_dim=tile.block_d,
        sms=target.sms,
        ctas_per_sm=tile.ctas_per_sm,
    )


def shape_of(tile: Tile | TwoPassTile, *, q_len: int, kv_len: int, heads: int, group: int, mask: str) -> Shape:
    """The problem as the schedule sees it; `heads` is batch x kv heads, `group` the query heads of each."""
    return Shape(
        q_len=q_len,
        kv_len=kv_len,
        heads=heads,
        group=group,
        head_dim=tile.block_d,
        block_m=tile.block_m,
        block_n=tile.block_n,
        mask=mask,
    )


def chained() -> bool:
    """Whether the settings ask for one ticket per chain, which ends with any number of resident CTAs."""
    return current().launch == "chained"


def chained_family(mask: str) -> str:
    """The family of a chained launch: its chains wait for earlier tickets only, which mono orders alone allow."""
    forced = current().schedule
    return forced if forced != "auto" else "ascending" if mask == "full" else "descending"


def plan_for(
    target: Target, tile: Tile | TwoPassTile, shape: Shape, blocks: Blocks | None = None
) -> tuple[Plan | Straddling, int | None]:
    """The schedule of a shape, placed, under the settings in force, and its time in ns where the cost model has one.

    blocks go with the mask "table". ValueError where the settings cannot be met.
    """
    if isinstance(tile, TwoPassTile):  # every sum in ascending order, whoever computes it
        return Plan(make("ascending", shape.geometry, 1), shape.heads, 1, shape.group), None
    forced, guarantee, costs = current().schedule, current().guarantee, costs_of(target, tile)
    if chained():
        geometry = geometry_of(shape, blocks)
        return Plan(make(chained_family(shape.mask), geometry, geometry.n_kv), shape.heads, shape.heads, shape.group), None
    if forced == TABLE or blocks is not None:
        family = forced if forced != "auto" else TABLE if guarantee == "run" else "descending"
        if problem := too_weak(guarantee, family):
            raise ValueError(problem)
        return table_plan(shape, costs, family, blocks)
    choice = choose(shape, costs, guarantee, forced)
    return choice.plan(), choice.time_ns


__all__ = [
    "DTYPES",
    "Target",
    "Tile",
    "TwoPassTile",
    "chained",
    "chained_family",
    "costs_of",
    "plan_for",
    "shape_of",
    "target_of",
    "tile_of",
]
