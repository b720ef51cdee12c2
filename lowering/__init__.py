"""From `dash::sdpa_backward` to Inductor's IR. The only place that knows it."""

from . import sdpa_backward, stock  # noqa: F401
