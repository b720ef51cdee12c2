"""The launch of one pass by the Triton templates."""

from __future__ import annotations

import torch
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.ir import FixedLayout, TensorBox

from dash_inductor.first_use.kind import kinds_of
from dash_inductor.schedule.packing import ROUND_ROBIN_MAX_N_Q
from dash_inductor.schedule.parts import FEW_CHAINS
from dash_inductor.templates import tiles
from dash_inductor.templates.tiles import Tile
from dash_inductor.text import digest

from .. import failed_waits, kernels
from ..header import add_to_header, root_graph
from ..inputs import Inputs, accumulator_order
from ..mods import Mods
from ..walk import Walk


def launch(inputs: Inputs, tile: Tile, walk: Walk, mods: Mods, scratch: TensorBox, dv: TensorBox) -> TensorBox:
    """dk; scratch, fp32 [B * H, Q tiles, elements of a Q tile] for dq, and dv are filled."""
    device, parts = inputs.device, walk.parts
    _, dk_meta, _ = inputs.gradients
    semaphores = inputs.query_heads_total * inputs.n_q  # one for each (head, Q tile)
    dk = kernels.call(
        kernels.BLOCK_MASK_ONE_PASS if walk.blocks else kernels.ONE_PASS,
        grid=walk.workers,
        inputs=[*inputs.tensors, *walk.tensors, *mods.read],
        mutated=[scratch, dv, *([parts.sums] if parts else []), *mods.mutated],
        scalars=[parts.bands, parts.sets] if parts else [],
        output=FixedLayout(device, inputs.key_gradients_dtype, *dk_meta),
        workspace_arg=WorkspaceArg(
            count=2 + semaphores + walk.own_ints,  # the first two: the ticket, a dummy
            zero_mode=WorkspaceZeroMode.ZERO_ON_CALL,
            device=device,
            outer_name=WorkspaceArg.unique_name(),
            dtype=torch.int32,
        ),
        triton_meta={"launch_cooperative_grid": not inputs.resolution.chained}
        | ({} if device.type == "cpu" else _of_a_gpu(inputs, tile)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=inputs.constants(tile)
        | accumulator_order(tile)
        | {"ATOMIC_ADD": tile.atomic_add, "RELEASE_AFTER": tiles.RELEASE_AFTER}
        | _constants(walk, inputs.resolution.problem.segments)
        | mods.constants,
        subgraphs=mods.subgraphs,
    )
    mods.note(dk)
    return dk


def _constants(walk: Walk, segments: int) -> dict[str, object]:
    """What the template knows of the walk when it is compiled; of a part that does not apply it has no trace."""
    if (rows := walk.blocks) is None:
        constants: dict[str, object] = {"STRADDLING": walk.round_robin, "ROW_BLOCK": ROUND_ROBIN_MAX_N_Q}
        return constants | ({"SHARED_ROW": True} if walk.shared_row else {})
    constants = {"SEGMENTS": segments} if segments else {}
    if walk.parts:
        constants |= {"BANDS": rows.bands, "MOST_CHAINS": FEW_CHAINS, "LEAST_STEPS": walk.parts.least_steps}
    return constants | {"Q_TILES": rows.q_tiles, "KV_TILES": rows.kv_tiles, "MASK_HEADS": rows.rows.get_size()[1] != 1}


def _of_a_gpu(inputs: Inputs, tile: Tile) -> dict[str, object]:
    """What a kernel on a GPU is held to, and where it reports a wait that gave up."""
    kind = str(kinds_of(inputs.resolution)[0])
    name = f"dash_waits_{digest(kind)}"
    source = f"from {failed_waits.__name__} import address_of\n\n{name}_high, {name}_low = address_of({kind!r})\n"
    add_to_header(root_graph(), source)
    return {kernels.CTAS_PER_SM: tile.ctas_per_sm, kernels.FAILED_WAIT: name}
