"""What an attention gets, and why: asked by the pass, the op, the lowering and every command, and derived nowhere else."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from .config import AUTO, GLUON, TRITON, Config
from .decision import Declined, Kernel, LeftToStock
from .devices.cost_files import load_costs, load_tflops, load_two_pass, two_pass_percent
from .devices.stock_kernels import percent_as_called, published, stock_cost
from .devices.target import Target
from .problem import BLOCK_MASK, Problem
from .schedule import ROUND_ROBIN, TWO_PASS, Costs, Plan, TwoPass
from .schedule.candidates import two_pass_ns
from .schedule.choice import ScheduleChoice, choose, choose_chained, two_pass_plan
from .schedule.costs import FLOP_PER_ELEMENT, two_pass_margin
from .schedule.families import may_round_robin, why_impossible
from .schedule.formulas.chained import chained_plan, chained_time
from .schedule.packing import schedule_ints, why_no_round_robin
from .templates import gluon_is_tested, tiles
from .templates.tiles import DEFAULTS, ONE_PASS_HEAD_DIM, AnyTile, NoTile, Template, Tile, TwoPassTile

# What an operation of FlexAttention's functions costs, in FLOP of the kernel's matmuls: an SM does 128 of them in a clock, its
# tensor cores 4,096 FLOP, of which the kernel gets about 0.4. Unmeasured proxy; error against the replay -32 % to +48 %.
MOD_FLOP = 13
FP32_BYTES = 4
as_if_small: ContextVar[bool] = ContextVar("as_if_small", default=False)  # whether the smaller tile is taken always; set by trials
OURS = "none needed: template='one_pass' or guarantee='device' takes ours all the same"  # where speed leaves it to another kernel
TIE = 1.05  # times our predicted speed, up to which ours is taken in the place of another deterministic kernel


@dataclass(frozen=True)
class Resolution:
    """What an attention gets on a device under settings.

    one_pass, two_pass: the tiles of the templates that it takes, None for one that it does not; both where sizes known at run time
        decide.
    costs: those of one pass, with two_pass in them where sizes decide; None under two passes.
    choice: of a grouped launch of one pass, for sizes that are known.
    """

    problem: Problem
    settings: Config
    target: Target
    one_pass: Tile | None
    two_pass: TwoPassTile | None
    costs: Costs | None = None
    choice: ScheduleChoice | None = None

    @property
    def template(self) -> Template:
        """One pass, two, or by size."""
        if self.two_pass is None:
            return Template.ONE_PASS
        return Template.TWO_PASS if self.one_pass is None else Template.BY_SIZE

    @property
    def tile(self) -> AnyTile:
        """The tile of one pass if there is one. Delta and logsumexp are padded to its block_m, a multiple of that of two passes."""
        tile = self.one_pass or self.two_pass
        assert tile
        return tile

    @property
    def tile_text(self) -> str:
        """As a decision has it."""
        return " or ".join(str(tile) for tile in (self.one_pass, self.two_pass) if tile)

    @property
    def kernel(self) -> str:
        """TRITON or GLUON: that of one pass, if it takes one."""
        return TRITON if self.one_pass is None else kernel_for(self.problem, self.settings, self.target)

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
        return forced

    @property
    def may_round_robin(self) -> bool:
        """Whether the schedule of one pass may be a round robin."""
        return not self.chained and may_round_robin(self.settings.guarantee, self.settings.schedule)

    @property
    def two_pass_costs(self) -> TwoPass:
        """What two passes cost on the target."""
        assert self.two_pass
        return _two_pass_costs(self.target, self.two_pass)

    @cached_property
    def schedule(self) -> tuple[Plan, int | None]:
        """(The order placed for all heads, its time in ns or None where the cost model has none), for sizes that are known."""
        tiled = self.problem.tiled(self.tile)
        if self.one_pass is None:
            return two_pass_plan(tiled, self.two_pass_costs), two_pass_ns(tiled, self.two_pass_costs)
        assert self.costs
        if self.chained:
            plan = chained_plan(tiled.geometry, self.family, tiled.kv_heads_total, tiled.group)
            return plan, chained_time(tiled, self.costs, self.family)
        assert self.choice
        return self.choice.plan(), self.choice.time_ns

    @property
    def schedule_ints(self) -> int:
        """Ints of memory that the schedule takes, for sizes that are known."""
        return schedule_ints(self.schedule[0], tiles.GLUON_PARTITIONS if self.kernel == GLUON else 1)

    def workspace_bytes(self, q_tiles: Any, schedule_ints: Any) -> Any:
        """Memory beside inputs and outputs, for so many Q tiles of all query heads and ints of the schedule; sizes may be symbolic.

        fp32 delta and logsumexp of each row. Of one pass also fp32 dq, a semaphore for each Q tile, the ticket and a dummy.
        """
        block_m, of_delta_and_lse = self.tile.block_m, 2
        if self.one_pass is None:
            return FP32_BYTES * q_tiles * block_m * of_delta_and_lse
        return FP32_BYTES * (q_tiles * (block_m * (self.one_pass.block_d + of_delta_and_lse) + 1) + 2 + schedule_ints)


def resolve(problem: Problem, settings: Config, target: Target) -> Resolution:
    """The template, tile and schedule of an attention, a pure function of its arguments and the target's cost file.

    Raises:
        Declined: the attention is left to its stock kernel.
    """
    if declined := problem.why_not_taken():
        raise declined
    template = template_for(problem, settings, target)
    try:
        one_pass, two_pass = _tiles(template, problem, settings, target)
    except NoTile as no_tile:
        raise Declined(str(no_tile), no_tile.remedy) from None
    tile = one_pass or two_pass
    assert tile
    if problem.mask == BLOCK_MASK and (declined := problem.why_no_blocks(tile)):
        raise declined
    asked = settings.template != "auto" or settings.schedule != "auto" or problem.segments > 0
    kernel = kernel_for(problem, settings, target)
    may_stay = settings.guarantee == "run" and target.arch != tiles.EMULATED and not asked
    if may_stay:
        _require_speed(problem, target, one_pass, two_pass, kernel)
    if one_pass is None:
        return Resolution(problem, settings, target, None, two_pass)
    if declined := problem.why_no_table(one_pass):
        raise declined
    costs = _costs(target, one_pass, two_pass, kernel)
    if problem.mods and kernel == TRITON:  # Gluon's mask function is asked before the launch
        costs = replace(costs, step_ns=round(costs.step_ns * (1 + _share_of_mods(problem, one_pass))))
    if may_stay and two_pass is None:
        _require_chains(problem, one_pass, costs, target)
    resolution = Resolution(problem, settings, target, one_pass, two_pass, costs)
    if reason := _why_no_schedule(resolution):
        raise Declined(reason, DEFAULTS)
    if not problem.is_static or problem.mask == BLOCK_MASK:
        return resolution
    return _with_schedule(resolution, one_pass)


def kernel_for(problem: Problem, settings: Config, target: Target) -> str:
    """TRITON or GLUON: the kernel of one pass. Unless it is forced, the architecture, the dtype and the head dim say which.

    Masks in blocks take TRITON, since the Gluon kernel has not run under them on a GPU.
    """
    if settings.kernel != AUTO:
        return settings.kernel
    head_dim, value_dim = problem.head_dims
    is_faster = head_dim == value_dim and (target.arch, problem.dtype, head_dim) in tiles.GLUON_BY_DEFAULT
    is_taken = problem.mask != BLOCK_MASK and not problem.why_no_gluon() and settings.template != Template.TWO_PASS
    return GLUON if is_faster and is_taken and gluon_is_tested() else TRITON


def _tiles(template: Template, problem: Problem, settings: Config, target: Target) -> tuple[Tile | None, TwoPassTile | None]:
    one_pass = None
    if template != Template.TWO_PASS:
        of = target.arch, problem.dtype, *problem.head_dims
        if kernel_for(problem, settings, target) == GLUON:
            one_pass = tiles.gluon_tile(*of)
        else:
            one_pass = tiles.tile(*of)
            if _needs_small(problem, one_pass):
                one_pass = tiles.tile(*of, small=True)
    return one_pass, None if template == Template.ONE_PASS else _two_pass_tile(problem, target)


def _needs_small(problem: Problem, tile: Tile) -> bool:
    """Whether blocks of the mask are no whole tiles, or registers would not hold what a step computes beside its gradients."""
    splits_blocks = problem.mask == BLOCK_MASK and problem.block_size is not None and problem.block_size[0] % tile.block_m != 0
    return splits_blocks or problem.dropout is not None or problem.changes_scores or as_if_small.get()


def _two_pass_tile(problem: Problem, target: Target) -> TwoPassTile:
    return tiles.two_pass_tile(target.arch, problem.dtype, *problem.head_dims)


def mask_block(target: Target, settings: Config, head_dims: tuple[int, int]) -> tuple[int, int]:
    """Queries and keys of a block of a mask that the pass makes: the tile that walks it divides it."""
    if target.arch != tiles.EMULATED:
        return 128, 128
    takes_two = settings.template == Template.TWO_PASS or max(head_dims) > ONE_PASS_HEAD_DIM
    return (32, 64) if takes_two else (32, 32)


def template_for(problem: Problem, settings: Config, target: Target) -> Template:
    """One pass, two, or by size; Declined where the settings cannot be met.

    Bits differ between the two. So sizes and the number of SMs decide under the guarantee `run` alone, for graphs of one shape as
    for graphs of any; under `device` and `batch` settings and compile-time facts do.
    """
    if problem.mods is not None or problem.mask == BLOCK_MASK:
        return _template_of_flex(problem, settings, target)
    if settings.kernel == GLUON:  # asked for, which no sizes overrule
        return Template.ONE_PASS
    if settings.template == Template.TWO_PASS:
        return Template.TWO_PASS
    _require_small(problem, settings)
    most = max(problem.head_dims)
    if settings.template != "auto" or settings.schedule != "auto":
        return Template.ONE_PASS
    if most > ONE_PASS_HEAD_DIM:
        return Template.TWO_PASS
    if settings.guarantee == "run":
        return Template.ONE_PASS if target.reserved_sms else Template.BY_SIZE  # plain launches would take the reserved SMs
    if kernel_for(problem, settings, target) == GLUON:
        return Template.ONE_PASS
    percent, estimate = two_pass_percent(target.key, most)
    return Template.TWO_PASS if percent * (100 + two_pass_margin(estimate)) < 100 * 100 else Template.ONE_PASS


def _template_of_flex(problem: Problem, settings: Config, target: Target) -> Template:
    """One pass, or two for larger head dims; Declined where the settings cannot be met."""
    if settings.kernel == GLUON and (declined := problem.why_no_gluon()):
        raise declined
    if problem.mask == BLOCK_MASK and settings.schedule not in ("auto", "descending"):
        reason = f"schedule={settings.schedule!r} takes no BlockMask: its KV tiles are added in descending order"
        raise Declined(reason, DEFAULTS)
    if kernel_for(problem, settings, target) == GLUON:
        return Template.ONE_PASS
    takes_two = settings.template == Template.TWO_PASS
    if not takes_two:
        _require_small(problem, settings)
    if not takes_two and max(problem.head_dims) <= ONE_PASS_HEAD_DIM:
        return Template.ONE_PASS
    if problem.segments:
        by = "template='two_pass'" if takes_two else f"head dim {tiles.dims_text(*problem.head_dims)}"
        remedy = f"{DEFAULTS}, and a head dim of at most {ONE_PASS_HEAD_DIM}"
        raise Declined(f"segment={settings.segment} takes one pass, {by} two", remedy)
    return Template.TWO_PASS


def _require_small(problem: Problem, settings: Config) -> None:
    """Raises Declined for a head dim that one pass does not take, where the settings ask for it: schedules are of one pass."""
    asked = [name for name in ("template", "schedule") if getattr(settings, name) != "auto"]
    if asked and max(problem.head_dims) > ONE_PASS_HEAD_DIM:
        by = " and ".join(f"{name}={getattr(settings, name)!r}" for name in asked)
        dims = tiles.dims_text(*problem.head_dims)
        reason = f"head dim {dims} is more than the {ONE_PASS_HEAD_DIM} of one pass, which {by} asks for"
        raise Declined(reason, f"{DEFAULTS}: two passes take such head dims")


def _require_speed(problem: Problem, target: Target, one_pass: Tile | None, two_pass: TwoPassTile | None, kernel: str) -> None:
    """Raises LeftToStock where flash attention has another implementation, and what is known of its speed is above ours.

    One of torch's registry has to be deterministic, and above ours by more than a tie. An op that is called with deterministic=True
    has to be no slower than ours.
    """
    stock = problem.stock
    if stock is None or not stock.may_stay or stock.implementation is None:
        return
    implementation, called = stock.implementation, stock.called
    if called and one_pass and kernel == TRITON:
        percent_of_ours = percent_as_called(implementation, target.arch, problem.head_dims)
        if percent_of_ours is not None and percent_of_ours <= 100:
            known = f"takes about {percent_of_ours} % of the time of ours, by what is known of like attentions"
            raise LeftToStock(f"its kernel {known} (dash_inductor/devices/stock_kernels.py)", OURS)
        return
    figure = published(implementation, target.arch, problem.head_dims, problem.mask)
    if figure is None:
        return
    tile = one_pass or two_pass
    assert tile
    of_one, by_triton = (load_tflops(target.key, tile.mean_dim, each) for each in (kernel, TRITON))
    percent, _ = two_pass_percent(target.key, tile.mean_dim)
    ours = max(of_one if one_pass else 0, by_triton * 100 / percent if two_pass else 0)
    if called and figure.tflops >= ours:
        raise LeftToStock(f"its kernel is no slower: {figure}; ours {ours:.0f} TFLOPS predicted", OURS)
    if not called and figure.tflops > TIE * ours:
        raise LeftToStock(
            f"{implementation} is active in torch's registry, and deterministic: {figure}; ours {ours:.0f} TFLOPS predicted",
            "none needed: guarantee='device', template='one_pass' or restore_flash_attention_impl() takes ours all the same",
            implementation=implementation,
        )


def _require_chains(problem: Problem, tile: Tile, costs: Costs, target: Target) -> None:
    """Raises LeftToStock where chains are few and stock's kernel, which is deterministic in the mode in force, is faster.

    Then one pass takes as long as its longest chain. Stock's kernel takes as long as its own longest CTA, or what its work takes
    when all SMs share it, whichever is more.
    """
    stock = problem.stock
    if stock is None or not stock.is_deterministic or stock.implementation not in (None, "FA2"):  # that one is torch's own
        return
    kernel, of_head = stock.kernel, problem.chains_of_work(tile)
    if kernel == Kernel.FLEX:
        # Its longest CTA has the steps of our longest chain, and less to do in each.
        name, shared, ends_sooner = "stock's two passes", _two_passes_by_one(problem, tile, costs, target), True
    else:
        name = "flash_attn's kernel" if stock.called else "stock's kernel in strict mode"
        cost = stock_cost(kernel, target.arch, tile.mean_dim)
        shared, longest = cost.shared / 100, of_head if kernel == Kernel.EFFICIENT else 1
        ends_sooner = longest * cost.chain < 100 * problem.group
    chains, least = problem.kv_heads_total * of_head, math.ceil(costs.workers / shared)
    if ends_sooner and chains < least:
        raise LeftToStock(
            f"few KV tiles: all the work is {chains} times that of the longest chain, and one pass needs {least} times to be "
            f"as fast as {name}, deterministic too",
            OURS,
        )


def _two_passes_by_one(problem: Problem, tile: Tile, costs: Costs, target: Target) -> float:
    """The time of FlexAttention's two passes over that of one pass, for an element; its functions count twice in it."""
    two_pass, share = _two_pass_costs(target, _two_pass_tile(problem, target)), _share_of_mods(problem, tile)
    one_ns = costs.step_ns / (tile.block_m * tile.block_n)
    two_ns = two_pass.kv_step_ns / (two_pass.block_m * two_pass.kv_rows) + two_pass.q_step_ns / (two_pass.q_rows * two_pass.block_n)
    return two_ns / one_ns + 2 * share / (1 + share)


