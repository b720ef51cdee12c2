"""Operators, beside attention, that torch's strict mode changes on a GPU.

From the page of torch.use_deterministic_algorithms. Compiled code takes torch's kernel in the place of Inductor's by
`index_put_impl_` and `use_scatter_fallback` of Inductor in torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from . import Changed

SORTED = "torch's kernel, which sorts or adds in order, in the place of Inductor's"
CUDNN = "cuDNN's deterministic algorithms alone"
NATIVE = "torch's deterministic kernel"
REFUSED = "strict mode refuses it; warn_only warns, and its bits may differ"
SPLIT = "nothing, and its bits may differ: Inductor may scan a long row in parts, whose order hangs on timing"
FILLED = "filled with NaN or the largest integer, unless torch.utils.deterministic.fill_uninitialized_memory is False"
BY_NAME = {
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_add"), SORTED),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), SORTED),
    **dict.fromkeys(("embedding_dense_backward", "index_copy", "max_pool3d_with_indices_backward"), NATIVE),
    "max_pool2d_with_indices_backward": NATIVE,
    **dict.fromkeys(("convolution", "convolution_backward"), CUDNN),
    **dict.fromkeys(("empty", "empty_strided", "new_empty", "new_empty_strided", "resize"), FILLED),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), SPLIT),
    **dict.fromkeys(("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"), REFUSED),
    **dict.fromkeys(("adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"), REFUSED),
    **dict.fromkeys(("max_unpool2d", "max_unpool3d", "histc", "put", "_ctc_loss_backward", "nll_loss2d_forward"), REFUSED),
    **{f"upsample_{kind}_backward": REFUSED for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")},
    **{f"reflection_pad{n}d_backward": REFUSED for n in (1, 2, 3)},
    **dict.fromkeys(("grid_sampler_2d_backward", "grid_sampler_3d_backward"), REFUSED),
}
# A scan of more elements is cut, where there are few rows: Inductor's `reduction_split_factor`. Its parts add what those before
# have written so far: `exclusive_scan_decoupled_lookback`.
LONGEST_ROW = 8192


def changed(nodes: Iterable[fx.Node]) -> list[Changed]:
    """Those among nodes of joint graphs, by name."""
    counts: Counter[str] = Counter()
    for node in nodes:
        name = name_of(node)
        if name in BY_NAME and not (BY_NAME[name] == SPLIT and _is_short(node)):
            counts[name] += 1
    return [Changed(f"aten.{name}", counts[name], BY_NAME[name]) for name in sorted(counts)]


def name_of(node: fx.Node) -> str:
    """An aten operator's name without namespace, overload and the underscore of one that writes in place; "" for another node."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return ""
    name = node.target._schema.name.removeprefix("aten::")
    return name.removesuffix("_") if name.removesuffix("_") in BY_NAME else name


def _is_short(node: fx.Node) -> bool:
    """Whether a scan is of whole numbers, whose sums have no order, or of a row that one CTA takes."""
    scanned, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    value = scanned.meta["val"] if isinstance(scanned, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return True
    return value.dim() == 0 or bool(value.shape[dim] <= LONGEST_ROW)  # type: ignore[index]
