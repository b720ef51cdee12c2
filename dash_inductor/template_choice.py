"""One pass or two: which template an attention takes, or that its sizes decide.

Bits differ between the two. So sizes and the number of SMs decide under the guarantee `run` alone, by one pure function for graphs
of one shape and graphs of any shape; under `device` and `batch` settings and compile-time facts do.
"""

from __future__ import annotations

from .config import GLUON, ONE_PASS, Config
from .devices.cost_files import two_pass_percent
from .schedule import TABLE_MASK, TWO_PASS
from .schedule.costs import two_pass_margin
from .templates.tiles import MAX_HEAD_DIM, MIN_HEAD_DIM, ONE_PASS_HEAD_DIM

BY_SIZE = "by size"


def template_for(settings: Config, device: str, head_dim: int, mask: str, reserved_sms: int = 0) -> str:
    """`one_pass`, `two_pass` or `by size`, for the device of a cost file; ValueError where the settings cannot be met."""
    if settings.template == TWO_PASS and mask == TABLE_MASK:
        raise ValueError(f"template={TWO_PASS!r} takes no mask={mask!r}")
    if settings.kernel == GLUON:
        return ONE_PASS
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head dim {head_dim} is outside {MIN_HEAD_DIM}..{MAX_HEAD_DIM}")
    if settings.template == TWO_PASS:
        return TWO_PASS
    asked = [name for name in ("template", "schedule") if getattr(settings, name) != "auto"]  # schedules are of one pass
    if head_dim > ONE_PASS_HEAD_DIM and (asked or mask == TABLE_MASK):
        by = " and ".join(f"{name}={getattr(settings, name)!r}" for name in asked) or f"mask={mask!r}"
        remedy = f": with {' and '.join(f'{name}=%r' % 'auto' for name in asked)} it takes two passes" if asked else ""
        raise ValueError(f"head dim {head_dim} is more than the {ONE_PASS_HEAD_DIM} of one pass, which {by} asks for{remedy}")
    if asked or mask == TABLE_MASK:
        return ONE_PASS
    if head_dim > ONE_PASS_HEAD_DIM:
        return TWO_PASS
    if settings.guarantee == "run":
        return ONE_PASS if reserved_sms else BY_SIZE  # plain launches would take the reserved SMs
    percent, estimate = two_pass_percent(device, head_dim)
    return TWO_PASS if percent * (100 + two_pass_margin(estimate)) < 100 * 100 else ONE_PASS
