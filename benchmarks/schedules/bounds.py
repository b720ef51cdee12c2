"""What no schedule of a geometry can beat."""

from __future__ import annotations

from itertools import accumulate

from dash_inductor.schedule.geometry import Geometry, check_count


def lower_bound(geometry: Geometry, *, heads: int, workers: int, step_ns: int, hop_ns: int) -> int:
    """Lower bound in ns of the makespan of `heads` kv heads on `workers` CTAs, whatever the family and the placement.

    step_ns is tau of the whole group of query heads (which are innermost), hop_ns lam. The largest of: total work over all
    workers; the packing of whole chains into workers, the longest chain included; and the busiest dq tile, whose parts end a
    step apart on one worker and a hop apart on two.

    >>> g = Geometry(6, 6, 1, 2, "causal")  # chains of 6, 4 and 2 steps
    >>> [lower_bound(g, heads=1, workers=w, step_ns=10, hop_ns=4) for w in (1, 2, 3)]
    [120, 60, 60]
    """
    for name, count in (("heads", heads), ("workers", workers)):
        check_count(name, count)
    for name, cost in (("step_ns", step_ns), ("hop_ns", hop_ns)):
        check_count(name, cost, least=0)
    lengths = [geometry.steps(j) for j in range(geometry.n_kv)]
    work = -(-heads * sum(lengths) // workers)
    busiest = max(len(geometry.contributors(i)) for i in range(geometry.n_q))
    return max(max(work, _packing(lengths, heads, workers)) * step_ns, step_ns + (busiest - 1) * min(step_ns, hop_ns))


def _packing(lengths: list[int], heads: int, workers: int) -> int:
    """A bound by packing: of the workers * m + 1 longest chains some worker gets m + 1, at best the shortest of them."""
    ordered = sorted(lengths, reverse=True)
    sums = [0, *accumulate(ordered)]

    def longest(count: int) -> int:
        """Steps of that many longest chains; every length stands there `heads` times."""
        whole, part = divmod(count, heads)
        return sums[whole] * heads + (ordered[whole] * part if part else 0)

    most = (heads * len(lengths) - 1) // workers
    return max(longest(workers * m + 1) - longest(workers * m - m) for m in range(most + 1))
