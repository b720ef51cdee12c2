"""What an attention gets, and why: asked by the pass, the op, the lowering and every command, and derived nowhere else."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config import AUTO, GLUON, TRITON, Config
from ..decision import Declined
from ..devices.cost_files import two_pass_percent
from ..devices.stock_kernels import Speed
from ..devices.target import Target
from ..problem import BLOCK_MASK, Problem
from ..schedule import ROUND_ROBIN, TWO_PASS, Costs, Plan, TwoPass
from ..schedule.candidates import two_pass_ns
from ..schedule.choice import ScheduleChoice, choose, choose_chained, two_pass_plan
from ..schedule.costs import two_pass_margin
from ..schedule.families import OF_LISTS, REGISTER, default_family, why_impossible
from ..schedule.formulas.chained import chained_plan, chained_time
from ..schedule.packing import is_too_large, schedule_ints, why_no_round_robin
from ..templates import gluon_is_tested, tiles
from ..templates.tiles import DEFAULTS, ONE_PASS_HEAD_DIM, AnyTile, NoTile, Template, Tile, TwoPassTile
from .prices import TIE, of_one_pass, of_two_passes, step_costs, two_pass_costs
from .speed import for_few_chains, require_speed

FP32_BYTES = 4
as_if_small: ContextVar[bool] = ContextVar("as_if_small", default=False)  # whether the smaller tile is taken always; set by trials


@dataclass(frozen=True)
class Resolution:
    """What an attention gets on a device under settings.

    one_pass, two_pass: the tiles of the templates that it takes, None for one that it does not; both where sizes known at run time
        decide.
    kernel: TRITON or GLUON: that of one pass; two passes are TRITON.
    costs: those of one pass, with two_pass in them where sizes decide; None under two passes.
    choice: of a grouped launch of one pass, for sizes that are known.
    """

    problem: Problem
    settings: Config
    target: Target
    one_pass: Tile | None
    two_pass: TwoPassTile | None
    kernel: str = TRITON
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
        """Tile sizes as reports show them."""
        return " or ".join(str(tile) for tile in (self.one_pass, self.two_pass) if tile)

    @property
    def lacks_gluon(self) -> bool:
        """Whether it would be for the Gluon kernel, if that were tested with the Triton that is installed."""
        is_for_gluon = self.settings.kernel == AUTO and _is_for_gluon(self.problem, self.settings, self.target)
        return is_for_gluon and not gluon_is_tested()

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
            return OF_LISTS
        if forced == "auto" and self.chained:
            return default_family(self.problem.mask)
        return forced

    @property
    def turn(self) -> Problem:
        """What a launch of one pass has: all of the problem, or one turn of the Gluon kernel."""
        return self.problem.turn if self.kernel == GLUON else self.problem

    @property
    def turns(self) -> int:
        """How many of them there are, each with a launch."""
        return 1 if self.turn is self.problem else self.problem.kv_heads_total // self.turn.kv_heads_total

    @property
    def slices(self) -> int:
        """How many launches of the Gluon kernel there are, each for some of the KV tiles."""
        return self.problem.slices if self.kernel == GLUON else 1

    @property
    def may_cut_chains(self) -> bool:
        """Whether a chain under a mask in blocks may be in parts. Under `batch` the number of heads may not decide bits. Segments
        cut chains themselves. Slices of the keys are of long sequences, which have many."""
        return self.settings.guarantee != "batch" and not self.problem.segments and self.slices == 1

    @property
    def may_round_robin(self) -> bool:
        """Whether the schedule of one pass may be a round robin."""
        return not self.chained and self.settings.guarantee == "run" and self.settings.schedule in ("auto", *ROUND_ROBIN)

    @property
    def two_pass_costs(self) -> TwoPass:
        """What two passes cost on the target."""
        assert self.two_pass
        return two_pass_costs(self.target, self.two_pass, self.problem.mask)

    @cached_property
    def schedule(self) -> tuple[Plan, int | None]:
        """(The order placed for all heads of a turn, the time of all turns in ns or None where the cost model has none), for sizes
        that are known."""
        tiled = self.turn.tiled(self.tile)
        if self.one_pass is None:
            return two_pass_plan(tiled, self.two_pass_costs), two_pass_ns(tiled, self.two_pass_costs)
        assert self.costs
        if self.chained:
            plan = chained_plan(tiled.geometry, self.family, tiled.kv_heads_total, tiled.group)
            return plan, self.turns * chained_time(tiled, self.costs, self.family)
        assert self.choice
        time_ns = self.choice.time_ns
        return self.choice.plan(), None if time_ns is None else self.turns * time_ns

    @property
    def speed(self) -> Speed:
        """The price of what it takes; where sizes decide, the faster one."""
        speeds = [of_one_pass(self.problem, self.target, self.one_pass, self.kernel)] if self.one_pass else []
        speeds += [of_two_passes(self.problem, self.target)] if self.two_pass else []
        return max(speeds, key=lambda speed: speed.tflops)

    @property
    def row_copies(self) -> int:
        """How many rows of a round robin a CTA writes for itself: of the Gluon kernel each partition has its own."""
        return tiles.gluon_partitions(stores_values=self.problem.trains_captures) if self.kernel == GLUON else 1

    @property
    def schedule_ints(self) -> int:
        """Ints of memory that the schedule takes, for sizes that are known."""
        return schedule_ints(self.schedule[0], self.row_copies)

    def workspace_bytes(self, q_tiles: Any, schedule_ints: Any) -> Any:
        """Memory beside inputs and outputs, for so many Q tiles of all query heads and ints of the schedule; sizes may be symbolic.

        fp32 delta and logsumexp of each row. Of one pass also fp32 dq, semaphores for each Q tile, the ticket and a dummy.
        """
        block_m, of_delta_and_lse = self.tile.block_m, 2
        if self.one_pass is None:
            return FP32_BYTES * q_tiles * block_m * of_delta_and_lse
        semaphores = tiles.gluon_semaphores(self.one_pass.block_d) if self.kernel == GLUON else 1
        return FP32_BYTES * (q_tiles * (block_m * (self.one_pass.block_d + of_delta_and_lse) + semaphores) + 2 + schedule_ints)


def resolve(problem: Problem, settings: Config, target: Target) -> Resolution:
    """The template, tile and schedule of an attention, a pure function of its arguments and the target's cost file.

    Raises:
        Declined: the attention is left to its stock kernel.
    """
    if declined := problem.why_not_taken():
        raise declined
    kernel = kernel_for(problem, settings, target)
    try:
        template = template_for(problem, settings, target, kernel)
        one_pass = None if template == Template.TWO_PASS else _one_pass_tile(problem, target, kernel)
        two_pass = None if template == Template.ONE_PASS else _two_pass_tile(problem, target)
    except NoTile as no_tile:
        raise Declined(str(no_tile), no_tile.remedy) from None
    tile = one_pass or two_pass
    assert tile
    if problem.mask == BLOCK_MASK and (declined := problem.why_no_blocks(tile)):
        raise declined
    if _by_speed(problem, settings, target):
        require_speed(problem, target, one_pass, two_pass, kernel)
        if one_pass and not two_pass:
            takes_two = problem.is_lowered_as_flex and _may_take_two(problem, settings, target)
            fewer = _two_pass_tile(problem, target) if takes_two else None
            if for_few_chains(problem.turn if kernel == GLUON else problem, target, one_pass, fewer, kernel):
                one_pass, two_pass = None, fewer
    if one_pass is None:
        return Resolution(problem, settings, target, None, two_pass)
    if declined := problem.why_no_table(one_pass):
        raise declined
    if problem.mask != BLOCK_MASK and (reason := _why_no_schedule(problem, settings)):
        raise Declined(reason, DEFAULTS)
    costs = step_costs(problem, target, one_pass, two_pass, kernel)
    resolution = Resolution(problem, settings, target, one_pass, two_pass, kernel, costs)
    if not problem.is_static or problem.mask == BLOCK_MASK:
        return resolution
    return _with_schedule(resolution, one_pass)


def _by_speed(problem: Problem, settings: Config, target: Target) -> bool:
    """Whether speed decides between our kernels and stock's: of a GPU, under `run`, where nothing asks for one of ours."""
    asked = any(getattr(settings, name) != AUTO for name in ("template", "schedule", "kernel")) or problem.segments > 0
    return settings.guarantee == "run" and target.arch != tiles.EMULATED and not asked


