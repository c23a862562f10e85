"""What the tests of the tiers share: an engine and a pool, closed afterwards, and stores over temporary paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierzero.tiers import HostAllocator, IoEngine, MemoryPool, Tier, TieredStore

BLOCK = 64 << 10


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    engine = IoEngine(4, compute_threads=2)
    yield engine
    engine.close()


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    pool = MemoryPool(Tier.HOST, 64 << 20, HostAllocator())
    yield pool
    pool.close()


@pytest.fixture
def make_store(engine: IoEngine, pool: MemoryPool, tmp_path: Path) -> Iterator[Callable[..., TieredStore]]:
    """Makes stores over ``paths`` fresh folders; keyword arguments replace the store's."""
    stores = []

    def make(paths: int = 1, **changes: Any) -> TieredStore:
        folders = [tmp_path / f"drive{index}" for index in range(paths)]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        settings: dict[str, Any] = {
            "pools": {Tier.HOST: pool},
            "nvme_paths": folders,
            "rank": 0,
            "block_size": BLOCK,
            "direct": "auto",
            "nvme_limit": None,
        }
        store = TieredStore(engine, **(settings | changes))
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)
