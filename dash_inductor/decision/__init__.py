"""What became of each attention, and why."""

from .decided import GATHERED, NO_BITS, RING, UNKNOWN, Decision, Graph, size_text, sizes_in_text
from .declined import Declined, LeftToStock
from .record import add_eager, clear_decisions, comment, decisions, decisions_in, is_new, report, take
from .stock import (
    Kernel,
    Stock,
    Verdict,
    claim_of,
    is_of_torch,
    kernel_of,
    known_of_package,
    serves,
    stock_is_deterministic,
    stock_workspace_bytes,
)

__all__ = [
    "GATHERED",
    "NO_BITS",
    "RING",
    "UNKNOWN",
    "Decision",
    "Declined",
    "Graph",
    "Kernel",
    "LeftToStock",
    "Stock",
    "Verdict",
    "add_eager",
    "claim_of",
    "clear_decisions",
    "comment",
    "decisions",
    "decisions_in",
    "is_new",
    "is_of_torch",
    "kernel_of",
    "known_of_package",
    "report",
    "serves",
    "size_text",
    "sizes_in_text",
    "stock_is_deterministic",
    "stock_workspace_bytes",
    "take",
]
