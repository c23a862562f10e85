"""Rates from repeated calls, within a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Progress = Callable[[str, float], None]
"""Takes what is being measured and how much of the part is done, from 0 to 1."""

_BATCH_S = 0.005
"""Calls are timed together until they take so long: the clock's own time, and a device's start, no longer count."""


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, and their extremes."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def times(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.samples)

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, "samples": self.samples}


def rate(
    work: Callable[[], object], amount: float, seconds: float, finish: Callable[[], object] = lambda: None
) -> Spread:
    """``amount`` per second of ``work``, called for about ``seconds`` and once at least, after a call that warms up.

    ``finish`` waits until what was started is done.
    """
    work()
    finish()
    alone = min(_timed(work, 1, finish) for _ in range(2))
    calls = max(1, int(_BATCH_S / alone)) if alone > 0 else 100
    found = [amount / alone] if calls == 1 else []
    ends = time.perf_counter() + seconds - alone
    while not found or time.perf_counter() < ends:
        found.append(amount * calls / _timed(work, calls, finish))
    return Spread.of(found)


def _timed(work: Callable[[], object], calls: int, finish: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        work()
    finish()
    return time.perf_counter() - started


def together(rates: Iterable[tuple[float, Spread]]) -> Spread:
    """Of amounts that are worked off one after another, each at its own rate: all of it by the sum of their times."""
    pairs = list(rates)
    whole = sum(amount for amount, _ in pairs)

    def over(of: Callable[[Spread], float]) -> float:
        return whole / sum(amount / of(spread) for amount, spread in pairs)

    least = min(spread.samples for _, spread in pairs)
    return Spread(over(lambda s: s.median), over(lambda s: s.low), over(lambda s: s.high), least)
