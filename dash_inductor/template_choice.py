"""One pass or two: which template an attention takes, or that its sizes decide.

Bits differ between the two. So sizes and the number of SMs decide under the guarantee `run` alone, by one pure function for graphs
of one shape and graphs of any shape; under `device` and `batch` settings and compile-time facts do.
"""

from __future__ import annotations

from .config import GLUON, ONE_PASS, Config
from .schedule import TABLE_MASK, TWO_PASS
from .schedule.costs import two_pass_margin, two_pass_percent
from .templates.tiles import MIN_HEAD_DIM, ONE_PASS_HEAD_DIM

BY_SIZE = "by size"


def template_for(settings: Config, device: str, head_dim: int, mask: str, reserved_sms: int = 0) -> str:
    """`one_pass`, `two_pass` or `by size`, for the device of a cost file; ValueError where the settings cannot be met."""
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
    if settings.guarantee == "run":
        return ONE_PASS if reserved_sms else BY_SIZE  # plain launches would take the reserved SMs
    percent, estimate = two_pass_percent(device, head_dim)
    return TWO_PASS if percent * (100 + two_pass_margin(estimate)) < 100 * 100 else ONE_PASS
