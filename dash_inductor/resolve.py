"""What an attention gets, and why: asked by the pass, the op, the lowering and every command, and derived nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property

from .config import GLUON, Config
from .devices.cost_files import load_costs, load_two_pass, two_pass_percent
from .devices.target import Target
from .problem import BLOCK_MASK, Problem
from .schedule import BLOCKS_MASK, MONOTONE, ROUND_ROBIN, SEARCHED, TWO_PASS, Costs, Plan, TwoPass
from .schedule.candidates import two_pass_ns
from .schedule.choice import ScheduleChoice, choose, choose_chained, two_pass_plan
from .schedule.costs import FLOP_PER_ELEMENT, two_pass_margin
from .schedule.families import may_round_robin, why_guarantee_too_weak, why_impossible
from .schedule.formulas.chained import chained_plan, chained_time
from .schedule.packing import why_no_round_robin
from .schedule.searched import searched_plan
from .templates import tiles
from .templates.tiles import ONE_PASS_HEAD_DIM, AnyTile, EitherTile, Template, Tile, TwoPassTile

# What an operation of FlexAttention's functions costs, in FLOP of the kernel's matmuls: an SM does 128 of them in a clock, its
# tensor cores 4,096 FLOP, of which the kernel gets about 0.4. A proxy, of which nothing has been measured: by it a step of the
# kernels in docs/kernel.md takes 32 % less to 48 % more cycles than by their replay.
MOD_FLOP = 13


@dataclass(frozen=True)
class Resolution:
    """What an attention gets on a device under settings.

    tile: that of the template, or of both where sizes known at run time decide.
    costs: those of one pass, with two_pass in them where sizes decide; None under two passes.
    choice: of a grouped launch of one pass, for sizes that are known and masks that have formulas.
    """

    problem: Problem
    settings: Config
    target: Target
    template: Template
    tile: AnyTile
    costs: Costs | None = None
    choice: ScheduleChoice | None = None

    @property
    def chained(self) -> bool:
        """Whether every chain has its own ticket, so that the launch ends with any number of resident CTAs."""
        return self.settings.launch == "chained" or self.problem.mask == BLOCK_MASK

    @property
    def family(self) -> str:
        """The family that settings and mask ask for: `auto` where the cost model chooses.

        A chained launch takes monotone orders alone, whose chains wait for earlier tickets only.
        """
        forced = self.settings.schedule
        if self.problem.mask == BLOCK_MASK:
            return "descending"
        if forced == "auto" and self.chained:
            return "ascending" if self.problem.mask == "full" else "descending"
        if forced == "auto" and self.problem.mask == BLOCKS_MASK:
            return SEARCHED if self.settings.guarantee == "run" else "descending"
        return forced

    @property
    def may_round_robin(self) -> bool:
        """Whether the schedule of one pass may be a round robin."""
        return not self.chained and may_round_robin(self.settings.guarantee, self.settings.schedule)

    @property
    def two_pass(self) -> TwoPass:
        """What two passes cost on the target."""
        assert not isinstance(self.tile, Tile)
        return _two_pass_costs(self.target, self.tile.two_pass if isinstance(self.tile, EitherTile) else self.tile)

    @cached_property
    def schedule(self) -> tuple[Plan, int | None]:
        """(The order placed for all heads, its time in ns or None where the cost model has none), for sizes that are known."""
        tiled = self.problem.tiled(self.tile)
        if self.template == Template.TWO_PASS:
            return two_pass_plan(tiled, self.two_pass), two_pass_ns(tiled, self.two_pass)
        assert self.costs
        if self.chained:
            time_ns = None if tiled.blocks else chained_time(tiled, self.costs, self.family)
            return chained_plan(tiled.geometry, self.family, tiled.kv_heads_total, tiled.group), time_ns
        if self.choice:
            return self.choice.plan(), self.choice.time_ns
        return searched_plan(tiled, self.costs, self.family)


def resolve(problem: Problem, settings: Config, target: Target) -> Resolution:
    """The template, tile and schedule of an attention, a pure function of its arguments and the target's cost file.

    Raises:
        ValueError: with the reason why the attention is left to its stock kernel.
    """
    if reason := problem.why_not_taken():
        raise ValueError(reason)
    template = template_for(problem, settings, target)
    arguments = target.arch, problem.dtype, *problem.head_dims
    one_pass = (tiles.gluon_tile if settings.kernel == GLUON else tiles.tile)(*arguments) if template != Template.TWO_PASS else None
    two_pass = tiles.two_pass_tile(*arguments) if template != Template.ONE_PASS else None
    if one_pass is None:
        assert two_pass
        return Resolution(problem, settings, target, template, two_pass)
    if reason := problem.why_no_table(one_pass):
        raise ValueError(reason)
    if problem.mask == BLOCK_MASK and (reason := problem.why_no_blocks(one_pass)):
        raise ValueError(reason)
    costs = _costs(target, one_pass, two_pass)
    if problem.mods:
        costs = replace(costs, step_ns=round(costs.step_ns * (1 + _share_of_mods(problem, one_pass))))
    asked = settings.template != "auto" or settings.schedule != "auto"
    if problem.mods is not None and settings.guarantee == "run" and target.arch != tiles.EMULATED and not asked:
        _require_chains(problem, one_pass, costs, _two_pass_costs(target, tiles.two_pass_tile(*arguments)))
    either: AnyTile = EitherTile(one_pass, two_pass) if two_pass else one_pass
    resolution = Resolution(problem, settings, target, template, either, costs)
    if reason := _why_no_schedule(resolution):
        raise ValueError(reason)
    if not problem.is_static or problem.mask == BLOCK_MASK:
        return resolution
    return _decided(resolution, one_pass, two_pass)


def mask_block(target: Target) -> tuple[int, int]:
    """Queries and keys of a block of a mask that the pass makes: every tile of the target divides it."""
    return (32, 32) if target.arch == tiles.EMULATED else (128, 128)


def template_for(problem: Problem, settings: Config, target: Target) -> Template:
    """One pass, two, or by size; ValueError where the settings cannot be met.

    Bits differ between the two. So sizes and the number of SMs decide under the guarantee `run` alone, for graphs of one shape as
    for graphs of any; under `device` and `batch` settings and compile-time facts do.
    """
    mask, most = problem.mask, max(problem.head_dims)
    if problem.mods is not None or mask == BLOCK_MASK:
        return _template_of_flex(problem, settings)
    if settings.template == Template.TWO_PASS and mask == BLOCKS_MASK:
        raise ValueError(f"template='two_pass' takes no mask={mask!r}")
    if settings.kernel == GLUON:
        return Template.ONE_PASS
    if settings.template == Template.TWO_PASS:
        return Template.TWO_PASS
    asked = [name for name in ("template", "schedule") if getattr(settings, name) != "auto"]  # schedules are of one pass
    if most > ONE_PASS_HEAD_DIM and (asked or mask == BLOCKS_MASK):
        by = " and ".join(f"{name}={getattr(settings, name)!r}" for name in asked) or f"mask={mask!r}"
        raise ValueError(f"{_too_large(problem)}, which {by} asks for")
    if asked or mask == BLOCKS_MASK:
        return Template.ONE_PASS
    if most > ONE_PASS_HEAD_DIM:
        return Template.TWO_PASS
    if settings.guarantee == "run":
        return Template.ONE_PASS if target.reserved_sms else Template.BY_SIZE  # plain launches would take the reserved SMs
    percent, estimate = two_pass_percent(target.key, most)
    return Template.TWO_PASS if percent * (100 + two_pass_margin(estimate)) < 100 * 100 else Template.ONE_PASS


def _template_of_flex(problem: Problem, settings: Config) -> Template:
    """One pass, which alone takes functions of positions; ValueError where settings or head dim ask for another template."""
    for name, other in (("template", Template.TWO_PASS.value), ("kernel", GLUON)):
        if getattr(settings, name) == other:
            raise ValueError(f"{name}={other!r} takes no {'mask but full and causal' if problem.mods is None else 'FlexAttention'}")
    if problem.mask == BLOCK_MASK and settings.schedule not in ("auto", "descending"):
        raise ValueError(f"schedule={settings.schedule!r} takes no BlockMask: its KV tiles are added in descending order")
    if max(problem.head_dims) > ONE_PASS_HEAD_DIM:
        raise ValueError(_too_large(problem))
    return Template.ONE_PASS


def _too_large(problem: Problem) -> str:
    return f"head dim {tiles.dims_text(*problem.head_dims)} is more than the {ONE_PASS_HEAD_DIM} of one pass"


class StockIsFaster(ValueError):
    """The stock kernel is deterministic as well, and expected to be faster."""


def _require_chains(problem: Problem, tile: Tile, costs: Costs, two_pass: TwoPass) -> None:
    """Raises StockIsFaster where one pass has too few chains to fill the device, and two passes, as stock makes them, finish first.

    Two passes cost more for an element of the scores, in which the functions of the attention count twice, and fill the device
    from a few chains on: so much fewer workers may one pass keep busy. The mask is not known here, and divides both times.
    """
    share = _share_of_mods(problem, tile)
    one_ns = costs.step_ns / (tile.block_m * tile.block_n)
    two_ns = two_pass.kv_step_ns / (two_pass.block_m * two_pass.kv_rows) + two_pass.q_step_ns / (two_pass.q_rows * two_pass.block_n)
    least = math.ceil(costs.workers * one_ns / (two_ns + 2 * one_ns * share / (1 + share)))
    if problem.chains(tile) < least:
        raise StockIsFaster(
            f"{problem.chains(tile)} KV tiles over all kv heads are fewer than the {least} from which one pass fills the device: "
            "stock's two passes, which are deterministic too, are faster"
        )


def _share_of_mods(problem: Problem, tile: Tile) -> float:
    """What the functions of a FlexAttention take of a step of one pass, in parts of what the step takes without them."""
    return (problem.mods or 0) * MOD_FLOP / (FLOP_PER_ELEMENT * tile.mean_dim)


def _why_no_schedule(resolution: Resolution) -> str | None:
    """Why one pass has no schedule for what is asked; None if it has one."""
    problem, settings, family = resolution.problem, resolution.settings, resolution.family
    if problem.mask == BLOCK_MASK:
        return None
    if settings.kernel == GLUON and resolution.may_round_robin:
        reason = f"with guarantee {settings.guarantee!r} and schedule {settings.schedule!r} there may be one"
        return f"the Gluon kernel takes no round robin, and {reason}: force a family, or guarantee device or batch"
    if SEARCHED not in (family, settings.schedule) and problem.mask != BLOCKS_MASK:
        return why_impossible(problem.mask, settings.guarantee, settings.schedule)
    if not problem.is_static:
        sizes = f"B={problem.batch}, H={problem.heads}/{problem.kv_heads}, S_q={problem.q_len}, S_k={problem.kv_len}"
        return f"family {family!r} is made for static shapes (dynamic=False), not for {sizes}"
    if family not in (*MONOTONE, SEARCHED):
        return f"family {family!r} does not serve every mask: use ascending, descending or searched"
    return why_guarantee_too_weak(settings.guarantee, family)


def _decided(resolution: Resolution, one_pass: Tile, two_pass: TwoPassTile | None) -> Resolution:
    """One pass or two, and the choice of a schedule, for sizes that are known."""
    problem, settings, costs = resolution.problem, resolution.settings, resolution.costs
    assert costs
    tiled = problem.tiled(one_pass)
    in_one_pass = replace(resolution, template=Template.ONE_PASS, tile=one_pass)
    if resolution.chained:
        takes_two = choose_chained(tiled, costs, resolution.family) == TWO_PASS
    elif resolution.family == SEARCHED or problem.blocks is not None:
        return in_one_pass
    else:
        choice = choose(tiled, costs, settings.guarantee, settings.schedule)
        takes_two = choice.family == TWO_PASS
        in_one_pass = replace(in_one_pass, choice=choice)
        if choice.family in ROUND_ROBIN and (reason := why_no_round_robin(tiled.geometry, choice.family)):
            raise ValueError(reason)
    if not takes_two:
        return in_one_pass
    assert two_pass
    return replace(in_one_pass, template=Template.TWO_PASS, tile=two_pass)


@cache
def _costs(target: Target, one_pass: Tile, two_pass: TwoPassTile | None) -> Costs:
    """The costs of a tile step on the target, in nanoseconds; those of two passes with them where sizes decide."""
    blocks = {"block_m": one_pass.block_m, "block_n": one_pass.block_n, "head_dim": one_pass.mean_dim}
    costs = load_costs(target.key, **blocks, sms=target.sms, ctas_per_sm=one_pass.ctas_per_sm)
    return replace(costs, two_pass=_two_pass_costs(target, two_pass)) if two_pass else costs


@cache
def _two_pass_costs(target: Target, two_pass: TwoPassTile) -> TwoPass:
    """What two passes cost on the target."""
    return load_two_pass(target.key, **two_pass.sizes(), sms=target.sms)
