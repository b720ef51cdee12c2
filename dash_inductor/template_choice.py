"""One pass or two: which template an attention takes.

Bits differ between the two, so the choice follows from settings and compile-time facts alone, never from sizes: a graph of one
shape and a graph of any shape must take the same.
"""

from __future__ import annotations

from .config import GLUON, ONE_PASS, TWO_PASS, Config
from .schedule import TABLE_MASK, Costs
from .schedule.costs import two_pass_percent
from .templates.tiles import MIN_HEAD_DIM, ONE_PASS_HEAD_DIM


def template_for(settings: Config, device: str, head_dim: int, mask: str) -> str:
    """`one_pass` or `two_pass`, for the device of a cost file; ValueError where the settings cannot be met."""
    if settings.template == TWO_PASS and mask == TABLE_MASK:
        raise ValueError(f"template={TWO_PASS!r} takes no mask={mask!r}")
    if settings.kernel == GLUON:
        return ONE_PASS
    if settings.template != "auto":
        return settings.template
    if settings.schedule != "auto" or mask == TABLE_MASK:  # schedules are of one pass
        return ONE_PASS
    if not MIN_HEAD_DIM <= head_dim <= ONE_PASS_HEAD_DIM:  # the wider range
        return TWO_PASS
    if settings.launch == "chained":
        return ONE_PASS
    # As for any candidate that is not the default.
    return TWO_PASS if two_pass_percent(device, head_dim) * (100 + Costs.margin_percent) < 100 * 100 else ONE_PASS