def kernel_for(problem: Problem, settings: Config, target: Target) -> str:
    """TRITON or GLUON: the kernel of one pass. Unless it is forced, GLUON where that takes the attention and is no slower."""
    if settings.kernel != AUTO:
        return settings.kernel
    return GLUON if gluon_is_tested() and _is_for_gluon(problem, settings, target) else TRITON


def _is_for_gluon(problem: Problem, settings: Config, target: Target) -> bool:
    """Whether `auto` takes the Gluon kernel, by a Triton with which that was tested: by the prices of the cost file."""
    try:
        tile = _one_pass_tile(problem, target, GLUON)
    except NoTile:
        return False
    if settings.template == Template.TWO_PASS or problem.why_no_gluon(settings):
        return False
    if problem.mask == BLOCK_MASK and problem.why_no_blocks(tile):
        return False
    by_triton, is_large = [], max(problem.head_dims) > ONE_PASS_HEAD_DIM
    if not is_large:
        by_triton.append(of_one_pass(problem, target, _one_pass_tile(problem, target, TRITON), TRITON).tflops)
    if is_large or (problem.is_lowered_as_flex and _may_take_two(problem, settings, target)):
        by_triton.append(of_two_passes(problem, target).tflops)
    turn, busy = problem.turn, 1.0
    if turn is not problem and settings.guarantee == "run":  # elsewhere the number of SMs may not decide
        busy = min(busy, turn.kv_heads_total * turn.chains_of_work(tile) / target.sms)
    return max(by_triton) <= TIE * busy * of_one_pass(problem, target, tile, GLUON).tflops


