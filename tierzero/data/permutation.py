"""A keyed permutation of 0..n-1 that needs no memory: any position can be asked for by itself."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
U64 = npt.NDArray[np.uint64]


def _mix(x: U64) -> U64:
    """The finaliser of SplitMix64: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(U64, x ^ (x >> np.uint64(31)))


def permute(positions: npt.ArrayLike, n: int, *key: int) -> npt.NDArray[np.int64]:
    """Where the permutation of ``range(n)`` chosen by ``key`` sends each of ``positions`` (each in [0, n)), int64.

    A Feistel network over the next even number of bits; a result outside the range is sent through again, which keeps
    the map a permutation (cycle walking).
    """
    index = np.atleast_1d(np.asarray(positions, dtype=np.uint64)).copy()
    if n < 1 or (index.size and int(index.max()) >= n):
        raise ValueError(f"positions must lie in [0, {n})")
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    state = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = _mix(state * np.uint64(3) + np.array([part & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + np.uint64(1))
    outside = np.ones(index.shape, dtype=bool)
    while outside.any():
        index[outside] = _network(index[outside], half, mask, state)
        outside = index >= np.uint64(n)
    return index.astype(np.int64)


def _network(index: U64, half: np.uint64, mask: np.uint64, state: U64) -> U64:
    left, right = index >> half, index & mask
    for number in range(1, _ROUNDS + 1):
        mixed = _mix(right ^ _mix(state + np.uint64(number)))
        left, right = right, left ^ (mixed & mask)
    return cast(U64, (left << half) | right)
