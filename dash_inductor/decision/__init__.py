"""What became of each attention, and why."""

from .decided import UNKNOWN, Decision, Graph, size_text, sizes_in_text
from .declined import Declined, LeftToStock
from .record import add_eager, clear_decisions, comment, decisions, decisions_in, is_new, report, take
from .stock import Kernel, Stock, is_of_torch, stock_is_deterministic, stock_workspace_bytes

__all__ = [
    "UNKNOWN",
    "Decision",
    "Declined",
    "Graph",
    "Kernel",
    "LeftToStock",
    "Stock",
    "add_eager",
    "clear_decisions",
    "comment",
    "decisions",
    "decisions_in",
    "is_new",
    "is_of_torch",
    "report",
    "size_text",
    "sizes_in_text",
    "stock_is_deterministic",
    "stock_workspace_bytes",
    "take",
]