def _one_pass_tile(problem: Problem, target: Target, kernel: str) -> Tile:
    of = target.arch, problem.dtype, *problem.head_dims
    if kernel == GLUON:
        return tiles.gluon_tile(*of)
    tile = tiles.tile(*of)
    splits_blocks = problem.mask == BLOCK_MASK and problem.block_size is not None and problem.block_size[0] % tile.block_m != 0
    # Registers would not hold what a step computes beside its gradients.
    computes_more = problem.dropout is not None or problem.changes_scores
    return tiles.tile(*of, small=True) if splits_blocks or computes_more or as_if_small.get() else tile


def _two_pass_tile(problem: Problem, target: Target) -> TwoPassTile:
    return tiles.two_pass_tile(target.arch, problem.dtype, *problem.head_dims)


def mask_block(target: Target, settings: Config, head_dims: tuple[int, int]) -> tuple[int, int]:
    """Queries and keys of a block of a mask that the pass makes: the tile that walks it divides it."""
    if target.arch != tiles.EMULATED:
        return 128, 128
    takes_two = settings.template == Template.TWO_PASS or max(head_dims) > ONE_PASS_HEAD_DIM
    return (32, 64) if takes_two else (32, 32)


def template_for(problem: Problem, settings: Config, target: Target, kernel: str) -> Template:
    """One pass, two, or by size; Declined where the settings cannot be met.

    Bits differ between the two. So sizes and the number of SMs decide under the guarantee `run` alone, for graphs of one shape as
    for graphs of any; under `device` and `batch` settings and compile-time facts do.
    """
    if problem.is_lowered_as_flex:
        return _template_of_flex(problem, settings, target, kernel)
    if settings.kernel == GLUON:  # asked for, which no sizes overrule
        return Template.ONE_PASS
    if settings.template == Template.TWO_PASS:
        return Template.TWO_PASS
    most = max(problem.head_dims)
    if kernel == TRITON:
        _require_small(problem, settings)
    if settings.template != "auto" or settings.schedule != "auto":
        return Template.ONE_PASS
    if kernel == TRITON and most > ONE_PASS_HEAD_DIM:
        return Template.TWO_PASS
    if settings.guarantee == "run":
        return Template.ONE_PASS if target.reserved_sms else Template.BY_SIZE  # plain launches would take the reserved SMs
    if kernel == GLUON:
        return Template.ONE_PASS
    percent, estimate = two_pass_percent(target.key, most)
    return Template.TWO_PASS if percent * (100 + two_pass_margin(estimate)) < 100 * 100 else Template.ONE_PASS


