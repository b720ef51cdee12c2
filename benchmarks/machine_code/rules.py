"""What the figures of a compiled main kernel are held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dash_inductor.devices import LIMITS
from dash_inductor.templates.tiles import Tile, TwoPassTile, prefetches, tiles_of

MATMULS = {80: "hmma", 90: "hgmma", 100: "utcmma"}
# What the loop of a FlexAttention may have of the instructions of the two loops of stock's kernel, which multiply seven times to
# our five and call score_mod and mask_mod twice. Both are counted for as many elements of the scores.
SHARE_OF_STOCK = 0.70
STOCK_ELEMENTS = 64 * 128  # of a step of either loop of stock's, at head dims 64 to 128


@dataclass(frozen=True)
class Rules:
    """What the figures of a main kernel are held against: its GPU's and its tile's, and some of its own."""

    arch: int
    tile: Tile | TwoPassTile
    most_instructions: int | None = None  # of the main loop
    most_local: int = 0  # LDL and STL of them
    most_barriers: int | None = None  # of all warps, of them
    share_of_stock: float = SHARE_OF_STOCK  # the most instructions, in parts of stock's
    stock_instructions: int | None = None
    is_gluon: bool = False  # its main loop is that of the warps that multiply: others load, add and fence for them
    is_plain: bool = False  # without a mask in blocks, functions and dropout

    def violated(self, values: Mapping[str, Any]) -> list[str]:
        """The gates that these `figures` do not pass, a sentence each."""
        gates = (self._of_matmuls, self._of_waits, self._of_memory, self._of_sm, self._of_length)
        return [sentence for gate in gates for sentence in gate(values)]

    @property
    def _waits_for_rank(self) -> bool:
        """Whether the main loop's warps do, in each step."""
        return isinstance(self.tile, Tile) and not self.is_gluon

    def _of_matmuls(self, values: Mapping[str, Any]) -> Iterator[str]:
        matmul = MATMULS[tiles_of(self.arch)]
        if values["main_loops"] != self.tile.kinds:
            yield f"{values['main_loops']} loops with matmuls, where the tile has {self.tile.kinds} kinds of CTAs"
        if not values[matmul]:
            yield f"no matmul in the main loop is {matmul.upper()}"
        if others := [name.upper() for name in MATMULS.values() if name != matmul and values[name]]:
            yield f"matmuls in the main loop are {', '.join(others)}, not {matmul.upper()}"
        if values["wgmma_serialised"]:
            yield f"every wgmma is waited for: {values['warpgroup_depbars']} WARPGROUP.DEPBAR in the main loop"

    def _of_waits(self, values: Mapping[str, Any]) -> Iterator[str]:
        waits_for_last = values["copies_ahead"] is not None and values["copies_ahead"] < 0
        if waits_for_last and prefetches(self.arch, self.tile.block_d, self.tile.block_dv):
            yield f"nothing is prefetched: the first wait is for {-values['copies_ahead']} groups of copies of the step before"
        if values["idle_fences"] or values["idle_additions"]:
            yield f"the tensor cores idle under {values['idle_fences']} fences and {values['idle_additions']} additions"
        if self.is_gluon and values["idle_fences"] is not None:
            yield "the warps that multiply fence for the whole GPU, which is for another one"
        # Of a plain attention S has all queries of a step at once. If they are 128, no matmul is behind dP's either.
        drains = 2 if self.is_plain and self.tile.block_m == 128 else 1
        if self.is_gluon and values["drains"] != drains:
            yield f"{values['drains']} waits of a step leave no matmul in flight, and not {drains}"
        if self.most_barriers is not None and values["barriers"] > self.most_barriers:
            yield f"{values['barriers']} barriers of all warps in the main loop, more than {self.most_barriers}"
        if values["warp_syncs"] > self._waits_for_rank:
            of_wait = int(self._waits_for_rank)
            yield f"ptxas takes warps for diverged: {values['warp_syncs']} WARPSYNC in the main loop, whose source has {of_wait}"
        if not self.is_gluon and not values["ldgsts"] + values["utmaldg"]:
            yield "the loads are not asynchronous: neither LDGSTS nor UTMALDG in the main loop"

    def _of_memory(self, values: Mapping[str, Any]) -> Iterator[str]:
        if values["local_in_loop"] > self.most_local:
            more = f", more than {self.most_local}" if self.most_local else ""
            yield f"the main loop spills: {values['local_in_loop']} LDL and STL{more}"
        if values["atomg"]:
            yield f"{values['atomg']} ATOMG in the main loop: an addition returns its value"
        if values["shuffle_barriers"]:
            yield f"dQ goes through shared memory: {values['shuffle_barriers']} barriers before it is added"
        additions = self._waits_for_rank and self.tile.atomic_add
        if (values["red"] > 0) != additions:
            yield f"{values['red']} REDG.F32 in the main loop, where the tile has {'some' if additions else 'none'}"

    def _of_sm(self, values: Mapping[str, Any]) -> Iterator[str]:
        limits = LIMITS[self.arch]
        for name, most, meaning in (
            ("registers", limits.registers_per_thread, "registers"),
            ("shared_bytes", limits.shared_bytes_per_block_optin, "bytes of shared memory"),
            ("tmem_columns", limits.tmem_columns, "columns of tensor memory"),
        ):
            if values[name] > most:
                yield f"{values[name]} {meaning} of {most}"
        # The model of two passes takes one CTA, and more do no harm, since nobody waits.
        ctas, wanted = values["ctas_per_sm"], getattr(self.tile, "ctas_per_sm", None)
        if not ctas or (wanted and ctas != wanted):
            yield f"an SM holds {ctas} CTAs, where the tile table has {wanted or 'at least 1'}"

    def _of_length(self, values: Mapping[str, Any]) -> Iterator[str]:
        count, most, stock = values["instructions_in_loop"], self.most_instructions, self.stock_instructions
        if most is not None and count > most:
            yield f"{count} instructions in the main loop, more than {most}"
        of_as_many = count * STOCK_ELEMENTS / (self.tile.block_m * self.tile.block_n)
        if stock is not None and of_as_many > self.share_of_stock * stock:
            share = f"more than {self.share_of_stock} of stock's {stock}"
            yield f"{of_as_many:.0f} instructions of the main loop for 64 x 128 elements, {share}"
