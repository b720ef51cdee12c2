"""Shared memory of one SM: what warps read and write waits in a queue, and matmuls in flight come first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Matmul:
    """One HGMMA of a warpgroup: it starts when all of its warps have issued it and the tensor cores are free."""

    issued: int = 0  # warps
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Busy:
    """The tensor cores took [begin, end) for a matmul of `work` clocks; what is more, shared memory kept them from.

    share: the part of shared memory's clocks that the matmul takes in that time.
    """

    begin: float
    end: float
    work: float
    share: float


@dataclass(eq=False)
class Access:
    """What one instruction reads or writes. The matmul that its warp issued last, `behind` which it stands, has to start first."""

    clocks: float  # that it still needs
    behind: Matmul | None = None
    done: float | None = None

    @property
    def begins(self) -> float:
        """When it can begin, as far as that is known."""
        return 0.0 if self.behind is None else or_never(self.behind.start)


@dataclass
class SharedMemory:
    """The queue of accesses. Times are in clocks. `least_share` is what matmuls leave to it at least, in parts of all clocks."""

    least_share: float
    accesses: list[Access] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)  # the tensor cores, in order
    served: float = 0.0  # until when it has worked
    ended: int = 0  # of `busy`, by then

    def serve(self, until: float) -> None:
        """Work at the queue until then."""
        while self.accesses and self.served < until:
            first = self._first()
            rate, ends = self._rate(self.ended, self.served)
            if first is None:
                self._advance(min(min(access.begins for access in self.accesses), until))
            elif (done := self.served + first.clocks / rate) <= min(ends, until):
                self._advance(done)
                first.done = done
                self.accesses.remove(first)
            else:
                there = min(ends, until)
                first.clocks -= rate * (there - self.served)
                self._advance(there)
        self._advance(until)

    def next_done(self) -> float:
        """When the first access is through, or one can begin, by the matmuls that are known: no access is through before."""
        if not self.accesses:
            return math.inf
        first = self._first()
        if first is None:
            return min(access.begins for access in self.accesses)
        now, left, ended = self.served, first.clocks, self.ended
        while True:
            rate, ends = self._rate(ended, now)
            if now + left / rate <= ends:
                return now + left / rate
            left -= rate * (ends - now)
            now = ends
            ended += ended < len(self.busy) and self.busy[ended].end <= now

    def _advance(self, now: float) -> None:
        self.served = now
        while self.ended < len(self.busy) and self.busy[self.ended].end <= now:
            self.ended += 1

    def _first(self) -> Access | None:
        return next((access for access in self.accesses if access.begins <= self.served), None)

    def _rate(self, ended: int, now: float) -> tuple[float, float]:
        """The part of all clocks that accesses get, and until when, where so many matmuls have ended."""
        if ended == len(self.busy):
            return 1.0, math.inf
        matmul = self.busy[ended]
        if matmul.begin > now:
            return 1.0, matmul.begin
        return max(self.least_share, 1 - matmul.share), matmul.end


def or_never(time: float | None) -> float:
    """Infinity for a time that is not known yet."""
    return math.inf if time is None else time