def _template_of_flex(problem: Problem, settings: Config, target: Target, kernel: str) -> Template:
    """One pass, or two where they are faster and for larger head dims; Declined where the settings cannot be met."""
    if settings.kernel == GLUON and (declined := problem.why_no_gluon(settings)):
        raise declined
    if problem.mask == BLOCK_MASK and settings.schedule not in ("auto", OF_LISTS):
        reason = f"schedule={settings.schedule!r} takes no BlockMask: its KV tiles are added in {OF_LISTS} order"
        raise Declined(reason, DEFAULTS)
    if kernel == GLUON:
        return Template.ONE_PASS
    takes_two = settings.template == Template.TWO_PASS
    if not takes_two:
        _require_small(problem, settings)
    if not takes_two and max(problem.head_dims) <= ONE_PASS_HEAD_DIM:
        return Template.TWO_PASS if _two_passes_are_faster(problem, settings, target) else Template.ONE_PASS
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


def _two_passes_are_faster(problem: Problem, settings: Config, target: Target) -> bool:
    """Whether they are by the margin of their estimate, whatever the sizes, and may be taken."""
    if not _may_take_two(problem, settings, target):
        return False
    two, margin = of_two_passes(problem, target), two_pass_margin(two_pass_percent(target.key, max(problem.head_dims))[1])
    one_pass = _one_pass_tile(problem, target, TRITON)
    return two.tflops * 100 > of_one_pass(problem, target, one_pass, TRITON).tflops * (100 + margin)


def _may_take_two(problem: Problem, settings: Config, target: Target) -> bool:
    """Whether two passes may stand in for one: plain launches would take reserved SMs, and blocks have to be whole tiles."""
    fit = problem.mask != BLOCK_MASK or problem.why_no_blocks(_two_pass_tile(problem, target)) is None
    return _by_speed(problem, settings, target) and not target.reserved_sms and fit


def _why_no_schedule(problem: Problem, settings: Config) -> str | None:
    """Why one pass has no schedule for what is asked; None if it has one."""
    if reason := why_impossible(problem.mask, settings.guarantee, settings.schedule):
        return reason
    forced = REGISTER.get(settings.schedule)
    if forced and not forced.on_device and not problem.is_static:
        return f"schedule={forced.name!r} takes sizes that are known when compiling: no kernel writes its table"
    return None


def _with_schedule(resolution: Resolution, one_pass: Tile) -> Resolution:
    """One pass or two, and the choice of a schedule, for sizes that are known."""
    settings, costs, tiled = resolution.settings, resolution.costs, resolution.turn.tiled(one_pass)
    assert costs
    choice = None
    if resolution.chained:
        takes_two = choose_chained(tiled, costs, resolution.family) == TWO_PASS
    else:
        choice = choose(tiled, costs, settings.guarantee, settings.schedule)
        takes_two = choice.family == TWO_PASS
        if not takes_two and not REGISTER[choice.family].on_device and is_too_large(choice.plan()):
            raise Declined(f"schedule={choice.family!r} has a table that is too large for a constant", DEFAULTS)
        if choice.family in ROUND_ROBIN and (reason := why_no_round_robin(tiled.geometry, choice.family)):
            raise Declined(reason, DEFAULTS)
    if takes_two:
        return replace(resolution, one_pass=None, kernel=TRITON, choice=choice)
    return replace(resolution, two_pass=None, choice=choice)
