"""What became of each attention, and why."""

from .decided import ORIGIN, UNKNOWN, Decision, size_text, sizes_in_text
from .record import add, decisions, loaded, loading_line
from .stock_memory import stock_workspace_bytes

__all__ = [
    "ORIGIN",
    "UNKNOWN",
    "Decision",
    "add",
    "decisions",
    "loaded",
    "loading_line",
    "size_text",
    "sizes_in_text",
    "stock_workspace_bytes",
]
