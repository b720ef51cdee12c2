"""What a backward costs, ours by each kernel and the stock kernels that are deterministic: so what is taken where speed decides.

A price is a speed in TFLOPS, of the five matmuls that a gradient needs, on a whole GPU that long sequences keep busy. It depends on
the kind of mask, the dtype and the head dim. Lengths, heads and what a mask shows have no part in it: all masks but a full one are
priced as causal ones of 8,192 positions, where one block in 33 is partial, beside the beginnings and ends of chains.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..config import GLUON, TRITON
from ..decision import Kernel
from ..devices.cost_files import load_costs, load_tflops, load_two_pass, two_pass_percent
from ..devices.stock_kernels import Speed, published, speed_of_flex, stock_cost
from ..devices.target import Target
from ..problem import Problem
from ..schedule import Costs, TwoPass
from ..schedule.costs import FLOP_PER_ELEMENT
from ..templates import tiles
from ..templates.tiles import Tile, TwoPassTile

# What an operation of functions costs, in FLOP of our matmuls: an SM does 128 of them in a clock, its tensor cores 4,096 FLOP, of
# which the kernel gets about 0.4. In two passes, ours or stock's, it is as much, though they call functions twice: by the replay,
# for sm_90, ALiBi takes 490 to 1,060 cycles for 64 x 128 elements in our Triton kernel, 0.8 to 1.7 times what this says.
FUNCTION_FLOP = 13
# What functions take in the Gluon kernel, in cycles for 64 x 128 elements: for a function, for each of its operations, and without
# one by columns of a tile. By the replay of the loops under masks in blocks as Triton 3.7.1 compiles them: ALiBi, of 10 operations,
# takes up to 566, a soft-cap, of 55, 754 to 1,804. `python -m benchmarks.machine_code gates --template gluon --dtype bf16` has
# the cycles of a step, of 128 x 128 elements in 64 columns and of 64 x 64 in 256. LOCAL_CYCLES, of a byte of local memory of a
# thread, is an estimate.
GLUON_CYCLES, LOCAL_CYCLES = (300, 28), 2
GLUON_CYCLES_WITHOUT = {64: 2078, 128: 3413, 256: 9438}
# The same for dropout by its bits, by the same command: the mean of full and causal masks, in 64 columns beside a loop whose steps
# have two parts too, as the one that was timed had. What making the bits costs comes on top: `_share_of_bits`.
GLUON_DROPOUT_CYCLES = {64: 374, 128: 210, 256: 144}
OF_COST_FILE = "predicted by our cost file"
TIE = 1.05  # times our speed, up to which ours is taken in the place of another deterministic kernel


def of_one_pass(problem: Problem, target: Target, tile: Tile, kernel: str) -> Speed:
    """By a tile of TRITON or GLUON, whose mask function is asked before its launch, and which may have more columns than others."""
    small = kernel == TRITON and is_small(problem, target, tile)
    tflops = load_tflops(target.key, tile.mean_dim, kernel, mask=problem.mask, small=small)
    if kernel == GLUON:
        columns = tile.block_d / _head_dim(problem, target)
        share = gluon_function_share(problem, tile) + _share_of_bits(problem, tile)
        return Speed(tflops / (columns * (1 + share)), OF_COST_FILE)
    return Speed(_with_functions(tflops, problem, target), OF_COST_FILE)


def of_two_passes(problem: Problem, target: Target) -> Speed:
    """By two passes, of seven matmuls."""
    percent, _ = two_pass_percent(target.key, _head_dim(problem, target))
    return Speed(_with_functions(_triton(problem, target) * 100 / percent, problem, target), OF_COST_FILE)


def of_stock(problem: Problem, target: Target) -> Speed | None:
    """By the stock kernel, if it is deterministic in the mode in force, or called so; None where nothing is known of its speed."""
    stock = problem.stock
    if stock is None or not stock.may_stay:
        return None
    if stock.kernel == Kernel.FLEX:
        speed = speed_of_flex(target.arch, _head_dim(problem, target), problem.mask)
        if speed is None:
            return Speed(of_two_passes(problem, target).tflops, "as our own two passes, for want of a figure")
        return Speed(_with_functions(speed.tflops, problem, target), speed.known)
    if stock.implementation not in (None, "FA2"):
        figure = published(stock.implementation, target.arch, problem.head_dims, problem.mask, stock.called)
        return None if figure is None else Speed(figure.tflops, figure.known)
    if max(problem.head_dims) > tiles.ONE_PASS_HEAD_DIM:
        return None
    cost = stock_cost(stock.kernel, target.arch, _head_dim(problem, target))
    tflops = _triton(problem, target) * 100 / cost.shared
    return Speed(_with_functions(tflops, problem, target), "by its ratio to our Triton kernel")


def step_costs(problem: Problem, target: Target, one_pass: Tile, two_pass: TwoPassTile | None, kernel: str) -> Costs:
    """The costs of a step with what functions take, in nanoseconds; those of two passes with them where sizes decide."""
    of = target, one_pass, two_pass, kernel, problem.mask
    costs = _step_costs(*of, kernel == TRITON and is_small(problem, target, one_pass))
    if kernel == GLUON:  # whose mask function is asked before the launch
        return replace(costs, step_ns=round(costs.step_ns * (1 + gluon_function_share(problem, one_pass))))
    if not problem.function_ops:
        return costs
    return replace(costs, step_ns=costs.step_ns + round(_step_costs(*of, False).step_ns * function_share(problem, target)))


@cache
def _step_costs(target: Target, one_pass: Tile, two_pass: TwoPassTile | None, kernel: str, mask: str, small: bool) -> Costs:
    blocks = {"block_m": one_pass.block_m, "block_n": one_pass.block_n, "head_dim": one_pass.mean_dim}
    of_gpu = {"sms": target.sms, "ctas_per_sm": one_pass.ctas_per_sm}
    costs = load_costs(target.key, **blocks, **of_gpu, kernel=kernel, mask=mask, small=small)
    return replace(costs, two_pass=two_pass_costs(target, two_pass, mask)) if two_pass else costs


@cache
def two_pass_costs(target: Target, two_pass: TwoPassTile, mask: str) -> TwoPass:
    """What two passes cost on the target."""
    return load_two_pass(target.key, **two_pass.sizes(), sms=target.sms, mask=mask)


def function_share(problem: Problem, target: Target) -> float:
    """What functions of the scores, of a mask, and dropout take, in parts of what our Triton kernel takes without them."""
    return problem.function_ops * FUNCTION_FLOP / (FLOP_PER_ELEMENT * _head_dim(problem, target))


def gluon_function_share(problem: Problem, tile: Tile) -> float:
    """What functions of the scores and dropout take in the Gluon kernel, in parts of what it takes without them."""
    cycles = 0 if problem.dropout is None else GLUON_DROPOUT_CYCLES[tile.block_d]
    if problem.changes_scores:
        cycles += GLUON_CYCLES[0] + GLUON_CYCLES[1] * problem.function_ops
    if problem.gluon_function:
        cycles += LOCAL_CYCLES * problem.gluon_function.local
    return cycles / GLUON_CYCLES_WITHOUT[tile.block_d]


def _share_of_bits(problem: Problem, tile: Tile) -> float:
    """What the kernel takes that makes bits of dropout, in the same parts."""
    return 0.0 if problem.dropout is None else problem.dropout.bits_cycles / GLUON_CYCLES_WITHOUT[tile.block_d]


def is_small(problem: Problem, target: Target, tile: Tile) -> bool:
    """Whether it is the Triton kernel's smaller tile of the head dim."""
    return tile.block_m < tiles.tile(target.arch, problem.dtype, *problem.head_dims).block_m


def _head_dim(problem: Problem, target: Target) -> int:
    """Padded, the mean of query's and value's."""
    return tiles.two_pass_tile(target.arch, problem.dtype, *problem.head_dims).mean_dim


def _triton(problem: Problem, target: Target) -> float:
    """The TFLOPS of our Triton kernel in one pass, without functions; past head dim 128 as if it took such a head dim."""
    return load_tflops(target.key, _head_dim(problem, target), mask=problem.mask)


def _with_functions(tflops: float, problem: Problem, target: Target) -> float:
    """A speed beside functions."""
    return 1 / (1 / tflops + function_share(problem, target) / _triton(problem, target))
