"""Which path each block of a striped file lies on, in proportion to the paths' speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

_SAME = 1.25
"""Drives whose rates differ by less are alike: a measurement varies by as much."""
_MOST = 8
"""No drive gets more blocks for each of the slowest one's."""


@dataclass(frozen=True)
class StripePattern:
    """Blocks come in periods of ``sum(shares)``; path p has ``shares[p]`` of them, spread evenly over the period."""

    shares: tuple[int, ...]

    @cached_property
    def _order(self) -> tuple[tuple[int, int], ...]:
        """For each block of a period its path, and how many blocks of that path come before it."""
        period, given = sum(self.shares), [0] * len(self.shares)
        order = []
        for position in range(1, period + 1):
            path = max(range(len(given)), key=lambda p: self.shares[p] * position - given[p] * period)
            order.append((path, given[path]))
            given[path] += 1
        return tuple(order)

    def locate(self, block: int) -> tuple[int, int]:
        """The path of a block, and its place among the blocks there."""
        period, position = divmod(block, len(self._order))
        path, before = self._order[position]
        return path, period * self.shares[path] + before

    def sizes(self, nbytes: int, block_size: int) -> list[int]:
        """Bytes that each path holds of a logical space of ``nbytes``."""
        full, rest = divmod(nbytes, block_size)
        periods, over = divmod(full, len(self._order))
        blocks = [periods * share for share in self.shares]
        for path, _ in self._order[:over]:
            blocks[path] += 1
        sizes = [count * block_size for count in blocks]
        if rest:
            sizes[self.locate(full)[0]] += rest
        return sizes


def equal_shares(paths: int) -> tuple[int, ...]:
    return (1,) * paths


def shares_of(rates: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in proportion to ``rates`` (bytes per second)."""
    slowest = min(rates)
    if max(rates) <= slowest * _SAME:
        return equal_shares(len(rates))
    shares = [round(min(rate / slowest, _MOST) * 2) for rate in rates]
    common = reduce(math.gcd, shares)
    return tuple(share // common for share in shares)
