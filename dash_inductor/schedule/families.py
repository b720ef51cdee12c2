"""The families of schedules by name (those of DASH, arXiv 2601.21824), and the masks and guarantees that each serves."""

from __future__ import annotations

from .geometry import MASKS

MONOTONE = ("ascending", "descending")
FAMILIES = (*MONOTONE, "shift", "symmetric")  # those with a formula, whose tables a device can compute
ROUND_ROBIN = {"shift_round_robin": "shift", "symmetric_round_robin": "symmetric"}  # round-robin family -> underlying order
TWO_PASS = "two_pass"  # used in place of a family name; has no schedule
GUARANTEES = ("run", "device", "batch")


def why_impossible(mask: object, guarantee: object, family: object) -> str | None:
    """Why no schedule has this mask, guarantee and forced family (or "auto"); None if one has."""
    if mask not in MASKS:
        return f"mask must be one of {', '.join(MASKS)}, got {mask!r}"
    if guarantee not in GUARANTEES:
        return f"guarantee must be one of {', '.join(GUARANTEES)}, got {guarantee!r}"
    if family not in ("auto", *FAMILIES, *ROUND_ROBIN):
        return f"family must be one of auto, {', '.join((*FAMILIES, *ROUND_ROBIN))}, got {family!r}"
    order = ROUND_ROBIN.get(str(family), family)
    if order == "shift" and mask != "full":
        return f"family {family!r} serves the full mask only, this one is causal: use symmetric or descending"
    if order == "symmetric" and mask == "full":
        return f"family {family!r} serves causal masks only, this one is full: use shift or ascending"
    if guarantee == "run" or family in ("auto", *MONOTONE):
        return None
    reason = f"family {family!r} adds in an order that depends on the SM count"
    return f"{reason}: guarantee {guarantee!r} needs ascending or descending"


def may_round_robin(guarantee: str, family: str = "auto") -> bool:
    """Whether a choice under a guarantee and a forced family (or "auto") may be a round robin."""
    return guarantee == "run" and family in ("auto", *ROUND_ROBIN)
