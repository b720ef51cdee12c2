"""What became of each attention, and why."""

from .decided import ORIGIN, UNKNOWN, Decision, size_text, sizes_in_text
from .record import add, decisions, loaded, loading_line

__all__ = ["ORIGIN", "UNKNOWN", "Decision", "add", "decisions", "loaded", "loading_line", "size_text", "sizes_in_text"]
