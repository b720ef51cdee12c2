"""Repetitions in turns, and what is said of them: median, p20, p80, and ratios of times taken in the same round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

Key = TypeVar("Key")


class Summary(NamedTuple):
    median: float
    p20: float
    p80: float


def summary(values: Sequence[float]) -> Summary:
    """Quantiles with linear interpolation between order statistics; ValueError without values."""
    if not values:
        raise ValueError("values must not be empty")
    wanted = torch.tensor(Summary(0.5, 0.2, 0.8), dtype=torch.float64)
    return Summary(*torch.quantile(torch.tensor(values, dtype=torch.float64), wanted).tolist())


def named(name: str, values: Sequence[float]) -> dict[str, float]:
    """The summary as cells of a row: `name` is the median, `name`_p20 and `name`_p80 are the quantiles."""
    return dict(zip((name, f"{name}_p20", f"{name}_p80"), summary(values), strict=True))


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """times[r] / others[r]: a clock that changes from round to round changes both.

    >>> ratios([2.0, 4.0], [1.0, 2.0])
    [2.0, 2.0]
    """
    return [time / other for time, other in zip(times, others, strict=True)]


def interleaved(
    timers: Mapping[Key, Callable[[], float]], rounds: int, warm_up: int = 0, enough: Callable[[], bool] = lambda: False
) -> dict[Key, list[float]]:
    """Calls every timer once a round, each round starting with another one; what the warm-up rounds return is dropped.

    `enough` is asked after every round that counts: no other begins once it says so.
    """
    names = list(timers)
    taken: dict[Key, list[float]] = {name: [] for name in names}
    for round_ in range(-warm_up, rounds):
        first = round_ % max(1, len(names))
        for name in names[first:] + names[:first]:
            time = timers[name]()
            if round_ >= 0:
                taken[name].append(time)
        if round_ >= 0 and enough():
            break
    return taken
