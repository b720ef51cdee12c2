"""From `dash::sdpa_backward` to Inductor's IR. The only place that knows it."""

from . import flex, lower, stock, sums  # noqa: F401
