"""The orders that a schedule can have, one family per module."""
