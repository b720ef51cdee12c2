"""One pass or two: which template an attention takes.

Bits differ between the two, so the choice follows from settings and compile-time facts alone, never from sizes: a graph of one
shape and a graph of any shape must take the same.
"""

from __future__ import annotations

import functools

from .config import GLUON, ONE_PASS, TWO_PASS, Config
from .schedule import TABLE_MASK
from .schedule.costs import FOLDER, tomllib
from .templates.tiles import MIN_HEAD_DIM, ONE_PASS_HEAD_DIM

MARGIN_PERCENT = 2  # how much cheaper two passes must be, as for any candidate that is not the default


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
    return TWO_PASS if two_pass_percent(device, head_dim) * (100 + MARGIN_PERCENT) < 100 * 100 else ONE_PASS


@functools.cache
def two_pass_percent(device: str, head_dim: int) -> int:
    """The time of a tile in two passes, in percent of its step in one."""
    numbers = tomllib.loads((FOLDER / f"{device}.toml").read_text(encoding="utf-8"))
    return numbers["two_pass_percent"]["128" if head_dim > 64 else "64"]["value"]
