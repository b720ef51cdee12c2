"""The register of the families of schedules (those of DASH, arXiv 2601.21824), and which masks and guarantees each serves."""

from __future__ import annotations

from .family import Family
from .orders.monotone import ASCENDING, DESCENDING
from .orders.shift import SHIFT, SHIFT_ROUND_ROBIN
from .orders.symmetric import SYMMETRIC, SYMMETRIC_ROUND_ROBIN

# By name, in the order in which reports list them. A new family is a line here.
REGISTER: dict[str, Family] = {
    family.name: family
    for family in (
        ASCENDING,
        DESCENDING,
        SHIFT,
        SYMMETRIC,
        SHIFT_ROUND_ROBIN,
        SYMMETRIC_ROUND_ROBIN,
    )
}
FAMILIES = tuple(name for name, family in REGISTER.items() if family.queue_of is None)
# A round robin, and the family whose order it takes.
ROUND_ROBIN = {name: family.queue_of for name, family in REGISTER.items() if family.queue_of is not None}
MONOTONE = tuple(name for name, family in REGISTER.items() if family.is_monotone)
TWO_PASS = "two_pass"  # used in place of a family name; has no schedule
GUARANTEES = ("run", "device", "batch")
OF_LISTS = DESCENDING.name  # the order of chains under a mask in blocks, whose lists a device makes
_SERVED = {"full": "the full mask", "causal": "causal masks"}


def default_family(mask: str) -> str:
    """The monotone family on which `auto` falls back under a mask."""
    return next(name for name, family in REGISTER.items() if mask in family.default_under)


def tried_families(mask: str) -> list[Family]:
    """The families that `auto` tries besides, where bits may depend on the number of SMs."""
    return [family for family in REGISTER.values() if mask in family.tried_under]


def why_impossible(mask: str, guarantee: str, family: str) -> str | None:
    """Why no schedule has this mask, guarantee and forced family (or "auto"); None if one has."""
    if family == "auto":
        return None
    asked = REGISTER[family]
    if mask not in asked.masks:
        served = " and ".join(_SERVED[each] for each in asked.masks)
        others = [each.name for each in tried_families(mask) if each.queue_of is None]
        use = " or ".join([*others, default_family(mask)])
        return f"family {family!r} serves {served} only, this one is {mask}: use {use}"
    if guarantee == "run" or asked.is_monotone:
        return None
    reason = f"family {family!r} adds in an order that depends on the SM count"
    return f"{reason}: guarantee {guarantee!r} needs {' or '.join(MONOTONE)}"