def _share_of_mods(problem: Problem, tile: Tile) -> float:
    """What the functions of a FlexAttention take of a step of one pass, in parts of what the step takes without them."""
    return (problem.mods or 0) * MOD_FLOP / (FLOP_PER_ELEMENT * tile.mean_dim)


def _why_no_schedule(resolution: Resolution) -> str | None:
    """Why one pass has no schedule for what is asked; None if it has one."""
    problem, settings = resolution.problem, resolution.settings
    if problem.mask == BLOCK_MASK:
        return None
    return why_impossible(problem.mask, settings.guarantee, settings.schedule)


def _with_schedule(resolution: Resolution, one_pass: Tile) -> Resolution:
    """One pass or two, and the choice of a schedule, for sizes that are known."""
    settings, costs, tiled = resolution.settings, resolution.costs, resolution.problem.tiled(one_pass)
    assert costs
    choice = None
    if resolution.chained:
        takes_two = choose_chained(tiled, costs, resolution.family) == TWO_PASS
    else:
        choice = choose(tiled, costs, settings.guarantee, settings.schedule)
        takes_two = choice.family == TWO_PASS
        if choice.family in ROUND_ROBIN and (reason := why_no_round_robin(tiled.geometry, choice.family)):
            raise Declined(reason, DEFAULTS)
    two_pass = resolution.two_pass if takes_two else None
    return replace(resolution, one_pass=None if takes_two else one_pass, two_pass=two_pass, choice=choice)


@cache
def _costs(target: Target, one_pass: Tile, two_pass: TwoPassTile | None, kernel: str) -> Costs:
    """The costs of a tile step on the target, in nanoseconds; those of two passes with them where sizes decide."""
    blocks = {"block_m": one_pass.block_m, "block_n": one_pass.block_n, "head_dim": one_pass.mean_dim}
    costs = load_costs(target.key, **blocks, sms=target.sms, ctas_per_sm=one_pass.ctas_per_sm, kernel=kernel)
    return replace(costs, two_pass=_two_pass_costs(target, two_pass)) if two_pass else costs


@cache
def _two_pass_costs(target: Target, two_pass: TwoPassTile) -> TwoPass:
    """What two passes cost on the target."""
    return load_two_pass(target.key, **two_pass.sizes(), sms=target.sms)
