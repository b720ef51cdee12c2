"""Where speed decides: whether a stock kernel that is deterministic too is faster than ours, and two passes than long chains."""

from __future__ import annotations

import math

from ..decision import Kernel, LeftToStock
from ..devices.stock_kernels import Speed, stock_cost
from ..devices.target import Target
from ..problem import Problem
from ..templates.tiles import ONE_PASS_HEAD_DIM, Tile, TwoPassTile
from .prices import TIE, of_one_pass, of_stock, of_two_passes, step_costs

OURS = "none needed: template='one_pass' or guarantee='device' takes ours all the same"  # the remedy, where another is faster


def require_speed(problem: Problem, target: Target, one_pass: Tile | None, two_pass: TwoPassTile | None, kernel: str) -> None:
    """Raises LeftToStock where the stock kernel is deterministic, and faster than ours by more than a tie, by what is known."""
    if (stock := of_stock(problem, target)) is None or problem.stock is None:
        return
    prices = [of_one_pass(problem, target, one_pass, kernel)] if one_pass else []
    ours = max([*prices, *[of_two_passes(problem, target)] * (two_pass is not None)], key=lambda price: price.tflops)
    if stock.tflops <= TIE * ours.tflops:
        return
    implementation, name, remedy = problem.stock.implementation, "stock's kernel, deterministic too,", OURS
    if problem.stock.called:
        implementation, name = None, "its kernel"
    elif implementation:
        name = f"{implementation}, active in torch's registry and deterministic,"
        remedy = OURS.replace(" or ", ", ", 1).replace(" takes", " or restore_flash_attention_impl() takes")
    raise LeftToStock(f"{name} is faster: {stock}; ours {ours}", remedy, implementation=implementation)


def for_few_chains(problem: Problem, target: Target, tile: Tile, fewer: TwoPassTile | None, kernel: str) -> bool:
    """Whether chains are so few that two passes, by the tile `fewer`, are faster than one; it is None where they may not be taken.

    With few chains one pass takes as long as its longest chain, two passes what their work takes when all SMs share it.

    Raises:
        LeftToStock: the stock kernel, which is deterministic in the mode in force, is then faster than both.
    """
    one, two = of_one_pass(problem, target, tile, kernel), of_two_passes(problem, target)
    chains, workers = problem.kv_heads_total * problem.chains_of_work(tile), target.sms * tile.ctas_per_sm

    def least(other: Speed) -> int:
        """CTAs, with a chain as long as the longest each, that the work must be enough for, for one pass to be as fast."""
        return math.ceil(workers * other.tflops / one.tflops)

    stock = _stock_that_shares(problem, target, tile)
    if stock and not (fewer and two.tflops > stock.tflops) and chains < least(stock):
        raise LeftToStock(
            f"few KV tiles: one pass has work for {chains} CTAs, and needs work for {least(stock)} to be as fast as stock's "
            f"kernel, deterministic too: {stock}; ours {one}",
            OURS,
        )
    return fewer is not None and _ends_first(fewer, round(1000 * one.tflops / two.tflops), problem, target, tile, kernel)


def _ends_first(fewer: TwoPassTile, per_thousand: int, problem: Problem, target: Target, tile: Tile, kernel: str) -> bool:
    """Whether two passes end before one pass whose longest chain runs alone, by their prices, the beginnings and ends of CTAs, and
    what runs beside. In whole numbers, since of sizes that are symbols this is a guard.

    per_thousand: the time of two passes where SMs are busy, in thousandths of that of one.
    """
    costs = step_costs(problem, target, tile, fewer, kernel)
    assert costs.two_pass
    steps_ns = (problem.q_len + tile.block_m - 1) // tile.block_m * problem.group * costs.step_ns
    elements = problem.batch * problem.heads * problem.q_len * tile.mean_dim
    launches, chains = costs.launches, problem.kv_heads_total * problem.chains_of_work(tile)
    alone_ns = steps_ns + costs.chain_ns + launches.beside_ns(elements, two_pass=False)
    other_ns = 2 * costs.two_pass.end_ns + launches.beside_ns(elements, two_pass=True)
    return bool(1000 * costs.workers * (alone_ns - other_ns) > steps_ns * chains * per_thousand)


def _stock_that_shares(problem: Problem, target: Target, tile: Tile) -> Speed | None:
    """The price of a deterministic kernel, torch's or flash_attn 2's, whose longest CTA takes no longer than our longest chain."""
    stock, price = problem.stock, of_stock(problem, target)
    if stock is None or price is None or stock.implementation not in (None, "FA2"):  # which is torch's own
        return None
    if stock.kernel == Kernel.FLEX and max(problem.head_dims) > ONE_PASS_HEAD_DIM:  # priced as our two passes, which share as well
        return None
    if stock.kernel != Kernel.FLEX:  # of which it has the steps of our longest chain, and less to do in each
        longest = problem.chains_of_work(tile) if stock.kernel == Kernel.EFFICIENT else 1
        if not longest * stock_cost(stock.kernel, target.arch, tile.mean_dim).chain < 100 * problem.group:
            return None
    return price
